"""Trellis-coded quantization with a computed codebook (after QTIP, Tseng et al., 2024).

A row is a stream of bits, `width` for each number. A number is the codebook's entry for a state: the last 12
bits of the stream up to its own. Neighboring numbers share most bits of their states, so a stream is a path
through a trellis, and the Viterbi algorithm finds the nearest one.

Axes: ``n`` rows, ``D`` dimensions.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from shared_embeddings.codecs.codec import Codebooks, Codec, Encoded, fitted_scales, rms
from shared_embeddings.layers.bit_packing import bytes_for, pack_bits, read_windows

STATE_BITS = 12
_STATES = 2**STATE_BITS
# The free bits of a row's first state; the bits before them are zero.
_START_BITS = 8
# Rows whose path costs are updated together; their costs fit into the cache of a core.
_ROWS = 32


class TrellisCodec(Codec):
    """See the module."""

    name = "trellis"

    def row_bytes(self, width: int) -> int:
        """As in the base class."""
        return bytes_for(_START_BITS + width * (self.dim - 1))

    def encode(self, rows: Tensor, width: int, codebooks: Codebooks) -> Encoded:
        """As in the base class: the path with the least squared error for rows at unit variance."""
        book = codebook(rows.device)
        normal = rows / rms(rows)
        states = torch.cat([nearest_paths(part, width, book) for part in normal.split(_ROWS)])
        codes = _packed(states, width)
        return Encoded(codes, fitted_scales(rows, book[states]))

    def decode(self, codes: Tensor, width: int, codebooks: Codebooks) -> Tensor:
        """As in the base class."""
        start = _START_BITS - STATE_BITS
        states = read_windows(codes, self.dim, STATE_BITS, width, start)
        return torch.nn.functional.embedding(states, codebook(codes.device).unsqueeze(1)).squeeze(-1)


@functools.cache
def codebook(device: torch.device) -> Tensor:
    """The entries ``(4096,)`` of all states: quantiles of the normal distribution in a scrambled order."""
    # The finalizer of MurmurHash3, in 64-bit numbers that hold 32 bits.
    hashed = torch.arange(_STATES, device=device)
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        hashed = (hashed ^ hashed >> shift) * factor + factor & 0xFFFFFFFF
    hashed = hashed ^ hashed >> 16
    ranks = hashed.argsort().argsort().double()
    return torch.special.ndtri((ranks + 0.5) / _STATES).float()


@torch.no_grad()
def nearest_paths(rows: Tensor, width: int, book: Tensor) -> Tensor:
    """The states ``(n, D)`` of the path that is nearest to each row ``(n, D)`` in squared error."""
    count, dim = rows.shape
    heads = _STATES >> width  # the states without their last `width` bits
    costs = torch.full((count, _STATES), torch.inf, device=rows.device)
    start = 1 << _START_BITS
    costs[:, :start] = (rows[:, :1] - book[:start]).square()
    squares, slopes = book.square(), -2 * book
    choices = torch.empty((dim, count, heads), dtype=torch.uint8, device=rows.device)
    errors = torch.empty_like(costs)
    for step in range(1, dim):
        best, choices[step] = _minimum(costs.view(count, 1 << width, heads))
        torch.addcmul(squares, rows[:, step : step + 1], slopes, out=errors)
        torch.add(errors.view(count, heads, -1), best.unsqueeze(-1), out=costs.view(count, heads, -1))
    states = torch.empty((dim, count), dtype=torch.long, device=rows.device)
    states[-1] = costs.argmin(dim=1)
    everyone = torch.arange(count, device=rows.device)
    for step in range(dim - 1, 0, -1):
        head = states[step] >> width
        states[step - 1] = choices[step, everyone, head].long() * heads + head
    return states.t()


def _minimum(costs: Tensor) -> tuple[Tensor, Tensor]:
    """The minimum over the middle axis, of a length that is a power of two, and its uint8 index."""
    half = costs.size(1) // 2
    if half == 0:
        return costs[:, 0], torch.zeros_like(costs[:, 0], dtype=torch.uint8)
    low, high = costs[:, :half], costs[:, half:]
    best, inner = _minimum(torch.minimum(low, high))
    is_high = high < low
    if half == 1:
        return best, is_high[:, 0].to(torch.uint8)
    chosen = is_high.gather(1, inner.long().unsqueeze(1)).squeeze(1)
    return best, inner + chosen.to(torch.uint8) * half


def _packed(states: Tensor, width: int) -> Tensor:
    """The stream of each row: the first state's low bits, then `width` bits of every other state."""
    first = states[:, :1] & (1 << _START_BITS) - 1
    rest = states[:, 1:] & (1 << width) - 1
    bits = torch.cat([_bits(first, _START_BITS), _bits(rest, width)], dim=1)
    return pack_bits(bits, 1)


def _bits(numbers: Tensor, width: int) -> Tensor:
    """The bits ``(n, T * width)`` of numbers ``(n, T)``, most significant first."""
    shifts = torch.arange(width - 1, -1, -1, device=numbers.device)
    return (numbers.unsqueeze(-1) >> shifts & 1).flatten(1)
