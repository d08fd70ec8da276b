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

from shared_embeddings.codecs.allocation import direction_bits
from shared_embeddings.codecs.bit_packing import bytes_for
from shared_embeddings.codecs.codec import Codebooks, Codec, Encoded, fitted_scales, rms
from shared_embeddings.codecs.principal import principal_directions
from shared_embeddings.codecs.trellis import START_BITS, codebook, nearest_states, packed_states, read_states

_MOST_BITS = 8
# The bits of a number of a reflection as stored, and the share of all bits that reflections may take.
_AXIS_BITS = 16
_SHARE = 0.03


class SpectralCodec(Codec):
    """See the module. Codebooks: ``axes`` ``(K, D)`` of the reflections; ``spread`` ``(K + 1,)``, the size of
    numbers along each principal direction, then of the others.

    Args:
        directions: K, then for each width from 1 to 8 how many dimensions have 0, 1, ... 8 bits; by default
            all have as many as the width, with an eighth of D reflections.
    """

    name = "spectral"
    adapts = True

    def __init__(self, dim: int, directions: Sequence[int] = ()) -> None:
        super().__init__(dim)
        plain = [dim * (bits == width) for width in self.widths[1:] for bits in range(_MOST_BITS + 1)]
        self.num_axes, *self.counts = directions or (dim // 8, *plain)
        self._shares: Tensor | None = None

    def row_bytes(self, width: int) -> int:
        """As in the base class."""
        return bytes_for(START_BITS + width * (self.dim - 1))

    def options(self) -> dict[str, object]:
        """As in the base class."""
        return {"directions": [self.num_axes, *self.counts]}

    def codebook_shapes(self, widths: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """As in the base class."""
        return {"axes": (self.num_axes, self.dim), "spread": (self.num_axes + 1,)}

    def initial_codebooks(self, widths: Sequence[int]) -> Codebooks:
        """As in the base class: reflections that exchange signs only."""
        return {"axes": torch.eye(self.num_axes, self.dim), "spread": torch.ones(self.num_axes + 1)}

    def field_widths(self, width: int) -> list[int]:
        """The bits of every dimension with bits, descending."""
        counts = self.counts[9 * (width - 1) : 9 * width]
        return [bits for bits in range(_MOST_BITS, 0, -1) for _ in range(counts[bits])]

    # Adapting to a table.

    def adapted(self, rows: Tensor, bits: float) -> Codec:
        """As in the base class: as many directions as fit into a small share of the bits, and their bits."""
        most = int(_SHARE * bits * len(rows) / _AXIS_BITS)
        found = SpectralCodec(self.dim, [min(most, self.dim // 4), *self.counts])
        variances = found._spectrum(rows)[0]
        shares, counts = [1.0], []
        for width in self.widths[1:]:
            each = direction_bits(variances, _errors(), width * (self.dim - 1))
            shares.append(float((variances * _errors()[each]).sum() / variances.sum().clamp(min=1e-30)))
            counts += torch.bincount(each, minlength=_MOST_BITS + 1).tolist()
        found.counts, found._shares = counts, torch.tensor(shares, dtype=torch.float64)
        return found

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
        """As in the base class: the path with the least squared error for rows at unit variance."""
        reflected = _reflected(rows, codebooks["axes"])
        widths, book = self.field_widths(width), codebook(rows.device)
        spread = self._spreads(codebooks)[: len(widths)]
        numbers = reflected[:, : len(widths)] / (rms(rows) * spread)
        states = nearest_states(numbers, widths, spread.square(), book)
        values = F.pad(book[states] * spread, (0, self.dim - len(widths)))
        codes = packed_states(states, widths)
        missing = self.row_bytes(width) - codes.size(1)
        return Encoded(F.pad(codes, (0, missing)), fitted_scales(reflected, values))

    def decode(self, codes: Tensor, width: int, codebooks: Codebooks) -> Tensor:
        """As in the base class."""
        return _reflected(self.scored_rows(codes, width, codebooks), codebooks["axes"].flip(0))

    def scores(
        self, hidden: Tensor, codes: Tensor, width: int, codebooks: Codebooks, scales: Tensor
    ) -> Tensor:
        """As in the base class; the hidden states are reflected instead of the rows."""
        reflected = _reflected(hidden, codebooks["axes"].to(hidden.dtype))
        return super().scores(reflected, codes, width, codebooks, scales)

    def scored_rows(self, codes: Tensor, width: int, codebooks: Codebooks) -> Tensor:
        """As in the base class: reflected rows."""
        widths = self.field_widths(width)
        values = read_states(codes, widths) * self._spreads(codebooks)[: len(widths)]
        return F.pad(values, (0, self.dim - len(widths)))

    def _spreads(self, codebooks: Codebooks) -> Tensor:
        """The size of numbers along every dimension ``(D,)``."""
        spread = codebooks["spread"]
        return torch.cat([spread[:-1], spread[-1:].expand(self.dim - self.num_axes)])


def _reflected(values: Tensor, axes: Tensor) -> Tensor:
    """Vectors ``(n, D)`` after one reflection after the other, on the hyperplanes orthogonal to `axes`."""
    for axis in F.normalize(axes.to(values.dtype)):
        values = values - 2 * (values @ axis).unsqueeze(1) * axis
    return values


def _errors() -> Tensor:
    """The mean squared errors of trellis codes of 0, 1, ... bits for normal numbers, as measured."""
    errors = [1.0, 0.2756, 0.0722, 0.0196, 0.0053, 0.00148, 0.00044, 0.00015, 0.00007]
    return torch.tensor(errors, dtype=torch.float64)
