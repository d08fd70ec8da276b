"""Codecs whose rows are levels times a scale for each group of numbers, maybe plus an offset.

What other runtimes read are such grids. All are rounded in the same way: the scale of a group is the best one
for its numbers, corrected for the errors of the groups before, where the error of a number counts by what
later numbers cannot make up for. Scales and offsets are rounded to bfloat16 before codes are chosen, so that
float32, float16 and bfloat16 hold them exactly.

Axes: ``n`` rows, ``D`` dimensions, ``S`` groups of a row, ``G`` numbers in a group, ``K`` levels.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shared_embeddings.quant import kernels
from shared_embeddings.quant.bits import pack_bits, read_entries
from shared_embeddings.quant.codec import BLOCK, Books, Codec, Encoded
from shared_embeddings.quant.metric import Metric

# First scales that are tried, relative to one whose last level is the largest number, and the least-squares
# steps after each.
_TRIALS, _REFINEMENTS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0), 2


class Levels(NamedTuple):
    """The levels of codes 0, 1, ..."""

    values: Tensor  # ``(K,)`` ascending
    middles: Tensor | None  # between neighbors ``(K - 1,)``; None if all are 1 apart

    @classmethod
    def of(cls, values: np.ndarray, device: torch.device) -> Levels:
        """Levels on a device."""
        tensor = torch.from_numpy(values).to(device)
        is_even = bool((np.diff(values) == 1).all())
        return cls(tensor, None if is_even else (tensor[1:] + tensor[:-1]) / 2)


class GridCodec(Codec):
    """See the module. Scales are ``(n, S)``, and followed by offsets ``(n, S)`` if there are any.

    Attributes:
        has_offsets: whether groups have an offset.
        num_groups: S. The last group of a row may be smaller.
    """

    rotates = False
    has_groups = True
    rows_at_once = 2 * BLOCK
    has_offsets: ClassVar[bool] = False

    def __init__(self, dim: int, group_size: int = 32, layout: tuple[int, ...] = ()) -> None:
        super().__init__(dim, group_size, layout)
        self.num_groups = self.num_scales
        self.num_scales *= 1 + self.has_offsets

    @staticmethod
    @abstractmethod
    def levels(rate: float) -> np.ndarray:
        """The levels ``(K,)`` of codes 0, 1, ..., ascending, in float32."""

    def encode(self, rows: Tensor, rate: float, books: Books, metric: Metric | None = None) -> Encoded:
        levels = Levels.of(self.levels(rate), rows.device)
        rows = rows.t().contiguous().t()  # columns are read one after another
        scales = rows.new_empty(len(rows), self.num_scales)
        codes = torch.empty_like(rows, dtype=torch.uint8)
        if metric is None:
            weights = rows.new_ones(self.dim)
            for group in range(self.num_groups):
                of_group = slice(group * self.group_size, (group + 1) * self.group_size)
                best = best_scales(rows[:, of_group], weights[of_group], levels, self.has_offsets)
                scales[:, group :: self.num_groups] = best
                codes[:, of_group] = nearest_codes(rows[:, of_group], best, levels)
            return Encoded(pack_bits(codes, int(rate)), scales)
        weights = metric.upper.diagonal() ** -2

        def quantize(left: Tensor, column: int) -> Tensor:
            group, place = divmod(column, self.group_size)
            if place == 0:
                of_group = weights[column : column + self.group_size]
                best = best_scales(left[:, : len(of_group)], of_group, levels, self.has_offsets)
                scales[:, group :: self.num_groups] = best
            of_rows = scales[:, group :: self.num_groups]
            codes[:, column] = nearest_codes(left[:, :1], of_rows, levels).squeeze(1)
            return apply_scales(levels.values[codes[:, column].long()].unsqueeze(1), of_rows)

        metric.round(rows, range(1, self.dim + 1), quantize)
        return Encoded(pack_bits(codes, int(rate)), scales)

    def decode(self, codes: Tensor, scales: Tensor, rate: float, books: Books) -> Tensor:
        if kernels.usable(codes):
            plan, ones = _plan(type(self), self.dim, int(rate)), scales.new_ones(len(codes), 1)
            values = kernels.decode_rows(codes, ones, plan, *kernels.plain(self.dim))
        else:
            levels = torch.from_numpy(self.levels(rate)).to(codes.device)
            values = read_entries(codes, self.dim, int(rate), levels).to(scales.dtype)
        parts = scales.split(self.num_groups, dim=1)
        if self.dim % self.group_size == 0:
            values = values.unflatten(1, (-1, self.group_size))
            factors, *offsets = (part.unsqueeze(-1) for part in parts)
        else:
            factors, *offsets = (
                part.repeat_interleave(self.group_size, dim=1)[:, : self.dim] for part in parts
            )
        values = torch.addcmul(offsets[0], values, factors) if offsets else values * factors
        return values.flatten(1)


@functools.cache
def _plan(codec: type[GridCodec], dim: int, width: int) -> kernels.EntryPlan:
    """How `kernels.decode_rows` reads rows of D numbers."""
    return kernels.EntryPlan.of([(0, 1, dim, width, width, 0)], width, codec.levels(width))


def best_scales(numbers: Tensor, weights: Tensor, levels: Levels, has_offset: bool) -> Tensor:
    """The scales ``(n, 1)``, or scales and offsets ``(n, 2)``, that leave the least squared error of a group.

    Args:
        numbers: ``(n, G)``.
        weights: of their squared errors ``(G,)``.
    """
    weights = weights / weights.sum()
    if has_offset:
        low, high = numbers.aminmax(dim=1, keepdim=True)
        first, last = levels.values[0], levels.values[-1]
        span, middle, center = (high - low) / (last - first), (high + low) / 2, (last + first) / 2
        starts = [torch.cat([span * trial, middle - span * trial * center], dim=1) for trial in _TRIALS]
    else:
        # One side may have more levels: it is that of the largest number.
        largest = numbers.gather(1, numbers.abs().argmax(dim=1, keepdim=True))
        last = levels.values[levels.values.abs().argmax()]
        starts = [largest * (trial / last) for trial in _TRIALS]
    best, least = torch.zeros_like(starts[0]), numbers.new_full((len(numbers), 1), torch.inf)
    for scales in starts:
        for step in range(_REFINEMENTS + 1):
            scales = scales.bfloat16().float()
            chosen = levels.values[nearest_codes(numbers, scales, levels).long()]
            errors = (numbers - apply_scales(chosen, scales)).square() @ weights.unsqueeze(1)
            best, least = torch.where(errors < least, scales, best), torch.minimum(errors, least)
            if step == _REFINEMENTS:
                break
            mean = numbers.new_zeros(len(numbers), 1)
            if has_offset:
                mean = chosen @ weights.unsqueeze(1)
            spread = (chosen - mean) * weights
            norms = (spread * chosen).sum(dim=1, keepdim=True).clamp(min=1e-30)
            scales = (spread * numbers).sum(dim=1, keepdim=True) / norms
            if has_offset:
                scales = torch.cat([scales, numbers @ weights.unsqueeze(1) - scales * mean], dim=1)
    return best


def nearest_codes(numbers: Tensor, scales: Tensor, levels: Levels) -> Tensor:
    """The codes ``(n, G)`` uint8 of the nearest levels to numbers ``(n, G)`` of a group."""
    factors, *offsets = scales.split(1, dim=1)
    parts = (numbers - offsets[0] if offsets else numbers) / factors.masked_fill(factors == 0, 1.0)
    if levels.middles is None:
        return parts.sub_(levels.values[0]).round_().clamp_(0, len(levels.values) - 1).to(torch.uint8)
    return torch.bucketize(parts.contiguous(), levels.middles, out_int32=True).to(torch.uint8)


def apply_scales(levels: Tensor, scales: Tensor) -> Tensor:
    """The numbers ``(n, G)`` of a group with these levels ``(n, G)``."""
    factors, *offsets = scales.split(1, dim=1)
    return torch.addcmul(offsets[0], levels, factors) if offsets else levels * factors
