"""What training tells: a bar on a terminal, lines on stdout and in train.log, curves for TensorBoard."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm


class Report:
    """The report of one run, by the process that writes; see `Silence` for the others.

    Args:
        folder: gets ``train.log`` (appended to) and ``tensorboard/``.
        first_step: the step that this process begins after.
        total_tokens: about how many tokens this run is in all.
        done_tokens: about how many of them were read before.
    """

    def __init__(self, folder: Path, first_step: int, total_tokens: int, done_tokens: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._log = (folder / "train.log").open("a", encoding="utf-8")
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)
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
        """Write lines to stdout and to the log."""
        print(text, file=self._log, flush=True)
        if self.is_terminal:
            tqdm.write(text, file=sys.stdout)
        else:
            print(text, flush=True)

    def tokens(self, number: int) -> None:
        """Advance the bar."""
        self._bar.update(number)

    def training(self, step: int, epoch: float, values: Mapping[str, float], done: float) -> None:
        """One line about the steps since the last one.

        Args:
            step: the last of them.
            epoch: passes through the data so far.
            values: ``loss`` (nats per token), ``rate`` (of learning), ``norm`` (of gradients), ``speed``
                (tokens per second); ``reconstruction`` (of the teacher's table) where there is such a loss.
            done: share of training that is done.
        """
        passed = time.monotonic() - self._begin
        left = passed * (1 - done) / max(done - self._start, 1e-9)
        distance = f" reconstruction {values['reconstruction']:.5f}" if "reconstruction" in values else ""
        time_left = tqdm.format_interval(min(left, 1e9))
        self.line(
            f"step {step} epoch {epoch:.2f} loss {values['loss']:.6f} ppl {perplexity(values['loss']):.2f} "
            f"lr {values['rate']:.4g}{distance} | {values['speed']:,.0f} tokens/s, {time_left} left"
        )
        self._bar.set_postfix(loss=f"{values['loss']:.3f}", refresh=False)
        for name, value in values.items():
            self._writer.add_scalar(f"train/{name}", value, step)

    def validation(self, step: int, loss: float, best: float, averaged: int) -> None:
        """One line about a validation.

        Args:
            step: after which step.
            loss: nats per token.
            best: the lowest loss so far, this one included.
            averaged: over how many steps the evaluated parameters are averaged; 0 when they are not.
        """
        note = f", averaged over {averaged} steps" if averaged else ""
        place = "the best so far" if loss <= best else f"best {perplexity(best):.2f}"
        self.line(f"step {step} valid loss {loss:.6f} ppl {perplexity(loss):.2f} ({place}){note}")
        self._writer.add_scalar("valid/loss", loss, step)
        self._writer.add_scalar("valid/perplexity", perplexity(loss), step)

    def close(self) -> None:
        """Close the bar and the files."""
        self._bar.close()
        self._writer.close()
        self._log.close()


class Silence(Report):
    """The report of a process that leaves writing to another."""

    def __init__(self) -> None:
        self.is_terminal = False

    def line(self, text: str) -> None:
        """Nothing."""

    def tokens(self, number: int) -> None:
        """Nothing."""

    def training(self, step: int, epoch: float, values: Mapping[str, float], done: float) -> None:
        """Nothing."""

    def validation(self, step: int, loss: float, best: float, averaged: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Speed:
    """Tokens per second since the last time that it was asked for."""

    def __init__(self, tokens: int) -> None:
        self._begin, self._tokens = time.monotonic(), tokens

    def lap(self, tokens: int) -> float:
        """The speed up to now, after `tokens` in all."""
        seconds, read = time.monotonic() - self._begin, tokens - self._tokens
        self._begin, self._tokens = time.monotonic(), tokens
        return read / max(seconds, 1e-9)


def perplexity(loss: float) -> float:
    """``exp(loss)``, infinite where that is too large to be told."""
    return math.exp(loss) if loss < 700 else math.inf
