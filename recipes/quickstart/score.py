"""Scores of translations into any of the quickstart's languages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sacrebleu.metrics import BLEU

from recipes.translation.bleu import corpus_scores

# Without spaces between words, sacreBLEU's usual tokenization would take a sentence for one word.
UNSPACED_LANGUAGES = ("ja", "th", "zh", "yue", "lo", "km", "my")


def scores(hypotheses: Sequence[str], references: Sequence[str], language: str) -> dict[str, Any]:
    """BLEU and chrF with their signatures; BLEU over characters for languages without spaces between words.

    Raises:
        UserError: when the two sides differ in length or are empty.
    """
    result = corpus_scores(hypotheses, references)
    if language.replace("-", "_").split("_")[0] in UNSPACED_LANGUAGES:
        metric = BLEU(tokenize="char")
        result["bleu"] = metric.corpus_score(list(hypotheses), [list(references)]).score
        result["bleu_signature"] = str(metric.get_signature())
    return result
