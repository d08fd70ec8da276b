"""Dropout (Srivastava et al., 2014) with masks that are cheap on a CPU: 16 random bits per entry."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Random bits for one entry of a mask.
_BITS = 16


def keep_mask(like: Tensor, shape: tuple[int, ...], probability: float) -> Tensor:
    """A mask of `shape`: zero with `probability`, else 1 / (1 - probability), which preserves means.

    The probability is exact to 2**-16. The mask is drawn from 64-bit random numbers, because ``bernoulli_``
    on a CPU takes several times as long: a sixth of a training step of a small Transformer.

    Args:
        like: a tensor with the dtype and device of the mask.
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
    """``nn.Dropout`` with `dropout`; ``inplace`` is ignored."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout(input, self.p, self.training)


class EndingDropout(Dropout):
    """Dropout that ends after a number of optimizer updates, see `set_updates`.

    Args:
        probability: of a zero, until then.
        updates: the number of updates after which dropout ends; None for never.
    """

    def __init__(self, probability: float, updates: int | None) -> None:
        super().__init__(probability)
        self.probability = probability
        self.updates = updates


def set_updates(model: nn.Module, done: int) -> None:
    """Set the number of optimizer updates so far, `done`, in all modules that depend on it.

    Training loops call this before every update, so that dropout with a limited number of updates ends
    (option `relu_dropout_steps` of `alone`). Checkpoints need not store anything for it.
    """
    for module in model.modules():
        if isinstance(module, EndingDropout):
            # The number is not stored: a compiled model would be compiled again for each.
            module.p = 0.0 if module.updates is not None and done >= module.updates else module.probability
