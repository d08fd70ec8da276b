"""Fixes of beam and greedy search, which confuse hypotheses with sentences, and of the written output."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from onmt.translate import TranslationBuilder
from onmt.translate.beam_search import BeamSearchBase
from onmt.translate.decode_strategy import DecodeStrategy
from onmt.translate.greedy_search import GreedySearch
from onmt.translate.penalties import PenaltyBuilder
from onmt.translate.translator import GeneratorLM, Inference
from torch import Tensor

from nmt.fixes import wrap


@wrap("beams_non_finished", BeamSearchBase)
def limit_length_by_sentence(original: Any, self: Any, i: int, *args: Any) -> bool:
    """Use the source length of each sentence; there is one per hypothesis, which is indexed by sentence."""
    of_hypotheses = self.src_len
    self.src_len = of_hypotheses[:: self.beam_size]
    try:
        return original(self, i, *args)  # type: ignore[no-any-return]
    finally:
        self.src_len = of_hypotheses


@wrap("update_finished", BeamSearchBase)
def drop_blocked_of_beams(original: Any, self: Any) -> None:
    """Drop the blocked n-grams of finished sentences; they shift to other sentences."""
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


@wrap("update_finished", GreedySearch)
def drop_blocked_of_sentences(original: Any, self: Any) -> None:
    """Drop the blocked n-grams of finished sentences; they shift to other sentences."""
    original(self)
    if not self.done:
        self.forbidden_tokens = [self.forbidden_tokens[row] for row in self.select_indices.tolist()]


@wrap("advance", GreedySearch)
def block_in_greedy_search(original: Any, self: Any, log_probs: Tensor, attn: Tensor) -> None:
    """Block repeated n-grams in greedy search, where they are never recorded."""
    original(self, log_probs, attn)
    self.maybe_update_forbidden_tokens()


@wrap("block_ngram_repeats", DecodeStrategy)
def block_words(original: Any, self: Any, log_probs: Tensor) -> None:
    """Block repeated words with ``block_ngram_repeat: 1``, which blocks the wrong ones."""
    if self.block_ngram_repeat != 1:
        original(self, log_probs)
        return
    for scores, after in zip(log_probs, self.forbidden_tokens, strict=True):
        scores[list(after.get((), ()))] = -10e20


@wrap("coverage_wu", PenaltyBuilder)
def ignore_padding(original: Any, self: Any, coverage: Tensor, beta: float = 0.0) -> Any:
    """Exclude padding from the coverage penalty: it has no attention, and log 0 is minus infinity."""
    return original(self, coverage.masked_fill(coverage == 0.0, 1.0), beta)


@wrap("report_results", Inference)
def count_tokens(original: Any, self: Any, *args: Any) -> Any:
    """Count the tokens of the best translations and of the targets to score, for their perplexities."""
    results = original(self, *args)
    batch = results["batch"]
    counts: Counter[str] = Counter(PRED=sum(len(best[0]) for best in results["predictions"]))
    if "tgt" in batch:
        targets = batch["tgt"] if isinstance(self, GeneratorLM) else batch["tgt"][:, 1:]
        counts["GOLD"] = int(targets.ne(self._tgt_pad_idx).sum())
    counts.update(getattr(self, "tokens", {}))
    self.tokens = counts
    return results


@wrap("_report_score", Inference)
def report_per_token(original: Any, self: Any, name: str, total: Any, sentences: int) -> Any:
    """Report sums of log probabilities per token; the perplexity of a sentence is a huge number."""
    if sentences == 0 or (name == "PRED" and self.global_scorer.has_len_pen):
        return original(self, name, total, sentences)
    score = torch.as_tensor(float(total) / self.tokens.pop(name))
    return f"{name} SCORE: {score:.4f}, {name} PPL: {(-score).exp():.2f} NB SENTENCES: {sentences}"


@wrap("from_batch", TranslationBuilder)
def write_scores_of_beams(original: Any, self: Any, translation_batch: Any) -> Any:
    """Make ``-with_score`` write the scores of beam search, which are floats and not tensors."""
    translations = original(self, translation_batch)
    for translation in translations:
        translation.pred_scores = [
            torch.as_tensor(score, dtype=torch.float64) for score in translation.pred_scores
        ]
    return translations
