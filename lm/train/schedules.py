"""Learning rates as functions of how far training has come, so that nothing of them has to be stored."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from shared_embeddings.options import require, require_at_least


class Progress(NamedTuple):
    """How far training has come.

    Attributes:
        done: the share of all training that is done, from 0 to 1.
        epochs: passes through the data, with their fraction.
        scores: what the validations gave so far; lower is better.
    """

    done: float
    epochs: float
    scores: Sequence[float]


@dataclasses.dataclass(frozen=True)
class ConstantOptions:
    """A learning rate that stays."""

    def factor(self, progress: Progress) -> float:
        """What the learning rate is multiplied with."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class CosineOptions:
    """A learning rate that falls along half a period of the cosine.

    Attributes:
        min_lr_ratio: share of the learning rate that is left at the end.
    """

    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        """Check the range."""
        require(
            0 <= self.min_lr_ratio <= 1,
            f"option 'min_lr_ratio' is {self.min_lr_ratio}, but it must be from 0 to 1",
        )

    def factor(self, progress: Progress) -> float:
        """What the learning rate is multiplied with."""
        wave = (1 + math.cos(math.pi * min(progress.done, 1.0))) / 2
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * wave


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """A learning rate that is divided when given numbers of epochs are over.

    Attributes:
        decay_epochs: the epochs after which it is divided.
        decay_factor: what it is divided by.
    """

    decay_epochs: tuple[float, ...]
    decay_factor: float = 10.0

    def __post_init__(self) -> None:
        """Check the range."""
        _check_decay(self.decay_factor)

    def factor(self, progress: Progress) -> float:
        """What the learning rate is multiplied with."""
        return float(self.decay_factor ** -sum(progress.epochs >= epoch for epoch in self.decay_epochs))


@dataclasses.dataclass(frozen=True)
class PlateauOptions:
    """A learning rate that is divided when validation stops improving.

    Attributes:
        decay_factor: what it is divided by.
        decay_patience: validations in a row without a new best that it is divided after.
    """

    decay_factor: float = 4.0
    decay_patience: int = 1

    def __post_init__(self) -> None:
        """Check the ranges."""
        _check_decay(self.decay_factor)
        require_at_least("decay_patience", self.decay_patience, 1)

    def factor(self, progress: Progress) -> float:
        """What the learning rate is multiplied with."""
        best, waited, divisions = math.inf, 0, 0
        for score in progress.scores:
            waited = 0 if score < best else waited + 1
            best = min(best, score)
            if waited == self.decay_patience:
                waited, divisions = 0, divisions + 1
        return float(self.decay_factor**-divisions)


SCHEDULES: dict[str, type] = {
    "constant": ConstantOptions,
    "cosine": CosineOptions,
    "step": StepOptions,
    "plateau": PlateauOptions,
}


def _check_decay(factor: float) -> None:
    """Raise `OptionError` unless dividing by `factor` makes a learning rate smaller."""
    require(factor > 1, f"option 'decay_factor' is {factor}, but it must be above 1; raise it")
