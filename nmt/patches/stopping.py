"""Patches that stop training, see `nmt.train.stopping`; they affect trainers with ``stopping`` only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shared_embeddings.utils.interrupts import Interrupted


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
