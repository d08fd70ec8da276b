"""What ``--smoke`` does in the recipes for language models, beyond `recipes.common.smoke`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm.data.datasets import SOURCES
from recipes.common.corpus import write_lines
from recipes.common.model_rows import DATA, ModelRow, Recipe
from recipes.common.results import SMOKE_FOLDER
from recipes.common.smoke import (
    LINES,
    SMOKE,
    TEST_LINES,
    generated_words,
    sentence,
    smoke_embedding,
    smoke_start,
)

# What is smaller than in any row, where the row's model has it.
_LESS: dict[str, Any] = {
    "hidden_dim": 32,
    "num_heads": 2,
    "head_dim": 8,
    "feed_forward_dim": 32,
    "memory_length": 20,
    "clamp_length": 20,
    "target_length": 20,
}
_TRAINING = {"epochs": 2, "batch_size": 4, "sequence_length": 40, "log_every": 5}
# Options of another length of training, of which an epoch is all.
_LONG = ("steps", "evaluate_every", "warmup_steps")
# Two where the first and the last layer of an LSTM have widths of their own.
_LAYERS = 2
_PARAGRAPH = 10


class SmokeModelRecipe(Recipe):
    """A recipe whose runs lie in a folder ``smoke`` of its own."""

    @property
    def home(self) -> Path:
        """``$RUNS/RECIPE/smoke``."""
        return super().home / SMOKE_FOLDER

    def command(self, script: str, *arguments: str) -> str:
        """As `Recipe.command`, with ``--smoke``."""
        return super().command(script, *arguments, SMOKE)


def smoke_model_row(row: ModelRow) -> ModelRow:
    """The same row with a narrow network, an embedding for a small vocabulary, and two short epochs.

    There is one generated text, so that rows of all sizes take it.
    """
    return replace(
        row,
        data=DATA,
        embedding=smoke_embedding(row.embedding),
        train=_smaller(row.train),
        finetune=None if row.finetune is None else _smaller(row.finetune),
        evaluate=_less(row.evaluate),
        distill=smoke_start(row.distill),
        fit=smoke_start(row.fit),
    )


def _smaller(train: dict[str, Any]) -> dict[str, Any]:
    """Options of ``lm_train`` for a narrow network and two epochs; the width of the embedding stays."""
    kept = {name: value for name, value in _less(train).items() if name not in _LONG}
    return {**kept, **_TRAINING, "num_layers": min(_LAYERS, train["num_layers"])}


def _less(options: dict[str, Any]) -> dict[str, Any]:
    """Options with those of `_LESS` that they have made smaller."""
    return {**options, **{name: value for name, value in _LESS.items() if name in options}}


def write_smoke_corpus(dataset: str, folder: Path) -> dict[str, Path]:
    """Write a generated text for each split, with the names and the layout of the texts of `dataset`.

    Args:
        dataset: a name of `lm.data.datasets.SOURCES`.
        folder: gets the texts.
    """
    layout = _LAYOUTS.get(dataset, _articles)
    texts = {}
    for seed, (split, name) in enumerate(SOURCES[dataset].files.items()):
        lines = LINES if split == "train" else 5 * TEST_LINES
        texts[split] = folder / name
        write_lines(texts[split], layout(list(generated_words(lines, seed))))
    return texts


def _plain(lines: list[list[str]]) -> Iterator[str]:
    """Sentences without marks, in small letters, with ``N`` for numbers; a space at either end."""
    for words in lines:
        yield f" {' '.join(['<unk>', *words, 'N'])} "


def _articles(lines: list[list[str]]) -> Iterator[str]:
    """Articles with headings between equals signs, a paragraph on a line, and empty lines in between."""
    for start in range(0, len(lines), _PARAGRAPH):
        title, *paragraph = lines[start : start + _PARAGRAPH]
        text = " ".join(sentence(words).replace(".", " .") for words in paragraph)
        for line in (f"= {' '.join(title[:3]).title()} =", f"{text} 3 @.@ 5 <unk>"):
            yield from (" ", f" {line} ")


_LAYOUTS: dict[str, Callable[[list[list[str]]], Iterator[str]]] = {"ptb": _plain}
