"""Dropout (Srivastava et al., 2014) whose masks cost little on a CPU: drawn from whole random words."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Random bits that decide on one entry of a mask.
_BITS = 16


def keep_mask(like: Tensor, shape: tuple[int, ...], probability: float) -> Tensor:
    """A mask of `shape`: zero with `probability`, else 1 / (1 - probability), so that means stay.

    The probability is kept to 2**-16. Drawn from whole random words, because ``bernoulli_`` on a CPU takes
    several times as long: a sixth of a training step of a small Transformer.

    Args:
        like: gives the type and the device.
        probability: of a zero, below 1.
    """
    count = math.prod(shape)
    random_words = torch.randint(-(2**63), 2**63 - 1, (-(-count * _BITS // 64),), device=like.device)
    numbers = random_words.view(torch.int16)[:count].view(shape)
    first_kept = int(probability * 2**_BITS) - 2 ** (_BITS - 1)
    return torch.ge(numbers, first_kept, out=like.new_empty(shape)).div_(1.0 - probability)


def dropout(inputs: Tensor, probability: float, training: bool) -> Tensor:
    """``F.dropout`` of inputs of any shape, with `keep_mask` on a CPU; other devices have a kernel for it.

    Raises:
        ValueError: `probability` is not from 0 to 1.
    """
    if inputs.device.type != "cpu" or not 0.0 < probability < 1.0:
        return F.dropout(inputs, probability, training)
    return inputs * keep_mask(inputs, tuple(inputs.shape), probability) if training else inputs


class Dropout(nn.Dropout):
    """``nn.Dropout`` by way of `dropout`; ``inplace`` is not looked at."""

    def forward(self, input: Tensor) -> Tensor:
        """``(...)`` -> ``(...)``."""
        return dropout(input, self.p, self.training)
