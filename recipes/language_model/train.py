"""Train one row of a recipe for language models, optionally with several processes under torchrun."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.common.recipe import Recipe, parse_row
from recipes.common.rows import Row
from recipes.common.tools import (
    Segment,
    distillation_options,
    fit_model,
    kept_segments,
    peak_memory_of_children,
    read_json,
    run_module,
    write_json,
    write_yaml,
)
from shared_embeddings.errors import UserError
from shared_embeddings.utils.files import locked, remove_leftovers

LAST, BEST = "last.pt", "best.pt"
USAGE = """usage: train.sh ROW [--smoke] [option of lm_train ...]

Trains ROW in $RUNS/{recipe}/ROW, or resumes its training. Run preprocess.sh first, and train.sh for the
teacher of ROW if it has one. With --smoke, trains a tiny network in $RUNS/{recipe}/smoke/ROW on the data of
preprocess.sh --smoke."""
# Options that the script sets.
OWN_OPTIONS = ("config", "data", "embedding", "output_dir")


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Train the row of the command line."""
    recipe, row, options = parse_row(recipe, USAGE, arguments)
    check_options(options, OWN_OPTIONS)
    train(recipe, row, options)


def check_options(options: Sequence[str], own: Sequence[str]) -> None:
    """Raise `UserError` for an option that the script sets."""
    for option in options:
        name = option.lstrip("-").partition("=")[0]
        if option.startswith("-") and name in own:
            raise UserError(f"-{name} is set by the row and $RUNS; remove it")


def train(recipe: Recipe, row: Row, options: Sequence[str]) -> None:
    """Train a row; rows with ``finetune`` are trained a second time from the best model.

    Args:
        recipe: the recipe.
        row: the row.
        options: further command-line options of ``lm_train`` for the first training.

    Raises:
        UserError: the data are not prepared, the teacher is not trained, another process trains this row, or
            training failed.
    """
    checksum = recipe.describe_data(data_folder(recipe, row))["checksum"]
    run = recipe.home / row.name
    if row.fit is not None:
        _fit(recipe, row, run, options, checksum)
        return
    option = {} if row.distill is None else distillation_options(row.distill, _teacher_model(recipe, row))
    _train_stage(recipe, row, run, {**row.train, **option}, options, checksum)
    if row.finetune is not None:
        settings = {**row.finetune, "init_from": str(run / BEST)}
        _train_stage(recipe, row, run / "finetune", settings, (), checksum)


def data_folder(recipe: Recipe, row: Row) -> Path:
    """Return the folder of the prepared data of a row."""
    return recipe.home / str(row.data.get("folder", "data"))


def _teacher_model(recipe: Recipe, row: Row) -> Path:
    """Return the model of the row's teacher."""
    assert row.teacher is not None
    try:
        folders = trained_folders(recipe, recipe.row(row.teacher))
    except UserError as error:
        raise UserError(f"{row.name} starts from {row.teacher}; {error}") from error
    return folders[-1] / BEST


def trained_folders(recipe: Recipe, row: Row) -> list[Path]:
    """Return the folder of each training of a row; the last one has the final model.

    Raises:
        UserError: training is not complete.
    """
    run = recipe.home / row.name
    folders = [run] if row.finetune is None else [run, run / "finetune"]
    logs = [read_json(folder / "training.json") for folder in folders]
    is_there = (folders[-1] / BEST).exists() and all(logs)
    if not is_there or any(segment["ended"] is None for log in logs if log for segment in log["segments"]):
        raise UserError(f"{run}: training is not complete; run {recipe.command('train.sh', row.name)}")
    return folders


def _fit(recipe: Recipe, row: Row, run: Path, options: Sequence[str], checksum: str) -> None:
    """Fit the embedding of a row, and write time and memory to ``training.json``."""
    assert row.fit is not None
    if options:
        raise UserError(f"{row.name} is fitted, not trained: {options[0]} has no effect; remove it")
    if not is_first_process():
        return
    teacher = _teacher_model(recipe, row)
    with locked(run / "lock"):
        segment: Segment = {"started": time.time(), "ended": None}
        _write_log(run, [segment], checksum, options)
        embedding = recipe.with_files(row.embedding, recipe.home)
        counts = data_folder(recipe, row) / "vocabulary.tsv"
        fit_model(teacher, embedding, counts, row.train.get("seed", 0), run / BEST, row.fit)
        segment["ended"] = time.time()
        _write_log(run, [segment], checksum, options)


def _train_stage(
    recipe: Recipe,
    row: Row,
    folder: Path,
    settings: dict[str, Any],
    options: Sequence[str],
    checksum: str,
) -> None:
    """Run ``lm_train`` in `folder`, and write time and memory to ``training.json`` there."""
    own = {
        "data": str(data_folder(recipe, row)),
        "output_dir": str(folder),
        "embedding": recipe.with_files(row.embedding, recipe.home),
    }
    write_yaml(folder / "settings.yaml", {**own, **settings})
    arguments = ["-config", str(folder / "settings.yaml"), *options]
    if not is_first_process():
        run_module("lm.train.command", arguments)
        return
    with locked(folder / "lock") as lock:
        log = read_json(folder / "training.json") or {"segments": []}
        before = _time_of(folder / LAST)
        segments = kept_segments(log["segments"], before)
        segment: Segment = {"started": time.time(), "ended": None}
        _write_log(folder, [*segments, segment], checksum, options)
        run_module("lm.train.command", arguments, keep_open=[lock])
        remove_leftovers(folder / "settings.yaml", folder / "training.json")  # of killed processes
        segment["ended"] = time.time()
        # Skip the segment if the run was already finished.
        done = segments if _time_of(folder / LAST) == before else [*segments, segment]
        _write_log(folder, done, checksum, options)


def _write_log(folder: Path, segments: list[Segment], checksum: str, options: Sequence[str]) -> None:
    """Write the log of a training; its seconds are those of finished segments."""
    seconds = sum(part["ended"] - part["started"] for part in segments if part["ended"] is not None)
    before = read_json(folder / "training.json") or {}
    content = {
        "segments": segments,
        "data_checksum": checksum,
        "options": list(options),
        "seconds": round(seconds, 1),
        "peak_memory_mib": max(peak_memory_of_children(), before.get("peak_memory_mib", 0.0)),
    }
    write_json(folder / "training.json", content)


def _time_of(path: Path) -> float | None:
    """Return when a file was last modified; None if it is missing."""
    return path.stat().st_mtime if path.exists() else None


def is_first_process() -> bool:
    """Return whether this is the only process, or the first one of torchrun."""
    return int(os.environ.get("RANK", 0)) == 0
