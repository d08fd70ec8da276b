"""A published row, its prepared data, its teacher, and batches that keep their size on any number of GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import shared_embeddings as se
from recipes.common.config import Row, distillation_options
from recipes.common.errors import UserError
from recipes.common.recipe import Recipe
from recipes.common.training import AVERAGED, Data, read_json

# How long machines wait for each other: they start apart, and the first one validates alone. Upstream's 60
# seconds are for the processes of one machine.
PATIENCE_SECONDS = 1800


def data_folder(recipe: Recipe, row: Row) -> Path:
    """Folder of the data that a row takes."""
    return recipe.data / str((row.data or {})["pieces"])


def prepared_data(recipe: Recipe, row: Row) -> Data:
    """The data of a row as options of ``onmt_train``.

    Raises:
        UserError: they are not prepared.
    """
    folder, taken = data_folder(recipe, row), row.data or {}
    description = read_json(folder / "data.json")
    if description is None:
        command = recipe.command("preprocess.sh", folder.name)
        raise UserError(f"{folder}: no prepared data; run {command}")
    languages = {"src": description["source"], "tgt": description["target"]}
    corpora = {
        part: {f"path_{side}": str(folder / f"{name}.{language}") for side, language in languages.items()}
        for part, name in (("train", "train"), ("valid", taken["valid"]))
    }
    shared = "vocabulary" in description["vocabulary"]
    vocabularies = {
        f"{side}_vocab": str(folder / ("vocabulary" if shared else f"vocabulary.{language}"))
        for side, language in languages.items()
    }
    return Data({"data": corpora, **vocabularies}, description["checksum"])


def complete_row(recipe: Recipe, row: Row) -> Row:
    """The row with the files of its embedding where the prepared data are, and with its teacher's model.

    Raises:
        UserError: the row that it starts from is not trained.
    """
    method = row.embedding["method"]
    names = [name for name in se.file_options(method) if name in row.embedding]
    files = {name: str(data_folder(recipe, row) / row.embedding[name]) for name in names}
    row = replace(row, embedding={**row.embedding, **files})
    if row.distill is None:
        return row
    teacher = row.distill["teacher"]
    model = recipe.home / teacher / AVERAGED
    if not model.exists():
        command = recipe.command("train.sh", teacher)
        raise UserError(f"{row.name} starts from {teacher}, which is not trained; run {command}")
    return replace(row, train={**row.train, **distillation_options(row.distill, model)})


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
        """Refuse numbers that do not fit together.

        Raises:
            UserError: names the one that does not.
        """
        if self.gpus < 0 or (self.machines > 1 and self.gpus == 0):
            raise UserError(f"--gpus is {self.gpus}; it must be at least {1 if self.machines > 1 else 0}")
        if self.machines < 1 or not 0 <= self.machine < self.machines:
            raise UserError(f"--machine is {self.machine} of {self.machines}; number the machines from 0 on")

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
