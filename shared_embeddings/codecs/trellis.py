"""Trellis-coded quantization with a computed codebook (after QTIP, Tseng et al., 2024).

A row is a stream of bits, `width` for each number. A number is the codebook's entry for a state: the last 12
bits of the stream up to its own. Neighboring numbers share most bits of their states, so a stream is a path
through a trellis, and the Viterbi algorithm finds the nearest one.

Axes: ``n`` rows, ``D`` dimensions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.codecs import kernels
from shared_embeddings.codecs.bit_packing import bits_of, bytes_for, pack_bits, read_windows
from shared_embeddings.codecs.codec import Codebooks, Codec, Encoded, fitted_scales, rms
from shared_embeddings.layers.caching import cache_tensor
from shared_embeddings.layers.tracing import has_values

STATE_BITS = 12
_STATES = 2**STATE_BITS
# The free bits of a row's first state; the bits before them are zero.
START_BITS = 8
# Rows whose path costs are updated together; their costs fit into the cache of a core.
_ROWS = 32


class TrellisCodec(Codec):
    """See the module."""

    name = "trellis"

    def row_bytes(self, width: int) -> int:
        """As in the base class."""
        return bytes_for(START_BITS + width * (self.dim - 1))

    def encode(self, rows: Tensor, width: int, codebooks: Codebooks) -> Encoded:
        """As in the base class: the path with the least squared error for rows at unit variance."""
        book = codebook(rows.device)
        widths = [width] * self.dim
        states = nearest_states(rows / rms(rows), widths, rows.new_ones(self.dim), book)
        return Encoded(packed_states(states, widths), fitted_scales(rows, book[states]))

    def decode(self, codes: Tensor, width: int, codebooks: Codebooks) -> Tensor:
        """As in the base class."""
        if kernels.usable(codes):
            return kernels.decode_windows(codes, self.dim, width, START_BITS, codebook(codes.device))
        if torch.compiler.is_compiling():  # a graph would build a larger table in every call
            entries = codebook(codes.device).unsqueeze(1)
        else:
            entries = successive_entries(width, codes.device)
        bits, each = entries.size(0).bit_length() - 1, entries.size(1)
        start = START_BITS - STATE_BITS
        windows = read_windows(codes, -(-self.dim // each), bits, width * each, start)
        return F.embedding(windows, entries).flatten(1)[:, : self.dim]

    def direct_scores(
        self, hidden: Tensor, codes: Tensor, width: int, codebooks: Codebooks, scales: Tensor
    ) -> Tensor | None:
        """As in the base class."""
        return kernels.window_scores(hidden, codes, width, START_BITS, codebook(codes.device), scales)


def nearest_states(rows: Tensor, widths: Sequence[int], weights: Tensor, book: Tensor) -> Tensor:
    """The states ``(n, D)`` of the path with the least weighted squared error from each row ``(n, D)``.

    Args:
        rows: rows whose numbers have a variance of one.
        widths: the bits of each number.
        weights: ``(D,)`` of the squared errors.
        book: the entry of every state.
    """
    if kernels.usable(rows):
        return kernels.nearest_paths(rows, widths, weights, 1 << START_BITS, book)
    # All blocks use the same memory: page faults would take longer than the search.
    count = min(_ROWS, len(rows))
    lowest = rows.new_empty((rows.size(1), _STATES >> min(widths), count))
    blocks = F.pad(rows, (0, 0, 0, -len(rows) % count)).split(count)
    return torch.cat([nearest_paths(block, widths, weights, book, lowest) for block in blocks])[: len(rows)]


def _codebook() -> Tensor:
    # The finalizer of MurmurHash3, in 64-bit numbers that hold 32 bits.
    hashed = torch.arange(_STATES, device="cpu")
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        hashed = (hashed ^ hashed >> shift) * factor + factor & 0xFFFFFFFF
    hashed = hashed ^ hashed >> 16
    ranks = hashed.argsort().argsort().double()
    return torch.special.ndtri((ranks + 0.5) / _STATES).float()


_CODEBOOK = _codebook()


def codebook(device: torch.device) -> Tensor:
    """The entries ``(4096,)`` of all states: quantiles of the normal distribution in a scrambled order."""
    return (_CODEBOOK if has_values() else _codebook()).to(device)


@cache_tensor
def successive_entries(width: int, device: torch.device) -> Tensor:
    """The entries ``(2**bits, m)`` of m successive states, for all streams of their `bits` bits, 16 at most.

    One look-up then gives m numbers.
    """
    each = {1: 4, 2: 2, 3: 2, 4: 2}.get(width, 1)
    streams = torch.arange(2 ** (STATE_BITS + width * (each - 1)), device=device).unsqueeze(1)
    shifts = torch.arange(each - 1, -1, -1, device=device) * width
    return codebook(device)[streams >> shifts & _STATES - 1]


@torch.no_grad()
def nearest_paths(
    rows: Tensor, widths: Sequence[int], weights: Tensor, book: Tensor, lowest: Tensor
) -> Tensor:
    """`nearest_states` of a block of rows.

    Args:
        rows, widths, weights, book: as in `nearest_states`.
        lowest: ``(D, 4096 / 2**narrowest, n)``, overwritten with the lowest cost of a path to a state that
            the states with the same leading bits can follow.
    """
    count = len(rows)
    # The rows are the last axis, which makes all operations long loops over contiguous memory.
    columns = rows.t().contiguous()
    # (x - c)^2 - x^2 = (c^2, -2 c) (1, x), which is enough for finding the smallest.
    entries = torch.stack([book.square(), -2 * book], dim=1)
    numbers = rows.new_ones((2, count))
    costs, errors = (rows.new_empty((_STATES, count)) for _ in range(2))
    for step, width in enumerate(widths):
        numbers[1] = columns[step]
        torch.mm(entries, numbers * weights[step], out=costs if step == 0 else errors)
        if step == 0:
            costs[1 << START_BITS :] = torch.inf
        else:
            heads = _STATES >> width  # the states without their last `width` bits
            _minimum(costs.view(-1, heads, count), lowest[step, :heads])
            by_head = costs.view(heads, -1, count)
            torch.add(errors.view(heads, -1, count), lowest[step, :heads].unsqueeze(1), out=by_head)
    return _traced(costs.argmin(dim=0), lowest, entries, columns, widths, weights)


def _minimum(costs: Tensor, out: Tensor) -> None:
    """The minimum over the first axis, whose length is a power of two."""
    while (half := costs.size(0) // 2) > 1:
        costs = torch.minimum(costs[:half], costs[half:])
    torch.minimum(costs[0], costs[1], out=out)


def _traced(
    last: Tensor, lowest: Tensor, entries: Tensor, columns: Tensor, widths: Sequence[int], weights: Tensor
) -> Tensor:
    """The states ``(n, D)`` of the paths that end in the states `last` ``(n,)``; see `nearest_paths`.

    The costs of the states before a state are computed again: the choices of all states would take more time
    to find than those on the paths.
    """
    states = [last]
    everyone = torch.arange(len(last), device=last.device)
    for step in range(len(widths) - 2, -1, -1):
        before = torch.arange(0, _STATES, _STATES >> widths[step + 1], device=last.device).unsqueeze(1)
        candidates = before + (states[-1] >> widths[step + 1])
        squares, slopes = entries[candidates].unbind(-1)
        costs = (squares + slopes * columns[step]) * weights[step]
        if step == 0:
            costs = costs.masked_fill(candidates >= 1 << START_BITS, torch.inf)
        else:
            costs += lowest[step, candidates >> widths[step], everyone]
        states.append(candidates.gather(0, costs.argmin(dim=0, keepdim=True)).squeeze(0))
    return torch.stack(states[::-1], dim=1)


def packed_states(states: Tensor, widths: Sequence[int]) -> Tensor:
    """The stream of each row: the first state's low bits, then those of every other state."""
    bits, done = [bits_of(states[:, :1] & (1 << START_BITS) - 1, START_BITS)], 1
    for width, run in itertools.groupby(widths[1:]):
        count = len(list(run))
        bits.append(bits_of(states[:, done : done + count] & (1 << width) - 1, width))
        done += count
    return pack_bits(torch.cat(bits, dim=1), 1)


def read_states(codes: Tensor, widths: Sequence[int]) -> Tensor:
    """The entries ``(n, D)`` of the states that `packed_states` wrote."""
    book = codebook(codes.device)
    ends = torch.tensor([START_BITS, *widths[1:]], device=codes.device).cumsum(0)
    if kernels.usable(codes):
        return kernels.decode_fields(codes, ends, book)
    places = (ends - 1) // 8
    padded = F.pad(codes, (2, 0)).int()
    high, middle, low = (padded.index_select(1, places + number) for number in range(3))
    windows = (high << 16 | middle << 8 | low) >> (8 * (places + 1) - ends).int() & _STATES - 1
    return F.embedding(windows, book.unsqueeze(1)).squeeze(-1)
