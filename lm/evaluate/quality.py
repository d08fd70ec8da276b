"""The perplexity of a language model that is compressed, as ``lm_eval`` measures it with its own defaults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lm.evaluate.evaluation import Reading, evaluate
from lm.evaluate.scored_text import read_data
from lm.models import LanguageModel
from shared_embeddings.checkpoints.quality import Quality


def perplexity(model: LanguageModel, words: Sequence[str], path: Path) -> Quality:
    """The perplexity of every token of a text but the first.

    Args:
        model: in which memory it has, as trained.
        words: its words, in the order of their ids.
        path: a text in words, or a folder of ``lm_prepare``, of which the validation text is taken.

    Raises:
        shared_embeddings.errors.UserError: no such text, another vocabulary, or a text that is too short.
    """
    text = read_data(path, "valid" if path.is_dir() else None, words)
    reading = Reading()
    score = evaluate(model, text.tokens, *reading)
    how = (
        f"{text.name}: {score.tokens:,} targets, {text.unknown:,} tokens <unk>, read {reading.target_length} "
        "at a time"
    )
    return Quality("perplexity", score.perplexity, how)
