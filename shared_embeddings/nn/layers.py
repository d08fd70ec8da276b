"""Parts that methods and hosts share: dropout, activations, scales of new parameters, types of codes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Random bits for one entry of a mask of dropout (Srivastava et al., 2014).
_BITS = 16


def keep_mask(like: Tensor, shape: tuple[int, ...], probability: float) -> Tensor:
    """A mask of `shape`: zero with `probability`, else 1 / (1 - probability), which preserves means.

    The probability is exact to 2**-16; dtype and device are those of `like`. The mask is drawn from 64-bit
    random numbers, because ``bernoulli_`` on a CPU takes several times as long: a sixth of a training step of
    a small Transformer.
    """
    count = math.prod(shape)
    random_words = torch.randint(-(2**63), 2**63 - 1, (-(-count * _BITS // 64),), device=like.device)
    numbers = random_words.view(torch.int16)[:count].view(shape)
    first_kept = int(probability * 2**_BITS) - 2 ** (_BITS - 1)
    return torch.ge(numbers, first_kept, out=like.new_empty(shape)).div_(1.0 - probability)


class Dropout(nn.Dropout):
    """``nn.Dropout`` with `keep_mask` on a CPU; other devices have a kernel for it."""

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu" or not self.training or not 0.0 < self.p < 1.0:
            return super().forward(input)
        return input * keep_mask(input, tuple(input.shape), self.p)


class EndingDropout(Dropout):
    """Dropout that ends after a number of optimizer updates, if not None; see `set_updates`."""

    def __init__(self, probability: float, updates: int | None) -> None:
        super().__init__(probability)
        self.probability = probability
        self.updates = updates


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation mode temporarily."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def set_updates(model: nn.Module, done: int) -> None:
    """Set the number of optimizer updates so far, `done`, in all modules that depend on it.

    Training loops call this before every update, so that dropout with a limited number of updates ends
    (option `relu_dropout_steps` of `alone`). Checkpoints need not store anything for it.

    Args:
        model: any module that contains embeddings.
        done: finished updates, 0 before the first.
    """
    for module in model.modules():
        if isinstance(module, EndingDropout):
            # The number is not stored: a compiled model would be compiled again for each.
            module.p = 0.0 if module.updates is not None and done >= module.updates else module.probability


# Codes are initialized smaller by this factor than the entries of a table, and their basis larger. Adam moves
# all entries by similar amounts, so rows then move further in a step. After 500 steps, the perplexity of a
# small translation model with rank D / 4 was 218 without this factor, 149 with 1/2, 100 with 1/5, and 154
# with a full table.
CODE_SCALE = 1 / 3


# The slope of a ReLU below zero in the backward pass. A code belongs to one word, and without a gradient
# nothing revives it: after 600 steps of SGD, 89 % of the codes of the 500 most frequent words of a small
# AWD-LSTM were zero. Its perplexity was 277; with slopes of 0.1, 0.3, 0.5 and 1: 166, 162, 158, 174.
RELU_SLOPE = 0.5


def relu_of_codes(codes: Tensor) -> Tensor:
    """max(0, x); in the backward pass, gradients of negative codes are multiplied by `RELU_SLOPE`."""
    if not (torch.is_grad_enabled() and codes.requires_grad):
        return torch.relu(codes)
    below = RELU_SLOPE * codes.detach().clamp(max=0.0)
    return F.leaky_relu(codes, RELU_SLOPE) - below


# Of the codes of words, before a basis: f of Distilled Embedding, Eq. 3.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": relu_of_codes,
    "gelu": F.gelu,
    "tanh": torch.tanh,
}


def entry_std(embedding_dim: int) -> float:
    """The std of new table entries, D**-0.5, which hosts scale to one by sqrt(D)."""
    return math.sqrt(1.0 / embedding_dim)


def code_std(embedding_dim: int) -> float:
    """The std of the new codes ``(V, R)`` of a narrow table, before a basis widens them to D."""
    return CODE_SCALE * entry_std(embedding_dim)


def zero_padding_row(table: Tensor, padding_idx: int | None) -> None:
    """Set the padding row of a parameter ``(V, ...)`` to zero, the value that is used."""
    if padding_idx is not None:
        with torch.no_grad():
            table[padding_idx].zero_()


def code_dtype(codebook_size: int) -> torch.dtype:
    """The smallest integer type that holds the codes 0 to `codebook_size` - 1."""
    if codebook_size <= 2**8:
        return torch.uint8
    return torch.int16 if codebook_size <= 2**15 else torch.int32


def code_bits(codebook_size: int) -> int:
    """The bits of a code: log2 of `codebook_size`, rounded up."""
    return math.ceil(math.log2(codebook_size))


def draw_codes(codes: Tensor, codebook_size: int, seed: int) -> None:
    """Fill `codes` with numbers below `codebook_size` from `seed` alone, the same on every device."""
    if codes.is_meta:
        return
    generator = torch.Generator(device="cpu").manual_seed(seed)
    codes.copy_(torch.randint(codebook_size, codes.shape, generator=generator, device="cpu"))
