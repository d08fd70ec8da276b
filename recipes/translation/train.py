"""Train one row of a recipe for translation or headlines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes.common.errors import UserError
from recipes.common.fitting import distillation_options
from recipes.common.recipe import Recipe, parse_row
from recipes.common.rows import Row
from recipes.common.tools import read_json, run_tool, with_overrides, write_yaml
from recipes.translation.machines import Machines
from recipes.translation.training import (
    AVERAGED,
    Data,
    checkpoints_to_average,
    complete_checkpoints,
    fit_row,
    target_step,
    train_row,
)
from shared_embeddings.utils.command_line import Parser

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
