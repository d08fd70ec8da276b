"""k-means, sums of codebook entries, and class vectors: near the best, the same with the same seed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shared_embeddings.fitting import clustering, codes
from shared_embeddings.fitting.clustering import class_centers, kmeans, nearest
from shared_embeddings.fitting.codes import learn_codes


def islands(points: int = 3000, clusters: int = 40) -> tuple[Tensor, Tensor]:
    """Points ``(n, 6)`` around centers ``(K, 6)`` that are far from each other."""
    generator = torch.Generator().manual_seed(0)
    centers = 20 * torch.randn(clusters, 6, generator=generator)
    chosen = torch.arange(points) % clusters
    return centers[chosen] + 0.1 * torch.randn(points, 6, generator=generator), centers


def test_every_island_is_a_cluster() -> None:
    points, centers = islands()
    codes, found = kmeans(points, 40, seed=1, products=2**40)
    assert float((found[codes] - points).square().sum(1).mean()) < 1.1 * 6 * 0.01
    assert nearest(centers, found)[0].unique().numel() == 40
    again = kmeans(points, 40, seed=1, products=2**40)
    assert torch.equal(codes, again[0]) and torch.equal(found, again[1])


def test_parts_and_samples_find_the_islands_too(monkeypatch: pytest.MonkeyPatch) -> None:
    points, _ = islands()
    monkeypatch.setattr(clustering, "_DRAWN_DISTANCES", 3000 * 40 // 3)
    monkeypatch.setattr(clustering, "_LEAST_SAMPLE", 0)
    monkeypatch.setattr(clustering, "_PER_CLUSTER", 30)
    codes, found = kmeans(points, 40, seed=1, products=2**40)
    assert codes.shape == (3000,) and found.shape == (40, 6)
    variance = points.var(dim=0).sum()
    assert float((found[codes] - points).square().sum(1).mean()) < 0.1 * variance
    torch.testing.assert_close(codes, nearest(points, found)[0])


def test_codes_of_words_outside_the_sample_are_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    books = torch.randn(6, 8, 12, generator=generator)
    words = torch.randint(8, (2000, 6), generator=generator)
    table = sum(book[code] for book, code in zip(books, words.unbind(1)))
    assert isinstance(table, Tensor)

    def error() -> float:
        codes, entries = learn_codes(table, 6, 8)
        rows = sum(book[code] for book, code in zip(entries, codes.long().unbind(1)))
        return float((rows - table).norm() / table.norm())

    of_all = error()
    monkeypatch.setattr(codes, "_SAMPLE", 1500)
    monkeypatch.setattr(codes, "_ROWS", 64)
    assert error() < 1.1 * of_all < 0.6


def test_class_vectors_have_the_least_mean_distance() -> None:
    """One level: the geometric median of each class, where the gradient of the distances is zero."""
    generator = torch.Generator().manual_seed(0)
    part = torch.randn(200, 5, generator=generator) ** 3
    classes = torch.randint(4, (200, 1), generator=generator)
    words = torch.arange(1, 200)
    (found,) = class_centers([part], classes, words, [4])
    for number in range(4):
        members = words[classes[words, 0] == number]
        missed = part[members] - found[number]
        pull = (missed / missed.norm(dim=1, keepdim=True)).mean(dim=0)
        assert float(pull.norm()) < 0.02
        mean = part[members].mean(dim=0)
        assert missed.norm(dim=1).mean() <= (part[members] - mean).norm(dim=1).mean()
