"""Rotation, and the levels with the least squared error for normal numbers (Lloyd, 1982; Max, 1960).

Axes: ``n`` rows, ``D`` dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared_embeddings.quant import kernels
from shared_embeddings.quant.bits import byte_products, bytes_for, field_ends, pack_bits, read_entries
from shared_embeddings.quant.codec import Books, Codec, Encoded, fitted_scales, register, row_sizes
from shared_embeddings.quant.decoder import windows
from shared_embeddings.quant.metric import Metric
from shared_embeddings.utils.tracing import cache_tensor

_ITERATIONS = 3000


def decode_lloyd_max(codes: Any, rate: float, dim: int, parts: Mapping[str, Any]) -> Any:
    """Entries of the levels for this rate."""
    return parts[f"levels{int(rate)}"][windows(codes, int(rate) * np.arange(1, dim + 1), int(rate))]


@register("lloyd_max")
class LloydMaxCodec(Codec):
    """See the module. Codebooks: ``levels<rate>`` ``(2**rate,)``."""

    about = "the best levels for normal numbers"
    example_bits = 3.0
    standalone = (decode_lloyd_max,)

    def row_bytes(self, rate: float) -> int:
        return bytes_for(int(rate) * self.dim)

    def book_shapes(self, rates: Sequence[float]) -> dict[str, tuple[int, ...]]:
        return {f"levels{int(rate)}": (2 ** int(rate),) for rate in rates}

    def initial_books(self, rates: Sequence[float]) -> Books:
        return {f"levels{int(rate)}": normal_levels(int(rate)) for rate in rates}

    def encode(self, rows: Tensor, rate: float, books: Books, metric: Metric | None = None) -> Encoded:
        """The nearest levels at unit variance, then the best scale."""
        levels, targets = books[f"levels{int(rate)}"].float(), rows / row_sizes(rows)
        if metric is not None:
            ends = range(1, self.dim + 1)
            targets = metric.round(
                targets, ends, lambda left, _: levels[nearest_entries(left[:, :1], levels)]
            )
        codes = nearest_entries(targets, levels)
        return Encoded(pack_bits(codes, int(rate)), fitted_scales(rows, levels[codes], metric))

    def decode(self, codes: Tensor, scales: Tensor, rate: float, books: Books) -> Tensor:
        entries = read_entries(codes, self.dim, int(rate), books[f"levels{int(rate)}"])
        return entries.to(scales.dtype) * scales

    def direct_scores(
        self, hidden: Tensor, codes: Tensor, scales: Tensor, rate: float, books: Books
    ) -> Tensor | None:
        width, levels = int(rate), books[f"levels{int(rate)}"]
        tables = byte_products(hidden, width, levels)
        if tables is None:
            ends = field_ends(self.dim, width)
            return kernels.entry_scores(hidden, codes, scales, ends, levels.unsqueeze(0))
        return kernels.table_scores(codes, tables, scales)


@cache_tensor
def normal_levels(bits: int) -> Tensor:
    """The 2**bits ascending levels with the least squared error for normal numbers, by Lloyd's iteration."""
    count = 2**bits
    levels = torch.special.ndtri((torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) / count)
    for _ in range(_ITERATIONS):
        borders = _borders(levels)
        density = torch.exp(-borders.square() / 2) / math.sqrt(2 * math.pi)
        # The mean of a normal number between two borders.
        levels = -density.diff() / torch.special.ndtr(borders).diff()
    return levels.float()


def normal_error(bits: int) -> float:
    """The mean squared error of `normal_levels` for normal numbers with a variance of one."""
    levels = normal_levels(bits).double()
    # A level is the mean of the numbers that it represents.
    return 1.0 - float((torch.special.ndtr(_borders(levels)).diff() * levels.square()).sum())


def _borders(levels: Tensor) -> Tensor:
    """The borders of the intervals around ascending levels, with both infinities."""
    edge = torch.full((1,), torch.inf, dtype=levels.dtype, device=levels.device)
    return torch.cat([-edge, (levels[1:] + levels[:-1]) / 2, edge])


def nearest_entries(values: Tensor, levels: Tensor) -> Tensor:
    """The numbers of the nearest of ascending levels."""
    return torch.bucketize(values.contiguous(), (levels[1:] + levels[:-1]) / 2)
