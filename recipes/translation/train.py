"""Train one row of a recipe for translation or headlines, on any number of GPUs and machines.

A training starts or resumes with ``onmt_train``; then its last checkpoints are averaged.
"""

from __future__ import annotations

import os
import re
import time
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from recipes.common.recipe import Recipe, parse_row
from recipes.common.rows import Row
from recipes.common.tools import (
    Segment,
    distillation_options,
    fit_model,
    kept_segments,
    option_value,
    peak_memory_of_children,
    read_json,
    run_tool,
    with_overrides,
    write_json,
    write_yaml,
)
from shared_embeddings.errors import UserError
from shared_embeddings.utils.command_line import Parser
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


# Machines start at different times, and only the first one validates; OpenNMT-py's default is 60 seconds.
TIMEOUT_SECONDS = 1800


class Machines(NamedTuple):
    """The machines that train a row.

    Attributes:
        gpus: GPUs per machine, one process each; 0 for one process on the CPU.
        machines: number of machines.
        machine: index of this machine, from 0.
        address: address of machine 0.
        port: port on machine 0.
    """

    gpus: int
    machines: int = 1
    machine: int = 0
    address: str = "localhost"
    port: int = 10000

    def check(self) -> None:
        """Check the numbers; raises `UserError` otherwise."""
        if self.gpus < 0 or (self.machines > 1 and self.gpus == 0):
            raise UserError(f"--gpus is {self.gpus}; it must be at least {1 if self.machines > 1 else 0}")
        if self.machines < 1 or not 0 <= self.machine < self.machines:
            raise UserError(
                f"--machine is {self.machine} of {self.machines}; it must be between 0 and the "
                "number of machines minus 1"
            )

    def options(self, batch: dict[str, Any]) -> list[str]:
        """Return the options of ``onmt_train`` for processes and batches of constant total size."""
        world = max(1, self.gpus * self.machines)
        size, accumulated = batch_size(batch, world)
        options = ["-batch_size", str(size), "-accum_count", str(accumulated), "-accum_steps", "0"]
        if self.gpus:
            first = self.machine * self.gpus
            ranks = [str(rank) for rank in range(first, first + self.gpus)]
            options += ["-world_size", str(world), "-gpu_ranks", *ranks]
        if self.machines > 1:
            options += ["-master_ip", self.address, "-master_port", str(self.port)]
            options += ["-timeout", str(TIMEOUT_SECONDS)]
        return options


def batch_size(batch: dict[str, Any], processes: int) -> tuple[int, int]:
    """Return the tokens per process and the number of accumulated batches for a constant total batch size.

    Args:
        batch: ``tokens`` per step (target side) and ``per_gpu``, the maximum per GPU.
        processes: number of processes.

    Raises:
        UserError: there are fewer tokens than processes.
    """
    tokens, most = batch["tokens"], batch["per_gpu"]
    accumulated = -(-tokens // (most * processes))
    size = round(tokens / (accumulated * processes))
    if size < 1:
        raise UserError(f"{tokens} tokens a step are fewer than {processes} processes; use fewer GPUs")
    return size, accumulated


USAGE = """usage: train.sh ROW [--smoke] [option of onmt_train ...]

Trains ROW in $RUNS/{recipe}/ROW and averages the last checkpoints ($AVERAGE of them, if set). Resumes from
the latest complete checkpoint. Run preprocess.sh first, and train.sh for the teacher of ROW if it has one.
Fitted rows have no options. With --smoke, trains a tiny network for a few steps on the CPU, in
$RUNS/{recipe}/smoke/ROW, on the data of preprocess.sh --smoke."""
MACHINES_USAGE = """
Rows of papers have these additional options

  --gpus N      GPUs of this machine, one process each (default: all; 0: one process on the CPU)
  --machines M  number of machines with N GPUs each; run the command on each, with $RUNS on shared storage
  --machine I   index of this machine, from 0; machine 0 writes
  --address A   address of machine 0
  --port P      port on machine 0 (default: 10000)

Every step has as many tokens as in the paper: with fewer GPUs, more batches are accumulated."""


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Train the row of the command line."""
    has_papers = any(row.batch for row in recipe.rows.values())
    recipe, row, options = parse_row(recipe, USAGE + (MACHINES_USAGE if has_papers else ""), arguments)
    data, run = prepared_data(recipe, row), recipe.home / row.name
    if row.fit is not None:
        counts = data_folder(recipe, row) / "vocabulary"
        fit_row(row, run, data, teacher_model(recipe, row), counts, options)
        return
    machine = 0
    if row.batch is not None:
        machines, options = read_machines(options, gpus=0 if recipe.is_smoke else _gpus())
        options, machine = with_overrides(machines.options(row.batch), options), machines.machine
    row = complete_row(recipe, row)
    if machine:
        join_training(run, row, data, machine, options)
    else:
        train_row(row, run, data, options, checkpoints_to_average(row.average))


def _gpus() -> int:
    """Return the number of GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def read_machines(given: Sequence[str], gpus: int) -> tuple[Machines, list[str]]:
    """Parse the options of machines; return them and the options for ``onmt_train``.

    Args:
        given: arguments after the row.
        gpus: default number of GPUs.

    Raises:
        UserError: an option is invalid.
    """
    parser = Parser("train.sh", add_help=False)
    parser.add_argument("--gpus", type=int, default=gpus)
    parser.add_argument("--machines", type=int, default=1)
    parser.add_argument("--machine", type=int, default=0)
    parser.add_argument("--address", default="localhost")
    parser.add_argument("--port", type=int, default=10000)
    known, rest = parser.parse_known_args(list(given))
    machines = Machines(known.gpus, known.machines, known.machine, known.address, known.port)
    machines.check()
    return machines, rest


def data_folder(recipe: Recipe, row: Row) -> Path:
    """Return the folder of the prepared data of a row."""
    return recipe.data / row.data["pieces"] if row.data else recipe.data


def prepared_data(recipe: Recipe, row: Row) -> Data:
    """Return the data of a row as options of ``onmt_train``.

    Raises:
        UserError: the data are not prepared.
    """
    folder = data_folder(recipe, row)
    description = recipe.describe_data(folder)
    languages = {"src": description["source"], "tgt": description["target"]}
    corpora = {
        part: {f"path_{side}": str(folder / f"{name}.{language}") for side, language in languages.items()}
        for part, name in (("train", "train"), ("valid", row.data.get("valid", "valid")))
    }
    # Recipes with several kinds of subwords list their vocabularies.
    listed = description["vocabulary"]
    is_shared = not isinstance(listed, dict) or "vocabulary" in listed
    vocabularies = {
        f"{side}_vocab": str(folder / ("vocabulary" if is_shared else f"vocabulary.{language}"))
        for side, language in languages.items()
    }
    return Data({"data": corpora, **vocabularies}, description["checksum"])


def complete_row(recipe: Recipe, row: Row) -> Row:
    """Add the paths of the embedding's files and of the teacher's model to a row.

    Raises:
        UserError: the teacher is not trained.
    """
    folder = data_folder(recipe, row) if row.data else recipe.home
    row = replace(row, embedding=recipe.with_files(row.embedding, folder))
    if row.distill is None:
        return row
    option: dict[str, Any] = distillation_options(row.distill, teacher_model(recipe, row))
    return replace(row, train={**row.train, **option})


def teacher_model(recipe: Recipe, row: Row) -> Path:
    """Return the model of the row's teacher.

    Raises:
        UserError: the teacher is not trained.
    """
    assert row.teacher is not None
    model = recipe.home / row.teacher / AVERAGED
    if not model.exists():
        command = recipe.command("train.sh", row.teacher)
        raise UserError(f"{row.name} starts from {row.teacher}, which is not trained; run {command}")
    return model


def join_training(run: Path, row: Row, data: Data, machine: int, options: Sequence[str]) -> None:
    """Take part in the training of machine 0, which writes all files, unless it is finished."""
    found = complete_checkpoints(run / "checkpoints")
    log = read_json(run / "training.json") or {}
    if found and log.get("finished") == target_step(row, options):
        print(f"{row.name}: already trained to step {log['finished']}", flush=True)
        return
    config = run / f"machine_{machine}.yaml"
    paths = {"save_model": str(run / "checkpoints" / "model")}
    write_yaml(config, {**data.options, **paths, **row.train, "embedding": row.embedding})
    resumed = ["-train_from", str(found[-1].path)] if found else []
    run_tool("onmt_train", ["-config", str(config), *options, *resumed])
