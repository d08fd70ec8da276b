"""Measure the models, and write the table and the picture of the README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recipes.common.recipe import Recipe
from recipes.common.results import FILE, write_result
from recipes.common.smoke import SMOKE, SMOKE_HELP
from recipes.common.tools import print_line, read_json, run_module
from recipes.shrink_a_model.encoder import Encoder, read_encoder, read_onnx, speed_ratio, table_bytes
from recipes.shrink_a_model.grid import ORIGINAL, ShrinkRow, chosen_rows, read_grid
from recipes.shrink_a_model.measures import Texts, measure, read_all
from recipes.shrink_a_model.preprocess import MODEL, PAIRS, TEXTS, VECTORS
from recipes.shrink_a_model.report import MARKER, write_report
from recipes.shrink_a_model.train import COMMAND, WEIGHTS, model_folder
from shared_embeddings.errors import UserError
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.files import bytes_on_disk, write_text
from shared_embeddings.utils.path_options import PathOption

# Sentences whose vectors are compared between ONNX Runtime and PyTorch.
_COMPARED = 64
_PLAIN: dict[str, Any] = {"method": "standard", "options": {}, "relative_error": 0.0}


def evaluate(home: Path, row: ShrinkRow, data: Mapping[str, Any]) -> Path:
    """Measure the model of a row; returns the file of results.

    Args:
        home: folder of everything that the recipe writes.
        row: whose model is measured.
        data: the description of the data.

    Raises:
        UserError: the model is not there.
    """
    folder, prepared = model_folder(home, row), home / "data"
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder}: no model; run train.sh {row.name}")
    texts = Texts(**read_json(prepared / TEXTS))
    with np.load(prepared / VECTORS) as stored:
        original = dict(stored)
    encoder, tests = read_encoder(folder), read_all(prepared / PAIRS)
    vectors = texts.encode(encoder, prepared / PAIRS)
    metrics = {
        **measure(vectors, original, tests),
        "speed": speed_ratio(encoder, read_encoder(prepared / MODEL), texts.descriptions),
        "onnx": _in_onnx_runtime(home, row, texts.descriptions, vectors["descriptions"]),
    }
    fit = _fit(folder) if row.is_compressed else _PLAIN
    options = {name: value for name, value in fit["options"].items() if name != "words_per_width"}
    return write_result(
        home,
        row.name,
        config={
            "trim": row.trim,
            "ratio": row.ratio,
            "given": row.embedding,
            "embedding": {"method": fit["method"], **options},
        },
        counts={
            "words": len(encoder.tokenizer),
            "folder_bytes": bytes_on_disk(folder),
            # What is not the table takes as much in all models.
            "stored_bits": 8
            * (_weights(folder) - _weights(prepared / MODEL) + table_bytes(prepared / MODEL)),
        },
        metrics={**metrics, "relative_error": fit["relative_error"]},
        data_checksum=data["checksum"],
    )


def _fit(folder: Path) -> dict[str, Any]:
    """What the report of ``compress`` beside a folder says of the fit of its one table."""
    fit: dict[str, Any] = read_json(folder.with_suffix(".json"))["tables"][0]["fit"]
    return fit


def _weights(folder: Path) -> int:
    """Bytes of the files of weights in a folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _in_onnx_runtime(
    home: Path, row: ShrinkRow, sentences: Sequence[str], vectors: np.ndarray
) -> dict[str, float] | None:
    """The size of the exported model, its difference from PyTorch, and its speed relative to the original.

    Returns None, with a line that says why, where the model is not exported as a whole.

    Args:
        home: folder of everything that the recipe writes.
        row: whose model it is.
        sentences: which are encoded.
        vectors: of PyTorch ``(N, D)``.
    """
    own, original = (_exported(home, each) for each in (row, read_original(home)))
    if own is None or original is None:
        print_line(f"{row.name}: not run in ONNX Runtime: export wrote no file with the whole encoder")
        return None
    difference = np.abs(own.encode(sentences[:_COMPARED]) - vectors[:_COMPARED]).max()
    return {
        "bytes": _file(home, row).stat().st_size,
        "difference": float(difference),
        "speed": speed_ratio(own, original, sentences),
    }


def read_original(home: Path) -> ShrinkRow:
    """The row of the original model, which is written by train.sh.

    Raises:
        UserError: it is not there.
    """
    row = ShrinkRow(ORIGINAL)
    if not (model_folder(home, row) / WEIGHTS).is_file():
        raise UserError(f"{model_folder(home, row)}: no model; run train.sh {ORIGINAL}")
    return row


def _file(home: Path, row: ShrinkRow) -> Path:
    """The exported model of a row."""
    return model_folder(home, row).with_suffix(".onnx")


def _exported(home: Path, row: ShrinkRow) -> Encoder | None:
    """The model of a row in ONNX Runtime, exported where it is older than the model; None without one."""
    file, folder = _file(home, row), model_folder(home, row)
    if not file.is_file() or file.stat().st_mtime < (folder / WEIGHTS).stat().st_mtime:
        try:
            run_module(
                COMMAND, ["export", "--model", folder, "--format", "onnx", "--output", file, "--force"]
            )
        except (UserError, SystemExit):
            return None
    return read_onnx(file, folder)


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Measure the models of the rows; write the table and the picture of all results into the README."""
    parser = Parser("eval.sh", description=main.__doc__)
    parser.add_argument("rows", nargs="*", default=[], help="names or patterns, such as 'automatic_*'")
    parser.add_argument(
        "--readme",
        type=PathOption.UPDATED,
        help="with the markers; gets the table, also without rows (default: README.md beside the results)",
    )
    parser.add_argument(SMOKE, action="store_true", help=f"{SMOKE_HELP}; all of its rows")
    options = parser.parse_args(arguments)
    recipe = recipe.smoke() if options.smoke else recipe
    rows = chosen_rows(recipe, ["*"] if options.smoke else options.rows)
    data = recipe.describe_data(recipe.data)
    for row in rows:
        print_line(f"{row.name}: wrote {evaluate(recipe.home, row, data)}")
    readme = options.readme or recipe.home / "README.md"
    if options.readme is None:
        write_text(readme, f"<!-- BEGIN {MARKER} -->\n<!-- END {MARKER} -->\n")
    write_report(read_grid(recipe), recipe.home / FILE, readme)
