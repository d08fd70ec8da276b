"""Trellis codes with more bits for principal directions of the table (reverse water-filling), and scales.

Householder reflections turn the first dimensions of rows into the principal directions. A few reflections
take much less memory than a basis, and are orthogonal whatever the precision of their numbers.

Axes: ``n`` rows, ``D`` dimensions, ``K`` reflections.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.quant.allocation import direction_bits
from shared_embeddings.quant.codec import RATES, Codebooks, Codec, Encoded, fitted_scales, row_sizes
from shared_embeddings.quant.codecs.principal import principal_directions
from shared_embeddings.quant.codecs.trellis import (
    Runs,
    entries_of,
    errors_of,
    gains_for,
    nearest_states,
    packed_states,
    path_scores,
    read_entries,
    steps_for,
    stream_bytes,
    trellis_widths,
)

# The bits of a number of a reflection as stored, and the share of all bits that reflections may take.
_AXIS_BITS = 16
_SHARE = 0.04


class SpectralCodec(Codec):
    """See the module. Codebooks: ``axes`` ``(K, D)`` of the reflections; ``spread`` ``(K + 1,)``, the size of
    numbers along each principal direction, then of the others.

    Args:
        directions: K, then for each width from 1 to 10 how many dimensions have each width; by default all
            have that of the word, with an eighth of D reflections.
    """

    name = "spectral"
    adapts = True

    def __init__(self, dim: int, directions: Sequence[int] = ()) -> None:
        super().__init__(dim)
        self.widths = trellis_widths(dim)
        plain = [dim * (other == width) for width in range(1, len(RATES)) for other in range(len(RATES))]
        self.num_axes, *self.counts = directions or (dim // 8, *plain)
        self._shares: Tensor | None = None

    def row_bytes(self, width: int) -> int:
        """As in the base class."""
        return stream_bytes(steps_for(((RATES[width], self.dim),)))

    def options(self) -> dict[str, object]:
        """As in the base class."""
        return {"directions": [self.num_axes, *self.counts]}

    def codebook_shapes(self, widths: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """As in the base class."""
        return {"axes": (self.num_axes, self.dim), "spread": (self.num_axes + 1,)}

    def initial_codebooks(self, widths: Sequence[int]) -> Codebooks:
        """As in the base class: reflections that exchange signs only."""
        return {"axes": torch.eye(self.num_axes, self.dim), "spread": torch.ones(self.num_axes + 1)}

    def runs(self, width: int) -> Runs:
        """The bits of the dimensions of a row, descending, each with how many dimensions have them."""
        counts = self.counts[len(RATES) * (width - 1) : len(RATES) * width]
        return tuple(
            (rate, count) for rate, count in sorted(zip(RATES, counts), reverse=True) if rate * count
        )

    # Adapting to a table.

    def adapted(self, rows: Tensor, bits: float) -> Codec:
        """As in the base class: as many directions as fit into a small share of the bits, and their bits."""
        most = int(_SHARE * bits * len(rows) / _AXIS_BITS)
        found = SpectralCodec(self.dim, [min(most, self.dim // 4), *self.counts])
        variances = found._spectrum(rows)[0]
        shares, counts = {0: 1.0}, []
        for width in range(1, len(RATES)):
            chosen = found._chosen_widths(variances, width)
            shares[width] = float((variances * errors_of(chosen)).sum() / variances.sum().clamp(min=1e-30))
            counts += torch.tensor(chosen).bincount(minlength=len(RATES)).tolist()
        found.counts = counts
        found._shares = torch.tensor([shares[width] for width in self.widths], dtype=torch.float64)
        return found

    def _chosen_widths(self, variances: Tensor, width: int) -> list[int]:
        """The width of every direction, for rows that are as long as those with `width`."""
        rates = [RATES[one] for one in self.widths]
        errors = errors_of(self.widths)
        total = RATES[width] * self.dim + max(RATES)  # the bits of the first state are not those of a step
        while True:
            chosen = direction_bits(variances, rates, errors, total)
            counts = chosen.bincount(minlength=len(rates)).tolist()
            runs = tuple((rate, count) for rate, count in zip(rates, counts) if rate * count)
            if stream_bytes(steps_for(runs[::-1])) <= self.row_bytes(width):
                return [self.widths[one] for one in chosen.tolist()]
            total -= 1

    def error_shares(self) -> Tensor:
        """As in the base class, of the table that it was adapted to."""
        return super().error_shares() if self._shares is None else self._shares

    def learn(self, rows: Tensor, widths: Sequence[int], seed: int) -> Codebooks:
        """As in the base class: reflections onto the principal directions."""
        variances, directions = self._spectrum(rows)
        axes = torch.geqrf(directions).a.tril(-1).t() if self.num_axes else directions.t()
        axes = axes + torch.eye(self.num_axes, self.dim)
        spread = variances[: self.num_axes + 1].sqrt().clamp(min=1e-4)
        return {"axes": F.normalize(axes).to(rows), "spread": spread.to(rows)}

    def _spectrum(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Variances ``(D,)`` of rows with a variance of one, equal but for K; the K directions ``(D, K)``."""
        variances, basis = principal_directions(rows, torch.zeros(self.dim))
        variances = variances / variances.mean().clamp(min=1e-30)
        variances[self.num_axes :] = variances[self.num_axes :].mean()
        return variances, basis[: self.num_axes].t().contiguous()

    # Coding.

    def encode(self, rows: Tensor, width: int, codebooks: Codebooks) -> Encoded:
        """As in the base class: the path with the least squared error for rows at the size of entries."""
        reflected = _reflected(rows, codebooks["axes"])
        steps, sizes = steps_for(self.runs(width)), self._sizes(width, codebooks)
        targets = reflected[:, : len(sizes)] / (row_sizes(rows) * sizes)
        states = nearest_states(targets, steps, sizes.square())
        values = F.pad(entries_of(states, steps) * sizes, (0, self.dim - len(sizes)))
        codes = packed_states(states, steps)
        missing = self.row_bytes(width) - codes.size(1)
        return Encoded(F.pad(codes, (0, missing)), fitted_scales(reflected, values))

    def decode(self, codes: Tensor, width: int, codebooks: Codebooks) -> Tensor:
        """As in the base class."""
        return _reflected(self.scored_rows(codes, width, codebooks), codebooks["axes"].flip(0))

    def scored_states(self, hidden: Tensor, codebooks: Codebooks) -> Tensor:
        """As in the base class; the hidden states are reflected instead of the rows."""
        return _reflected(hidden, codebooks["axes"].to(hidden.dtype))

    def direct_scores(
        self, hidden: Tensor, codes: Tensor, width: int, codebooks: Codebooks, scales: Tensor
    ) -> Tensor | None:
        """As in the base class."""
        sizes = self._sizes(width, codebooks)
        return path_scores(hidden[:, : len(sizes)] * sizes, codes, steps_for(self.runs(width)), scales)

    def scored_rows(self, codes: Tensor, width: int, codebooks: Codebooks) -> Tensor:
        """As in the base class: reflected rows."""
        sizes = self._sizes(width, codebooks)
        values = read_entries(codes, steps_for(self.runs(width))) * sizes
        return F.pad(values, (0, self.dim - len(sizes)))

    def _sizes(self, width: int, codebooks: Codebooks) -> Tensor:
        """The size of the entries of every dimension with bits."""
        spread, runs = codebooks["spread"], self.runs(width)
        sizes = torch.cat([spread[:-1], spread[-1:].expand(self.dim - self.num_axes)])
        gains = gains_for(runs, spread.device)
        return sizes[: len(gains)] * gains.to(spread.dtype)


def _reflected(values: Tensor, axes: Tensor) -> Tensor:
    """Vectors ``(n, D)`` after one reflection after the other, on the hyperplanes orthogonal to `axes`."""
    for axis in F.normalize(axes.to(values.dtype)):
        values = values - 2 * (values @ axis).unsqueeze(1) * axis
    return values
