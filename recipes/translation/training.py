"""Training one row with ``onmt_train``: start or resume, then average the last checkpoints."""

from __future__ import annotations

import os
import re
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recipes.common.rows import Row
from recipes.common.tools import (
    Segment,
    fit_model,
    kept_segments,
    option_value,
    peak_memory_of_children,
    read_json,
    run_tool,
    write_json,
    write_yaml,
)
from shared_embeddings.errors import UserError
from shared_embeddings.utils.files import locked, remove_leftovers, replacing

AVERAGED = "model_averaged.pt"
# Settings that may change when a run is resumed.
FREE_TO_CHANGE = ("train_steps", "report_every", "keep_checkpoint")


class Checkpoint(NamedTuple):
    """A complete checkpoint; sorted by step."""

    step: int
    path: Path


def complete_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return all complete checkpoints ``*_step_N.pt`` in `folder` by step.

    Checkpoints are zip archives, whose directory is at the end; truncated files are not valid archives.
    """
    found = []
    for path in folder.glob("*_step_*.pt"):
        step = re.search(r"_step_(\d+)\.pt$", path.name)
        if step and zipfile.is_zipfile(path):
            found.append(Checkpoint(int(step[1]), path))
    return sorted(found)


class Data(NamedTuple):
    """Prepared data: options of ``onmt_train`` with their paths, and their checksum."""

    options: dict[str, Any]
    checksum: str


def train_row(row: Row, run: Path, data: Data, options: Sequence[str], average: int) -> None:
    """Train `row` in the folder `run`, and average its last checkpoints.

    Training resumes from the latest complete checkpoint.

    Args:
        row: the row.
        run: folder for ``train.yaml``, ``train.log``, ``training.json``, checkpoints and the averaged model.
        data: training data.
        options: further command-line options of ``onmt_train``.
        average: number of checkpoints to average.

    Raises:
        UserError: another process trains this row, or the run was started with other settings or data.
    """
    settings = {**row.train, "embedding": row.embedding}
    target = target_step(row, options)
    checkpoints = run / "checkpoints"
    paths = {"save_model": str(checkpoints / "model"), "log_file": str(run / "train.log")}
    with locked(run / "lock") as lock:
        remove_leftovers(run / "train.yaml", run / "training.json", run / AVERAGED)
        found = complete_checkpoints(checkpoints)
        log: dict[str, Any] = {"settings": settings, "data_checksum": data.checksum}
        log |= {"segments": [], "finished": None}
        if found:
            log.update(read_json(run / "training.json") or {})
        _check_unchanged(run, log, settings, data.checksum)
        write_yaml(run / "train.yaml", {**data.options, **paths, **settings})
        if found and log["finished"] == target:
            print(f"{run.name}: already trained to step {found[-1].step}", flush=True)
        else:
            _train(run, log, found[-1] if found else None, target, options, lock)
        _average(complete_checkpoints(checkpoints)[-average:], run / AVERAGED)


def fit_row(row: Row, run: Path, data: Data, teacher: Path, counts: Path, options: Sequence[str]) -> None:
    """Fit the embedding of a row to its teacher's, without training.

    Args:
        row: a row with ``fit``.
        run: folder for ``model_averaged.pt``, ``fit.json`` and ``training.json``.
        data: training data of the teacher.
        teacher: model of the teacher.
        counts: file with word counts.
        options: must be empty.

    Raises:
        UserError: there are options, or another process fits this row.
    """
    if options:
        raise UserError(f"{row.name} is fitted, not trained: {options[0]} has no effect; remove it")
    with locked(run / "lock"):
        started = time.time()
        fit_model(teacher, row.embedding, counts, row.train.get("seed", 0), run / AVERAGED, row.fit or {})
        log = {"settings": {"embedding": row.embedding}, "data_checksum": data.checksum, "finished": 0}
        log |= {"options": [], "seconds": round(time.time() - started, 1)}
        log |= {"peak_memory_mib": peak_memory_of_children()}
        write_json(run / "training.json", log)


def _train(
    run: Path,
    log: dict[str, Any],
    newest: Checkpoint | None,
    target: int,
    options: Sequence[str],
    lock: int,
) -> None:
    """Run ``onmt_train``, from the checkpoint `newest` if there is one, and log time and memory."""
    arguments = ["-config", str(run / "train.yaml"), *options]
    segments: list[Segment] = []
    if newest:
        print(f"{run.name}: resuming from step {newest.step}", flush=True)
        arguments += ["-train_from", str(newest.path)]
        segments = kept_segments(log["segments"], newest.path.stat().st_mtime)
    segment: Segment = {"from_step": newest.step if newest else 0, "started": time.time(), "ended": None}
    log = {**log, "segments": [*segments, segment], "finished": None, "options": list(options)}
    write_json(run / "training.json", log)
    run_tool("onmt_train", arguments, keep_open=[lock])
    segment["ended"] = time.time()
    log["finished"] = target
    log["seconds"] = round(sum(part["ended"] - part["started"] for part in log["segments"]), 1)
    log["peak_memory_mib"] = peak_memory_of_children()
    write_json(run / "training.json", log)


def checkpoints_to_average(default: int) -> int:
    """Return the number of checkpoints to average: ``$AVERAGE``, or the default.

    Raises:
        UserError: the variable is not an integer of at least 1.
    """
    given = os.environ.get("AVERAGE") or str(default)
    if not given.isdecimal() or int(given) < 1:
        raise UserError(f"AVERAGE is {given!r}; it must be an integer of at least 1")
    return int(given)


def _average(checkpoints: Sequence[Checkpoint], target: Path) -> None:
    """Average checkpoints and write the result to `target`."""
    if not checkpoints:
        raise UserError(
            f"{target.parent}: training wrote no checkpoint; set save_checkpoint_steps in rows.yaml"
        )
    print(f"averaging steps {', '.join(str(checkpoint.step) for checkpoint in checkpoints)}", flush=True)
    with replacing(target) as temporary:
        models = [checkpoint.path for checkpoint in checkpoints]
        run_tool("onmt_average_models", ["-models", *models, "-output", temporary])


def _check_unchanged(run: Path, log: dict[str, Any], settings: dict[str, Any], checksum: str) -> None:
    """Check that a run is resumed with the same settings and data."""
    before = {**log["settings"], "data": log["data_checksum"]}
    now = {**settings, "data": checksum}
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    changed = [key for key in changed if key not in FREE_TO_CHANGE]
    if changed:
        raise UserError(
            f"{run}: started with a different {', '.join(changed)}; restore it, or move the folder away"
        )


def target_step(row: Row, options: Sequence[str]) -> int:
    """Return the last step of training: from the command line or the row.

    Raises:
        UserError: it is not an integer of at least 1.
    """
    value: Any = option_value(options, "train_steps") or row.train.get("train_steps")
    if not str(value).isdecimal() or int(value) < 1:
        raise UserError(f"train_steps is {value!r}; it must be an integer of at least 1")
    return int(value)
