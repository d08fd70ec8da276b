"""The rows of the recipe: what each makes of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from recipes.common.recipe import Recipe
from recipes.common.rows import FILE, read_file
from shared_embeddings.errors import UserError

ORIGINAL = "original"


@dataclass(frozen=True)
class ShrinkRow:
    """One model.

    Attributes:
        name: of the row.
        trim: whether the vocabulary is trimmed to the texts.
        ratio: how many times fewer bytes its table takes than before compression, or None.
        embedding: method and options; empty where `compress` chooses them, or nothing is compressed.
    """

    name: str
    trim: bool = False
    ratio: float | None = None
    embedding: dict[str, Any] = field(default_factory=dict)

    @property
    def is_compressed(self) -> bool:
        """Whether its table is replaced."""
        return bool(self.embedding) or self.ratio is not None


def read_grid(recipe: Recipe) -> dict[str, ShrinkRow]:
    """The rows of ``rows.yaml`` by name, with ``--smoke`` those of the small grid.

    Raises:
        UserError: a row has an unknown key.
    """
    path = recipe.folder / FILE
    rows = read_file(path)["grids"]["smoke" if recipe.is_smoke else "full"]
    try:
        return {name: ShrinkRow(name, **settings) for name, settings in rows.items()}
    except TypeError as error:
        raise UserError(f"{path}: grids: {error}; a row may hold trim, ratio and embedding") from error


def chosen_rows(recipe: Recipe, patterns: Sequence[str]) -> list[ShrinkRow]:
    """The rows whose names match one of the patterns, in the order of the file.

    Raises:
        UserError: a pattern matches none.
    """
    rows = read_grid(recipe)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in rows):
            raise UserError(f"no row is called {pattern!r}; there are: {', '.join(rows)}")
    return [row for name, row in rows.items() if any(fnmatchcase(name, pattern) for pattern in patterns)]
