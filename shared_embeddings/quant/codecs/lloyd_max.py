"""Rotation, and the levels with the least squared error for normal numbers (Lloyd, 1982; Max, 1960).

Axes: ``n`` rows, ``D`` dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shared_embeddings.quant import kernels
from shared_embeddings.quant.bits import byte_products, bytes_for, pack_bits, read_entries
from shared_embeddings.quant.codec import Codebooks, Codec, Encoded, fitted_scales, row_sizes
from shared_embeddings.utils.tracing import cache_tensor

_ITERATIONS = 3000


class LloydMaxCodec(Codec):
    """See the module. Codebooks: ``levels<width>`` ``(2**width,)``."""

    name = "lloyd_max"

    def row_bytes(self, width: int) -> int:
        """As in the base class."""
        return bytes_for(width * self.dim)

    def codebook_shapes(self, widths: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """As in the base class."""
        return {f"levels{width}": (2**width,) for width in widths}

    def initial_codebooks(self, widths: Sequence[int]) -> Codebooks:
        """As in the base class."""
        return {f"levels{width}": normal_levels(width) for width in widths}

    def encode(self, rows: Tensor, width: int, codebooks: Codebooks) -> Encoded:
        """As in the base class: the nearest levels at unit variance, then the best scale."""
        levels = codebooks[f"levels{width}"].float()
        borders = (levels[1:] + levels[:-1]) / 2
        codes = torch.bucketize((rows / row_sizes(rows)).contiguous(), borders)
        return Encoded(pack_bits(codes, width), fitted_scales(rows, levels[codes]))

    def decode(self, codes: Tensor, width: int, codebooks: Codebooks) -> Tensor:
        """As in the base class."""
        return read_entries(codes, self.dim, width, codebooks[f"levels{width}"])

    def direct_scores(
        self, hidden: Tensor, codes: Tensor, width: int, codebooks: Codebooks, scales: Tensor
    ) -> Tensor | None:
        """As in the base class."""
        if 8 % width:
            return kernels.window_scores(hidden, codes, width, width, codebooks[f"levels{width}"], scales)
        return super().direct_scores(hidden, codes, width, codebooks, scales)

    def byte_tables(self, hidden: Tensor, width: int, codebooks: Codebooks) -> Tensor | None:
        """As in the base class."""
        return byte_products(hidden, width, codebooks[f"levels{width}"])


@cache_tensor
def normal_levels(width: int) -> Tensor:
    """The 2**width ascending levels with the least squared error for normal numbers, by Lloyd's iteration."""
    count = 2**width
    levels = torch.special.ndtri((torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) / count)
    edge = torch.full((1,), torch.inf, dtype=torch.float64, device="cpu")
    for _ in range(_ITERATIONS):
        borders = torch.cat([-edge, (levels[1:] + levels[:-1]) / 2, edge])
        density = torch.exp(-borders.square() / 2) / math.sqrt(2 * math.pi)
        # The mean of a normal number between two borders.
        levels = -density.diff() / torch.special.ndtr(borders).diff()
    return levels.float()


def normal_error(width: int) -> float:
    """The mean squared error of `normal_levels` for normal numbers with a variance of one."""
    levels = normal_levels(width).double()
    edge = torch.full((1,), torch.inf, dtype=torch.float64, device="cpu")
    borders = torch.cat([-edge, (levels[1:] + levels[:-1]) / 2, edge])
    # A level is the mean of the numbers that it represents.
    return 1.0 - float((torch.special.ndtr(borders).diff() * levels.square()).sum())
