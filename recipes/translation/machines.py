"""Batches that keep their size on any number of GPUs and machines."""

from __future__ import annotations

from typing import Any, NamedTuple

from recipes.common.errors import UserError

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
