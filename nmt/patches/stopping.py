"""How training stops early, see `nmt.train.stopping`; a trainer without ``stopping`` is upstream's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shared_embeddings.utils.interrupts import Interrupted


def leaving_the_end_to_all(original: Any) -> Any:
    """Do not let the first rank, which alone validates, leave the others waiting for it."""

    def has_stopped(self: Any) -> bool:
        self.ends = original(self)
        return self.ends and not torch.distributed.is_initialized()

    return has_stopped


def ending_together(original: Any) -> Any:
    """End the batches of all ranks after the same step; upstream then saves that step."""

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


def with_validation_cut_short(original: Any) -> Any:
    """Save at a signal that comes during a validation, which may be long, and do not finish it.

    With early stopping it is finished, because what follows depends on it.
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
