"""Training one row: start or resume, then average the last checkpoints."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recipes.common.checkpoints import Checkpoint, complete_checkpoints
from recipes.common.config import Row, write_yaml
from recipes.common.errors import UserError
from recipes.common.fitting import fit_model
from recipes.common.tools import run_tool
from shared_embeddings.utils import reading
from shared_embeddings.utils.files import locked, remove_leftovers, replacing, write_text

AVERAGED = "model_averaged.pt"
# What may change between a start and a resumption without making it another model.
FREE_TO_CHANGE = ("train_steps", "report_every", "keep_checkpoint")
Segment = dict[str, Any]


class Data(NamedTuple):
    """Prepared data: the options of ``onmt_train`` that say where they are, and their checksum."""

    options: dict[str, Any]
    checksum: str


def train_row(row: Row, run: Path, data: Data, options: Sequence[str], average: int) -> None:
    """Train `row` in the folder `run` up to its number of steps, and average its last checkpoints.

    Training goes on from the newest complete checkpoint when there is one.

    Args:
        row: what to train.
        run: gets ``train.yaml``, ``train.log``, ``training.json``, the checkpoints and the averaged model.
        data: what to train on.
        options: further options of ``onmt_train``, as on its command line.
        average: how many checkpoints to average.

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
        books: dict[str, Any] = {"settings": settings, "data_checksum": data.checksum}
        books |= {"segments": [], "finished": None}
        if found:
            books.update(read_json(run / "training.json") or {})
        _check_unchanged(run, books, settings, data.checksum)
        write_text(run / "train.yaml", write_yaml({**data.options, **paths, **settings}))
        if found and books["finished"] == target:
            print(f"{run.name}: trained to step {found[-1].step} before", flush=True)
        else:
            _train(run, books, found[-1] if found else None, target, options, lock)
        _average(complete_checkpoints(checkpoints)[-average:], run / AVERAGED)


def fit_row(row: Row, run: Path, data: Data, teacher: Path, counts: Path, options: Sequence[str]) -> None:
    """Fit the embedding of a row that is not trained, in a copy of its teacher's model.

    Args:
        row: what to fit, with its ``fit``.
        run: gets ``model_averaged.pt``, ``fit.json`` and ``training.json``.
        data: what the teacher was trained on.
        teacher: its model.
        counts: file of how often words occur.
        options: must be none.

    Raises:
        UserError: there are options, or another process fits this row.
    """
    if options:
        raise UserError(f"{row.name} is only fitted, not trained: {options[0]} has no effect; leave it out")
    with locked(run / "lock"):
        started = time.time()
        seed, steps = row.train.get("seed", 0), (row.fit or {}).get("fit_steps")
        fit_model(teacher, row.embedding, counts, seed, run / AVERAGED, steps)
        books = {"settings": {"embedding": row.embedding}, "data_checksum": data.checksum, "finished": 0}
        books |= {"options": [], "seconds": round(time.time() - started, 1)}
        books |= {"peak_memory_mib": peak_memory_of_children()}
        _write_json(run / "training.json", books)


def _train(
    run: Path,
    books: dict[str, Any],
    newest: Checkpoint | None,
    target: int,
    options: Sequence[str],
    lock: int,
) -> None:
    """Run ``onmt_train``, from `newest` on if there is one; time and memory go into the `books`."""
    arguments = ["-config", str(run / "train.yaml"), *options]
    segments: list[Segment] = []
    if newest:
        print(f"{run.name}: going on from step {newest.step}", flush=True)
        arguments += ["-train_from", str(newest.path)]
        segments = kept_segments(books["segments"], newest.path.stat().st_mtime)
    segment: Segment = {"from_step": newest.step if newest else 0, "started": time.time(), "ended": None}
    books = {**books, "segments": [*segments, segment], "finished": None, "options": list(options)}
    _write_json(run / "training.json", books)
    run_tool("onmt_train", arguments, keep_open=[lock])
    segment["ended"] = time.time()
    books["finished"] = target
    books["seconds"] = round(sum(part["ended"] - part["started"] for part in books["segments"]), 1)
    books["peak_memory_mib"] = peak_memory_of_children()
    _write_json(run / "training.json", books)


def kept_segments(segments: Sequence[Segment], saved: float) -> list[Segment]:
    """The stretches of training that led to a checkpoint saved at `saved`; what came after it was lost."""
    kept = [segment for segment in segments if segment["started"] < saved]
    return [{**part, "ended": saved if part["ended"] is None else min(part["ended"], saved)} for part in kept]


def checkpoints_to_average(default: int) -> int:
    """How many checkpoints to average: ``$AVERAGE``, or the row's own number.

    Raises:
        UserError: the variable is no whole number of at least 1.
    """
    given = os.environ.get("AVERAGE") or str(default)
    if not given.isdecimal() or int(given) < 1:
        raise UserError(f"AVERAGE is {given!r}; it must be a whole number of at least 1")
    return int(given)


def _average(checkpoints: Sequence[Checkpoint], target: Path) -> None:
    """Average `checkpoints` into `target`."""
    if not checkpoints:
        raise UserError(
            f"{target.parent}: training left no checkpoint; set save_checkpoint_steps in common.yaml"
        )
    print(f"averaging steps {', '.join(str(checkpoint.step) for checkpoint in checkpoints)}", flush=True)
    with replacing(target) as temporary:
        models = [checkpoint.path for checkpoint in checkpoints]
        run_tool("onmt_average_models", ["-models", *models, "-output", temporary])


def _check_unchanged(run: Path, books: dict[str, Any], settings: dict[str, Any], checksum: str) -> None:
    """Refuse to resume a run under other settings, or on other data, than it was started with."""
    before = {**books["settings"], "data": books["data_checksum"]}
    now = {**settings, "data": checksum}
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    changed = [key for key in changed if key not in FREE_TO_CHANGE]
    if changed:
        raise UserError(
            f"{run}: started with another {', '.join(changed)}; put it back, or move the folder away"
        )


def option_value(options: Sequence[str], name: str) -> str | None:
    """The value of ``-name`` or ``--name`` among command line options, the last one if there are several."""
    value = None
    for index, option in enumerate(options):
        key, _, attached = option.partition("=")
        if key in (f"-{name}", f"--{name}"):
            value = attached or (options[index + 1] if index + 1 < len(options) else None)
    return value


def target_step(row: Row, options: Sequence[str]) -> int:
    """The step up to which a row is trained: that of the command line, or its own.

    Raises:
        UserError: it is no whole number of at least 1.
    """
    value: Any = option_value(options, "train_steps") or row.train.get("train_steps")
    if not str(value).isdecimal() or int(value) < 1:
        raise UserError(f"train_steps is {value!r}; it must be a whole number of at least 1")
    return int(value)


def peak_memory_of_children() -> float:
    """Largest resident memory of any child process so far, in MiB."""
    return round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, 1)


def read_json(path: Path) -> Any:
    """The content of a JSON file; ``None`` when it is absent or damaged."""
    try:
        return reading.read_json(path)
    except (OSError, ValueError):
        return None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")
