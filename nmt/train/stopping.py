"""When training stops before its end: after a signal or early stopping, all ranks after the same step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed

from shared_embeddings.utils.interrupts import Interrupted, Interrupts


class Stopping:
    """What one rank knows about the end of its training.

    Args:
        stopper: upstream's early stopping, which only the first rank updates; or None.

    Attributes:
        interrupts: notes signals while a step is under way.
        signal: the number of the signal that ended training, as all ranks agreed; 0 for none.
        steps: how many steps this process has begun.
    """

    def __init__(self, stopper: Any) -> None:
        self.stopper = stopper
        self.interrupts = Interrupts()
        self.signal = 0
        self.steps = 0

    def next_batches(self, batches: Iterator[Any]) -> Any:
        """Return the batches of the next step, or None when training ends; every rank calls this.

        A signal ends the wait for the batches, which may be long; those of a step that is not made are not
        counted as read.

        Raises:
            Interrupted: there was a signal before the first step, so that there is nothing to save.
        """
        taken = None
        try:
            with self.interrupts.raised_now():
                taken = next(batches, None)
        except Interrupted:
            pass  # the other ranks have to know first
        if self.agree():
            if self.signal and not self.steps:
                raise Interrupted(self.signal)
            return None
        self.steps += 1
        return taken

    def agree(self) -> bool:
        """Return whether any rank wants training to end; every rank has to ask at the same time."""
        asked, ends = self.interrupts.received or 0, bool(getattr(self.stopper, "ends", False))
        if torch.distributed.is_initialized():
            votes = torch.tensor([asked, int(ends)], device=_device_of_group())
            torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX)
            asked, ends = int(votes[0]), bool(votes[1])
        self.signal = asked
        return bool(asked or ends)


def _device_of_group() -> torch.device:
    """The device whose tensors the ranks exchange."""
    return torch.device("cuda" if torch.distributed.get_backend() == "nccl" else "cpu")
