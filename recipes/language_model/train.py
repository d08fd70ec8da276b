"""Train one row of a recipe for language models; under torchrun every process runs the same command."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.common.recipe import Recipe, parse_row
from recipes.common.rows import Row
from recipes.common.tools import (
    distillation_options,
    fit_model,
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

Trains ROW in $RUNS/{recipe}/ROW, resuming where it was stopped. Run preprocess.sh first, and train.sh for the
row that ROW starts from. With --smoke, a tiny network is trained in $RUNS/{recipe}/smoke/ROW on the data of
preprocess.sh --smoke."""
# Options that the script sets itself: with others, a result would not be that of its row.
OWN_OPTIONS = ("config", "data", "embedding", "output_dir")
Segment = dict[str, Any]


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Train the row that the command line names."""
    recipe, row, options = parse_row(recipe, USAGE, arguments)
    check_options(options, OWN_OPTIONS)
    train(recipe, row, options)


def check_options(options: Sequence[str], own: Sequence[str]) -> None:
    """Raise `UserError` for an option of the command line that the script sets itself."""
    for option in options:
        name = option.lstrip("-").partition("=")[0]
        if option.startswith("-") and name in own:
            raise UserError(f"-{name} is set by the row and $RUNS; remove it")


def train(recipe: Recipe, row: Row, options: Sequence[str]) -> None:
    """Train a row, and a second time from its best model where it has ``finetune``.

    Args:
        recipe: whose row it is.
        row: what to train.
        options: further options of ``lm_train`` for the first training, as on its command line.

    Raises:
        UserError: the data are not prepared, the row that this one starts from is not trained, another
            process trains this row, or training failed.
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
    """Folder of the prepared data that a row uses."""
    return recipe.home / str(row.data.get("folder", "data"))


def _teacher_model(recipe: Recipe, row: Row) -> Path:
    """The trained model of the row that `row` starts from."""
    assert row.teacher is not None
    try:
        folders = trained_folders(recipe, recipe.row(row.teacher))
    except UserError as error:
        raise UserError(f"{row.name} starts from {row.teacher}; {error}") from error
    return folders[-1] / BEST


def trained_folders(recipe: Recipe, row: Row) -> list[Path]:
    """The folder of each training of a row; the last has its model.

    Raises:
        UserError: the row is not trained to the end.
    """
    run = recipe.home / row.name
    folders = [run] if row.finetune is None else [run, run / "finetune"]
    logs = [read_json(folder / "training.json") for folder in folders]
    is_there = (folders[-1] / BEST).exists() and all(logs)
    if not is_there or any(segment["ended"] is None for log in logs if log for segment in log["segments"]):
        raise UserError(f"{run}: not trained to the end; run {recipe.command('train.sh', row.name)}")
    return folders


def _fit(recipe: Recipe, row: Row, run: Path, options: Sequence[str], checksum: str) -> None:
    """Fit the embedding of a row that is not trained; its time and memory go into ``training.json``."""
    assert row.fit is not None
    if options:
        raise UserError(f"{row.name} is only fitted, not trained: {options[0]} has no effect; remove it")
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
    """Run ``lm_train`` in `folder`; its time and memory go into ``training.json`` there."""
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
        segments = lasting_segments(log["segments"], before)
        segment: Segment = {"started": time.time(), "ended": None}
        _write_log(folder, [*segments, segment], checksum, options)
        run_module("lm.train.command", arguments, keep_open=[lock])
        remove_leftovers(folder / "settings.yaml", folder / "training.json")  # of processes that were killed
        segment["ended"] = time.time()
        # A run that was already finished has not trained.
        done = segments if _time_of(folder / LAST) == before else [*segments, segment]
        _write_log(folder, done, checksum, options)


def lasting_segments(segments: Sequence[Segment], saved: float | None) -> list[Segment]:
    """The segments of training that led to what was saved at `saved`; a killed one ended with that."""
    if saved is None:
        return []
    ended = [{**part, "ended": saved if part["ended"] is None else part["ended"]} for part in segments]
    return [part for part in ended if part["started"] < part["ended"]]


def _write_log(folder: Path, segments: list[Segment], checksum: str, options: Sequence[str]) -> None:
    """Write what has been trained so far; seconds are those of finished segments."""
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
    """When a file was last written; None when it is absent."""
    return path.stat().st_mtime if path.exists() else None


def is_first_process() -> bool:
    """Whether this is the only process, or the first of those that torchrun has started."""
    return int(os.environ.get("RANK", 0)) == 0
