"""Perplexity of a compressed language model, as ``lm_eval`` computes it by default."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lm.evaluate.evaluation import Reading, evaluate
from lm.evaluate.scored_text import read_data
from lm.models import LanguageModel
from shared_embeddings.checkpoints.quality import Quality


def perplexity(model: LanguageModel, words: Sequence[str], path: Path) -> Quality:
    """Compute the perplexity of a text.

    Args:
        model: the model, with the memory settings of training.
        words: its words in the order of their ids.
        path: a tokenized text, or a folder written by ``lm_prepare``, whose validation text is used.

    Raises:
        shared_embeddings.errors.UserError: the text is missing, too short, or has another vocabulary.
    """
    text = read_data(path, "valid" if path.is_dir() else None, words)
    reading = Reading()
    score = evaluate(model, text.tokens, *reading)
    how = (
        f"{text.name}: {score.tokens:,} targets, {text.unknown:,} <unk>, segments of {reading.target_length} "
        "tokens"
    )
    return Quality("perplexity", score.perplexity, how)
