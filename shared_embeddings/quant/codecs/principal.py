"""Bits for each principal direction of the table (reverse water-filling), and a mean.

A row is the mean plus a sum of principal directions. A factor of a row is one of the levels of its direction:
the directions with the largest variance have the most bits, those with the smallest none. Words of each width
have their own bits and spreads; the directions and the levels are shared. There are no scales.

Axes: ``n`` rows, ``D`` dimensions, ``R`` directions with bits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.quant.allocation import direction_bits
from shared_embeddings.quant.bits import bits_of, bytes_for, pack_bits, read_windows
from shared_embeddings.quant.codec import Codebooks, Codec, Encoded
from shared_embeddings.quant.codecs.lloyd_max import normal_error, normal_levels
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


class _Field(NamedTuple):
    """Directions with the same number of bits, one after another.

    Attributes:
        bits: of each of them.
        first, last: the directions, the last excluded.
        start: the position of the first bit in the codes of a row.
    """

    bits: int
    first: int
    last: int
    start: int


class PrincipalCodec(Codec):
    """See the module.

    Codebooks: ``basis`` ``(1 + R, D)``, the mean and the directions; ``spread`` ``(widest, R)``; ``levels``,
    those of 1 bit, of 2 bits and so on.

    Args:
        directions: for each width from 1 to 8 the number of directions with 0, 1, ... 8 bits; by default all
            directions have as many bits as the width.
    """

    name = "principal"
    rotates = False
    adapts = True

    def __init__(self, dim: int, directions: Sequence[int] = ()) -> None:
        super().__init__(dim)
        counts = list(directions) or [
            dim * (bits == width) for width in self.widths[1:] for bits in range(_MOST_BITS + 1)
        ]
        self.directions = counts
        parts = [counts[start : start + 9] for start in range(0, len(counts), 9)]
        self.rank = max(dim - part[0] for part in parts)
        self._most = max(bits for part in parts for bits, count in enumerate(part) if count)
        self._fields = {width: list(_fields(part)) for width, part in enumerate(parts, 1)}
        self._shares: Tensor | None = None
        self._learned: Codebooks = {}

    @property
    def num_scales(self) -> int:
        """As in the base class."""
        return 0

    def row_bytes(self, width: int) -> int:
        """As in the base class."""
        return bytes_for(width * self.dim)

    def options(self) -> dict[str, object]:
        """As in the base class."""
        return {"directions": self.directions}

    def codebook_shapes(self, widths: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """As in the base class."""
        return {
            "basis": (1 + self.rank, self.dim),
            "spread": (max(widths, default=0), self.rank),
            "levels": (2 ** (self._most + 1) - 2,),
        }

    def initial_codebooks(self, widths: Sequence[int]) -> Codebooks:
        """As in the base class: random directions, levels for normal numbers, spreads for random codes.

        The entries of rows have a std near D**-0.5.
        """
        shapes = self.codebook_shapes(widths)
        basis = torch.randn(shapes["basis"], device="cpu") * max(self.rank * self.dim, 1) ** -0.5
        basis[0] = 0.0
        levels = self._normal_levels()
        spread = torch.ones(shapes["spread"])
        for width, row in enumerate(spread, 1):
            for field in self._fields[width]:
                row[field.first : field.last] /= levels[_entries(field.bits)].square().mean().sqrt()
        return {"basis": basis, "spread": spread, "levels": levels}

    def _normal_levels(self) -> Tensor:
        """Levels for normal numbers."""
        return torch.cat([torch.empty(0, device="cpu"), *map(normal_levels, range(1, self._most + 1))])

    # Adapting to a table.

    def adapted(self, rows: Tensor, bits: float) -> Codec:
        """As in the base class: the principal directions that are worth their bytes at a mean of `bits`."""
        found = copy.copy(self)
        mean = _mean(rows)
        variances, basis = principal_directions(rows, mean)
        gains = variances.unsqueeze(1) * _errors().diff().neg()
        least = gains.flatten().sort(descending=True).values[max(round(bits * self.dim), 1) - 1]
        # The net gain of a direction, against the same bits for others.
        net = ((gains - least).clamp(min=0).sum(dim=1) * len(rows) - _BASIS_BITS * self.dim * least) > 0
        found.rank = max(int(net.sum()), 1)
        found._learned = {"basis": torch.cat([mean.unsqueeze(0), basis[: found.rank]]).float()}
        left = float(variances[found.rank :].sum())
        kept = variances[: found.rank]
        shares = [
            float((kept * _errors()[direction_bits(kept, range(9), _errors(), width * self.dim)]).sum())
            + left
            for width in self.widths
        ]
        found._shares = torch.tensor(shares, dtype=torch.float64) / variances.sum().clamp(min=1e-30)
        return found

    def error_shares(self) -> Tensor:
        """As in the base class, of the table that it was adapted to."""
        return super().error_shares() if self._shares is None else self._shares

    def energy(self, rows: Tensor) -> Tensor:
        """As in the base class, around the mean."""
        mean, found = self._learned["basis"][0].to(rows), rows.new_empty(len(rows), dtype=torch.float64)
        for part, energy in zip(rows.split(_BLOCK), found.split(_BLOCK), strict=True):
            energy.copy_((part - mean).double().square().sum(dim=1))
        return found

    def laid_out(self, rows: Tensor, widths: Tensor) -> Codec:
        """As in the base class: the bits of directions for the words of each width, and their codebooks."""
        basis = self._learned["basis"].to(rows)
        factors, directions = {}, []
        spread = torch.ones(int(widths.max()), self.rank)
        every = -(-int((widths > 0).sum()) * self.rank // _SAMPLE)
        for width in self.widths[1:]:
            mine = (widths == width).nonzero().flatten().to(rows.device)
            bits = torch.zeros(self.rank, dtype=torch.long)
            if len(mine):
                factors[width] = ((rows[mine[::every]] - basis[0]) @ basis[1:].t()).cpu()
                variances = torch.zeros(self.rank, dtype=torch.float64)
                for ids in mine.split(_BLOCK):
                    part = (rows[ids] - basis[0]) @ basis[1:].t()
                    variances += part.double().square().sum(dim=0).cpu() / len(mine)
                bits = direction_bits(variances, range(9), _errors(), width * self.dim)
                bits = bits.sort(descending=True).values
                spread[width - 1] = variances.sqrt().clamp(min=1e-30).float()
            counts = torch.bincount(bits, minlength=_MOST_BITS + 1)
            counts[0] += self.dim - self.rank
            directions += counts.tolist()
        found = PrincipalCodec(self.dim, directions)
        levels = found._normal_levels()
        found._learned = {
            "basis": basis[: 1 + found.rank].cpu(),
            "spread": spread[:, : found.rank],
            "levels": levels,
        }
        found._train(factors)
        return found

    def _train(self, sample: dict[int, Tensor]) -> None:
        """Alternate between levels and spreads with the least squared error for the factors by width."""
        levels, spread = self._learned["levels"], self._learned["spread"]
        for bits in range(1, self._most + 1):
            pooled = [
                (values[:, field.first : field.last] / spread[width - 1, field.first : field.last]).flatten()
                for width, values in sample.items()
                for field in self._fields[width]
                if field.bits == bits
            ]
            if pooled:
                levels[_entries(bits)] = _companded(torch.cat(pooled), bits)
        for _ in range(_STEPS):
            sums, norms = torch.zeros_like(levels), torch.zeros_like(levels)
            for width, values in sample.items():
                for field in self._fields[width]:
                    scales, entry = spread[width - 1, field.first : field.last], _entries(field.bits)
                    wanted = values[:, field.first : field.last]
                    codes = _nearest(wanted / scales, levels[entry])
                    sums[entry].index_add_(0, codes.flatten(), (wanted * scales).flatten())
                    norms[entry].index_add_(0, codes.flatten(), scales.square().expand_as(wanted).flatten())
                    coded = levels[entry][codes]
                    best = (wanted * coded).sum(dim=0) / coded.square().sum(dim=0).clamp(min=1e-30)
                    spread[width - 1, field.first : field.last] = torch.where(best > 0, best, scales)
            levels.copy_(torch.where(norms > 0, sums / norms.clamp(min=1e-30), levels))
            for bits in range(1, self._most + 1):
                levels[_entries(bits)] = levels[_entries(bits)].sort().values

    def learn(self, rows: Tensor, widths: Sequence[int], seed: int) -> Codebooks:
        """As in the base class: those that `laid_out` found."""
        return self._learned

    # Coding.

    def encode(self, rows: Tensor, width: int, codebooks: Codebooks) -> Encoded:
        """As in the base class: the nearest levels."""
        basis, spread, levels = codebooks["basis"], codebooks["spread"], codebooks["levels"]
        factors = (rows - basis[0]) @ basis[1:].t() / spread[width - 1]
        bits = [
            bits_of(_nearest(factors[:, field.first : field.last], levels[_entries(field.bits)]), field.bits)
            for field in self._fields[width]
        ]
        missing = width * self.dim - sum(part.size(1) for part in bits)
        packed = pack_bits(F.pad(torch.cat(bits, dim=1), (0, missing)), 1)
        return Encoded(packed, rows.new_empty(len(rows), 0))

    def decode(self, codes: Tensor, width: int, codebooks: Codebooks) -> Tensor:
        """As in the base class."""
        factors, basis = self._factors(codes, width, codebooks), codebooks["basis"]
        return torch.addmm(basis[0], factors, basis[1 : 1 + factors.size(1)])

    def scaled(self, values: Tensor, scales: Tensor) -> Tensor:
        """The values unchanged."""
        return values.to(scales.dtype)

    def uncoded(self, codebooks: Codebooks, scales: Tensor) -> Tensor:
        """The mean."""
        return codebooks["basis"][0].to(scales.dtype).expand(scales.size(0), -1)

    def scores(
        self, hidden: Tensor, codes: Tensor, width: int, codebooks: Codebooks, scales: Tensor
    ) -> Tensor:
        """As in the base class, from the factors."""
        products = F.linear(hidden, codebooks["basis"].to(hidden.dtype))
        found = hidden.new_empty(len(hidden), len(codes))
        for start in range(0, len(codes), _BLOCK):
            factors = self._factors(codes[start : start + _BLOCK], width, codebooks).to(hidden.dtype)
            scored = products[:, 1 : 1 + factors.size(1)] @ factors.t()
            found[:, start : start + _BLOCK] = scored + products[:, :1]
        return found

    def _factors(self, codes: Tensor, width: int, codebooks: Codebooks) -> Tensor:
        """The factors ``(n, m)`` of the first m directions."""
        levels, parts = codebooks["levels"], []
        for bits, first, last, start in self._fields[width]:
            numbers = read_windows(codes, last - first, bits, bits, start)
            parts.append(F.embedding(numbers, levels[_entries(bits)].unsqueeze(1)).squeeze(-1))
        factors = torch.cat(parts, dim=1)
        return factors * codebooks["spread"][width - 1, : factors.size(1)]


@cache_tensor
def _errors() -> Tensor:
    """The squared errors of normal numbers with 0, 1, ... bits."""
    return torch.tensor([1.0, *map(normal_error, range(1, _MOST_BITS + 1))], dtype=torch.float64)


def _fields(counts: Sequence[int]) -> Iterator[_Field]:
    """The fields of codes with these numbers of directions by bits; those with the most bits come first."""
    first = start = 0
    for bits in range(len(counts) - 1, 0, -1):
        if counts[bits]:
            yield _Field(bits, first, first + counts[bits], start)
            first, start = first + counts[bits], start + bits * counts[bits]


def _entries(bits: int) -> slice:
    """Where the levels of `bits` bits are."""
    return slice(2**bits - 2, 2 ** (bits + 1) - 2)


def _companded(values: Tensor, bits: int) -> Tensor:
    """Levels whose density is that of the values to the power 1/3 (Panter and Dite, 1951), ascending.

    Factors of word vectors have longer tails than normal numbers.
    """
    low, high = float(values.min()), float(values.max())
    shares = torch.histc(values, _BINS, low, high).pow(1 / 3).cumsum(0)
    ranks = (torch.arange(2**bits) + 0.5) / 2**bits * shares[-1]
    return low + (high - low) / _BINS * (torch.searchsorted(shares, ranks) + 0.5)


def _nearest(values: Tensor, levels: Tensor) -> Tensor:
    """The numbers of the nearest of ascending levels."""
    return torch.bucketize(values.contiguous(), (levels[1:] + levels[:-1]) / 2)


def _mean(rows: Tensor) -> Tensor:
    """The mean ``(D,)`` of rows ``(n, D)`` in float64."""
    mean = rows.new_zeros(rows.size(1), dtype=torch.float64)
    for part in rows.split(_BLOCK):
        mean += part.sum(dim=0, dtype=torch.float64) / len(rows)
    return mean.cpu()


def principal_directions(rows: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Variances ``(D,)`` of rows ``(n, D)`` around `mean`, and directions ``(D, D)``, largest first."""
    products = torch.zeros(len(mean), len(mean), dtype=torch.float64, device=rows.device)
    for part in rows.split(_BLOCK):
        centered = part - mean.to(part)
        products += (centered.t() @ centered).double()
    variances, basis = torch.linalg.eigh(products.cpu() / len(rows))
    return variances.flip(0).clamp(min=0), basis.flip(1).t()
