"""Which part of the training data each process reads, on one machine and on several."""

from __future__ import annotations

from argparse import Namespace

from nmt.train.training import data_share


def machine(ranks: list[int], world_size: int, mode: str = "data_parallel") -> list[tuple[int, int]]:
    """The shares of the processes of one machine."""
    opt = Namespace(gpu_ranks=ranks, world_size=world_size, parallel_mode=mode)
    return [data_share(opt, device_id) for device_id in range(len(ranks))]


def test_processes_of_one_machine() -> None:
    assert machine([0, 1, 2], 3) == [(0, 3), (1, 3), (2, 3)]


def test_no_two_processes_of_two_machines_read_the_same() -> None:
    assert machine([0, 1], 4) + machine([2, 3], 4) == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_tensor_parallel_processes_read_everything() -> None:
    assert machine([0, 1], 2, mode="tensor_parallel") == [(0, 1), (0, 1)]


def test_one_process() -> None:
    assert machine([0], 1) == [(0, 1)]
    cpu = Namespace(gpu_ranks=[], world_size=1, parallel_mode="data_parallel")
    assert data_share(cpu, -1) == (0, 1)
