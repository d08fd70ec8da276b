"""Patches of training with several processes, on GPUs or over gloo on CPUs."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import onmt.utils.distributed
import onmt.utils.misc
import torch
from torch import Tensor

from shared_embeddings.utils.interrupts import leave_to_parent


def with_cpu_ranks(original: Any) -> Any:
    """Train ranks on the CPU if the backend is gloo and there is no GPU."""

    def use_gpu(opt: Namespace) -> bool:
        on_cpu = getattr(opt, "gpu_backend", "") == "gloo" and not torch.cuda.is_available()
        return not on_cpu and bool(original(opt))

    return use_gpu


def on_any_device(original: Any) -> Any:
    """Set the GPU of a process if there is one, and seed all generators."""

    def configure_process(opt: Namespace, device_id: int) -> None:
        if device_id >= 0 and not torch.cuda.is_available():
            onmt.utils.misc.set_random_seed(opt.seed, False)
        else:
            original(opt, device_id)

    return configure_process


def with_batches_on_device(original: Any) -> Any:
    """Keep batches on the CPU if there is no GPU."""

    def build_dynamic_dataset_iter(*args: Any, device_id: int = -1, **kwargs: Any) -> Any:
        return original(*args, device_id=device_id if torch.cuda.is_available() else -1, **kwargs)

    return build_dynamic_dataset_iter


def all_gather_list(data: Any, max_size: int = 4096) -> list[Any]:
    """Gather Python objects over any backend; OpenNMT-py needs a GPU and a maximum size."""
    del max_size
    results: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(results, data)
    return results


def without_rescaling(original: Any) -> Any:
    """Sum the gradients of all processes: their losses are already divided by the tokens of all of them."""

    def all_reduce(tensors: list[Tensor], rescale_denom: float, buffer_size: int = 104857600) -> None:
        del rescale_denom  # the number of processes
        original(tensors, 1.0, buffer_size)

    return all_reduce


def with_signals_ignored(original: Any) -> Any:
    """End processes that count or write words silently when the command is stopped."""

    def start(*args: Any) -> Any:
        leave_to_parent()
        return original(*args)

    return start
