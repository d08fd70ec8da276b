"""Whole numbers of a few bits in bytes: rows of numbers one after another, most significant bit first.

Axes: ``n`` rows, ``T`` numbers in a row.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS_AT_ONCE = 4096


def pack_bits(numbers: Tensor, width: int) -> Tensor:
    """Numbers ``(n, T)`` below 2**width as bytes ``(n, ceil(T * width / 8))``; unused bits are zero."""
    bits = bits_of(numbers, width)
    missing = -bits.size(1) % 8
    bits = F.pad(bits, (0, missing)).unflatten(1, (-1, 8))
    return (bits << torch.arange(7, -1, -1, device=bits.device)).sum(dim=-1).to(torch.uint8)


def unpack_bits(packed: Tensor, count: int, width: int) -> Tensor:
    """The numbers ``(n, count)`` uint8 of at most 8 bits that `pack_bits` wrote."""
    # Not all rows at once: windows take four bytes a number.
    parts = packed.split(_ROWS_AT_ONCE)
    return torch.cat([read_windows(part, count, width, width).to(torch.uint8) for part in parts])


def bits_of(numbers: Tensor, width: int) -> Tensor:
    """The bits ``(n, T * width)`` of numbers ``(n, T)``, most significant first."""
    shifts = torch.arange(width - 1, -1, -1, device=numbers.device)
    return (numbers.unsqueeze(-1) >> shifts & 1).flatten(1)


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
    # Numbers whose positions within a byte are equal are read together, from views of the bytes.
    period = 8 // math.gcd(stride, 8)
    groups = -(-count // period)
    step = stride * period // 8
    # Zeros before and after, so that every window is in three consecutive bytes of a group.
    before = -(start // 8) if start < 0 else 0
    after = max(0, step * groups + 3 + (start + stride * period) // 8 - packed.size(1))
    padded = F.pad(packed, (before, after))
    numbers = []
    for place in range(period):
        first, shift = divmod(start + 8 * before + stride * place, 8)
        window = torch.zeros((), dtype=torch.int32, device=packed.device)
        for number in range(-(-(shift + width) // 8)):
            byte = padded[:, first + number : first + number + step * (groups - 1) + 1 : step]
            window = window << 8 | byte.int()
        numbers.append(window >> -(shift + width) % 8 & (1 << width) - 1)
    return torch.stack(numbers, dim=-1).flatten(1)[:, :count]


def read_entries(packed: Tensor, count: int, width: int, book: Tensor) -> Tensor:
    """The entries ``(n, count)`` of `book` ``(2**width,)`` for numbers that `pack_bits` wrote."""
    if 8 % width:
        numbers = read_windows(packed, count, width, width)
        return F.embedding(numbers, book.unsqueeze(1)).squeeze(-1)
    # One look-up for a byte gives all of its entries (256, 8 / width).
    every_byte = torch.arange(256, device=book.device).to(torch.uint8).unsqueeze(1)
    entries = F.embedding(read_windows(every_byte, 8 // width, width, width), book.unsqueeze(1)).squeeze(-1)
    return F.embedding(packed.int(), entries).flatten(1)[:, :count]
