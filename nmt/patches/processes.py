"""How several processes train together, on GPUs or on a CPU over gloo."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import onmt.utils.distributed
import onmt.utils.misc
import torch
from torch import Tensor

from shared_embeddings.utils.interrupts import leave_to_parent


def only_with_cuda(original: Any) -> Any:
    """Several processes may train on a CPU over gloo: ranks alone do not mean that there is a GPU."""

    def use_gpu(opt: Namespace) -> bool:
        on_cpu = getattr(opt, "gpu_backend", "") == "gloo" and not torch.cuda.is_available()
        return not on_cpu and bool(original(opt))

    return use_gpu


def configuring_any_device(original: Any) -> Any:
    """Choose the GPU of a process where there is one, and seed everything."""

    def configure_process(opt: Namespace, device_id: int) -> None:
        if device_id >= 0 and not torch.cuda.is_available():
            onmt.utils.misc.set_random_seed(opt.seed, False)
        else:
            original(opt, device_id)

    return configure_process


def with_batches_on_device(original: Any) -> Any:
    """Keep batches on the CPU where there is no GPU."""

    def build_dynamic_dataset_iter(*args: Any, device_id: int = -1, **kwargs: Any) -> Any:
        return original(*args, device_id=device_id if torch.cuda.is_available() else -1, **kwargs)

    return build_dynamic_dataset_iter


def gathering_on_any_device(original: Any) -> Any:
    """Gather Python objects over whichever backend there is."""

    def all_gather_list(data: Any, max_size: int = 4096) -> list[Any]:
        del max_size  # a limit of upstream's buffers only
        results: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(results, data)
        return results

    return all_gather_list


def summing_gradients(original: Any) -> Any:
    """Add up the gradients of several processes; each is divided by the tokens of all of them already."""

    def all_reduce(tensors: list[Tensor], rescale_denom: float, buffer_size: int = 104857600) -> None:
        del rescale_denom  # the number of processes, by which upstream divides once more
        original(tensors, 1.0, buffer_size)

    return all_reduce


def leaving_signals_to_parent(original: Any) -> Any:
    """Let a process that counts or writes words end without a word when the command is stopped."""

    def start(*args: Any) -> Any:
        leave_to_parent()
        return original(*args)

    return start
