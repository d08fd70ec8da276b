"""Where this recipe keeps its rows, and what a row takes from other runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import shared_embeddings as se
from recipes.common import smoke
from recipes.common.config import Row, distillation_options
from recipes.common.errors import UserError
from recipes.common.recipe import Recipe
from recipes.common.training import AVERAGED

RECIPE = Recipe(Path(__file__).parent.name)
CONFIGS = RECIPE.folder / "configs"


def parse(usage: str, arguments: Sequence[str]) -> tuple[Recipe, Row, list[str]]:
    """Take the command line ``CONFIG [--smoke] [option ...]`` apart.

    ``--help`` prints `usage` and the configs and exits with 0; without a CONFIG, they go to stderr, with 2.
    """
    recipe, row, options = smoke.parse(RECIPE, usage, arguments)
    return recipe, _with_own_files(recipe, row), options


def _with_own_files(recipe: Recipe, row: Row) -> Row:
    """The row, its embedding's files where preprocess.sh has put them."""
    method = row.embedding.get("method")
    names = se.file_options(method) if method in se.methods() else ()
    files = {name: str(recipe.home / row.embedding[name]) for name in names if name in row.embedding}
    return replace(row, embedding={**row.embedding, **files})


def with_teacher(recipe: Recipe, row: Row) -> Row:
    """The row, with the trained model of the row that it starts from among its options of ``onmt_train``.

    Raises:
        UserError: that row is not trained.
    """
    if row.distill is None:
        return row
    model = teacher_model(recipe, row, row.distill["teacher"])
    return replace(row, train={**row.train, **distillation_options(row.distill, model)})


def teacher_model(recipe: Recipe, row: Row, teacher: str) -> Path:
    """The trained model of the row `teacher`, which `row` starts from.

    Raises:
        UserError: that row is not trained.
    """
    model = recipe.home / teacher / AVERAGED
    if not model.exists():
        command = recipe.command("train.sh", teacher)
        raise UserError(f"{row.name} starts from {teacher}, which is not trained; run {command}")
    return model
