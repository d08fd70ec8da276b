"""Progress of training: a bar, log lines on stdout and in train.log, TensorBoard, and Weights & Biases."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from shared_embeddings.utils.files import refuse_link
from shared_embeddings.utils.results import Writer, Writers


class Report:
    """Reports the progress of a run, in the first process; the others use `NoReport`.

    Args:
        folder: folder of ``train.log``, which is appended to, and ``tensorboard/``; neither may be a link.
        first_step: number of steps before this process.
        total_tokens: approximate number of tokens of the run.
        done_tokens: approximate number of tokens before this process.
        writers: also get what TensorBoard gets.

    Raises:
        UserError: one is a symbolic link.
    """

    def __init__(
        self,
        folder: Path,
        first_step: int,
        total_tokens: int,
        done_tokens: int,
        writers: Iterable[Writer] = (),
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        for name in ("train.log", "tensorboard"):
            refuse_link(folder / name)
        self._log = (folder / "train.log").open("a", encoding="utf-8")
        tensorboard: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)
        self._writer = Writers([tensorboard, *writers])
        self.is_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=max(total_tokens, done_tokens),
            initial=done_tokens,
            unit="tok",
            unit_scale=True,
            disable=not self.is_terminal,
            dynamic_ncols=True,
        )
        self._begin = time.monotonic()
        self._start = done_tokens / max(total_tokens, 1)

    def line(self, text: str) -> None:
        """Write a line to stdout and the log."""
        print(text, file=self._log, flush=True)
        if self.is_terminal:
            tqdm.write(text, file=sys.stdout)
        else:
            print(text, flush=True)

    def tokens(self, number: int) -> None:
        """Advance the progress bar."""
        self._bar.update(number)

    def training(self, step: int, epoch: float, values: Mapping[str, float], done: float) -> None:
        """Report the steps since the last line.

        Args:
            step: number of steps.
            epoch: number of epochs.
            values: ``loss`` (nats per token), ``rate`` (learning rate), ``norm`` (gradient norm), ``speed``
                (tokens per second), ``step_ms`` (milliseconds per step), and optionally ``reconstruction``
                (loss of the teacher's table).
            done: fraction of training that is done.
        """
        passed = time.monotonic() - self._begin
        left = tqdm.format_interval(min(passed * (1 - done) / max(done - self._start, 1e-9), 1e9))
        distance = f" reconstruction {values['reconstruction']:.5f}" if "reconstruction" in values else ""
        self.line(
            f"step {step} epoch {epoch:.2f} loss {values['loss']:.6f} ppl {perplexity(values['loss']):.2f} "
            f"lr {values['rate']:.4g}{distance} | {values['speed']:,.0f} tokens/s, "
            f"{values['step_ms']:.1f} ms per step, {left} left"
        )
        self._bar.set_postfix(loss=f"{values['loss']:.3f}", refresh=False)
        for name, value in values.items():
            self._writer.add_scalar(f"train/{name}", value, step)

    def validation(self, step: int, loss: float, best: float, averaged: int) -> None:
        """Report a validation.

        Args:
            step: number of steps.
            loss: nats per token.
            best: lowest loss so far, including this one.
            averaged: number of averaged steps; 0 without averaging.
        """
        note = f", averaged over {averaged} steps" if averaged else ""
        place = "the best so far" if loss <= best else f"best {perplexity(best):.2f}"
        self.line(f"step {step} valid loss {loss:.6f} ppl {perplexity(loss):.2f} ({place}){note}")
        self._writer.add_scalar("valid/loss", loss, step)
        self._writer.add_scalar("valid/perplexity", perplexity(loss), step)

    def close(self) -> None:
        """Close the progress bar and the files."""
        self._bar.close()
        self._writer.close()
        self._log.close()


class NoReport(Report):
    """Report of a process that does not write."""

    def __init__(self) -> None:
        self.is_terminal = False

    def line(self, text: str) -> None:
        """Do nothing."""

    def tokens(self, number: int) -> None:
        """Do nothing."""

    def training(self, step: int, epoch: float, values: Mapping[str, float], done: float) -> None:
        """Do nothing."""

    def validation(self, step: int, loss: float, best: float, averaged: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Speed:
    """Measures tokens per second and milliseconds per step.

    Args:
        step: number of steps so far.
        tokens: number of tokens so far.
    """

    def __init__(self, step: int, tokens: int) -> None:
        self._begin, self._step, self._tokens = time.monotonic(), step, tokens

    def lap(self, step: int, tokens: int) -> dict[str, float]:
        """``speed`` and ``step_ms``, see `Report.training`, since the last call with fewer steps."""
        seconds = max(time.monotonic() - self._begin, 1e-9)
        steps, read = step - self._step, tokens - self._tokens
        self._begin, self._step, self._tokens = time.monotonic(), step, tokens
        return {"speed": read / seconds, "step_ms": 1000 * seconds / steps}


def perplexity(loss: float) -> float:
    """``exp(loss)``, or infinity on overflow."""
    return math.exp(loss) if loss < 700 else math.inf
