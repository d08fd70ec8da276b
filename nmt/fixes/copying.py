"""Fixes of copy attention (See et al., 2017), which mixes up the sentences of a batch.

OpenNMT-py 3 is batch first, except for parts of copy attention. The functions here are batch first.

Axes: ``B`` sentences (in search, hypotheses), ``T`` target words, ``S`` source words, ``C`` distinct words
of a source, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onmt.modules.copy_generator
import onmt.translate.translator
import onmt.utils.loss
import torch
from onmt.decoders.decoder import InputFeedRNNDecoder
from onmt.inference_engine import InferenceEnginePY
from onmt.inputters import text_utils
from onmt.modules.copy_generator import CopyGenerator
from onmt.translate.translator import Translator
from onmt.utils.loss import LossCompute
from torch import Tensor

from nmt.fixes import replace, wrap


@replace("forward", CopyGenerator)
def mixed_probabilities(generator: Any, hidden: Tensor, attention: Tensor, source: Tensor) -> Tensor:
    """Return ``p_gen P_vocab(w) + (1 - p_gen) sum of attention`` (See et al., Eq. 9), ``(B * T, V + C)``.

    From `hidden` ``(B * T, D)``, `attention` ``(B * T, S)`` and `source` ``(B, S, C)``, 1 where a position of
    the source has a word; ``linear_copy`` computes 1 - p_gen. Padding has probability 0.
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
    known = [place for place, word in enumerate(ids) if place > 0 and word != vocabulary.default_id]
    places = torch.tensor(known, dtype=torch.long, device=device)
    return places + len(vocabulary), torch.tensor(ids, dtype=torch.long, device=device)[places]


def collapsed(probabilities: Tensor, copies: Sequence[Copies]) -> Tensor:
    """Add the probabilities ``(B, T, V + C)`` of copied words to those in the vocabulary, in place."""
    for sentence, (places, ids) in enumerate(copies):
        rows = probabilities[sentence]
        rows.index_add_(1, ids, rows.index_select(1, places))
        rows.index_fill_(1, places, 1e-10)  # they are in the vocabulary now
    return probabilities


@replace("collapse_copy_scores", onmt.modules.copy_generator)
def collapse_copy_scores(scores: Tensor, batch: dict[str, Any], vocabulary: Any) -> Tensor:
    """Add the scores of copied words to those of the same words in the vocabulary, for statistics."""
    return collapsed(scores, [copies_of(words, vocabulary, scores.device) for words in batch["src_ex_vocab"]])


@replace("_unbottle", LossCompute)
def unbottle(self: Any, rows: Tensor, sentences: int) -> Tensor:
    """Split the rows of a batch by sentence."""
    return rows.view(sentences, -1, rows.size(1))


@replace("_compute_coverage_loss", LossCompute)
def coverage_loss(self: Any, attention: Tensor, coverage: Tensor, targets: Tensor) -> Any:
    """Return the weighted sum over all words of ``sum_i min(a_i, c_i)`` (See et al., Eq. 12).

    `coverage` is the sum of the attention ``(B, T, S)`` of each sentence up to and including each word.
    """
    is_word = targets.ne(self.padding_idx).view(attention.shape[:2])
    before = torch.cat([torch.zeros_like(coverage[:, :1]), coverage[:, :-1]], dim=1)
    return self.lambda_coverage * torch.min(attention, before).sum(dim=-1)[is_word].sum()


def over_words(attention: Tensor, lengths: Tensor) -> Tensor:
    """Set attention ``(B, T, S)`` on padding to 0 given `lengths` ``(B,)``, and normalize it to sum to 1."""
    is_word = torch.arange(attention.size(2), device=lengths.device) < lengths.unsqueeze(1)  # (B, S)
    of_words = attention * is_word.unsqueeze(1)
    return of_words / of_words.sum(dim=2, keepdim=True)


@wrap("forward", InputFeedRNNDecoder)
def attend_by_sentence(
    original: Any, self: Any, tgt: Tensor, enc_out: Tensor, src_len: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return attention with the sentence axis first, as other decoders do, and none on padding."""
    hidden, attentions = original(self, tgt, enc_out, src_len=src_len, **kwargs)
    attentions = {name: steps.transpose(0, 1).contiguous() for name, steps in attentions.items()}
    if "copy" in attentions and src_len is not None:
        attentions["copy"] = over_words(attentions["copy"], src_len)
    return hidden, attentions


@wrap("_translate", InferenceEnginePY)
def add_copy_inputs(original: Any, self: Any, infer_iter: Any) -> Any:
    """Add the inputs of copy generators to the batches, which only training has."""
    infer_iter.copy = self.translator.copy_attn
    return original(self, infer_iter)


@wrap("textbatch_to_tensor", text_utils)
def add_copy_inputs_of_requests(
    original: Any, vocabs: dict[str, Any], batch: list[dict[str, Any]], *args: Any
) -> Any:
    """Add the inputs of copy generators to the requests of a server."""
    return original(vocabs, [text_utils._addcopykeys(vocabs, example) for example in batch], *args)


@wrap("_translate_batch_with_strategy", Translator)
def keep_search(original: Any, self: Any, batch: dict[str, Any], strategy: Any) -> Any:
    """Store the search of a batch, which has the unfinished sentences, and the words that they can copy."""
    self.search = strategy
    if self.copy_attn:
        device, sources = batch["src"].device, batch["src_ex_vocab"]
        self.copies = [copies_of(words, self._tgt_vocab, device) for words in sources]
    return original(self, batch, strategy)


@wrap("_decode_and_generate", Translator)
def copy_words(
    original: Any,
    self: Any,
    decoder_in: Tensor,
    enc_out: Any,
    batch: dict[str, Any],
    src_len: Tensor,
    src_map: Tensor | None = None,
    step: int | None = None,
    batch_offset: Any = None,
    return_attn: bool = False,
) -> Any:
    """Make hypotheses and scored targets copy words of their own source."""
    if src_map is None:
        return original(self, decoder_in, enc_out, batch, src_len, src_map, step, batch_offset, return_attn)
    known = decoder_in.masked_fill(decoder_in.ge(self._tgt_vocab_len), self._tgt_unk_idx)
    asked = {"return_attn": self.global_scorer.has_cov_pen or return_attn}
    hidden, attentions = self.model.decoder(known, enc_out, src_len=src_len, step=step, **asked)
    attention = attentions["copy"]  # (B, T, S)
    # Ensembles have hidden states of one step without a time axis.
    rows = hidden.squeeze(1) if step is not None else hidden.flatten(0, 1)
    mixed = self.model.generator(rows, attention.flatten(0, 1), src_map)
    mixed = mixed.view(len(src_map), -1, mixed.size(1))  # (B, T, V + C)
    # The sentence of each row: in a search, of each hypothesis.
    sentences: Any = range(len(src_map))
    if step is not None and hasattr(self.search, "original_batch_idx"):
        sentences = self.search.original_batch_idx.tolist()
    elif step is not None:
        sentences = self.search.batch_offset.repeat_interleave(self.search.beam_size).tolist()
    log_probs = collapsed(mixed, [self.copies[sentence] for sentence in sentences]).log()
    return log_probs if step is None else log_probs.squeeze(1), attention
