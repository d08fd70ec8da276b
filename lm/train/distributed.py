"""The process group of a training: a single process, or those started by torchrun."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # noqa: F401  (imported later, its defaults would keep the group alive)
from torch import Tensor

from lm.cli import chosen_device


@dataclass(frozen=True)
class Group:
    """This process and its group."""

    device: torch.device  # of this process
    rank: int = 0  # rank 0 writes and prints
    world_size: int = 1  # number of processes

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes by rank, in every process."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def largest(self, value: int) -> Callable[[], int]:
        """Start computing the maximum over all processes; returns a function that waits for it."""
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


@contextmanager
def joined(device: str) -> Iterator[Group]:
    """Join the process group of torchrun, or create a group of one process, on a `chosen_device`.

    Raises:
        UserError: there are fewer CUDA devices than processes on this machine.
    """
    place = chosen_device(device, int(os.environ.get("LOCAL_RANK", 0)))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size == 1:
        yield Group(place)
        return
    if place.type == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield Group(place, dist.get_rank(), world_size)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they hold the model, and the model the group
        raise
    finally:
        dist.destroy_process_group()
        # A thread of gloo that frees a tensor while the interpreter shuts down aborts the process. Threads
        # end with the last reference to the group, which `DistributedDataParallel` has in cycles.
        gc.collect()
