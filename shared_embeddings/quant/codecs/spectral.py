"""Trellis codes with more bits for principal directions of the table (reverse water-filling), and scales.

Householder reflections turn the first dimensions of rows into the principal directions. A few reflections
take much less memory than a basis, and are orthogonal whatever the precision of their numbers.

Axes: ``n`` rows, ``D`` dimensions, ``K`` reflections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.quant.allocation import direction_bits
from shared_embeddings.quant.codec import (
    RATES,
    Books,
    Codec,
    Encoded,
    Fitted,
    fitted_scales,
    register,
    row_sizes,
    squared_norms,
)
from shared_embeddings.quant.codecs.principal import principal_directions
from shared_embeddings.quant.codecs.trellis import (
    Runs,
    TrellisCodec,
    entries_of,
    find_path,
    gains_for,
    packed_states,
    path_entries,
    path_gain,
    path_scores,
    read_entries,
    steps_for,
    stream_bytes,
)
from shared_embeddings.quant.metric import Metric

# The bits of a number of a reflection as stored, and the share of all bits that reflections may take.
_AXIS_BITS = 16
_SHARE = 0.04


def decode_spectral(codes: Any, rate: float, dim: int, parts: Mapping[str, Any]) -> Any:
    """Trellis codes with the bits and the size of each direction, reflected back."""
    axes, spread = parts["axes"], parts["spread"]
    start = 1 + len(RATES) * (RATES.index(rate) - 1)
    counts = parts["directions"][start : start + len(RATES)] or [dim * (other == rate) for other in RATES]
    each = [one for one, count in sorted(zip(RATES, counts), reverse=True) if one for _ in range(count)]
    sizes = np.concatenate([spread[:-1], np.repeat(spread[-1:], dim - len(axes))])[: len(each)]
    gains = np.array([path_gain(one) for one in each], np.float32)
    rows = np.pad(path_entries(codes, each) * (sizes * gains), ((0, 0), (0, dim - len(each))))
    for axis in axes[::-1]:
        axis = axis / max(np.linalg.norm(axis), 1e-12)
        rows = rows - 2 * (rows @ axis)[:, None] * axis
    return rows


@register("spectral")
class SpectralCodec(TrellisCodec):
    """See the module. Codebooks: ``axes`` ``(K, D)`` of the reflections; ``spread`` ``(K + 1,)``, the size of
    numbers along each principal direction, then of the others.

    The layout is K, then for each rate in the order of `RATES`, without 0, how many dimensions have each
    rate; by default all have that of the word, with an eighth of D reflections.
    """

    about = "trellis, with more bits for principal directions"
    about_layout = (
        "the number of reflections, then for words of 1, 2, ... 8, 1/2 and 1/4 bits the number of directions "
        "with 0, 1, ... 8, 1/2 and 1/4 bits"
    )
    example_bits = 2.5
    standalone = (path_gain, *TrellisCodec.standalone[:-1], decode_spectral)

    def __init__(self, dim: int, group_size: int = 32, layout: Sequence[int] = ()) -> None:
        super().__init__(dim, group_size, layout)
        plain = [dim * (other == rate) for rate in RATES[1:] for other in RATES]
        self.num_axes, *counts = layout or (dim // 8, *plain)
        # The bits of the dimensions of a row by its rate, descending, each with how many have them.
        self._runs: dict[float, Runs] = {}
        for number, rate in enumerate(RATES[1:]):
            pairs = zip(RATES, counts[number * len(RATES) :])
            self._runs[rate] = tuple(
                (one, count) for one, count in sorted(pairs, reverse=True) if one * count
            )

    def book_shapes(self, rates: Sequence[float]) -> dict[str, tuple[int, ...]]:
        return {"axes": (self.num_axes, self.dim), "spread": (self.num_axes + 1,)}

    def initial_books(self, rates: Sequence[float]) -> Books:
        """Reflections that exchange signs only."""
        return {"axes": torch.eye(self.num_axes, self.dim), "spread": torch.ones(self.num_axes + 1)}

    def fit(
        self,
        table: Tensor,
        bits: float,
        importance: Tensor | None,
        is_small: Callable[[Codec, Mapping[float, int]], bool],
    ) -> Fitted:
        """As many directions as fit into a small share of the bits, and their bits for each rate."""
        most = min(int(_SHARE * bits * len(table) / _AXIS_BITS), self.dim // 4)
        variances, _ = _spectrum(table, most)
        limits, shares, layout = super().errors(), {0.0: 1.0}, [most]
        for rate in RATES[1:]:
            # As many bits as rows fit into those of `rate` without directions; those of the first state are
            # not those of a step.
            total, is_long = rate * self.dim + max(RATES), True
            while is_long:
                chosen = direction_bits(variances, self.rates, limits, total)
                counts = dict(zip(self.rates, chosen.bincount(minlength=len(self.rates)).tolist()))
                runs = tuple((one, count) for one, count in counts.items() if one * count)
                is_long = stream_bytes(steps_for(runs[::-1])) > self.row_bytes(rate)
                total -= 1
            missed = (variances * limits[chosen]).sum() / variances.sum().clamp(min=1e-30)
            shares[rate] = float(missed)
            layout += [counts.get(one, 0) for one in RATES]
        codec = SpectralCodec(self.dim, layout=layout)
        errors = torch.tensor([shares[rate] for rate in self.rates], dtype=torch.float64)
        return Fitted(codec, codec.allocate(squared_norms(table), importance, is_small, errors))

    def learn(self, rows: Tensor, rates: Sequence[float], seed: int) -> Books:
        """Reflections onto the principal directions."""
        variances, directions = _spectrum(rows, self.num_axes)
        axes = torch.geqrf(directions).a.tril(-1).t() if self.num_axes else directions.t()
        axes = axes + torch.eye(self.num_axes, self.dim)
        spread = variances[: self.num_axes + 1].sqrt().clamp(min=1e-4)
        return {"axes": F.normalize(axes).to(rows), "spread": spread.to(rows)}

    def encode(self, rows: Tensor, rate: float, books: Books, metric: Metric | None = None) -> Encoded:
        """The path with the least error for reflected rows at the size of entries."""
        reflected = self.project(rows, books)
        steps, sizes = steps_for(self._runs[rate]), self._sizes(rate, books)
        states = find_path(reflected / row_sizes(rows), steps, sizes, metric)
        values = F.pad(entries_of(states, steps) * sizes, (0, self.dim - len(sizes)))
        codes = packed_states(states, steps)
        missing = self.row_bytes(rate) - codes.size(1)
        return Encoded(F.pad(codes, (0, missing)), fitted_scales(reflected, values, metric))

    def decode(self, codes: Tensor, scales: Tensor, rate: float, books: Books) -> Tensor:
        """Reflected rows."""
        sizes = self._sizes(rate, books)
        values = read_entries(codes, steps_for(self._runs[rate])) * sizes
        return F.pad(values, (0, self.dim - len(sizes))).to(scales.dtype) * scales

    def derived(self, books: Books) -> Books:
        """T for axes A: ``v - (v Aᵀ) T A`` is v after all reflections, one after the other.

        For unit axes, the inverse of T has their products above its diagonal of 1/2 (the compact WY form of
        Schreiber & Van Loan, 1989).
        """
        axes = _exact(books["axes"])
        units, norms = F.normalize(axes), axes.norm(dim=1, keepdim=True).clamp(min=1e-12)
        eye = torch.eye(len(units)).to(units)
        inverse = (units @ units.t()).triu(1) + eye / 2
        return {"turn": torch.linalg.solve_triangular(inverse, eye / norms.t(), upper=True) / norms}

    def restore(self, rows: Tensor, books: Books) -> Tensor:
        axes = _exact(books["axes"])
        return rows - (rows.to(axes.dtype) @ axes.t() @ books["turn"].t() @ axes).to(rows.dtype)

    def project(self, hidden: Tensor, books: Books) -> Tensor:
        axes = _exact(books["axes"])
        return hidden - (hidden.to(axes.dtype) @ axes.t() @ books["turn"] @ axes).to(hidden.dtype)

    def direct_scores(
        self, hidden: Tensor, codes: Tensor, scales: Tensor, rate: float, books: Books
    ) -> Tensor | None:
        sizes = self._sizes(rate, books)
        return path_scores(hidden[:, : len(sizes)] * sizes, codes, steps_for(self._runs[rate]), scales)

    def _sizes(self, rate: float, books: Books) -> Tensor:
        """The size of the entries of every dimension with bits."""
        spread, runs = books["spread"], self._runs[rate]
        sizes = torch.cat([spread[:-1], spread[-1:].expand(self.dim - self.num_axes)])
        gains = gains_for(runs, spread.device)
        return sizes[: len(gains)] * gains.to(spread.dtype)


def _spectrum(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Variances ``(D,)`` of rows with a variance of one, equal but for K; the K directions ``(D, K)``."""
    variances, basis = principal_directions(rows, torch.zeros(rows.size(1)))
    variances = variances / variances.mean().clamp(min=1e-30)
    variances[count:] = variances[count:].mean()
    return variances, basis[:count].t().contiguous()


def _exact(values: Tensor) -> Tensor:
    """Numbers in 32 bits or more."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
