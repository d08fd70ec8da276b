"""What ``--smoke`` does in the published translation recipes, beyond `recipes.common.smoke`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from recipes.common import smoke
from recipes.common.config import Row
from recipes.common.corpus import write_lines
from recipes.common.recipe import Recipe
from recipes.common.smoke import CLASSES, LINES, MERGES, TEST_LINES, SmokeRecipe, generated_pairs
from recipes.published.settings import Settings, classes_file

# Merges of byte pairs; pieces of SentencePiece, whose models hold as many as they are told.
_SIZES = {"bpe": MERGES, "sentencepiece": 240}


def parse(recipe: Recipe, usage: str, arguments: Sequence[str]) -> tuple[Recipe, Row, list[str]]:
    """As `recipes.common.smoke.parse`; a row of ``--smoke`` takes the class file that there is.

    Raises:
        UserError: see `Recipe.parse`.
    """
    chosen, row, options = smoke.parse(recipe, usage, arguments)
    if isinstance(chosen, SmokeRecipe) and "classes" in row.embedding:
        row = replace(row, embedding={**row.embedding, "classes": classes_file(CLASSES)})
    return chosen, row, options


def smoke_settings(settings: Settings) -> Settings:
    """The same steps for a generated text of a few hundred pairs."""
    small = {
        name: replace(pieces, size=_SIZES[pieces.kind], classes=(CLASSES,) if pieces.classes else ())
        for name, pieces in settings.pieces.items()
    }
    return replace(settings, shard=100, sentences=500, pieces=small)


def write_smoke_texts(folder: Path, settings: Settings) -> None:
    """Write plain files for the training text and every test set of `settings`."""
    sizes = {"train": LINES, **{texts.name: TEST_LINES for texts in settings.tests}}
    for seed, (name, lines) in enumerate(sizes.items()):
        drawn = list(generated_pairs(lines, seed))
        for side, language in enumerate(settings.languages):
            write_lines(folder / f"{name}.{language}", (pair[side] for pair in drawn))
