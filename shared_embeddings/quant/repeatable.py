"""The evenly spaced levels of `uniform` with 16-bit scales, such that encoding decoded rows changes nothing.

Scales are bfloat16: their 8 bits of precision times a level are exact in float32. Numbers that some scale
reproduces exactly get the smallest such scale, so that decoded numbers have the same codes and scales again.

Axes: ``n`` rows, ``D`` dimensions, ``G`` numbers in a group, ``N`` groups of all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shared_embeddings.quant.bits import pack_bits
from shared_embeddings.quant.codec import Books, Encoded
from shared_embeddings.quant.codecs.uniform import UniformCodec, best_scales, nearest_levels

SCALE_TYPE = torch.bfloat16
_RANGE = torch.finfo(SCALE_TYPE)


class RepeatableCodec(UniformCodec):
    """See the module."""

    def encode(self, rows: Tensor, rate: float, books: Books) -> Encoded:
        """As in the base class, with scales in bfloat16; finite rows of any size in float32."""
        zero = 1 << (int(rate) - 1)
        groups = self.grouped(rows).flatten(0, 1).clone()
        scales, is_exact = _exact_scales(groups, zero)
        rest = ~is_exact
        groups[rest] = self._rounded(groups[rest], zero)
        scales[rest] = _exact_scales(groups[rest], zero)[0]
        codes = (nearest_levels(groups, scales, zero) + zero).to(torch.uint8).view(len(rows), -1)
        return Encoded(pack_bits(codes[:, : self.dim], int(rate)), scales.to(SCALE_TYPE).view(len(rows), -1))

    def _rounded(self, groups: Tensor, zero: int) -> Tensor:
        """The nearest numbers to groups ``(N, G)`` that are levels times scales in bfloat16."""
        # Squares of numbers in float32 do not overflow in float64.
        groups = groups.double()
        limit = _RANGE.max / zero
        scales = best_scales(groups, zero).clamp(-limit, limit)
        scales = scales.to(SCALE_TYPE).double()
        # Scales below the smallest normal number are not exact; such groups become zero.
        scales = scales.masked_fill(scales.abs() < _RANGE.tiny, 0.0)
        return (nearest_levels(groups, scales, zero) * scales.unsqueeze(-1)).float()


def _exact_scales(groups: Tensor, zero: int) -> tuple[Tensor, Tensor]:
    """The smallest scales ``(N,)`` that reproduce groups ``(N, G)`` exactly, and whether there is one.

    The largest number is one of few levels, which leaves few scales to try.
    """
    largest = groups.abs().amax(dim=-1)
    scales, is_exact = torch.zeros_like(largest), largest == 0
    for level in range(zero, 0, -1):
        for trial in (largest / level, largest / -level):
            is_scale = (trial.to(SCALE_TYPE).float() == trial) & (trial.abs() >= _RANGE.tiny)
            tried = (is_scale & ~is_exact).nonzero().squeeze(1)
            numbers, found = groups[tried], trial[tried]
            same = nearest_levels(numbers, found, zero) * found.unsqueeze(-1) == numbers
            chosen = tried[same.all(dim=-1)]
            scales[chosen], is_exact[chosen] = trial[chosen], True
    return scales, is_exact
