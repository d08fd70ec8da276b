"""Headline generation: the source in subwords, the target in characters, and a length that the user sets.

Following Takase & Okazaki, "Positional Encoding to Control Output Sequence Length" (NAACL 2019), as section
3.3 of the ALONE paper does.

1. Text. ``onmt_characters split -input FILE -output FILE`` turns each line into its characters, with
   ``<sp>`` for a space; ``onmt_characters join`` is the inverse. ``onmt_character_vocab -source FILE...
   -target FILE... -output FILE`` makes the one vocabulary of both sides. Without the console commands:
   ``python -m nmt.summarization.characters`` and ``python -m nmt.summarization.vocabulary``.
2. Training. ``onmt_train -decoder_positions pe lrpe``, in YAML ``decoder_positions: [pe, lrpe]``: the sum
   of the named encodings (``pe``: sinusoids, ``ldpe``: length difference, ``lrpe``: length ratio) is added
   to the decoder's input. It needs ``position_encoding: true`` and ``decoder_type: transformer``. Left out,
   the decoder has OpenNMT's own sinusoids. The length of a training example is the number of its target
   tokens, without the start and the end of the sentence; ``<sp>`` counts as one, as every character does.
3. Translation. ``onmt_translate -desired_length 75`` for all lines, or ``-desired_lengths FILE`` with one
   integer per line of the source, counted as in training. ``-max_length`` (250 by default) has to be at
   least one more, for the end of the sentence; OpenNMT's ``-max_length_ratio``, which compares characters
   with subwords of the source, does not apply. ``onmt_server`` takes ``desired_length`` in the ``opt`` of a
   model.
4. Re-ranking. ``onmt_rerank -source FILE -hypotheses FILE -n_best N -output FILE`` keeps the one of the N
   hypotheses per line of the source with most of its content words, both in plain words; or ``python -m
   nmt.summarization.rerank``.
"""
