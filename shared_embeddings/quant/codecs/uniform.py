"""Evenly spaced levels with a scale for each group of numbers, without a rotation.

As in ONNX Runtime's GatherBlockQuantized and MatMulNBits, a number is ``(code - zero) * scale`` with the zero
point 2**(width - 1). One bit is -1/2 or 1/2.

Axes: ``n`` rows, ``D`` dimensions, ``S`` groups of a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.quant import kernels
from shared_embeddings.quant.bits import byte_products, bytes_for, pack_bits, read_entries
from shared_embeddings.quant.codec import Codebooks, Codec, Encoded

# Scales that are tried, relative to that of the largest number, and the least-squares steps after them.
_TRIALS = torch.linspace(0.5, 1.0, 11).tolist()
_REFINEMENTS = 3


class UniformCodec(Codec):
    """See the module.

    Args:
        group_size: numbers that share a scale; the last group of a row may be smaller.
    """

    name = "uniform"
    rotates = False
    row_scales = False

    def __init__(self, dim: int, group_size: int) -> None:
        super().__init__(dim)
        self.group_size = min(group_size, dim)

    @property
    def num_scales(self) -> int:
        """As in the base class."""
        return -(-self.dim // self.group_size)

    def row_bytes(self, width: int) -> int:
        """As in the base class."""
        return bytes_for(width * self.dim)

    def encode(self, rows: Tensor, width: int, codebooks: Codebooks) -> Encoded:
        """As in the base class: for each group the scale with the least squared error."""
        groups = self.grouped(rows)
        zero = _zero_point(width)
        scales = self.best_scales(groups, zero)
        codes = (nearest_levels(groups, scales, zero) + zero).to(torch.uint8).flatten(1)[:, : self.dim]
        return Encoded(pack_bits(codes, width), scales)

    def best_scales(self, groups: Tensor, zero: float) -> Tensor:
        """The scales ``(n, S)`` of groups ``(n, S, G)`` with levels from -zero to zero - 1."""
        best, best_error = groups.new_zeros(groups.shape[:2]), groups.square().sum(dim=-1)
        # Negative numbers have one level more; the largest number is there, so its sign is the scale's.
        largest = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True)).squeeze(-1)
        for trial in _TRIALS:
            scales = largest * (-trial / zero)
            for _ in range(_REFINEMENTS):
                levels = nearest_levels(groups, scales, zero)
                norm = levels.square().sum(dim=-1).clamp(min=1e-30)
                scales = (groups * levels).sum(dim=-1) / norm
            error = (
                (groups - nearest_levels(groups, scales, zero) * scales.unsqueeze(-1)).square().sum(dim=-1)
            )
            is_better = error < best_error
            best, best_error = torch.where(is_better, scales, best), torch.where(is_better, error, best_error)
        return best

    def decode(self, codes: Tensor, width: int, codebooks: Codebooks) -> Tensor:
        """As in the base class."""
        return read_entries(codes, self.dim, width, _levels(width, codes))

    def scaled(self, values: Tensor, scales: Tensor) -> Tensor:
        """As in the base class, with the scale of each group."""
        values = values.to(scales.dtype)
        if self.dim % self.group_size == 0:
            return (values.unflatten(1, (-1, self.group_size)) * scales.unsqueeze(-1)).flatten(1)
        return values * scales.repeat_interleave(self.group_size, dim=1)[:, : self.dim]

    def direct_scores(
        self, hidden: Tensor, codes: Tensor, width: int, codebooks: Codebooks, scales: Tensor
    ) -> Tensor | None:
        """As in the base class, if groups are whole bytes."""
        if self.dim % self.group_size or width * self.group_size % 8:
            return None
        if width in (4, 8):
            return kernels.uniform_scores(hidden, codes, width, scales)
        return super().direct_scores(hidden, codes, width, codebooks, scales)

    def byte_tables(self, hidden: Tensor, width: int, codebooks: Codebooks) -> Tensor | None:
        """As in the base class."""
        return byte_products(hidden, width, _levels(width, hidden))

    def products(self, hidden: Tensor, values: Tensor, scales: Tensor) -> Tensor:
        """As in the base class."""
        return F.linear(hidden, self.scaled(values, scales))

    def grouped(self, rows: Tensor) -> Tensor:
        """Rows ``(n, D)`` as groups ``(n, S, group_size)``, padded with zeros."""
        missing = self.num_scales * self.group_size - self.dim
        return F.pad(rows, (0, missing)).unflatten(1, (self.num_scales, self.group_size))


def _zero_point(width: int) -> float:
    """The code of the number 0; with one bit, 0 is between both codes."""
    return 0.5 if width == 1 else 2 ** (width - 1)


def _levels(width: int, like: Tensor) -> Tensor:
    """The levels ``(2**width,)`` of all codes, on the device of a tensor."""
    return (torch.arange(2**width, device=like.device) - _zero_point(width)).float()


def nearest_levels(groups: Tensor, scales: Tensor, zero: float) -> Tensor:
    """The nearest levels, from -zero to zero - 1, of groups ``(..., G)`` for scales ``(...)``."""
    safe = scales.masked_fill(scales == 0, 1.0).unsqueeze(-1)
    if zero < 1:
        return torch.where(groups / safe < 0, -zero, zero)
    return (groups / safe).round_().clamp_(-zero, zero - 1)
