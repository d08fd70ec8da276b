"""What training tells while it runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from onmt.utils.logging import logger
from onmt.utils.report_manager import ReportMgr
from tqdm import tqdm

from nmt.train.teacher import DistillationLoss


class ProgressReport(ReportMgr):  # type: ignore[misc]
    """OpenNMT's report, with a bar on a terminal and the time left in every line of the log.

    Args:
        report_every: steps between two lines.
        tensorboard_writer: or ``None``.
        first_step: the step at which this process begins.
        total_steps: the last step; 0 when it is not known.
        distillation: the loss whose part for the embedding is reported, too, or ``None``.
        check: called with the step and the mean loss before each line; raises when training has diverged.
    """

    def __init__(
        self,
        report_every: int,
        tensorboard_writer: Any,
        first_step: int,
        total_steps: int,
        distillation: DistillationLoss | None = None,
        check: Callable[[int, float], None] = lambda step, loss: None,
    ) -> None:
        super().__init__(report_every, start_time=-1, tensorboard_writer=tensorboard_writer)
        self.distillation = distillation
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
        """Advance the bar by one step, and report as upstream does."""
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
        if self.distillation is not None:
            self._report_reconstruction(step, self.distillation.take_mean())
        return result

    def _report_reconstruction(self, step: int, loss: float) -> None:
        """Log the mean reconstruction loss since the last report."""
        self.log(f"reconstruction loss: {loss:.5f}")
        if self.tensorboard_writer is not None:
            self.tensorboard_writer.add_scalar("progress/reconstruction", loss, step)
