"""Train one published row, on any number of GPUs and machines."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recipes.common.checkpoints import complete_checkpoints
from recipes.common.config import Row, write_yaml
from recipes.common.errors import run_main
from recipes.common.recipe import Recipe
from recipes.common.smoke import SmokeRecipe
from recipes.common.tools import run_tool, with_overrides
from recipes.common.training import Data, checkpoints_to_average, read_json, target_step, train_row
from recipes.published.rows import Machines, complete_row, prepared_data
from recipes.published.smoke import parse
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.files import write_text

USAGE = """usage: train.sh CONFIG [--gpus N] [--machines M --machine I --address A [--port P]] [--smoke]
                [option of onmt_train ...]

Trains CONFIG in $RUNS/{name}/CONFIG, going on from the newest complete checkpoint if there is one, and
averages the last checkpoints ($AVERAGE of them, if set). Run preprocess.sh first, and train.sh for the row
that CONFIG starts from. A step sees as many tokens as in the paper: fewer GPUs accumulate more batches.

  --gpus N      GPUs of this machine, one process on each (default: all; 0: one process on the CPU)
  --machines M  how many machines, N GPUs each; call this on each, with the same $RUNS on shared storage
  --machine I   the number of this one, from 0; machine 0 writes
  --address A   of machine 0
  --port P      on machine 0 (default: 10000)
  --smoke       one narrow layer and a few steps on the CPU, on what preprocess.sh --smoke has made"""


def main(arguments: Sequence[str]) -> None:
    """Train the row that the command line names."""
    name, *rest = arguments
    recipe, row, given = parse(Recipe(name), USAGE.format(name=name), rest)
    gpus = 0 if isinstance(recipe, SmokeRecipe) else torch.cuda.device_count()
    machines, options = read_options(given, gpus)
    row = complete_row(recipe, row)
    options = with_overrides(machines.options(row.batch or {}), options)
    data = prepared_data(recipe, row)
    if machines.machine:
        join_training(recipe, row, data, machines.machine, options)
    else:
        train_row(row, recipe.home / row.name, data, options, checkpoints_to_average(row.average))


def read_options(given: Sequence[str], gpus: int) -> tuple[Machines, list[str]]:
    """The machines, and the options that are left for ``onmt_train``.

    Args:
        given: the command line after the row.
        gpus: how many this machine uses where it does not say.

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


def join_training(recipe: Recipe, row: Row, data: Data, machine: int, options: Sequence[str]) -> None:
    """Take part in the training that machine 0 leads and keeps the books of; nothing else is written here.

    One that is at its end already is not joined: machine 0 would not come.
    """
    run = recipe.home / row.name
    found = complete_checkpoints(run / "checkpoints")
    books = read_json(run / "training.json") or {}
    if found and books.get("finished") == target_step(row, options):
        print(f"{row.name}: trained to step {books['finished']} before", flush=True)
        return
    config = run / f"machine_{machine}.yaml"
    paths = {"save_model": str(run / "checkpoints" / "model")}
    write_text(config, write_yaml({**data.options, **paths, **row.train, "embedding": row.embedding}))
    resumed = ["-train_from", str(found[-1].path)] if found else []
    run_tool("onmt_train", ["-config", str(config), *options, *resumed])


if __name__ == "__main__":
    raise SystemExit(run_main("train", main))
