"""Low-rank factors without negative codes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shared_embeddings.fitting.factorization import truncated_svd
from shared_embeddings.fitting.nonnegative import (
    common_direction,
    least_mean_distance,
    lifted,
    mean_distance,
    shifted,
    without_negatives,
)


def codes_around(direction: Tensor, spread: float, words: int = 200) -> Tensor:
    """Codes ``(V, R)`` in a cone about `direction`, of all lengths."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(words, len(direction), generator=generator)
    return (direction + spread * noise) * (0.1 + torch.rand(words, 1, generator=generator))


def test_mean_distance_by_hand() -> None:
    codes, basis = torch.tensor([[1.0], [0.0]]), torch.tensor([[1.0, 1.0]])
    assert mean_distance(torch.tensor([[4.0, 5.0], [0.0, 1.0]]), codes, basis) == pytest.approx(3.0)


def test_least_mean_distance_finds_the_best_line() -> None:
    """Rows near a line, and a few long ones that rotate the SVD; against a search over all directions."""
    generator = torch.Generator().manual_seed(6)
    near = torch.randn(60, 1, generator=generator) * torch.tensor([[2.0, 1.0]])
    table = near + 0.2 * torch.randn(60, 2, generator=generator)
    table = torch.cat((table, 4.0 * torch.tensor([[-1.0, 1.0], [-1.2, 1.0], [-1.0, 1.3]])))
    angles = torch.arange(0.0, math.pi, 1e-4)
    across = torch.stack((-angles.sin(), angles.cos()))
    best = float((table @ across).abs().mean(dim=0).min())
    assert mean_distance(table, *truncated_svd(table, 1)) > 1.02 * best
    assert mean_distance(table, *least_mean_distance(table, 1)) == pytest.approx(best, rel=1e-3)


def test_least_mean_distance_is_no_worse_than_svd_and_exact_where_svd_is() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(90, 12, generator=generator) * torch.rand(90, 1, generator=generator)
    for rank in (1, 5, 11):
        svd = mean_distance(table, *truncated_svd(table, rank))
        assert mean_distance(table, *least_mean_distance(table, rank)) < svd
    low = table[:, :3] @ torch.randn(3, 12, generator=generator)
    assert mean_distance(low, *least_mean_distance(low, 3)) < 1e-5
    assert mean_distance(torch.zeros(4, 3), *least_mean_distance(torch.zeros(4, 3), 2)) == 0.0


def test_common_direction_is_found_in_narrow_and_wide_cones() -> None:
    for spread in (0.1, 0.3):
        codes = codes_around(torch.eye(5)[2], spread)
        direction = common_direction(codes)
        assert direction is not None and float(direction.norm()) == pytest.approx(1.0, abs=1e-5)
        assert float((codes @ direction).min()) > 0.0


def test_common_direction_without_a_mean() -> None:
    """Many equal codes must not dominate: (1, 0) a thousand times and (-0.6, 0.8)."""
    codes = torch.tensor([[1.0, 0.0]]).repeat(1000, 1)
    codes = torch.cat((codes, torch.tensor([[-0.6, 0.8]])))
    assert float(codes.mean(dim=0) @ codes[-1]) < 0.0
    direction = common_direction(codes)
    assert direction is not None and float((codes @ direction).min()) > 0.0


def test_there_is_no_common_direction_around_zero() -> None:
    angles = torch.arange(5) * (2 * math.pi / 5)
    assert common_direction(torch.stack((angles.cos(), angles.sin()), dim=1)) is None
    assert common_direction(torch.zeros(4, 3)) is None


def test_tiny_codes_are_ignored() -> None:
    codes = torch.cat((codes_around(torch.eye(4)[0], 0.1), torch.tensor([[-1e-5, 0.0, 0.0, 0.0]])))
    direction = common_direction(codes)
    assert direction is not None and float(direction[0]) > 0.9


def test_lifted_factors_have_the_same_product() -> None:
    codes, basis = codes_around(torch.eye(6)[1], 0.25), torch.randn(6, 9)
    direction = common_direction(codes)
    assert direction is not None
    positive, other = lifted(codes, basis, direction)
    assert float(positive.min()) >= 0.0 and float(codes.min()) < 0.0
    assert positive.shape == codes.shape and other.shape == basis.shape
    torch.testing.assert_close(positive @ other, codes @ basis, rtol=1e-4, atol=1e-5)


def test_shifted_factors_by_hand() -> None:
    """c = (1, -3) and B = (2): a shift of 3, and a level of the codes' root mean square, sqrt(5)."""
    positive, basis = shifted(torch.tensor([[1.0], [-3.0]]), torch.tensor([[2.0]]))
    level = math.sqrt(5.0)
    torch.testing.assert_close(positive, torch.tensor([[4.0, level], [0.0, level]]))
    torch.testing.assert_close(basis, torch.tensor([[2.0], [-6.0 / level]]))
    torch.testing.assert_close(positive @ basis, torch.tensor([[2.0], [-6.0]]))


def test_without_a_common_direction_a_column_is_lost() -> None:
    generator = torch.Generator().manual_seed(4)
    codes, basis = torch.randn(50, 4, generator=generator), torch.randn(4, 7, generator=generator)
    positive, other = without_negatives(codes, basis)
    assert float(positive.min()) >= 0.0 and positive.shape == codes.shape
    torch.testing.assert_close(positive @ other, codes[:, :3] @ basis[:3], rtol=1e-4, atol=1e-4)


def test_one_column_keeps_the_stronger_sign() -> None:
    positive, basis = without_negatives(torch.tensor([[1.0], [2.0], [-4.0]]), torch.tensor([[3.0, 0.0]]))
    torch.testing.assert_close(positive @ basis, torch.tensor([[0.0, 0.0], [0.0, 0.0], [-12.0, 0.0]]))
