"""Codecs on any table: more bits leave a smaller error, and no codec a larger one than rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import shared_embeddings as se
import shared_embeddings.quant.codecs  # noqa: F401  # registers them
from shared_embeddings.quant.codec import codecs

WORDS, DIM = 60, 24
RATES = (0.25, 0.5, 1, 2, 3, 4, 5, 6, 7, 8)
# What 8 bits leave of normal numbers is 0.005; in a table of few numbers up to 0.009. Differences of less are
# those of codebooks and of paths, not of bits.
FINEST = 0.009


def normal(words: int = WORDS, dim: int = DIM) -> Tensor:
    return torch.randn(words, dim, generator=torch.Generator().manual_seed(words * dim))


def scaled(*parts: tuple[int, float]) -> Tensor:
    """A table whose first rows have other scales, each given with how many rows have it."""
    counts, scales = zip(*parts)
    rest = WORDS - sum(counts)
    return (
        normal()
        * torch.cat([torch.tensor(scales).repeat_interleave(torch.tensor(counts)), torch.ones(rest)])[:, None]
    )


def large_rows_alike() -> Tensor:
    table = normal()
    table[:6] = 100 * normal(1) * (1 + 0.01 * table[:6])
    return table


TABLES: dict[str, Callable[[], Tensor]] = {
    "a fifth zero": lambda: 0.05 * scaled((12, 0.0)),
    "most zero": lambda: scaled((50, 0.0)),
    "all zero": lambda: torch.zeros(WORDS, DIM),
    "tiny": lambda: 1e-30 * normal(),
    "zero, tiny and huge": lambda: scaled((15, 1e29), (15, 1e-30), (5, 0.0)),
    "large rows alike": large_rows_alike,
    "constant": lambda: torch.full((WORDS, DIM), 0.3),
    "one number": lambda: normal(1, 1),
    "two rows of 3": lambda: normal(2, 3),
    "three rows": lambda: normal(3),
    "two columns": lambda: normal(dim=2),
}


@pytest.mark.slow_except("a fifth zero-plain", "zero, tiny and huge-weighted", "two columns-plain")
@pytest.mark.parametrize(
    ("rates", "is_weighted"), [(RATES, False), (RATES[1::3], True)], ids=["plain", "weighted"]
)
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
def test_more_bits_are_better_and_rounding_is_not(
    table: Callable[[], Tensor], rates: tuple[float, ...], is_weighted: bool
) -> None:
    """Weights are a metric and the importance of words, as a calibration measures them."""
    rows, weights, costs = table(), torch.ones(1), torch.eye(1)
    known: dict[str, Tensor] = {}
    if is_weighted:
        states = normal(2 * rows.size(1), rows.size(1))
        costs, weights = states.t() @ states, normal(len(rows), 1)[:, 0].abs()
        known = {"metric": costs, "importance": weights}

    def size(values: Tensor) -> float:
        return float((values.double() * weights.double().sqrt()[:, None]).norm())

    errors: dict[str, list[float]] = {}
    for codec in codecs():
        for bits in rates:
            embedding = se.fit("quantized", rows, bits=bits, codec=codec, progress=False, **known)[0].eval()
            decoded = embedding.table().detach()
            assert bool(decoded.isfinite().all()), (codec, bits)
            missed = size(decoded.double() - rows.double()) / (size(rows) or 1.0)
            errors.setdefault(codec, []).append(missed)
        for place, (fewer, more) in enumerate(zip(errors[codec], errors[codec][1:])):
            # Other programs read rounded numbers of one rate, so words do not get bits by their norms.
            is_single = codec == "uniform" and rates[place + 1] >= 1 > rates[place]
            assert is_single or more <= 1.05 * fewer + FINEST, (codec, rates[place + 1], errors[codec])
    for codec, of_codec in errors.items():
        for bits, missed, rounded in zip(rates, of_codec, errors["uniform"]):
            # Rounding is exact where the numbers of a row are equal, or there is one: then no codec may leave
            # more than rounding leaves of normal numbers.
            assert missed <= max(1.1 * rounded, 1.5 * 2.0**-bits, FINEST), (codec, bits, missed, rounded)


@pytest.mark.slow_except("spectral-one direction", "uniform-two directions")
@pytest.mark.parametrize("metric", ["one direction", "one number", "two directions", "nearly one direction"])
@pytest.mark.parametrize("codec", codecs())
def test_metrics_of_few_directions(codec: str, metric: str) -> None:
    """Their errors fall, and those of all directions, which were several times those of rows, hardly rise."""
    rows = normal(200)
    states = normal(1 + (metric == "two directions"))
    matrix = torch.diag(torch.eye(DIM)[0]) if metric == "one number" else states.t() @ states
    if metric == "nearly one direction":
        matrix += 1e-4 * torch.eye(DIM)
    for bits in (1.0, 2.0, 2.5, 4.0, 8.0):
        plain, cost = [], []
        for known in (None, matrix):
            embedding = se.fit("quantized", rows, bits=bits, codec=codec, metric=known, progress=False)[0]
            missed = (embedding.eval().table().detach() - rows).double()
            plain.append(float(missed.norm()))
            cost.append(float((missed @ matrix.double() * missed).sum().sqrt()))
        assert cost[1] <= 1.01 * cost[0] and plain[1] <= 1.2 * plain[0], (bits, plain, cost)
