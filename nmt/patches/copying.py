"""Copy attention (See et al., 2017), batch first.

OpenNMT-py 3 is batch first, except for parts of copy attention, which therefore mix up the sentences of a
batch. The functions here are batch first.

Axes: ``B`` sentences (in search, hypotheses), ``T`` target words, ``S`` source words, ``C`` distinct words
of a source, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from onmt.inputters.text_utils import _addcopykeys
from torch import Tensor

# Probability of copied words whose probability was added to the vocabulary.
_NOTHING = 1e-10


def mixed_probabilities(generator: Any, hidden: Tensor, attention: Tensor, source: Tensor) -> Tensor:
    """Return ``p_gen P_vocab(w) + (1 - p_gen) sum of attention`` (See et al., Eq. 9).

    Args:
        generator: OpenNMT-py's `CopyGenerator`; ``linear_copy`` computes 1 - p_gen.
        hidden: ``(B * T, D)``, batch first.
        attention: ``(B * T, S)``, batch first.
        source: ``(B, S, C)``, 1 where a position of the source has a word.

    Returns:
        ``(B * T, V + C)``; padding has probability 0.
    """
    scores = generator.linear(hidden)
    scores[:, generator.pad_idx] = -float("inf")
    copying = torch.sigmoid(generator.linear_copy(hidden))
    of_vocabulary = torch.softmax(scores, dim=1) * (1 - copying)
    weights = (attention * copying).view(len(source), -1, attention.size(1))  # (B, T, S)
    of_source = torch.bmm(weights, source)  # (B, T, C)
    return torch.cat([of_vocabulary, of_source.flatten(0, 1)], dim=1)


# Positions of the words of a source in the extended vocabulary, and their ids in the vocabulary, ``(n,)``.
Copies = tuple[Tensor, Tensor]


def copies_of(source_words: Any, vocabulary: Any, device: torch.device) -> Copies:
    """Return the words of a source that are in the vocabulary."""
    ids = [vocabulary[word] for word in source_words.ids_to_tokens]
    # The first one is the unknown word.
    found = [place for place, word in enumerate(ids) if place > 0 and word != vocabulary.default_id]
    places = torch.tensor(found, dtype=torch.long, device=device)
    return places + len(vocabulary), torch.tensor(ids, dtype=torch.long, device=device)[places]


def collapsed(probabilities: Tensor, copies: Sequence[Copies]) -> Tensor:
    """Add the probabilities of copied words to those of the same words in the vocabulary, in place.

    Args:
        probabilities: ``(B, T, V + C)``.
        copies: see `copies_of`, for every sentence.
    """
    for sentence, (places, ids) in enumerate(copies):
        rows = probabilities[sentence]
        rows.index_add_(1, ids, rows.index_select(1, places))
        rows.index_fill_(1, places, _NOTHING)
    return probabilities


def over_words(attention: Tensor, lengths: Tensor) -> Tensor:
    """Set attention ``(B, T, S)`` on padding to 0 given `lengths` ``(B,)``, and normalize it to sum to 1."""
    is_word = torch.arange(attention.size(2), device=lengths.device) < lengths.unsqueeze(1)  # (B, S)
    kept = attention * is_word.unsqueeze(1)
    return kept / kept.sum(dim=2, keepdim=True)


def coverage_loss(attention: Tensor, coverage: Tensor, is_word: Tensor) -> Tensor:
    """Return the sum over all words of ``sum_i min(a_i, c_i)`` (See et al., Eq. 12).

    Args:
        attention: ``(B, T, S)``.
        coverage: ``(B, T, S)``, the sum of the attention up to and including each word.
        is_word: ``(B, T)``, False for padding of the target.
    """
    before = torch.cat([torch.zeros_like(coverage[:, :1]), coverage[:, :-1]], dim=1)
    return torch.min(attention, before).sum(dim=-1)[is_word].sum()


def sentences_of(strategy: Any) -> list[int]:
    """Return the sentence of each hypothesis of a search."""
    if hasattr(strategy, "original_batch_idx"):
        return strategy.original_batch_idx.tolist()  # type: ignore[no-any-return]
    return strategy.batch_offset.repeat_interleave(strategy.beam_size).tolist()  # type: ignore[no-any-return]


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
    copies = [copies_of(words, vocabulary, scores.device) for words in sources]
    return collapsed(scores, copies)


def weighted_coverage_loss(self: Any, attention: Tensor, coverage: Tensor, targets: Tensor) -> Tensor:
    """Compute the weighted coverage loss of each sentence over its own previous words."""
    is_word = targets.ne(self.padding_idx).view(attention.shape[:2])
    loss: Tensor = self.lambda_coverage * coverage_loss(attention, coverage, is_word)
    return loss


def with_sentences_first(original: Any) -> Any:
    """Return attention with the sentence axis first, as other decoders do, and none on padding."""

    def forward(
        self: Any, tgt: Tensor, enc_out: Tensor, src_len: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        hidden, attentions = original(self, tgt, enc_out, src_len=src_len, **kwargs)
        found = {name: steps.transpose(0, 1).contiguous() for name, steps in attentions.items()}
        if "copy" in found and src_len is not None:
            found["copy"] = over_words(found["copy"], src_len)
        return hidden, found

    return forward


def with_search_state(original: Any) -> Any:
    """Store the search of a batch, which has the unfinished sentences, and the words that they can copy."""

    def translate_batch_with_strategy(self: Any, batch: dict[str, Any], strategy: Any) -> Any:
        self.search = strategy
        if self.copy_attn:
            device, sources = batch["src"].device, batch["src_ex_vocab"]
            self.copies = [copies_of(words, self._tgt_vocab, device) for words in sources]
        return original(self, batch, strategy)

    return translate_batch_with_strategy


def with_copied_words(original: Any) -> Any:
    """Make hypotheses and scored targets copy words of their source."""

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
        sentences = range(len(src_map)) if step is None else sentences_of(self.search)
        log_probs = collapsed(mixed, [self.copies[sentence] for sentence in sentences]).log()
        return log_probs if step is None else log_probs.squeeze(1), attention

    return decode_and_generate
