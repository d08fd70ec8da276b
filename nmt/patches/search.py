"""Patches of search and of copy attention, which order rows sentence by sentence.

Axes: ``B`` hypotheses of all sentences, ``T`` target words, ``S`` source words, ``C`` different words of a
source, ``V`` vocabulary.
"""

from __future__ import annotations

from typing import Any

from onmt.inputters.text_utils import _addcopykeys
from torch import Tensor

from nmt.model import copying


def with_copy_inputs(original: Any) -> Any:
    """Add the inputs of copy generators to the batches; OpenNMT-py does this in training only."""

    def translate(self: Any, infer_iter: Any) -> Any:
        infer_iter.copy = self.translator.copy_attn
        return original(self, infer_iter)

    return translate


def with_copy_inputs_of_requests(original: Any) -> Any:
    """Add the inputs of copy generators to the requests of a server."""

    def textbatch_to_tensor(vocabs: dict[str, Any], batch: list[dict[str, Any]], *args: Any) -> Any:
        return original(vocabs, [_addcopykeys(vocabs, example) for example in batch], *args)

    return textbatch_to_tensor


def unbottle(self: Any, rows: Tensor, sentences: int) -> Tensor:
    """Split the rows of a batch by sentence."""
    return rows.view(sentences, -1, rows.size(1))


def collapse_copy_scores(scores: Tensor, batch: dict[str, Any], vocabulary: Any) -> Tensor:
    """Add the scores of copied words to those of the same words in the vocabulary, for statistics."""
    sources = batch["src_ex_vocab"]
    copies = [copying.copies_of(words, vocabulary, scores.device) for words in sources]
    return copying.collapsed(scores, copies)


def coverage_loss(self: Any, attention: Tensor, coverage: Tensor, targets: Tensor) -> Tensor:
    """Compute the weighted coverage loss of each sentence over its own previous words."""
    is_word = targets.ne(self.padding_idx).view(attention.shape[:2])
    loss: Tensor = self.lambda_coverage * copying.coverage_loss(attention, coverage, is_word)
    return loss


def with_sentences_first(original: Any) -> Any:
    """Return attention with the sentence axis first, as other decoders do, and none on padding."""

    def forward(
        self: Any, tgt: Tensor, enc_out: Tensor, src_len: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        hidden, attentions = original(self, tgt, enc_out, src_len=src_len, **kwargs)
        found = {name: steps.transpose(0, 1).contiguous() for name, steps in attentions.items()}
        if "copy" in found and src_len is not None:
            found["copy"] = copying.over_words(found["copy"], src_len)
        return hidden, found

    return forward


def with_search_state(original: Any) -> Any:
    """Store the search of a batch, which has the unfinished sentences, and the words that they can copy."""

    def translate_batch_with_strategy(self: Any, batch: dict[str, Any], strategy: Any) -> Any:
        self.search = strategy
        if self.copy_attn:
            device, sources = batch["src"].device, batch["src_ex_vocab"]
            self.copies = [copying.copies_of(words, self._tgt_vocab, device) for words in sources]
        return original(self, batch, strategy)

    return translate_batch_with_strategy


def with_copied_words(original: Any) -> Any:
    """Let hypotheses, and targets to be scored, copy words of their own source."""

    def decode_and_generate(
        self: Any,
        decoder_in: Tensor,
        enc_out: Any,
        batch: dict[str, Any],
        src_len: Tensor,
        src_map: Tensor | None = None,
        step: int | None = None,
        batch_offset: Any = None,
        return_attn: bool = False,
    ) -> tuple[Tensor, Tensor]:
        if src_map is None:
            return original(  # type: ignore[no-any-return]
                self, decoder_in, enc_out, batch, src_len, src_map, step, batch_offset, return_attn
            )
        known = decoder_in.masked_fill(decoder_in.ge(self._tgt_vocab_len), self._tgt_unk_idx)
        asked = {"return_attn": self.global_scorer.has_cov_pen or return_attn}
        hidden, attentions = self.model.decoder(known, enc_out, src_len=src_len, step=step, **asked)
        attention = attentions["copy"]  # (B, T, S)
        # Ensembles have hidden states of one step without a time axis.
        rows = hidden.squeeze(1) if step is not None else hidden.flatten(0, 1)
        mixed = self.model.generator(rows, attention.flatten(0, 1), src_map)
        mixed = mixed.view(len(src_map), -1, mixed.size(1))  # (B, T, V + C)
        sentences = range(len(src_map)) if step is None else copying.sentences_of(self.search)
        log_probs = copying.collapsed(mixed, [self.copies[sentence] for sentence in sentences]).log()
        return log_probs if step is None else log_probs.squeeze(1), attention

    return decode_and_generate


def with_length_per_sentence(original: Any) -> Any:
    """Use the source length of each sentence; OpenNMT-py has one per hypothesis but indexes by sentence."""

    def beams_non_finished(self: Any, i: int, *args: Any) -> bool:
        of_hypotheses = self.src_len
        self.src_len = of_hypotheses[:: self.beam_size]
        try:
            return original(self, i, *args)  # type: ignore[no-any-return]
        finally:
            self.src_len = of_hypotheses

    return beams_non_finished


def with_blocking_per_beam(original: Any) -> Any:
    """Drop the blocked n-grams of finished sentences."""

    def update_finished(self: Any) -> None:
        before = self.batch_offset.tolist()
        original(self)
        left = set(self.batch_offset.tolist())
        if not self.done:
            rows = [
                place * self.beam_size + beam
                for place, sentence in enumerate(before)
                if sentence in left
                for beam in range(self.beam_size)
            ]
            self.forbidden_tokens = [self.forbidden_tokens[row] for row in rows]

    return update_finished


def with_blocked_words(original: Any) -> Any:
    """Block repeated words with ``block_ngram_repeat: 1``; OpenNMT-py blocks the wrong ones."""

    def block_ngram_repeats(self: Any, log_probs: Tensor) -> None:
        if self.block_ngram_repeat != 1:
            original(self, log_probs)
            return
        for scores, after in zip(log_probs, self.forbidden_tokens, strict=True):
            scores[list(after.get((), ()))] = -10e20

    return block_ngram_repeats


def with_blocked_ngrams(original: Any) -> Any:
    """Block repeated n-grams in greedy search, too."""

    def advance(self: Any, log_probs: Tensor, attn: Tensor) -> None:
        original(self, log_probs, attn)
        self.maybe_update_forbidden_tokens()

    return advance


def with_blocking_per_sentence(original: Any) -> Any:
    """Drop the blocked n-grams of finished sentences."""

    def update_finished(self: Any) -> None:
        original(self)
        if not self.done:
            self.forbidden_tokens = [self.forbidden_tokens[row] for row in self.select_indices.tolist()]

    return update_finished


def without_padding(original: Any) -> Any:
    """Exclude padding from the coverage penalty: it has no attention, and log 0 is minus infinity."""

    def coverage_wu(self: Any, coverage: Tensor, beta: float = 0.0) -> Tensor:
        penalty: Tensor = original(self, coverage.masked_fill(coverage == 0.0, 1.0), beta)
        return penalty

    return coverage_wu
