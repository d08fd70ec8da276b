"""Corpus scores with sacreBLEU (Post, 2018), each with the signature that makes it comparable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sacrebleu.metrics import BLEU, CHRF

from recipes.common.errors import UserError


def corpus_scores(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Score detokenized translations against one detokenized reference each.

    Returns:
        ``bleu`` and ``chrf`` (0 to 100) with ``bleu_signature`` and ``chrf_signature``, and ``sentences``.

    Raises:
        UserError: when the two sides differ in length or are empty.
    """
    if len(hypotheses) != len(references):
        raise UserError(f"{len(hypotheses)} translations for {len(references)} references; translate again")
    if not references:
        raise UserError("nothing to score: the test set is empty")
    scores: dict[str, Any] = {"sentences": len(references)}
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        scores[name] = metric.corpus_score(list(hypotheses), [list(references)]).score
        scores[f"{name}_signature"] = str(metric.get_signature())
    return scores
