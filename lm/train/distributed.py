"""The processes that train one model together: one alone, or those that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shared_embeddings.errors import UserError


@dataclass(frozen=True)
class Group:
    """This process among those that train together.

    Attributes:
        device: where this process computes.
        rank: its number; the process with rank 0 writes and prints.
        world_size: how many there are.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes in the order of their ranks, in every process."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def from_first(self, value: float) -> float:
        """The value of the first process, in every process."""
        return float(self.gather(value)[0])

    def largest(self, value: int) -> Callable[[], int]:
        """Ask for the largest value of all processes; gives a function that waits for the answer.

        Until it is called, the processes compute on.
        """
        if self.world_size == 1:
            return lambda: value
        found = torch.tensor(value, device=self.device)
        asked = dist.all_reduce(found, dist.ReduceOp.MAX, async_op=True)

        def answer() -> int:
            asked.wait()
            return int(found)

        return answer

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a tensor over all processes."""
        if self.world_size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value / self.world_size


def local_rank() -> int:
    """The number of this process among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


@contextmanager
def joined(device: str) -> Iterator[Group]:
    """The group of this process while it works: that of torchrun's variables, or one process alone.

    Args:
        device: "cpu", "cuda", or "auto" for CUDA where there is a device.

    Raises:
        UserError: there is no CUDA device, or not one for every process of this machine.
    """
    place = _device(device)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield Group(place)
        return
    if place.type == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield Group(place, dist.get_rank(), world_size)
    finally:
        dist.destroy_process_group()


def _device(wanted: str) -> torch.device:
    """The device of this process."""
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not available):
        return torch.device("cpu")
    if local_rank() >= available:
        raise UserError(
            f"device is {wanted}, but torch finds {available} CUDA devices for process {local_rank()} of "
            "this machine; start fewer processes, or set device: cpu"
        )
    return torch.device("cuda", local_rank())
