"""Patches of training: loss, steps, stopping, several processes, log file."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, NoReturn

import onmt.utils.distributed
import onmt.utils.misc
import torch
from onmt.utils import Statistics
from torch import Tensor, nn

import shared_embeddings as se
from nmt.model.embeddings import SharedGenerator
from shared_embeddings.utils.interrupts import Interrupted, leave_to_parent


def with_chunked_loss(original: Any) -> Any:
    """Compute the loss of a shared output layer without materializing all scores.

    Losses that need the scores (language model priors, sparsemax, alignment, coverage) use OpenNMT-py's code.
    """

    def forward(
        self: Any,
        batch: dict[str, Any],
        output: Tensor,
        attns: Any,
        trunc_start: int = 0,
        trunc_size: int | None = None,
    ) -> Any:
        plain = (
            isinstance(self.generator, SharedGenerator)
            and isinstance(self.criterion, nn.CrossEntropyLoss)
            and self.lambda_align == 0.0
            and self.lambda_coverage == 0.0
            and self.lm_generator is None
            and self.lm_prior_model is None
        )
        if not plain:
            return original(self, batch, output, attns, trunc_start, trunc_size)
        size = batch["tgt"].size(1) - trunc_start if trunc_size is None else trunc_size
        first, last = trunc_start + self.tgt_shift_index, trunc_start + size
        targets = batch["tgt"][:, first:last, 0].reshape(-1)  # (N,)
        hidden = output.reshape(-1, output.size(-1))  # (N, D)
        loss, predictions = self.generator.loss_and_predictions(
            hidden,
            targets,
            ignore_index=self.criterion.ignore_index,
            label_smoothing=self.criterion.label_smoothing,
            reduction="sum",
        )
        real = targets.ne(self.criterion.ignore_index)
        sentences = len(batch["srclen"]) if trunc_start == 0 else 0
        statistics = Statistics(
            loss=loss.item(),
            n_batchs=1 if sentences else 0,
            n_sents=sentences,
            n_words=int(real.sum()),
            n_correct=int((predictions.eq(targets) & real).sum()),
        )
        return loss, statistics

    return forward


def with_update_counts(original: Any) -> Any:
    """Set the number of optimizer updates in shared embeddings before every step."""

    def _maybe_update_dropout(self: Any, step: int) -> None:
        original(self, step)
        # OpenNMT-py counts from 1.
        se.set_updates(self.model, step - 1)

    return _maybe_update_dropout


def with_stop_of_all_ranks(original: Any) -> Any:
    """Let the first rank, the only one that validates, stop early together with the others."""

    def has_stopped(self: Any) -> bool:
        self.ends = original(self)
        return self.ends and not torch.distributed.is_initialized()

    return has_stopped


def with_same_last_step(original: Any) -> Any:
    """End the batches of all ranks after the same step, which OpenNMT-py then saves."""

    def accum_batches(self: Any, iterator: Any) -> Iterator[Any]:
        batches = original(self, iterator)
        stopping = getattr(self, "stopping", None)
        if stopping is None:
            yield from batches
            return
        while (taken := stopping.next_batches(batches)) is not None:
            iterator.mark()
            yield taken

    return accum_batches


def with_interruptible_validation(original: Any) -> Any:
    """At a signal during a validation, which may be long, save and stop at once.

    With early stopping, the validation finishes because training depends on its result.
    """

    def validate(self: Any, *args: Any, **kwargs: Any) -> Any:
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

    return validate


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


def with_failing_log(original: Any) -> Any:
    """Raise errors of writing the log file; OpenNMT-py only prints them."""

    def init_logger(*args: Any, **kwargs: Any) -> Any:
        logger = original(*args, **kwargs)
        for handler in logger.handlers:
            if isinstance(handler, logging.FileHandler):
                handler.handleError = _raise_again  # type: ignore[method-assign]
        return logger

    return init_logger


def _raise_again(record: logging.LogRecord) -> NoReturn:
    """Raise the error that a log handler has caught."""
    error = sys.exc_info()[1]
    assert error is not None
    raise error
