"""Fits without gradients: factorizations, codes, groups and clusters, against plain loops and bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from shared_embeddings.fitting import codes as codes_of
from shared_embeddings.fitting import factorization
from shared_embeddings.fitting.codes import class_centers, kmeans, least_squares_codebooks, nearest
from shared_embeddings.fitting.factorization import (
    common_direction,
    least_mean_distance,
    lifted,
    mean_distance,
    shifted,
    truncated_svd,
    without_negatives,
)
from shared_embeddings.methods import group_reduce as group_reduction
from tests.shared_embeddings.references import tensor_train_row


def low_rank_table(words: int = 60, dim: int = 12, rank: int = 4, noise: float = 0.1) -> Tensor:
    """A random table that is near one of low rank."""
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(words, rank, generator=generator), torch.randn(rank, dim, generator=generator)
    return first @ second + noise * torch.randn(words, dim, generator=generator)


def clustered_table(words: int = 2000, dim: int = 32) -> tuple[Tensor, Tensor]:
    """A table whose words of four kinds lie near four different subspaces, and their Zipfian counts."""
    generator = torch.Generator().manual_seed(1)
    subspaces = torch.randn(4, 6, dim, generator=generator)
    kinds = torch.randint(4, (words,), generator=generator)
    codes = torch.randn(words, 1, 6, generator=generator)
    table = (codes @ subspaces[kinds]).squeeze(1) * dim**-0.5
    counts = 100_000 / torch.arange(1, words + 1)
    shuffled = torch.randperm(words, generator=generator)
    return table + 0.05 * torch.randn(words, dim, generator=generator), counts.floor()[shuffled]


def weighted_error(table: Tensor, approximation: Tensor, weights: Tensor) -> float:
    """The sum over words of weight times squared error, in a plain loop."""
    return sum(
        float(weight) * float((row.double() - near.double()).square().sum())
        for row, near, weight in zip(table, approximation, weights)
    )


# Singular values


@pytest.mark.parametrize("shape", [(60, 12), (7, 12), (12, 12), (20_000, 6)], ids=str)
@pytest.mark.parametrize("rank", [1, 3, 6])
def test_truncated_svd_is_the_best_of_its_rank(shape: tuple[int, int], rank: int) -> None:
    table = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(table.double(), full_matrices=False)
    expected = left[:, :rank] * values[:rank] @ right[:rank]
    codes, basis = factorization.truncated_svd(table, rank)
    assert codes.shape == (shape[0], rank) and basis.shape == (rank, shape[1])
    assert codes.dtype == basis.dtype == torch.float32
    torch.testing.assert_close((codes @ basis).double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(basis @ basis.T, torch.eye(rank), rtol=0, atol=1e-5)


def test_weighted_svd_is_the_svd_of_the_weighted_rows() -> None:
    table = low_rank_table()
    weights = 100.0 / torch.arange(1, 61)
    roots = weights.sqrt().unsqueeze(1).double()
    left, values, right = torch.linalg.svd(roots * table.double(), full_matrices=False)
    expected = left[:, :3] * values[:3] @ right[:3] / roots
    codes, basis = factorization.truncated_svd(table, 3, weights)
    torch.testing.assert_close((codes @ basis).double(), expected, rtol=0, atol=1e-5)


def test_word_without_weight_gets_its_best_code() -> None:
    """Only the first two words count, and they lie on one axis."""
    table = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 50.0]])
    codes, basis = factorization.truncated_svd(table, 1, torch.tensor([1.0, 1, 0]))
    torch.testing.assert_close(codes @ basis, torch.tensor([[1.0, 0], [2, 0], [3, 0]]))


# Tensor train


def expanded(cores: list[Tensor]) -> Tensor:
    """The table of a tensor train, a word and a dimension at a time."""
    words = math.prod(core.shape[1] for core in cores)
    return torch.stack([tensor_train_row(cores, word) for word in range(words)])


@pytest.mark.parametrize(
    ("vocab_shape", "dim_shape", "ranks"),
    [((5, 8), (3, 4), 15), ((2, 4, 5), (3, 2, 2), (6, 10)), ((2, 2, 2, 5), (2, 3, 1, 2), (4, 24, 10))],
)
def test_tt_svd_is_exact_at_full_ranks(
    vocab_shape: tuple[int, ...], dim_shape: tuple[int, ...], ranks: int | tuple[int, ...]
) -> None:
    table = torch.randn(37, 12, generator=torch.Generator().manual_seed(0))
    cores = factorization.tt_svd(table, vocab_shape, dim_shape, ranks)
    found = expanded(cores)
    torch.testing.assert_close(found[:37], table, rtol=0, atol=1e-5)
    assert found[37:].abs().max() < 1e-5


def test_tt_svd_of_two_cores_is_the_svd_of_the_rearranged_table() -> None:
    table = torch.randn(40, 12, generator=torch.Generator().manual_seed(0))
    cores = factorization.tt_svd(table, (5, 8), (3, 4), 6)
    matrix = table.view(5, 8, 3, 4).permute(0, 2, 1, 3).reshape(15, 32)
    values = torch.linalg.svdvals(matrix)
    error = (expanded(cores) - table).norm().item()
    assert error == pytest.approx(values[6:].norm().item(), rel=1e-4)
    assert [tuple(core.shape) for core in cores] == [(1, 5, 3, 6), (6, 8, 4, 1)]


def test_tt_svd_finds_a_train_of_the_same_rank_and_may_have_ranks_to_spare() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 3, 2, 2), (2, 2, 3, 2), (2, 4, 2, 1)]
    table = expanded([torch.randn(*shape, generator=generator) for shape in shapes])
    for ranks in ((2, 2), (2, 9), (20, 3)):
        cores = factorization.tt_svd(table, (3, 2, 4), (2, 3, 2), ranks)
        assert [core.shape[3] for core in cores] == [*ranks, 1]
        torch.testing.assert_close(expanded(cores), table, rtol=1e-4, atol=1e-5)


# Product quantization


def test_product_quantization_is_exact_with_a_cluster_for_each_word() -> None:
    table = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
    codes, centroids = codes_of.product_quantization(table, 3, 9)
    assert codes.shape == (9, 3) and centroids.shape == (3, 9, 2)
    rows = [torch.cat([centroids[g, codes[w, g]] for g in range(3)]) for w in range(9)]
    torch.testing.assert_close(torch.stack(rows), table)


def test_product_quantization_gives_every_piece_its_nearest_centroid() -> None:
    table = low_rank_table(200)
    codes, centroids = codes_of.product_quantization(table, 4, 5, seed=3)
    assert codes.dtype == torch.int64 and centroids.dtype == torch.float32
    for group in range(4):
        piece = table[:, group * 3 : group * 3 + 3]
        distances = torch.cdist(piece, centroids[group])
        chosen = distances.gather(1, codes[:, group : group + 1]).squeeze(1)
        torch.testing.assert_close(chosen, distances.amin(dim=1), rtol=1e-3, atol=1e-4)
    again = codes_of.product_quantization(table, 4, 5, seed=3)
    assert torch.equal(codes, again[0]) and torch.equal(centroids, again[1])


# Codes


def sums(codes: Tensor, codebooks: Tensor) -> Tensor:
    """The vectors ``(V, D)`` of codes, in a plain loop."""
    return torch.stack([sum(book[code] for book, code in zip(codebooks, word)) for word in codes.tolist()])


@pytest.mark.slow
def test_learned_codes_recover_a_table_of_codes() -> None:
    generator = torch.Generator().manual_seed(0)
    books = torch.randn(3, 4, 8, generator=generator)
    table = sums(torch.randint(4, (300, 3), generator=generator), books)
    codes, codebooks = codes_of.learn_codes(table, 3, 4)
    assert codes.shape == (300, 3) and codebooks.shape == (3, 4, 8)
    assert 0 <= int(codes.min()) and int(codes.max()) < 4
    left = (sums(codes, codebooks) - table).square().sum() / table.var(0, correction=0).mul(300).sum()
    assert left < 0.5
    random = torch.randint(4, (300, 3), generator=generator)
    refit = least_squares_codebooks(table, random, 4)
    assert (sums(codes, codebooks) - table).norm() < 0.8 * (sums(random, refit) - table).norm()


def test_codebooks_are_the_least_squares_solution_of_their_codes() -> None:
    table = low_rank_table(50)
    codes = torch.randint(3, (50, 2), generator=torch.Generator().manual_seed(0))
    ones = torch.zeros(50, 6)
    for word, (first, second) in enumerate(codes.tolist()):
        ones[word, first] = ones[word, 3 + second] = 1.0
    expected = ones.double() @ torch.linalg.pinv(ones.double()) @ table.double()
    found = sums(codes, least_squares_codebooks(table, codes, 3))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)


# Groups


def test_groups_by_frequency_worked_by_hand() -> None:
    """Counts 6 | 3, 3 | 1 * 6 are three groups of 6; averages 6, 3, 1 make ranks 12, 6 and 2 before the caps.

    In 100 dimensions, one word can use rank one and two words rank two; with six words, 2 is below the cap.
    """
    layout = group_reduction.group_layout(np.array([6.0, 3, 3, 1, 1, 1, 1, 1, 1]), 100, 3, 2)
    assert layout == ((1, 2, 6), (1, 2, 2))


def test_ranks_grow_with_the_average_frequency_up_to_the_highest() -> None:
    counts = np.repeat([8.0, 4, 2, 1], [100, 200, 400, 800])
    assert group_reduction.group_layout(counts, 500, 4, 5) == (
        (100, 200, 400, 800),
        (40, 20, 10, 5),
    )
    assert group_reduction.group_layout(counts, 500, 4, 5, 12).ranks == (12, 12, 10, 5)
    # Half of 40 dimensions, with enough words.
    assert group_reduction.group_layout(counts, 40, 4, 5).ranks == (20, 20, 10, 5)


@pytest.mark.parametrize("words", [1, 2, 5, 30])
def test_every_group_has_a_word(words: int) -> None:
    for groups in range(1, words + 1):
        sizes, ranks = group_reduction.group_layout(1.0 / np.arange(1, words + 1) ** 2, 16, groups, 3)
        assert len(sizes) == len(ranks) == groups
        assert sum(sizes) == words and min(sizes) >= 1 and min(ranks) >= 1


def rebuilt(found: group_reduction.GroupReduction) -> Tensor:
    """The table of a group reduction, word by word."""
    used = [0] * len(found.codes)
    rows = []
    for group in found.groups.tolist():
        rows.append(found.codes[group][used[group]] @ found.bases[group])
        used[group] += 1
    assert used == [len(codes) for codes in found.codes]
    return torch.stack(rows)


def parameters(found: group_reduction.GroupReduction) -> int:
    return sum(part.numel() for part in (*found.codes, *found.bases))


def test_group_reduce_is_a_weighted_svd_for_each_group() -> None:
    table, counts = clustered_table(300, 16)
    found = group_reduction.group_reduce(table, counts, 3, 2, refinements=0)
    order = counts.argsort(descending=True, stable=True)
    layout = group_reduction.group_layout(counts[order].clamp(min=1).numpy(), 16, 3, 2)
    start = 0
    for group, (size, rank) in enumerate(zip(*layout)):
        members = order[start : start + size].sort().values
        start += size
        assert (found.groups == group).nonzero().flatten().tolist() == members.tolist()
        codes, basis = factorization.truncated_svd(table[members], rank, counts[members])
        torch.testing.assert_close(found.codes[group] @ found.bases[group], codes @ basis, rtol=0, atol=1e-5)
    assert found.errors[0] == pytest.approx(weighted_error(table, rebuilt(found), counts), rel=1e-4)


def test_refinements_lower_the_error_and_never_add_parameters() -> None:
    table, counts = clustered_table()
    found = group_reduction.group_reduce(table, counts, 5, 4, refinements=6)
    assert len(found.errors) > 1 and found.errors == sorted(found.errors, reverse=True)
    assert found.errors[-1] < 0.95 * found.errors[0] and min(map(len, found.codes)) >= 1
    assert found.errors[-1] == pytest.approx(weighted_error(table, rebuilt(found), counts), rel=1e-4)
    before = group_reduction.group_reduce(table, counts, 5, 4, refinements=0)
    assert parameters(found) <= parameters(before)


def test_no_word_is_moved_below_the_minimum_rank() -> None:
    """The first groups are too small for it, so their words do not move."""
    table, counts = clustered_table()
    before = group_reduction.group_reduce(table, counts, 8, 5, refinements=0)
    after = group_reduction.group_reduce(table, counts, 8, 5, refinements=3)
    ranks = torch.tensor([len(basis) for basis in before.bases])
    assert (ranks < 5).any() and len(after.errors) > 1
    small = (ranks < 5)[before.groups]
    assert torch.equal(after.groups[small], before.groups[small])
    assert not (ranks < 5)[after.groups[~small]].any()


@pytest.mark.parametrize(("groups", "min_rank"), [(2, 3), (5, 4), (10, 3)])
@pytest.mark.parametrize("kind", ["clustered", "low rank", "noise"])
def test_group_reduce_beats_plain_svd_of_the_same_size(groups: int, min_rank: int, kind: str) -> None:
    table, counts = clustered_table()
    if kind == "low rank":
        table = low_rank_table(len(table), 32, 10)
    elif kind == "noise":
        table = torch.randn_like(table)
    found = group_reduction.group_reduce(table, counts, groups, min_rank, refinements=2)
    rank = -(-parameters(found) // sum(table.shape))
    for weights in (None, counts):
        codes, basis = factorization.truncated_svd(table, rank, weights)
        assert found.errors[-1] <= weighted_error(table, codes @ basis, counts)


def test_unseen_words_work() -> None:
    table, counts = clustered_table(200, 16)
    counts[counts < counts.median()] = 0
    found = group_reduction.group_reduce(table, counts, 4, 2)
    assert rebuilt(found).isfinite().all() and len(found.codes) == 4


def test_group_reduce_of_one_group_is_a_weighted_svd() -> None:
    table, counts = clustered_table(100, 16)
    found = group_reduction.group_reduce(table, counts, 1, 5)
    codes, basis = factorization.truncated_svd(table, 5, counts)
    torch.testing.assert_close(rebuilt(found), codes @ basis, rtol=0, atol=1e-5)


# Loading into embeddings


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


# Clusters


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
    monkeypatch.setattr(codes_of, "_DRAWN_DISTANCES", 3000 * 40 // 3)
    monkeypatch.setattr(codes_of, "_LEAST_SAMPLE", 0)
    monkeypatch.setattr(codes_of, "_PER_CLUSTER", 30)
    codes, found = kmeans(points, 40, seed=1, products=2**40)
    assert codes.shape == (3000,) and found.shape == (40, 6)
    variance = points.var(dim=0).sum()
    assert float((found[codes] - points).square().sum(1).mean()) < 0.1 * variance
    torch.testing.assert_close(codes, nearest(points, found)[0])


def test_codes_outside_the_sample_are_as_accurate(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    books = torch.randn(6, 8, 12, generator=generator)
    words = torch.randint(8, (2000, 6), generator=generator)
    table = sum(book[code] for book, code in zip(books, words.unbind(1)))
    assert isinstance(table, Tensor)

    def error() -> float:
        codes, entries = codes_of.learn_codes(table, 6, 8)
        rows = sum(book[code] for book, code in zip(entries, codes.long().unbind(1)))
        return float((rows - table).norm() / table.norm())

    of_all = error()
    monkeypatch.setattr(codes_of, "_SAMPLE", 1500)
    monkeypatch.setattr(codes_of, "_ROWS", 64)
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
