"""Bits for each principal direction of the table (reverse water-filling), and a mean.

A row is the mean plus a sum of principal directions. A factor of a row is one of the levels of its direction:
the directions with the largest variance have the most bits, those with the smallest none. Words of each rate
have their own bits and spreads; the directions and the levels are shared. There are no scales.

Axes: ``n`` rows, ``D`` dimensions, ``R`` directions with bits.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.quant import kernels
from shared_embeddings.quant.allocation import direction_bits
from shared_embeddings.quant.bits import bits_of, bytes_for, pack_bits, read_windows
from shared_embeddings.quant.codec import Books, Codec, Encoded, Fitted, register, squared_norms
from shared_embeddings.quant.decoder import windows
from shared_embeddings.quant.metric import Metric
from shared_embeddings.utils.tracing import cache_tensor

_MOST_BITS = 8
# The bits of a number of the basis as stored.
_BASIS_BITS = 16
_BLOCK = 4096
# Numbers that levels and spreads are learned from, and the steps of this.
_SAMPLE = 2**23
_STEPS = 8
# Bins of the distribution of factors.
_BINS = 4096
# Iterations of `normal_levels`.
_ITERATIONS = 3000


def decode_principal(codes: Any, rate: float, dim: int, parts: Mapping[str, Any]) -> Any:
    """The mean plus a sum of directions; each factor is one of the levels for its bits."""
    basis, width = parts["basis"], int(rate)
    if not width:
        return np.broadcast_to(basis[0], (len(codes), dim))
    counts = parts["directions"][9 * (width - 1) : 9 * width] or [dim * (bits == width) for bits in range(9)]
    bits = np.array([one for one in range(8, 0, -1) for _ in range(counts[one])], np.int64)
    numbers = windows(codes, bits.cumsum(), bits).astype(np.int64) + 2**bits - 2
    factors = parts["levels"][numbers] * parts["spread"][width - 1, : len(bits)]
    return basis[0] + factors @ basis[1 : 1 + len(bits)]


class _Field(NamedTuple):
    """Directions with the same number of `bits`, one after another, and the first bit of their codes."""

    bits: int
    columns: slice
    start: int

    @property
    def size(self) -> int:
        """The number of directions."""
        return self.columns.stop - self.columns.start

    @property
    def entries(self) -> slice:
        """Where the levels of these bits are."""
        return _entries(self.bits)


@register("principal")
class PrincipalCodec(Codec):
    """See the module.

    Codebooks: ``basis`` ``(1 + R, D)``, the mean and the directions; ``spread`` ``(highest rate, R)``;
    ``levels``, those of 1 bit, of 2 bits and so on. A decoded row ``(1 + R,)`` is a 1 and the factors.

    The layout is for each rate from 1 to 8 the number of directions with 0, 1, ... 8 bits; by default all
    directions have as many bits as the rate.
    """

    about = "more bits for principal directions with more variance, no scales or rotation, for word vectors"
    about_layout = "for words of 1, 2, ... 8 bits, the number of directions with 0, 1, ... 8 bits"
    rotates = False
    example_bits = 3.0
    few_states = 32
    standalone = (decode_principal,)

    def __init__(self, dim: int, group_size: int = 32, layout: Sequence[int] = ()) -> None:
        super().__init__(dim, group_size, layout)
        counts = layout or [dim * (bits == rate) for rate in self.rates[1:] for bits in range(_MOST_BITS + 1)]
        parts = [counts[start : start + 9] for start in range(0, len(counts), 9)]
        self.rank = max(dim - part[0] for part in parts)
        self._most = max(bits for part in parts for bits, count in enumerate(part) if count)
        self._fields = {float(rate): list(_fields(part)) for rate, part in enumerate(parts, 1)}

    @property
    def num_scales(self) -> int:
        return 0

    def row_bytes(self, rate: float) -> int:
        return bytes_for(int(rate) * self.dim)

    def book_shapes(self, rates: Sequence[float]) -> dict[str, tuple[int, ...]]:
        return {
            "basis": (1 + self.rank, self.dim),
            "spread": (int(max(rates, default=0)), self.rank),
            "levels": (2 ** (self._most + 1) - 2,),
        }

    def initial_books(self, rates: Sequence[float]) -> Books:
        """Random directions, levels for normal numbers, spreads for random codes.

        The entries of rows have a std near D**-0.5.
        """
        shapes = self.book_shapes(rates)
        basis = torch.randn(shapes["basis"], device="cpu") * max(self.rank * self.dim, 1) ** -0.5
        basis[0] = 0.0
        levels, spread = self._normal_levels(), torch.ones(shapes["spread"])
        for rate, row in enumerate(spread, 1):
            for field in self._fields[rate]:
                row[field.columns] /= levels[field.entries].square().mean().sqrt()
        return {"basis": basis, "spread": spread, "levels": levels}

    def _normal_levels(self) -> Tensor:
        """Levels for normal numbers."""
        return torch.cat([torch.empty(0, device="cpu"), *map(normal_levels, range(1, self._most + 1))])

    # Fitting.

    def fit(
        self,
        table: Tensor,
        bits: float,
        importance: Tensor | None,
        is_small: Callable[[Codec, Mapping[float, int]], bool],
    ) -> Fitted:
        """The principal directions that are worth their bytes, their bits for the words of each rate, and the
        levels and spreads for them.
        """
        draft = copy.copy(self)
        # The squared errors of normal numbers with 0, 1, ... bits.
        errors = torch.tensor([1.0, *map(normal_error, range(1, _MOST_BITS + 1))], dtype=torch.float64)
        mean = table.new_zeros(self.dim, dtype=torch.float64)
        for part in table.split(_BLOCK):
            mean += part.sum(dim=0, dtype=torch.float64) / len(table)
        mean = mean.cpu()
        variances, directions = principal_directions(table, mean)
        gains = variances.unsqueeze(1) * errors.diff().neg()
        least = gains.flatten().sort(descending=True).values[max(round(bits * self.dim), 1) - 1]
        # The net gain of a direction, against the same bits for others.
        net = ((gains - least).clamp(min=0).sum(dim=1) * len(table) - _BASIS_BITS * self.dim * least) > 0
        draft.rank = rank = max(int(net.sum()), 1)
        basis = torch.cat([mean.unsqueeze(0), directions[:rank]]).to(table)
        kept, left = variances[:rank], float(variances[rank:].sum())
        shares = [
            float((kept * errors[direction_bits(kept, range(9), errors, rate * self.dim)]).sum()) + left
            for rate in self.rates
        ]
        missed = torch.tensor(shares, dtype=torch.float64) / variances.sum().clamp(min=1e-30)
        rates = draft.allocate(squared_norms(table, basis[0]), importance, is_small, missed)

        # The bits of directions for the words of each rate.
        sample, layout = {}, []
        spread = torch.ones(int(rates.max()), rank)
        every = -(-int((rates > 0).sum()) * rank // _SAMPLE)
        for rate in self.rates[1:]:
            words = (rates == rate).nonzero().flatten().to(table.device)
            chosen = torch.zeros(rank, dtype=torch.long)
            if len(words):
                sample[rate] = ((table[words[::every]] - basis[0]) @ basis[1:].t()).cpu()
                variances = torch.zeros(rank, dtype=torch.float64)
                for ids in words.split(_BLOCK):
                    part = (table[ids] - basis[0]) @ basis[1:].t()
                    variances += part.double().square().sum(dim=0).cpu() / len(words)
                chosen = direction_bits(variances, range(9), errors, rate * self.dim)
                chosen = chosen.sort(descending=True).values
                spread[int(rate) - 1] = variances.sqrt().clamp(min=1e-30).float()
            counts = torch.bincount(chosen, minlength=_MOST_BITS + 1)
            counts[0] += self.dim - rank
            layout += counts.tolist()
        codec = PrincipalCodec(self.dim, layout=layout)
        levels, spread = codec._normal_levels(), spread[:, : codec.rank]
        codec._train(sample, levels, spread)
        books = {"basis": basis[: 1 + codec.rank].cpu(), "spread": spread, "levels": levels}
        return Fitted(codec, rates, books)

    def _train(self, sample: Mapping[float, Tensor], levels: Tensor, spread: Tensor) -> None:
        """Alternate between levels and spreads with the least squared error for the factors by rate."""
        fields = [(rate, field) for rate in sample for field in self._fields[rate]]
        for bits in range(1, self._most + 1):
            pooled = [
                (sample[rate][:, field.columns] / spread[int(rate) - 1, field.columns]).flatten()
                for rate, field in fields
                if field.bits == bits
            ]
            if pooled:
                levels[_entries(bits)] = _companded(torch.cat(pooled), bits)
        for _ in range(_STEPS):
            sums, norms = torch.zeros_like(levels), torch.zeros_like(levels)
            for rate, field in fields:
                scales, entries = spread[int(rate) - 1, field.columns], field.entries
                wanted = sample[rate][:, field.columns]
                codes = nearest_entries(wanted / scales, levels[entries])
                sums[entries].index_add_(0, codes.flatten(), (wanted * scales).flatten())
                norms[entries].index_add_(0, codes.flatten(), scales.square().expand_as(wanted).flatten())
                coded = levels[entries][codes]
                best = (wanted * coded).sum(dim=0) / coded.square().sum(dim=0).clamp(min=1e-30)
                spread[int(rate) - 1, field.columns] = torch.where(best > 0, best, scales)
            levels.copy_(torch.where(norms > 0, sums / norms.clamp(min=1e-30), levels))
            for bits in range(1, self._most + 1):
                levels[_entries(bits)] = levels[_entries(bits)].sort().values

    # Coding.

    def encode(self, rows: Tensor, rate: float, books: Books, metric: Metric | None = None) -> Encoded:
        """The nearest levels; the metric is not used, for word vectors have none."""
        basis, levels = books["basis"], books["levels"]
        factors = (rows - basis[0]) @ basis[1:].t() / books["spread"][int(rate) - 1]
        bits = [
            bits_of(nearest_entries(factors[:, field.columns], levels[field.entries]), field.bits)
            for field in self._fields[rate]
        ]
        missing = int(rate) * self.dim - sum(part.size(1) for part in bits)
        packed = pack_bits(F.pad(torch.cat(bits, dim=1), (0, missing)), 1)
        return Encoded(packed, rows.new_empty(len(rows), 0))

    def decode(self, codes: Tensor, scales: Tensor, rate: float, books: Books) -> Tensor:
        levels = books["levels"]
        if kernels.usable(codes, levels):
            factors = kernels.decode_entries(codes, self._entry_plan(rate, levels))
        else:
            parts = [levels.new_empty(codes.size(0), 0)]
            for field in self._fields[rate]:
                numbers = read_windows(codes, field.size, field.bits, field.bits, field.start)
                parts.append(F.embedding(numbers, levels[field.entries].unsqueeze(1)).squeeze(-1))
            factors = torch.cat(parts, dim=1)
        rows = F.pad(factors * books["spread"][int(rate) - 1, : factors.size(1)], (1, 0), value=1.0)
        return F.pad(rows.to(scales.dtype), (0, 1 + self.rank - rows.size(1)))

    def direct_scores(
        self, hidden: Tensor, codes: Tensor, scales: Tensor, rate: float, books: Books
    ) -> Tensor:
        plan, ones = self._entry_plan(rate, books["levels"]), scales.new_ones(len(codes), 1)
        spread = books["spread"][int(rate) - 1, : len(plan.ends)]
        scaled = hidden[:, 1 : 1 + len(plan.ends)] * spread
        return hidden[:, :1] + kernels.entry_scores(scaled, codes, ones, plan)

    def _entry_plan(self, rate: float, levels: Tensor) -> kernels.EntryPlan:
        """How loops read the codes of directions."""
        widths = [field.bits for field in self._fields[rate] for _ in range(field.size)]
        bits = torch.tensor(widths, dtype=torch.long, device="cpu")
        return kernels.EntryPlan(bits.cumsum(0), 2**bits - 2, 2**bits - 1, levels)

    def uncoded(self, scales: Tensor, books: Books) -> Tensor:
        """The mean only."""
        return F.pad(scales.new_ones(scales.size(0), 1), (0, self.rank))

    def restore(self, rows: Tensor, books: Books) -> Tensor:
        return rows @ books["basis"].to(rows.dtype)

    def project(self, hidden: Tensor, books: Books) -> Tensor:
        return F.linear(hidden, books["basis"].to(hidden.dtype))


def _fields(counts: Sequence[int]) -> Iterator[_Field]:
    """The fields of codes with these numbers of directions by bits; those with the most bits come first."""
    first = start = 0
    for bits in range(len(counts) - 1, 0, -1):
        if counts[bits]:
            yield _Field(bits, slice(first, first + counts[bits]), start)
            first, start = first + counts[bits], start + bits * counts[bits]


def _entries(bits: int) -> slice:
    """Where the levels of `bits` bits are."""
    return slice(2**bits - 2, 2 ** (bits + 1) - 2)


@cache_tensor
def normal_levels(bits: int) -> Tensor:
    """The 2**bits ascending levels with the least squared error for normal numbers (Max, 1960)."""
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


def _companded(values: Tensor, bits: int) -> Tensor:
    """Levels whose density is that of the values to the power 1/3 (Panter and Dite, 1951), ascending.

    Factors of word vectors have longer tails than normal numbers.
    """
    low, high = float(values.min()), float(values.max())
    shares = torch.histc(values, _BINS, low, high).pow(1 / 3).cumsum(0)
    ranks = (torch.arange(2**bits) + 0.5) / 2**bits * shares[-1]
    return low + (high - low) / _BINS * (torch.searchsorted(shares, ranks) + 0.5)


def principal_directions(rows: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Variances ``(D,)`` of rows ``(n, D)`` around `mean`, and directions ``(D, D)``, largest first."""
    products = torch.zeros(len(mean), len(mean), dtype=torch.float64, device=rows.device)
    for part in rows.split(_BLOCK):
        centered = part - mean.to(part)
        products += (centered.t() @ centered).double()
    variances, basis = torch.linalg.eigh(products.cpu() / len(rows))
    return variances.flip(0).clamp(min=0), basis.flip(1).t()
