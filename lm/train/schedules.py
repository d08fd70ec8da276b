"""Learning rate schedules as stateless functions of the progress of training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from shared_embeddings.options import require, require_at_least


class Progress(NamedTuple):
    """Progress of training.

    Attributes:
        done: fraction of training that is done.
        epochs: number of epochs, including fractions.
        scores: validation losses so far.
    """

    done: float
    epochs: float
    scores: Sequence[float]


@dataclasses.dataclass(frozen=True)
class ConstantOptions:
    """Constant learning rate."""

    def factor(self, progress: Progress) -> float:
        """The factor of the learning rate."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class CosineOptions:
    """Cosine decay.

    Attributes:
        min_lr_ratio: final learning rate as a fraction of the base learning rate.
    """

    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        """Check the range."""
        require(
            0 <= self.min_lr_ratio <= 1,
            f"option 'min_lr_ratio' is {self.min_lr_ratio}, but it must be from 0 to 1",
        )

    def factor(self, progress: Progress) -> float:
        """The factor of the learning rate."""
        wave = (1 + math.cos(math.pi * min(progress.done, 1.0))) / 2
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * wave


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Step decay at given epochs.

    Attributes:
        decay_epochs: epochs after which the learning rate is divided.
        decay_factor: divisor of the learning rate.
    """

    decay_epochs: tuple[float, ...]
    decay_factor: float = 10.0

    def __post_init__(self) -> None:
        """Check the range."""
        _check_decay(self.decay_factor)

    def factor(self, progress: Progress) -> float:
        """The factor of the learning rate."""
        return float(self.decay_factor ** -sum(progress.epochs >= epoch for epoch in self.decay_epochs))


@dataclasses.dataclass(frozen=True)
class PlateauOptions:
    """Decay when the validation loss stops improving.

    Attributes:
        decay_factor: divisor of the learning rate.
        decay_patience: number of validations without improvement before the learning rate is divided.
    """

    decay_factor: float = 4.0
    decay_patience: int = 1

    def __post_init__(self) -> None:
        """Check the ranges."""
        _check_decay(self.decay_factor)
        require_at_least("decay_patience", self.decay_patience, 1)

    def factor(self, progress: Progress) -> float:
        """The factor of the learning rate."""
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
    """Raise `OptionError` unless `factor` is above 1."""
    require(factor > 1, f"option 'decay_factor' is {factor}, but it must be above 1; raise it")
