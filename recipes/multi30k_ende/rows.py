"""Where this recipe keeps its rows, its data and its runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import shared_embeddings as se
from recipes.common.config import Row, distillation_options
from recipes.common.errors import UserError
from recipes.common.recipe import Recipe
from recipes.common.results import REPOSITORY
from recipes.common.training import AVERAGED, Data, read_json

RECIPE = Path(__file__).parent
CONFIGS = RECIPE / "configs"


def home() -> Path:
    """Folder of everything that this recipe writes: ``$RUNS/multi30k_ende``."""
    return Path(os.environ.get("RUNS") or REPOSITORY / "runs").absolute() / RECIPE.name


def data_folder() -> Path:
    """Folder of the prepared data."""
    return home() / "data"


def parse(usage: str, arguments: Sequence[str]) -> tuple[Row, list[str]]:
    """Take the command line ``CONFIG [option ...]`` apart.

    ``--help`` prints `usage` and the configs and exits with 0; without a CONFIG, they go to stderr, with 2.
    """
    row, options = Recipe(RECIPE.name).parse(usage, arguments)
    return _with_own_files(row), options


def _with_own_files(row: Row) -> Row:
    """The row, its embedding's files where preprocess.sh has put them."""
    method = row.embedding.get("method")
    names = se.file_options(method) if method in se.methods() else ()
    files = {name: str(home() / row.embedding[name]) for name in names if name in row.embedding}
    return replace(row, embedding={**row.embedding, **files})


def with_teacher(row: Row) -> Row:
    """The row, with the trained model of the row that it starts from among its options of ``onmt_train``.

    Raises:
        UserError: that row is not trained.
    """
    if row.distill is None:
        return row
    model = teacher_model(row, row.distill["teacher"])
    return replace(row, train={**row.train, **distillation_options(row.distill, model)})


def teacher_model(row: Row, teacher: str) -> Path:
    """The trained model of the row `teacher`, which `row` starts from.

    Raises:
        UserError: that row is not trained.
    """
    model = home() / teacher / AVERAGED
    if not model.exists():
        raise UserError(f"{row.name} starts from {teacher}, which is not trained; run train.sh {teacher}")
    return model


def prepared_data() -> Data:
    """The data that preprocess.sh has left.

    Raises:
        UserError: the data are not prepared.
    """
    folder = data_folder()
    description = read_json(folder / "data.json")
    if description is None:
        raise UserError(f"{folder}: no prepared data; run preprocess.sh")
    source, target = description["source"], description["target"]
    corpora = {
        part: {"path_src": str(folder / f"{part}.{source}"), "path_tgt": str(folder / f"{part}.{target}")}
        for part in ("train", "valid")
    }
    vocabulary = str(folder / "vocabulary")
    options = {"data": corpora, "src_vocab": vocabulary, "tgt_vocab": vocabulary}
    return Data(options, description["checksum"])
