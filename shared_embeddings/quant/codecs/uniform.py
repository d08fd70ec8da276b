"""Evenly spaced levels with a scale for each group of numbers, without a rotation.

As in ONNX Runtime's GatherBlockQuantized and MatMulNBits, a number is ``(code - zero) * scale`` with the zero
point 2**(rate - 1). One bit is -1/2 or 1/2.

Axes: ``n`` rows, ``D`` dimensions, ``S`` groups of a row, ``G`` numbers in a group.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.quant import kernels
from shared_embeddings.quant.bits import pack_bits, read_entries
from shared_embeddings.quant.codec import Books, Codec, Encoded, register
from shared_embeddings.quant.decoder import windows
from shared_embeddings.quant.metric import Metric

# Scales that are tried, relative to that of the largest number, and the least-squares steps after them.
_TRIALS = torch.linspace(0.5, 1.0, 11, device="cpu").tolist()
_REFINEMENTS = 3


def decode_uniform(codes: Any, rate: float, dim: int, parts: Mapping[str, Any]) -> Any:
    """Evenly spaced levels around zero."""
    numbers = windows(codes, int(rate) * np.arange(1, dim + 1), int(rate)).astype(np.float32)
    return numbers - (0.5 if rate == 1 else 2 ** (rate - 1))


@register("uniform")
class UniformCodec(Codec):
    """See the module. The last group of a row may be smaller."""

    about = "evenly spaced levels, a scale for each group, no rotation, as in ONNX Runtime"
    rotates = False
    has_groups = True
    onnx_rates = (4, 8)
    few_states = 16
    standalone = (decode_uniform,)

    def encode(self, rows: Tensor, rate: float, books: Books, metric: Metric | None = None) -> Encoded:
        zero, shape = zero_point(rate), (self.num_scales, self.group_size)
        missing = self.num_scales * self.group_size - self.dim  # filled up with zeros
        scales = best_scales(F.pad(rows, (0, missing)).unflatten(1, shape), zero)
        if metric is not None:

            def quantize(left: Tensor, column: int) -> Tensor:
                group, offset = divmod(column, self.group_size)
                if offset == 0:  # the numbers of the group have been corrected since
                    scales[:, group] = best_scales(left[:, : self.group_size], zero)
                of_group = scales[:, group]
                return nearest_levels(left[:, :1], of_group, zero) * of_group.unsqueeze(1)

            rows = metric.round(rows, range(1, self.dim + 1), quantize)
        levels = nearest_levels(F.pad(rows, (0, missing)).unflatten(1, shape), scales, zero)
        codes = (levels + zero).to(torch.uint8).flatten(1)[:, : self.dim]
        return Encoded(pack_bits(codes, int(rate)), scales)

    def decode(self, codes: Tensor, scales: Tensor, rate: float, books: Books) -> Tensor:
        if kernels.usable(codes):
            sizes, plan = torch.ones(self.dim), _plan(self.dim, int(rate))
            values = kernels.decode_rows(
                codes, scales.new_ones(len(codes), 1), plan, sizes, torch.zeros(self.dim)
            )
        else:
            levels = (torch.arange(2 ** int(rate), device=codes.device) - zero_point(rate)).float()
            values = read_entries(codes, self.dim, int(rate), levels).to(scales.dtype)
        if self.dim % self.group_size == 0:
            return (values.unflatten(1, (-1, self.group_size)) * scales.unsqueeze(-1)).flatten(1)
        return values * scales.repeat_interleave(self.group_size, dim=1)[:, : self.dim]

    def direct_scores(
        self, hidden: Tensor, codes: Tensor, scales: Tensor, rate: float, books: Books
    ) -> Tensor | None:
        if self.group_size % 8 and self.group_size < self.dim:
            return None
        size = -(-self.group_size // 8) * 8
        return kernels.uniform_scores(hidden, codes, int(rate), zero_point(rate), scales, size)


def zero_point(rate: float) -> float:
    """The code of the number 0; with one bit, 0 is between both codes."""
    return 0.5 if rate == 1 else 2 ** (rate - 1)


@functools.cache
def _plan(dim: int, width: int) -> kernels.EntryPlan:
    """How `kernels.decode_rows` reads rows of D numbers."""
    levels = np.arange(2**width, dtype=np.float32) - np.float32(zero_point(width))
    ends = width * np.arange(1, dim + 1)
    return kernels.EntryPlan.of(ends, np.zeros_like(ends), width, levels)


def best_scales(groups: Tensor, zero: float) -> Tensor:
    """The scales ``(...)`` of groups ``(..., G)`` with the least error for levels -zero to zero - 1."""
    best, least = groups.new_zeros(groups.shape[:-1]), groups.square().sum(dim=-1)
    # Negative numbers have one level more; the largest number is there, so its sign is the scale's.
    largest = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True)).squeeze(-1)
    for trial in _TRIALS:
        scales = largest * (-trial / zero)
        for _ in range(_REFINEMENTS):
            levels = nearest_levels(groups, scales, zero)
            scales = (groups * levels).sum(dim=-1) / levels.square().sum(dim=-1).clamp(min=1e-30)
        levels = nearest_levels(groups, scales, zero)
        error = (groups - levels * scales.unsqueeze(-1)).square().sum(dim=-1)
        is_better = error < least
        best, least = torch.where(is_better, scales, best), torch.where(is_better, error, least)
    return best


def nearest_levels(groups: Tensor, scales: Tensor, zero: float) -> Tensor:
    """The nearest levels, from -zero to zero - 1, of groups ``(..., G)`` for scales ``(...)``."""
    safe = scales.masked_fill(scales == 0, 1.0).unsqueeze(-1)
    if zero < 1:
        return torch.where(groups / safe < 0, -zero, zero)
    return (groups / safe).round_().clamp_(-zero, zero - 1)
