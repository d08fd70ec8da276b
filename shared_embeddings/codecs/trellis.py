"""Trellis-coded quantization with a computed codebook (after QTIP, Tseng et al., 2024).

A row is a stream of bits, `width` for each number. A number is the codebook's entry for a state: the last 12
bits of the stream up to its own. Neighboring numbers share most bits of their states, so a stream is a path
through a trellis, and the Viterbi algorithm finds the nearest one.

Axes: ``n`` rows, ``D`` dimensions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.codecs import kernels
from shared_embeddings.codecs.bit_packing import bits_of, bytes_for, pack_bits, read_windows
from shared_embeddings.codecs.codec import Codebooks, Codec, Encoded, fitted_scales, rms
from shared_embeddings.layers.caching import cache_tensor

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
        states = _nearest_states(rows / rms(rows), width, book)
        codes = _packed(states, width)
        return Encoded(codes, fitted_scales(rows, book[states]))

    def decode(self, codes: Tensor, width: int, codebooks: Codebooks) -> Tensor:
        """As in the base class."""
        if kernels.usable(codes):
            return kernels.decode_windows(codes, self.dim, width, _START_BITS, codebook(codes.device))
        if torch.compiler.is_compiling():  # a graph would build a larger table in every call
            entries = codebook(codes.device).unsqueeze(1)
        else:
            entries = successive_entries(width, codes.device)
        bits, each = entries.size(0).bit_length() - 1, entries.size(1)
        start = _START_BITS - STATE_BITS
        windows = read_windows(codes, -(-self.dim // each), bits, width * each, start)
        return F.embedding(windows, entries).flatten(1)[:, : self.dim]

    def direct_scores(
        self, hidden: Tensor, codes: Tensor, width: int, codebooks: Codebooks, scales: Tensor
    ) -> Tensor | None:
        """As in the base class."""
        return kernels.window_scores(hidden, codes, width, _START_BITS, codebook(codes.device), scales)


def _nearest_states(rows: Tensor, width: int, book: Tensor) -> Tensor:
    """The states ``(n, D)`` of the path that is nearest to each row ``(n, D)``."""
    if kernels.usable(rows):
        return kernels.nearest_paths(rows, width, 1 << _START_BITS, book)
    # All blocks use the same memory: page faults would take longer than the search.
    count = min(_ROWS, len(rows))
    lowest = rows.new_empty((rows.size(1), _STATES >> width, count))
    blocks = F.pad(rows, (0, 0, 0, -len(rows) % count)).split(count)
    return torch.cat([nearest_paths(block, width, book, lowest) for block in blocks])[: len(rows)]


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
    return _CODEBOOK.to(device)


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
def nearest_paths(rows: Tensor, width: int, book: Tensor, lowest: Tensor) -> Tensor:
    """The states ``(n, D)`` of the path that is nearest to each row ``(n, D)`` in squared error.

    Args:
        rows: rows with a variance of one.
        width: bits of a number.
        book: the entry of every state.
        lowest: ``(D, 4096 / 2**width, n)``, overwritten with the lowest cost of a path to a state that the
            states with the same leading bits can follow.
    """
    count, dim = rows.shape
    # The rows are the last axis, which makes all operations long loops over contiguous memory.
    columns = rows.t().contiguous()
    heads = _STATES >> width  # the states without their last `width` bits
    # (x - c)^2 - x^2 = (c^2, -2 c) (1, x), which is enough for finding the smallest.
    entries = torch.stack([book.square(), -2 * book], dim=1)
    numbers = rows.new_ones((2, count))
    costs, errors = (rows.new_empty((_STATES, count)) for _ in range(2))
    for step in range(dim):
        numbers[1] = columns[step]
        torch.mm(entries, numbers, out=costs if step == 0 else errors)
        if step == 0:
            costs[1 << _START_BITS :] = torch.inf
        else:
            _minimum(costs.view(-1, heads, count), lowest[step])
            by_head = costs.view(heads, -1, count)
            torch.add(errors.view(heads, -1, count), lowest[step].unsqueeze(1), out=by_head)
    return _traced(costs.argmin(dim=0), lowest, entries, columns, width)


def _minimum(costs: Tensor, out: Tensor) -> None:
    """The minimum over the first axis, whose length is a power of two."""
    while (half := costs.size(0) // 2) > 1:
        costs = torch.minimum(costs[:half], costs[half:])
    torch.minimum(costs[0], costs[1], out=out)


def _traced(last: Tensor, lowest: Tensor, entries: Tensor, columns: Tensor, width: int) -> Tensor:
    """The states ``(n, D)`` of the paths that end in the states `last` ``(n,)``; see `nearest_paths`.

    The costs of the states before a state are computed again: the choices of all states would take more time
    to find than those on the paths.
    """
    dim, heads, count = lowest.shape
    before = torch.arange(0, _STATES, heads, device=last.device).unsqueeze(1)
    states = [last]
    everyone = torch.arange(count, device=last.device)
    for step in range(dim - 2, -1, -1):
        candidates = before + (states[-1] >> width)
        squares, slopes = entries[candidates].unbind(-1)
        costs = squares + slopes * columns[step]
        if step == 0:
            costs = costs.masked_fill(candidates >= 1 << _START_BITS, torch.inf)
        else:
            costs += lowest[step, candidates >> width, everyone]
        states.append(candidates.gather(0, costs.argmin(dim=0, keepdim=True)).squeeze(0))
    return torch.stack(states[::-1], dim=1)


def _packed(states: Tensor, width: int) -> Tensor:
    """The stream of each row: the first state's low bits, then `width` bits of every other state."""
    first = states[:, :1] & (1 << _START_BITS) - 1
    rest = states[:, 1:] & (1 << width) - 1
    bits = torch.cat([bits_of(first, _START_BITS), bits_of(rest, width)], dim=1)
    return pack_bits(bits, 1)
