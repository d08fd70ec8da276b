"""Trellis codes with more bits for principal directions of the table (reverse water-filling), and scales.

Words of each rate have their own bits and sizes of directions. Householder reflections turn the first
dimensions of rows into the principal directions. A few reflections take much less memory than a basis, and
are orthogonal whatever the precision of their numbers.

Axes: ``n`` rows, ``D`` dimensions, ``K`` reflections.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.quant import kernels
from shared_embeddings.quant.codec import (
    BLOCK,
    RATES,
    Books,
    Codec,
    Encoded,
    fitted_scales,
    register,
    row_sizes,
    squared_norms,
)
from shared_embeddings.quant.codecs.trellis import (
    ERRORS,
    TOGETHER,
    Runs,
    TrellisCodec,
    entries_of,
    entry_plan,
    find_path,
    gains_for,
    packed_states,
    path_book,
    path_books,
    path_entries,
    path_gain,
    path_scores,
    read_entries,
    steps_for,
    stream_bytes,
)
from shared_embeddings.quant.metric import Metric

# Numbers of reflections that are tried, up to half of D, grow by this factor.
_GROWTH = 2
# Few reflections are fast: the fewest are taken whose expected error is within this factor of the least.
_ENOUGH = 1.005
# Words that choose between bits by what errors cost and by energy.
_TRIED = 1024
# Of these, about so many are rounded with each rate.
_MEASURED = 256
# The former are taken if the error is less than this part: they need more reflections, which are slow.
_CLEARLY = 0.9
# About as many rows have their numbers along directions computed: among all, and among those of each rate.
_SAMPLE = 2**14
# Rows whose products are computed together.
_BLOCK = 4096
# The largest entries, coarse and fine, and by how much sizes may be increased for numbers with long tails: of
# a row, or of all rows, of which a few large ones with a mean of their own leave small sizes for others.
_LARGEST = path_books().max(axis=1)
_INCREASES = [2 ** (step / 4) for step in range(9)]
_OTHERS = 32  # about as many directions without a size of their own are looked at
_MORE_INCREASES = [*_INCREASES, *(2.0**step for step in range(3, 11))]


def decode_spectral(codes: Any, rate: float, dim: int, parts: Mapping[str, Any]) -> Any:
    """Trellis codes with the bits and the size of each direction, reflected back."""
    axes, place, rows = parts["axes"], RATES.index(rate), np.zeros((len(codes), dim), np.float32)
    if rate:
        start, spread = 1 + len(RATES) * (place - 1), parts["spread"][place - 1]
        counts = parts["directions"][start : start + len(RATES)] or [dim * (bits == rate) for bits in RATES]
        widths = [
            bits for bits, count in sorted(zip(RATES, counts), reverse=True) if bits for _ in range(count)
        ]
        sizes = np.concatenate([spread[:-1], np.repeat(spread[-1:], dim - len(axes))])[: len(widths)]
        gains = np.array([path_gain(bits) for bits in widths], np.float32)
        rows[:, : len(widths)] = path_entries(codes, widths) * (sizes * gains)
    rows[:, : len(axes)] += parts["center"][place]
    for axis in axes[::-1]:
        axis = axis / max(np.linalg.norm(axis), 1e-12)
        rows = rows - 2 * (rows @ axis)[:, None] * axis
    return rows


class _Statistics(NamedTuple):
    """What is known of a table before any of its rows has bits."""

    table: Tensor  # ``(V, D)``
    weights: Tensor  # ``(V,)`` of the squared errors of words
    directions: Tensor  # ``(D, D)`` the principal ones, as columns
    energy: Tensor  # ``(V,)`` the squared errors of words without codes
    energies: tuple[Tensor, Tensor, Tensor]  # of a sample, as `_energies` returns


@register("spectral")
class SpectralCodec(TrellisCodec):
    """See the module. Codebooks: ``axes`` ``(K, D)`` of the reflections; ``center`` ``(11, K)``, for words of
    each rate the mean of numbers along each principal direction, in rows of size one, of which words without
    codes are multiples; ``spread`` ``(10, K + 1)``, for the other words the size of numbers along each
    principal direction, around these means, then of the others.

    The layout is K, then for each rate in the order of `RATES`, without 0, how many dimensions have each
    rate; by default all have that of the word, with an eighth of D reflections.
    """

    about = "trellis, with more bits for principal directions, the most exact up to 4 bits"
    about_layout = (
        "the number of reflections, then for tokens of 1, 2, ... 8, 1/2 and 1/4 bits the number of "
        "directions with 0, 1, ... 8, 1/2 and 1/4 bits"
    )
    example_bits = 2.5
    standalone = (path_gain, *TrellisCodec.standalone[:-1], decode_spectral)

    def __init__(self, dim: int, group_size: int = 32, layout: Sequence[int] = ()) -> None:
        super().__init__(dim, group_size, layout)
        plain = [dim * (other == rate) for rate in RATES[1:] for other in RATES]
        self.num_axes, *counts = layout or (dim // 8, *plain)
        # The bits of the dimensions of a row by its rate, descending, also each with how many have them.
        self._runs: dict[float, Runs] = {}
        for number, rate in enumerate(RATES[1:]):
            pairs = zip(RATES, counts[number * len(RATES) :])
            self._runs[rate] = tuple(
                (bits, count) for bits, count in sorted(pairs, reverse=True) if bits * count
            )

        self._bits = {
            rate: [bits for bits, count in runs for _ in range(count)] for rate, runs in self._runs.items()
        }
        axes, count = self.num_axes, len(RATES) - 1
        self.book_shapes = {"axes": (axes, dim), "spread": (count, axes + 1), "center": (count + 1, axes)}

    def initial_books(self) -> Books:
        """Reflections that exchange signs only."""
        axes, spread, center = self.book_shapes.values()
        return {"axes": torch.eye(*axes), "spread": torch.ones(spread), "center": torch.zeros(center)}

    def fit(
        self,
        table: Tensor,
        bits: float,
        importance: Tensor | None,
        metric: Tensor | None,
        is_small: Callable[[Codec, Mapping[float, int]], bool],
    ) -> tuple[Codec, Tensor]:
        """The number of reflections with the least expected error, and the bits of directions by rate.

        With a metric, bits of directions follow their energy times what errors cost if that has a clearly
        smaller error for a sample of words, or else the energy alone. Then words get bits by what each rate
        leaves of the sample in the metric: feedback leaves much less than their energies say.
        """
        equal = torch.ones(len(table), dtype=torch.float64, device=table.device)
        weights = equal if importance is None else importance.to(equal)
        directions = _principal_directions(table).to(table.device, torch.float32)
        energy = squared_norms(table)
        if metric is not None:
            # A metric of few directions knows little of most words.
            energy = squared_norms(table, metric) + metric.diagonal().mean().to(energy) * energy
        ids = torch.arange(len(table), device=table.device)[:: 1 + len(table) // _SAMPLE]
        energies = _energies(table, ids, equal, directions)
        known = _Statistics(table, weights, directions, energy, energies)
        if metric is None:
            return self._fitted(known, None, is_small)[:2]
        shares = weights.cumsum(0) / weights.sum()
        quantiles = (torch.arange(_TRIED, device=table.device) + 0.5) / _TRIED
        sample = torch.searchsorted(shares, quantiles.to(shares)).clamp(max=len(table) - 1)
        # Many reflections fit a few rows too well, so codebooks are learned from more.
        learned = torch.cat([ids, sample])
        learned_rows, sampled_rows = table[learned].float(), table[sample].float()
        trials, errors = [], []
        for costs in (metric, None):
            codec, rates, costs_of = self._fitted(known, costs, is_small)
            books = codec.learn(learned_rows, rates.to(table.device)[learned])
            sampled = rates[sample.cpu()]
            errors.append(
                sum(
                    codec._missed(sampled_rows[(sampled == rate).to(table.device)], rate, books, metric)
                    for rate in sampled.unique().tolist()
                )
            )
            trials.append((codec, costs_of))
        codec, costs_of = trials[0 if errors[0] < _CLEARLY * errors[1] else 1]
        rows, left = sampled_rows[:: _TRIED // _MEASURED], []
        for rate in self.rates:
            books = codec.learn(learned_rows, torch.full((len(learned),), rate, device=table.device))
            left.append(codec._missed(rows, rate, books, metric))
        measured = torch.tensor(left, dtype=torch.float64) / float(squared_norms(rows, metric).sum())
        rates = codec.allocate(energy, weights, is_small, measured)
        return self._with_layout(known, codec.num_axes, costs_of, rates), rates

    def _missed(self, rows: Tensor, rate: float, books: Books, metric: Tensor) -> float:
        """Return the squared error of rows ``(n, D)`` of one rate in a metric, with feedback."""
        books = books | self.derived(books, [rate])
        seen = Metric(metric.to(rows)).seen_by(functools.partial(self.project, books=books))
        if rate:
            values = self.decode(*self.encode(rows, rate, books, seen), rate, books)
        else:
            values = self.uncoded(self.uncoded_scales(rows, books, seen), books)
        differences = self.project(rows, books) - values
        return float((differences @ seen.matrix * differences).sum())

    def _fitted(
        self,
        known: _Statistics,
        metric: Tensor | None,
        is_small: Callable[[Codec, Mapping[float, int]], bool],
    ) -> tuple[SpectralCodec, Tensor, Tensor]:
        """What `fit` returns, with bits by energy along principal directions times what errors cost, and
        these costs ``(D,)``.
        """
        _, weights, directions, energy, energies = known
        trials, count = [], 0
        while count <= self.dim // 2:
            draft = SpectralCodec(self.dim, layout=[count, *[0] * (len(RATES) - 1) * len(RATES)])
            # What squared errors of reflected numbers (D,) count: with later ones that make up for them, and
            # without.
            costs = lone_costs = torch.ones(self.dim, dtype=torch.float64)
            if metric is not None:
                # Along those directions: a mean over principal ones is larger than over mixtures of them.
                books = {**draft.initial_books(), "axes": _reflections(directions[:, :count])}
                books |= draft.derived(books, ())
                seen = Metric(metric.to(directions)).seen_by(functools.partial(draft.project, books=books))
                # Numbers that are searched together do not make up for each other.
                places = [slice(start, start + TOGETHER) for start in range(0, self.dim, TOGETHER)]
                parts = [seen.upper[place, place].double() for place in places]
                costs = torch.cat([(part.t() @ part).inverse().diagonal() for part in parts]).cpu()
                costs = _leveled(costs, count)
                lone_costs = _leveled(seen.matrix.diagonal().double().cpu(), count)
            spectrum = _spectrum(*energies, count)
            missed = [float(spectrum @ lone_costs)]
            missed += [self._allot(spectrum * costs, rate)[1] for rate in self.rates[1:]]
            errors = torch.tensor(missed, dtype=torch.float64)
            rates = draft.allocate(energy, weights, is_small, errors)
            row_errors = errors[torch.searchsorted(torch.tensor(self.rates), rates)]
            trials.append((float((energy * weights).cpu() @ row_errors), count, rates, costs))
            count = max(count + 1, count * _GROWTH)
        least = min(error for error, *_ in trials)
        _, count, rates, costs = next(trial for trial in trials if trial[0] <= _ENOUGH * least)
        return self._with_layout(known, count, costs, rates), rates, costs

    def _with_layout(self, known: _Statistics, count: int, costs: Tensor, rates: Tensor) -> SpectralCodec:
        """Return a codec with so many reflections and the bits of directions for words with these rates."""
        table, weights, directions, _, energies = known
        layout = [count]
        for rate in RATES[1:]:
            ids = (rates == rate).nonzero().flatten().to(table.device)
            ids = ids[:: 1 + len(ids) // _SAMPLE]
            of_rate = _energies(table, ids, weights, directions) if len(ids) else energies
            layout += self._allot(_spectrum(*of_rate, count) * costs, rate)[0]
        return SpectralCodec(self.dim, layout=layout)

    def _allot(self, variances: Tensor, rate: float) -> tuple[list[int], float]:
        """How many directions of words of a rate have each of `RATES`, and the squared error that is left.

        Bits go one by one to the direction whose squared error they lower most.
        """
        rates = torch.tensor(self.rates, dtype=torch.float64)
        limits, steps = 4.0**-rates, rates.diff()
        gains = variances.double().unsqueeze(1) * (limits.diff().neg() / steps)
        order = gains.flatten().argsort(descending=True, stable=True)
        # As many bits as rows fit into those of the rate without directions; those of the first state are
        # not those of a step.
        total, is_long = rate * self.dim + max(RATES), True
        while is_long:
            fits = steps[order % len(steps)].cumsum(0) <= total + 1e-9
            chosen = torch.bincount(order[: int(fits.sum())] // len(steps), minlength=len(variances))
            counts = dict(zip(self.rates, chosen.bincount(minlength=len(self.rates)).tolist()))
            runs = tuple((bits, count) for bits, count in counts.items() if bits * count)
            is_long = stream_bytes(steps_for(runs[::-1])) > self.row_bytes(rate)
            total -= 1
        return [counts.get(bits, 0) for bits in RATES], float((variances * limits[chosen]).sum())

    def learn(self, rows: Tensor, rates: Tensor) -> Books:
        """Reflections onto the principal directions; means and sizes of directions with a small error.

        Sizes are root mean squares around the means. They are larger where numbers have long tails: what is
        beyond the largest entry is an error, which is known for normal numbers.
        """
        axes = _reflections(_principal_directions(rows)[:, : self.num_axes])
        books = {**self.initial_books(), "axes": axes.to(rows)}
        reflected, count = self.project(rows, books | self.derived(books, ())), self.num_axes
        for rate in rates.unique().tolist():
            place, rows_of_rate = RATES.index(rate), reflected[rates == rate]
            sizes = row_sizes(rows_of_rate)
            numbers, weights = rows_of_rate / sizes, sizes.square()
            weights = weights / weights.sum().clamp(min=1e-30)  # zeros if all rows are
            books["center"][place] = center = (weights * numbers).sum(dim=0)[:count]
            if not rate:
                continue
            numbers[:, :count] -= center
            powers = (weights * numbers.square()).sum(dim=0)
            powers = torch.cat([powers[:count], powers[count:].mean(dim=0, keepdim=True)])
            spread = powers.sqrt().clamp(min=1e-4)
            # In blocks: there are errors for every increase. A few of the other directions, which are alike.
            all_bits = self._bits[rate]
            columns = [*range(min(count, len(all_bits)))]
            columns += [*range(count, len(all_bits), 1 + self.dim // _OTHERS)]
            places = torch.tensor(columns, dtype=torch.long, device=rows.device)
            sized = numbers[:, places] / spread[places.clamp(max=count)]
            bits = [all_bits[column] for column in columns]
            blocks = zip(sized.split(BLOCK), weights.split(BLOCK))
            expected = ((of * _expected(part, bits, _MORE_INCREASES)).sum(dim=1) for part, of in blocks)
            errors = sum(expected, start=sized.new_zeros(()))
            increases = errors.new_tensor(_MORE_INCREASES)
            spread[:count][: len(columns)] *= increases[errors[:, :count].argmin(dim=0)]
            # Others are close to normal: they are increased by powers of 2 only.
            whole = increases.log2() % 1 == 0
            spread[count:] *= increases[whole][errors[whole, count:].sum(dim=1).argmin()]
            books["spread"][place - 1] = spread
        return books

    def encode(self, rows: Tensor, rate: float, books: Books, metric: Metric | None = None) -> Encoded:
        """The path with the least error for reflected rows at the size of entries."""
        reflected = self.project(rows, books)
        steps, gains = steps_for(self._runs[rate]), gains_for(self._runs[rate], rows.device)
        sizes, center = books[f"sizes{float(rate)}"][: len(gains)], books[f"center{float(rate)}"]
        scales, means, spread = row_sizes(rows), center[: len(sizes)], sizes / gains
        numbers = (reflected / scales)[:, : len(sizes)] - means
        expected = _expected(numbers / spread, self._bits[rate], _INCREASES, means / spread)
        best = (spread.square() * expected).sum(dim=2).argmin(dim=0)
        scales = scales * scales.new_tensor(_INCREASES)[best].unsqueeze(1)
        states = find_path(reflected / scales - center, steps, sizes, metric)
        values = F.pad(entries_of(states, steps) * sizes, (0, self.dim - len(sizes))) + center
        codes = packed_states(states, steps)
        missing = self.row_bytes(rate) - codes.size(1)
        return Encoded(F.pad(codes, (0, missing)), fitted_scales(reflected, values, metric))

    def decode(self, codes: Tensor, scales: Tensor, rate: float, books: Books) -> Tensor:
        """Reflected rows."""
        sizes, center = books[f"sizes{float(rate)}"], books[f"center{float(rate)}"]
        if kernels.usable(codes, scales, sizes, center):  # graphs cannot have the plan of `decoding`
            return kernels.decode_rows(codes, scales, *self.decoding(rate, books))
        entries = read_entries(codes, steps_for(self._runs[rate]))
        values = F.pad(entries, (0, self.dim - entries.size(1))) * sizes + center
        return values.to(scales.dtype) * scales

    def decoding(self, rate: float, books: Books) -> tuple[kernels.EntryPlan, Any, Any]:
        return entry_plan(self._runs[rate]), books[f"sizes{float(rate)}"], books[f"center{float(rate)}"]

    def derived(self, books: Books, rates: Sequence[float]) -> Books:
        """T for axes A: ``v - (v Aᵀ) T A`` is v after all reflections, one after the other. Also the mean
        ``(D,)`` of numbers and the size ``(D,)`` of entries of words of each rate.

        For unit axes, the inverse of T has their products above its diagonal of 1/2 (the compact WY form of
        Schreiber & Van Loan, 1989).
        """
        axes = books["axes"].to(torch.promote_types(books["axes"].dtype, torch.float32))
        units, norms = F.normalize(axes), axes.norm(dim=1, keepdim=True).clamp(min=1e-12)
        eye = torch.eye(len(units)).to(units)
        inverse = (units @ units.t()).triu(1) + eye / 2
        turn = torch.linalg.solve_triangular(inverse, eye / norms.t(), upper=True) / norms
        derived, rest = {"turn": turn}, self.dim - self.num_axes
        for rate in rates:
            place = RATES.index(rate)
            derived[f"center{float(rate)}"] = F.pad(books["center"][place], (0, rest))
            if rate:
                spread, gains = books["spread"][place - 1], gains_for(self._runs[rate], axes.device)
                sizes = torch.cat([spread[:-1], spread[-1:].expand(rest)])
                derived[f"sizes{float(rate)}"] = sizes * F.pad(gains, (0, self.dim - len(gains))).to(
                    spread.dtype
                )
        return derived

    def project(self, hidden: Tensor, books: Books, is_inverted: bool = False) -> Tensor:
        axes = books["axes"].to(torch.promote_types(books["axes"].dtype, torch.float32))
        turn = books["turn"].t() if is_inverted else books["turn"]
        return hidden - (hidden.to(axes.dtype) @ axes.t() @ turn @ axes).to(hidden.dtype)

    def direct_scores(
        self, hidden: Tensor, codes: Tensor, scales: Tensor, rate: float, books: Books
    ) -> Tensor | None:
        steps, count = steps_for(self._runs[rate]), sum(number for _, number in self._runs[rate])
        scores = path_scores((hidden * books[f"sizes{float(rate)}"])[:, :count], codes, steps, scales)
        if scores is None:
            return None
        # Autocast does not round these sums.
        offsets = (hidden * books[f"center{float(rate)}"]).sum(dim=1, keepdim=True)
        return scores.addcmul_(offsets.to(scores.dtype), scales.t().to(scores.dtype))


def _expected(
    numbers: Tensor, bits: Sequence[float], increases: Sequence[float], center: Tensor | float = 0.0
) -> Tensor:
    """The squared errors ``(i, n, d)`` of numbers with bits, for each of i increases of entries.

    Normal numbers of size one have those of `ERRORS`. Those beyond the largest entry of others add to it. The
    center, which numbers ``(n, d)`` are less, increases with entries.
    """
    factors = numbers.new_tensor(increases).view(-1, 1, 1)
    border = factors * numbers.new_tensor([path_gain(width) * _LARGEST[path_book(width)] for width in bits])
    beyond = ((numbers - (factors - 1) * center).abs() - border).clamp(min=0).square()
    usual = (1 + border**2) * torch.erfc(border / 2**0.5)
    usual -= (2 / torch.pi) ** 0.5 * border * torch.exp(-(border**2) / 2)
    return numbers.new_tensor([ERRORS[width] for width in bits]) * factors**2 + beyond - usual


def _principal_directions(rows: Tensor) -> Tensor:
    """Directions ``(D, D)`` along which rows ``(n, D)`` are largest, as columns, largest first; on a CPU."""
    products = torch.zeros(rows.size(1), rows.size(1), dtype=torch.float64, device=rows.device)
    for part in (block.float() for block in rows.split(_BLOCK)):
        products += (part.t() @ part).double()
    return torch.linalg.eigh(products.cpu()).eigenvectors.flip(1)


def _reflections(directions: Tensor) -> Tensor:
    """The axes ``(K, D)`` of reflections that turn the first dimensions into directions ``(D, K)``."""
    dim, count = directions.shape
    axes = torch.geqrf(directions.contiguous()).a.tril(-1).t() if count else directions.t()
    return F.normalize(axes + torch.eye(count, dim).to(directions))


def _energies(
    table: Tensor, ids: Tensor, weights: Tensor, directions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sums for some rows of a table: of squares along directions ``(D, D)``, of products with the
    sizes of rows, and of the squares of these.
    """
    squares, products = weights.new_zeros(2, directions.size(1))
    norm = weights.new_zeros(())
    for block in ids.split(_BLOCK):
        block_weights, factors = weights[block].unsqueeze(1), (table[block].float() @ directions).double()
        sizes = factors.square().mean(dim=1, keepdim=True).sqrt()
        squares += (block_weights * factors.square()).sum(dim=0)
        products += (block_weights * sizes * factors).sum(dim=0)
        norm += (block_weights * sizes.square()).sum()
    return squares, products, norm


def _spectrum(squares: Tensor, products: Tensor, norm: Tensor, count: int) -> Tensor:
    """The energies ``(D,)`` of K directions around their means in rows of size one, and of others, evenly."""
    around_means = squares[:count] - products[:count].square() / norm.clamp(min=1e-30)
    return _leveled(torch.cat([around_means.clamp(min=0), squares[count:]]), count).cpu()


def _leveled(values: Tensor, count: int) -> Tensor:
    """Values ``(D,)`` of K directions, and the mean of others."""
    return torch.cat([values[:count], values[count:].mean().expand(len(values) - count)])
