"""Word codes: for each word, which entry of each codebook it is made of."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def code_dtype(codebook_size: int) -> torch.dtype:
    """The smallest integer type that holds the codes 0 to `codebook_size` - 1."""
    if codebook_size <= 2**8:
        return torch.uint8
    return torch.int16 if codebook_size <= 2**15 else torch.int32


def code_bits(codebook_size: int) -> int:
    """The bits that it takes to tell `codebook_size` codes apart: log2, rounded up."""
    return math.ceil(math.log2(codebook_size))


def draw_codes(codes: Tensor, codebook_size: int, seed: int) -> None:
    """Fill `codes` with numbers below `codebook_size` from `seed` alone, the same on every device."""
    if codes.is_meta:
        return
    generator = torch.Generator(device="cpu").manual_seed(seed)
    codes.copy_(torch.randint(codebook_size, codes.shape, generator=generator, device="cpu"))
