"""Optimizers, learning rate schedules, parameter averaging, and segment lengths.

AWD-LSTM is Merity et al., "Regularizing and Optimizing LSTM Language Models" (2018).
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shared_embeddings.utils.options import option, require


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """Options of all optimizers."""

    learning_rate: float = option("base learning rate.")
    weight_decay: float = option("L2 penalty.", 0.0, minimum=0)

    def __post_init__(self) -> None:
        rate = self.learning_rate
        require(rate > 0, f"option 'learning_rate' is {rate}, but it must be above 0; raise it")


@dataclasses.dataclass(frozen=True)
class SGDOptions(OptimizerOptions):
    """Stochastic gradient descent."""

    momentum: float = option("momentum factor.", 0.0, minimum=0, below=1)


@dataclasses.dataclass(frozen=True)
class ASGDOptions(OptimizerOptions):
    """Averaged SGD: the model is the mean of the parameters over all steps (finetuning of AWD-LSTM)."""


@dataclasses.dataclass(frozen=True)
class NTASGDOptions(OptimizerOptions):
    """Non-monotonically triggered averaged SGD (AWD-LSTM, Algorithm 1)."""

    nonmono: int = option(
        "averaging starts when a validation is worse than the best one before the last `nonmono` "
        "validations.",
        5,
        minimum=0,
    )


@dataclasses.dataclass(frozen=True)
class AdamOptions(OptimizerOptions):
    """Adam (Kingma & Ba, 2015)."""

    betas: tuple[float, float] = option(
        "decay rates of the first and second moments.", (0.9, 0.999), minimum=0, below=1
    )
    eps: float = option("term added to the denominator.", 1e-8, minimum=0)


OPTIMIZERS: dict[str, type] = {
    "sgd": SGDOptions,
    "asgd": ASGDOptions,
    "ntasgd": NTASGDOptions,
    "adam": AdamOptions,
}


def build_optimizer(options: OptimizerOptions, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Build the optimizer: Adam or SGD."""
    rate, decay = options.learning_rate, options.weight_decay
    if isinstance(options, AdamOptions):
        return torch.optim.Adam(parameters, rate, options.betas, options.eps, decay)
    return torch.optim.SGD(parameters, rate, momentum=getattr(options, "momentum", 0.0), weight_decay=decay)


def starts_averaging(options: OptimizerOptions, scores: Sequence[float]) -> bool:
    """Whether averaging starts now, given the validation losses so far."""
    if isinstance(options, NTASGDOptions):
        return is_stalled(scores, options.nonmono)
    return isinstance(options, ASGDOptions)


def is_stalled(scores: Sequence[float], nonmono: int) -> bool:
    """Whether the last loss is worse than the best one before the `nonmono` previous ones (Algorithm 1)."""
    earlier = scores[: max(0, len(scores) - 1 - nonmono)]
    return bool(earlier) and scores[-1] > min(earlier)


def draw_length(base: int, generator: random.Random) -> int:
    """Draw a segment length: `base`, or half of it with probability 0.05, plus Gaussian noise (section 4.1).

    The minimum is 5, or `base` if it is smaller.
    """
    mean = base if generator.random() < 0.95 else base / 2
    return max(min(5, base), int(generator.gauss(mean, 5)))


class Averages:
    """Means of the parameters since averaging started (AWD-LSTM, Algorithm 1).

    Attributes:
        steps: number of averaged steps.
        means: of each parameter.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self.steps, self.means = 0, self.current()

    def current(self) -> list[Tensor]:
        """Return copies of the current parameters."""
        return [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Update the means after a step."""
        self.steps += 1
        torch._foreach_lerp_(self.means, [p.detach() for p in self._parameters], 1.0 / self.steps)

    @torch.no_grad()
    def write(self, values: Sequence[Tensor]) -> None:
        """Copy values to the parameters."""
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context with the means in place of the parameters."""
        current = self.current()
        if self.steps:
            self.write(self.means)
        try:
            yield
        finally:
            self.write(current)


@dataclasses.dataclass(frozen=True)
class ConstantOptions:
    """Constant learning rate."""


@dataclasses.dataclass(frozen=True)
class CosineOptions(ConstantOptions):
    """Cosine decay."""

    min_lr_ratio: float = option(
        "final learning rate as a fraction of the base learning rate.", 0.0, minimum=0, below=1
    )


@dataclasses.dataclass(frozen=True)
class StepOptions(ConstantOptions):
    """Step decay at given epochs."""

    decay_epochs: tuple[float, ...] = option("epochs after which the learning rate is divided.")
    decay_factor: float = option("divisor of the learning rate.", 10.0, minimum=1)


@dataclasses.dataclass(frozen=True)
class PlateauOptions(ConstantOptions):
    """Decay when the validation loss stops improving."""

    decay_factor: float = option("divisor of the learning rate.", 4.0, minimum=1)
    decay_patience: int = option(
        "number of validations without improvement before the learning rate is divided.", 1, minimum=1
    )


SCHEDULES: dict[str, type] = {
    "constant": ConstantOptions,
    "cosine": CosineOptions,
    "step": StepOptions,
    "plateau": PlateauOptions,
}


def rate_factor(schedule: ConstantOptions, done: float, epochs: float, scores: Sequence[float]) -> float:
    """Return the factor of the learning rate.

    Args:
        done: fraction of training that is done.
        epochs: completed, including fractions.
        scores: validation losses so far.
    """
    if isinstance(schedule, CosineOptions):
        wave = (1 + math.cos(math.pi * min(done, 1.0))) / 2
        return schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * wave
    if isinstance(schedule, StepOptions):
        return float(schedule.decay_factor ** -sum(epochs >= epoch for epoch in schedule.decay_epochs))
    if isinstance(schedule, PlateauOptions):
        best, waited, divisions = math.inf, 0, 0
        for score in scores:
            waited = 0 if score < best else waited + 1
            best = min(best, score)
            if waited == schedule.decay_patience:
                waited, divisions = 0, divisions + 1
        return float(schedule.decay_factor**-divisions)
    return 1.0
