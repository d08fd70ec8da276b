"""Progress reports, and stopping after a signal, on divergence, or early."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed
from onmt.utils.logging import logger
from onmt.utils.report_manager import ReportMgr
from torch import nn
from tqdm import tqdm

from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.interrupts import Interrupted, Interrupts


class ProgressReport(ReportMgr):  # type: ignore[misc]
    """OpenNMT-py's report with a progress bar on terminals and the remaining time in the log.

    In distillation, `reconstruction` gives the mean reconstruction loss since its last call. `check` gets the
    step and the mean loss before each report, and raises if training diverged.
    """

    def __init__(
        self,
        report_every: int,
        tensorboard_writer: Any,
        first_step: int,
        total_steps: int,
        reconstruction: Callable[[], float] | None = None,
        check: Callable[[int, float], None] = lambda step, loss: None,
    ) -> None:
        super().__init__(report_every, start_time=-1, tensorboard_writer=tensorboard_writer)
        self.reconstruction = reconstruction
        self.check = check
        self.first_step = first_step
        self.total_steps = total_steps
        self.bar = tqdm(
            total=total_steps or None,
            initial=first_step,
            unit="step",
            disable=not sys.stderr.isatty() or logger.disabled,
            dynamic_ncols=True,
        )

    def report_training(self, step: int, *args: Any, **kwargs: Any) -> Any:
        """Update the bar and report the step."""
        self.bar.update(step - self.bar.n)
        return super().report_training(step, *args, **kwargs)

    def _report_training(
        self, step: int, num_steps: int, learning_rate: float, patience: Any, report_stats: Any
    ) -> Any:
        self.check(step, report_stats.loss / max(1, report_stats.n_words))
        result = super()._report_training(step, num_steps, learning_rate, patience, report_stats)
        if self.total_steps > 0:
            done = max(1, step - self.first_step)
            left = (self.total_steps - step) * (time.time() - self.start_time) / done
            self.log(f"{step / self.total_steps:.0%} done, about {tqdm.format_interval(left)} left")
        if self.reconstruction is not None:
            loss = self.reconstruction()
            self.log(f"reconstruction loss: {loss:.5f}")
            if self.tensorboard_writer is not None:
                self.tensorboard_writer.add_scalar("progress/reconstruction", loss, step)
        return result


def check_finite(model: nn.Module, step: int, loss: float = 0.0) -> None:
    """Check that a model, which is equal on all ranks, can still be trained after a step with a mean loss."""
    if not math.isfinite(loss):
        what = f"the loss is {loss}"
    elif any(not bool(torch.isfinite(parameter).all()) for parameter in model.parameters()):
        what = "a parameter is not finite"
    else:
        return
    raise UserError(
        f"{what} at step {step}; earlier checkpoints are unchanged; lower learning_rate or max_grad_norm and "
        "train with another save_model, optionally with train_from"
    )


class Stopping:
    """Stops training on all ranks after the same step; only the first rank updates the `stopper`."""

    def __init__(self, stopper: Any) -> None:
        self.stopper = stopper
        self.interrupts = Interrupts()
        self.signal = 0  # the one that stopped training on all ranks
        self.steps = 0  # number of steps that this process has begun

    def next_batches(self, batches: Iterator[Any]) -> Any:
        """Return the batches of the next step, or None when training stops; every rank calls this.

        A signal interrupts the wait for batches. Batches of a step that is not made do not count as read.
        Before the first step, there is nothing to save: the signal raises `Interrupted`.
        """
        taken = None
        try:
            with self.interrupts.raised_now():
                taken = next(batches, None)
        except Interrupted:
            pass  # the other ranks must agree first
        if self.agree():
            if self.signal and not self.steps:
                raise Interrupted(self.signal)
            return None
        self.steps += 1
        return taken

    def agree(self) -> bool:
        """Return whether any rank wants to stop; every rank calls this at the same time."""
        asked, ends = self.interrupts.received or 0, bool(getattr(self.stopper, "ends", False))
        if torch.distributed.is_initialized():
            device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
            votes = torch.tensor([asked, int(ends)], device=device)
            torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX)
            asked, ends = int(votes[0]), bool(votes[1])
        self.signal = asked
        return bool(asked or ends)
