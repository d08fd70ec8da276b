"""Fixes of training: several processes, stopping at signals, log file, pretrained vectors, positions."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, NoReturn

import onmt.bin.build_vocab
import onmt.inputters
import onmt.train_single
import onmt.utils.distributed
import onmt.utils.logging
import onmt.utils.misc
import torch
from onmt.inputters import dynamic_iterator
from onmt.modules.embeddings import Embeddings, PositionalEncoding
from onmt.trainer import Trainer
from onmt.utils.earlystopping import EarlyStopping
from torch import Tensor

from nmt.checkpoints import reading_checkpoint
from nmt.fixes import replace, wrap
from nmt.train.batches import Batches, QuietLoader
from shared_embeddings.checkpoints import loaded
from shared_embeddings.utils.interrupts import Interrupted, leave_to_parent

# Applies the fixes in data loader workers, too.
replace("DynamicDatasetIter", dynamic_iterator)(Batches)
# Signals to the whole process group do not end its workers.
replace("DataLoader", dynamic_iterator)(QuietLoader)


@wrap("has_stopped", EarlyStopping)
def stop_all_ranks(original: Any, self: Any) -> bool:
    """Let the first rank, the only one that validates, stop early together with the others."""
    self.ends = original(self)
    return self.ends and not torch.distributed.is_initialized()


@wrap("_accum_batches", Trainer)
def end_at_same_step(original: Any, self: Any, iterator: Any) -> Iterator[Any]:
    """End the batches of all ranks after the same step, also at a signal; it is then saved."""
    batches = original(self, iterator)
    stopping = getattr(self, "stopping", None)
    if stopping is None:
        yield from batches
        return
    while (taken := stopping.next_batches(batches)) is not None:
        iterator.mark()
        yield taken


@wrap("_update_average", Trainer)
def average_by_step(original: Any, self: Any, step: int) -> None:
    """Count the steps of ``average_every`` from the start of the run instead of the process."""
    if (step - 1) % self.average_interval == 0:
        original(self, step)


@wrap("validate", Trainer)
def interrupt_validation(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """At a signal during a validation, which may be long, save and stop at once.

    With early stopping, the validation finishes because training depends on its result.
    """
    stopping = getattr(self, "stopping", None)
    if stopping is None or self.earlystopper is not None:
        return original(self, *args, **kwargs)
    try:
        with stopping.interrupts.raised_now():
            return original(self, *args, **kwargs)
    except Interrupted:
        stopping.agree()  # the other ranks wait for the next step
        if self.model_saver is not None:
            self.model_saver.save(self.optim.training_step - 1, moving_average=self.moving_average)
        raise


@wrap("init_pool", onmt.bin.build_vocab)
@wrap("write_files_from_queues", onmt.bin.build_vocab)
def leave_signals_to_parent(original: Any, *args: Any) -> Any:
    """End processes that count or write words silently when the command is stopped."""
    leave_to_parent()
    return original(*args)


@wrap("use_gpu", onmt.utils.misc)
def train_on_cpu(original: Any, opt: Namespace) -> bool:
    """Train ranks on the CPU if the backend is gloo and there is no GPU."""
    on_cpu = getattr(opt, "gpu_backend", "") == "gloo" and not torch.cuda.is_available()
    return not on_cpu and bool(original(opt))


@wrap("configure_process", onmt.train_single)
def set_device(original: Any, opt: Namespace, device_id: int) -> None:
    """Set the GPU of a process if there is one, and seed all generators."""
    if device_id >= 0 and not torch.cuda.is_available():
        onmt.utils.misc.set_random_seed(opt.seed, False)
    else:
        original(opt, device_id)


@wrap("build_dynamic_dataset_iter", dynamic_iterator)
def keep_batches_on_cpu(original: Any, *args: Any, device_id: int = -1, **kwargs: Any) -> Any:
    """Keep batches on the CPU if there is no GPU."""
    return original(*args, device_id=device_id if torch.cuda.is_available() else -1, **kwargs)


@replace("all_gather_list", onmt.utils.distributed)
def all_gather_list(data: Any, max_size: int = 4096) -> list[Any]:
    """Gather Python objects over any backend; OpenNMT-py needs a GPU and a maximum size."""
    results: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(results, data)
    return results


@wrap("all_reduce_and_rescale_tensors", onmt.utils.distributed)
def sum_gradients(
    original: Any, tensors: list[Tensor], rescale_denom: float, buffer_size: int = 104857600
) -> Any:
    """Do not divide gradients by the number of processes: losses are divided by the tokens of all of them."""
    return original(tensors, 1.0, buffer_size)


def _raise_again(record: logging.LogRecord) -> NoReturn:
    """Raise the error that a log handler has caught."""
    error = sys.exc_info()[1]
    assert error is not None
    raise error


@wrap("init_logger", onmt.utils.logging)
def fail_without_log(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise errors of writing the log file, which are only printed."""
    logger = original(*args, **kwargs)
    for handler in logger.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handleError = _raise_again  # type: ignore[method-assign]
    return logger


@wrap("load_pretrained_vectors", Embeddings)
def read_vectors_only(original: Any, self: Any, emb_file: str | None) -> None:
    """Read pretrained vectors without running code, and turn errors into one line."""
    if emb_file:
        with reading_checkpoint(emb_file):
            loaded(emb_file)
            original(self, emb_file)


@wrap("forward", PositionalEncoding)
def extend_sinusoids(original: Any, self: Any, emb: Tensor, step: int | None = None) -> Any:
    """Extend the sinusoids when a sentence is longer than their table, where an error is raised."""
    needed = (step or 0) + emb.size(1)
    if needed > self.pe.size(0):
        # Tables (T, 1, D) with all sines first; interleaved ones have cos(0) in column 1.
        is_concatenated = self.pe.size(-1) > 2 and float(self.pe[0, 0, 1]) == 0.0
        kind = "SinusoidalConcat" if is_concatenated else "SinusoidalInterleaved"
        self.pe = type(self)(self.dim, kind, max_len=2 * needed).pe.to(self.pe)
    return original(self, emb, step)
