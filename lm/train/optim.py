"""Optimizers, averages of the parameters, and the lengths of segments.

AWD-LSTM is Merity et al., "Regularizing and Optimizing LSTM Language Models" (2018).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shared_embeddings.options import require, require_at_least, require_probability


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """What every optimizer has.

    Attributes:
        learning_rate: size of a step.
        weight_decay: what is added to the gradient, as a share of the parameters themselves.
    """

    learning_rate: float
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        """Raise `OptionError` for values out of range."""
        rate = self.learning_rate
        require(rate > 0, f"option 'learning_rate' is {rate}, but it must be above 0; raise it")
        require_at_least("weight_decay", self.weight_decay, 0)

    def build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of these parameters: plain gradient descent unless a subclass has another."""
        return torch.optim.SGD(parameters, self.learning_rate, weight_decay=self.weight_decay)

    def starts_averaging(self, scores: Sequence[float]) -> bool:
        """Whether the parameters are averaged from now on, after validations that gave `scores`."""
        return False


@dataclasses.dataclass(frozen=True)
class SGDOptions(OptimizerOptions):
    """Stochastic gradient descent.

    Attributes:
        momentum: share of the last step that is kept in the next.
    """

    momentum: float = 0.0

    def __post_init__(self) -> None:
        """Raise `OptionError` for values out of range."""
        super().__post_init__()
        require_probability("momentum", self.momentum)

    def build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Gradient descent with momentum."""
        return torch.optim.SGD(
            parameters, self.learning_rate, momentum=self.momentum, weight_decay=self.weight_decay
        )


@dataclasses.dataclass(frozen=True)
class ASGDOptions(OptimizerOptions):
    """Gradient descent whose model is the mean of the parameters over all steps: the finetune stage."""

    def starts_averaging(self, scores: Sequence[float]) -> bool:
        """Always: averaging begins with the first step."""
        return True


@dataclasses.dataclass(frozen=True)
class NTASGDOptions(OptimizerOptions):
    """Gradient descent that averages the parameters once validation has stalled (Algorithm 1).

    Attributes:
        nonmono: averaging starts when a validation is worse than the best of all but the `nonmono`
            validations right before it.
    """

    nonmono: int = 5

    def __post_init__(self) -> None:
        """Raise `OptionError` for values out of range."""
        super().__post_init__()
        require_at_least("nonmono", self.nonmono, 0)

    def starts_averaging(self, scores: Sequence[float]) -> bool:
        """Whether the latest validation has stalled, see `is_stalled`."""
        return is_stalled(scores, self.nonmono)


@dataclasses.dataclass(frozen=True)
class AdamOptions(OptimizerOptions):
    """Adam (Kingma & Ba, 2015).

    Attributes:
        betas: decay rates of the means of the gradient and of its square.
        eps: what is added to the root of the second mean.
    """

    betas: tuple[float, ...] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        """Raise `OptionError` for values out of range."""
        super().__post_init__()
        require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            f"option 'betas' is {list(self.betas)}, but it must be two numbers of at least 0 and below 1",
        )
        require(self.eps > 0, f"option 'eps' is {self.eps}, but it must be above 0; raise it")

    def build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Adam with these rates."""
        return torch.optim.Adam(
            parameters,
            self.learning_rate,
            betas=(self.betas[0], self.betas[1]),
            eps=self.eps,
            weight_decay=self.weight_decay,
        )


OPTIMIZERS: dict[str, type] = {
    "sgd": SGDOptions,
    "asgd": ASGDOptions,
    "ntasgd": NTASGDOptions,
    "adam": AdamOptions,
}


def is_stalled(scores: Sequence[float], nonmono: int) -> bool:
    """Whether the last score is worse than the best one before the `nonmono` scores that precede it.

    This is the condition of AWD-LSTM's Algorithm 1; lower scores are better.
    """
    earlier = scores[: max(0, len(scores) - 1 - nonmono)]
    return bool(earlier) and scores[-1] > min(earlier)


def draw_length(base: int, generator: random.Random) -> int:
    """The length of a segment: `base`, or half of it with probability 0.05, plus normal noise; at least 5.

    From AWD-LSTM, section 4.1, with the numbers of section 5; below 5, `base` is itself the shortest length.
    """
    mean = base if generator.random() < 0.95 else base / 2
    return max(min(5, base), int(generator.gauss(mean, 5)))


class Averages:
    """The means of parameters over the steps since averaging began (AWD-LSTM, Algorithm 1).

    Attributes:
        steps: over how many steps the means go.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._means = [parameter.detach().clone() for parameter in parameters]
        self.steps = 0

    @torch.no_grad()
    def update(self) -> None:
        """Take the parameters after one more step into the means."""
        self.steps += 1
        torch._foreach_lerp_(self._means, [p.detach() for p in self._parameters], 1.0 / self.steps)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the means into the model, and the parameters back afterwards; no change before a step."""
        if self.steps == 0:
            yield
            return
        current = self.current()
        self._write(self._means)
        try:
            yield
        finally:
            self._write(current)

    def current(self) -> list[Tensor]:
        """Copies of the parameters as they are in the model now."""
        return [parameter.detach().clone() for parameter in self._parameters]

    def load(self, steps: int, parameters: Sequence[Tensor]) -> None:
        """Take what is in the model as the means over `steps` steps, and put `parameters` in their place."""
        self.steps = steps
        self._means = self.current()
        self._write(parameters)

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        """Copy values into the model."""
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)
