"""Whole numbers of a few bits in bytes: rows of numbers one after another, most significant bit first.

Axes: ``n`` rows, ``T`` numbers in a row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def bytes_for(bits: int) -> int:
    """The bytes that hold `bits` bits."""
    return -(-bits // 8)


def pack_bits(numbers: Tensor, width: int) -> Tensor:
    """Numbers ``(n, T)`` below 2**width as bytes ``(n, ceil(T * width / 8))``; unused bits are zero."""
    shifts = torch.arange(width - 1, -1, -1, device=numbers.device)
    bits = (numbers.unsqueeze(-1) >> shifts & 1).flatten(1)
    missing = -bits.size(1) % 8
    bits = torch.nn.functional.pad(bits, (0, missing)).view(len(bits), -1, 8)
    return (bits << torch.arange(7, -1, -1, device=bits.device)).sum(dim=-1).to(torch.uint8)


def read_windows(packed: Tensor, count: int, width: int, stride: int, start: int = 0) -> Tensor:
    """Numbers ``(n, count)`` of `width` bits, each `stride` bits after the one before.

    Args:
        packed: bytes ``(n, ...)``.
        count: how many numbers to read.
        width: of a number in bits, at most 16.
        stride: bits from the beginning of one number to the next; `width` reads what `pack_bits` wrote, less
            reads overlapping windows.
        start: the position of the first number in bits; bits before the first byte are zero.

    Returns:
        int32 numbers.
    """
    if width == stride == 8 and start == 0:
        return packed[:, :count].int()
    # One byte of zeros before and two after, so that every window is in three consecutive bytes.
    padded = torch.nn.functional.pad(packed, (1, 2)).int()
    begins = torch.arange(count, device=packed.device) * stride + (start + 8)
    first = begins // 8
    joined = padded[:, first] << 16 | padded[:, first + 1] << 8 | padded[:, first + 2]
    return joined >> (24 - width - begins % 8).int() & (1 << width) - 1
