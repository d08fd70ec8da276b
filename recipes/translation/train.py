"""Train one row of a recipe for translation or headlines, on any number of GPUs and machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from recipes.common.recipe import Recipe, parse_row
from recipes.common.rows import Row
from recipes.common.tools import distillation_options, read_json, run_tool, with_overrides, write_yaml
from recipes.translation.training import (
    AVERAGED,
    Data,
    checkpoints_to_average,
    complete_checkpoints,
    fit_row,
    target_step,
    train_row,
)
from shared_embeddings.errors import UserError
from shared_embeddings.utils.command_line import Parser

# How long machines wait for each other: they do not start together, and the first one validates alone.
# OpenNMT-py's 60 seconds are for the processes of one machine.
PATIENCE_SECONDS = 1800


class Machines(NamedTuple):
    """Where a row is trained.

    Attributes:
        gpus: processes on this machine, one on each GPU; 0 for one process on the CPU.
        machines: how many machines, with as many GPUs each.
        machine: the number of this one, from 0.
        address: of machine 0.
        port: on machine 0.
    """

    gpus: int
    machines: int = 1
    machine: int = 0
    address: str = "localhost"
    port: int = 10000

    def check(self) -> None:
        """Check that the numbers fit together.

        Raises:
            UserError: names the one that does not.
        """
        if self.gpus < 0 or (self.machines > 1 and self.gpus == 0):
            raise UserError(f"--gpus is {self.gpus}; it must be at least {1 if self.machines > 1 else 0}")
        if self.machines < 1 or not 0 <= self.machine < self.machines:
            raise UserError(f"--machine is {self.machine} of {self.machines}; number the machines from 0")

    def options(self, batch: dict[str, Any]) -> list[str]:
        """Options of ``onmt_train``: processes, and batches whose size does not depend on their number."""
        world = max(1, self.gpus * self.machines)
        size, accumulated = batch_size(batch, world)
        options = ["-batch_size", str(size), "-accum_count", str(accumulated), "-accum_steps", "0"]
        if self.gpus:
            first = self.machine * self.gpus
            ranks = [str(rank) for rank in range(first, first + self.gpus)]
            options += ["-world_size", str(world), "-gpu_ranks", *ranks]
        if self.machines > 1:
            options += ["-master_ip", self.address, "-master_port", str(self.port)]
            options += ["-timeout", str(PATIENCE_SECONDS)]
        return options


def batch_size(batch: dict[str, Any], processes: int) -> tuple[int, int]:
    """Tokens per process and accumulated batches, so that a step always sees as many tokens.

    Args:
        batch: ``tokens`` of a step (target side) and ``per_gpu``, the most that fit on one GPU.
        processes: how many there are.

    Raises:
        UserError: fewer tokens than processes.
    """
    tokens, most = batch["tokens"], batch["per_gpu"]
    accumulated = -(-tokens // (most * processes))
    size = round(tokens / (accumulated * processes))
    if size < 1:
        raise UserError(f"{tokens} tokens a step are fewer than {processes} processes; take fewer GPUs")
    return size, accumulated


USAGE = """usage: train.sh ROW [--smoke] [option of onmt_train ...]

Trains ROW in $RUNS/{recipe}/ROW and averages the last checkpoints ($AVERAGE of them, if set). Resumes from
the newest complete checkpoint if there is one. Run preprocess.sh first, and train.sh for the row that ROW
starts from; a row that is only fitted takes no options. With --smoke, a tiny network is trained for a few
steps on the CPU, in $RUNS/{recipe}/smoke/ROW, on the data of preprocess.sh --smoke."""
MACHINES_USAGE = """
Rows of papers also take the options

  --gpus N      GPUs of this machine, one process on each (default: all; 0: one process on the CPU)
  --machines M  how many machines, with N GPUs each; run this on each, with the same $RUNS on shared storage
  --machine I   the number of this one, from 0; machine 0 writes
  --address A   of machine 0
  --port P      on machine 0 (default: 10000)

A step uses as many tokens as in the paper: with fewer GPUs, more batches are accumulated."""


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Train the row that the command line names."""
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
    """How many GPUs this machine has."""
    import torch

    return torch.cuda.device_count()


def read_machines(given: Sequence[str], gpus: int) -> tuple[Machines, list[str]]:
    """The machines, and the options that remain for ``onmt_train``.

    Args:
        given: the command line after the row.
        gpus: how many this machine uses by default.

    Raises:
        UserError: numbers that do not fit together.
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
    """Folder of the prepared data that a row uses."""
    return recipe.data / row.data["pieces"] if row.data else recipe.data


def prepared_data(recipe: Recipe, row: Row) -> Data:
    """The data of a row as options of ``onmt_train``.

    Raises:
        UserError: they are not prepared.
    """
    folder = data_folder(recipe, row)
    description = recipe.describe_data(folder)
    languages = {"src": description["source"], "tgt": description["target"]}
    corpora = {
        part: {f"path_{side}": str(folder / f"{name}.{language}") for side, language in languages.items()}
        for part, name in (("train", "train"), ("valid", row.data.get("valid", "valid")))
    }
    # Recipes with several kinds of data list their vocabularies.
    listed = description["vocabulary"]
    is_shared = not isinstance(listed, dict) or "vocabulary" in listed
    vocabularies = {
        f"{side}_vocab": str(folder / ("vocabulary" if is_shared else f"vocabulary.{language}"))
        for side, language in languages.items()
    }
    return Data({"data": corpora, **vocabularies}, description["checksum"])


def complete_row(recipe: Recipe, row: Row) -> Row:
    """The row with the files of its embedding, and with its teacher's model among its options of training.

    Raises:
        UserError: the row that it starts from is not trained.
    """
    folder = data_folder(recipe, row) if row.data else recipe.home
    row = replace(row, embedding=recipe.with_files(row.embedding, folder))
    if row.distill is None:
        return row
    option: dict[str, Any] = distillation_options(row.distill, teacher_model(recipe, row))
    return replace(row, train={**row.train, **option})


def teacher_model(recipe: Recipe, row: Row) -> Path:
    """The trained model of the row that `row` starts from.

    Raises:
        UserError: that row is not trained.
    """
    assert row.teacher is not None
    model = recipe.home / row.teacher / AVERAGED
    if not model.exists():
        command = recipe.command("train.sh", row.teacher)
        raise UserError(f"{row.name} starts from {row.teacher}, which is not trained; run {command}")
    return model


def join_training(run: Path, row: Row, data: Data, machine: int, options: Sequence[str]) -> None:
    """Take part in the training that machine 0 leads and logs; nothing else is written here.

    A training that is finished is not joined: machine 0 would not come.
    """
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
