"""`se.fit` for every method, the reconstruction loss, and fits without gradients against plain loops."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import shared_embeddings as se
from shared_embeddings.compress.distillation import Reconstruction
from shared_embeddings.compress.fit import report
from shared_embeddings.fitting import codes as codes_of
from shared_embeddings.fitting.codes import class_centers, kmeans, least_squares_codebooks, nearest
from shared_embeddings.fitting.factorization import (
    distances,
    least_mean_distance,
    truncated_svd,
    tt_svd,
    without_negatives,
)
from shared_embeddings.utils.errors import UserError
from tests.helpers import example
from tests.shared_embeddings.support import tensor_train_row

VOCABULARY, DIMENSION, PADDING = 120, 24, 3


def clustered_table(seed: int = 0) -> Tensor:
    """A table ``(V, D)`` like a trained one: groups of words, few strong directions, a common part."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(12, DIMENSION, generator=generator)
    words = centers[torch.randint(12, (VOCABULARY,), generator=generator)]
    noise = torch.randn(VOCABULARY, DIMENSION, generator=generator)
    strengths = 1.5 * 0.85 ** torch.arange(DIMENSION)
    return (words + 0.4 * noise) * strengths + 0.3


def zipf_counts() -> Tensor:
    """How often each word occurs."""
    return (10000.0 / torch.arange(1, VOCABULARY + 1)).round()


def fitted(method: str, **changes: Any) -> tuple[se.SharedEmbedding, Any]:
    """One method fitted to the table."""
    settings: dict[str, Any] = {
        "teacher": clustered_table(),
        "token_counts": zipf_counts(),
        "padding_idx": PADDING,
        "steps": 300,
        "progress": False,
        **(example(method, VOCABULARY, DIMENSION) | changes),
    }
    return se.fit(method, **settings)


@pytest.mark.parametrize("method", se.methods())
def test_fit_comes_close(method: str) -> None:
    emb, stats = fitted(method)
    table = clustered_table()
    is_word = torch.arange(VOCABULARY) != PADDING
    missed = (emb.table().detach() - table)[is_word]
    assert stats.loss == pytest.approx(float(missed.norm(dim=1).mean()), rel=1e-4, abs=1e-6)
    assert stats.squared_loss == pytest.approx(float(missed.square().sum(1).mean()), rel=1e-4, abs=1e-6)
    assert stats.relative_error == pytest.approx(
        float(missed.norm() / table[is_word].norm()), rel=1e-4, abs=1e-6
    )
    roots = zipf_counts().sqrt().unsqueeze(1)[is_word]
    assert stats.weighted_error == pytest.approx(
        float((missed * roots).norm() / (table[is_word] * roots).norm()), rel=1e-4, abs=1e-6
    )
    assert stats.relative_error <= se.get_method_config(method).fit_bound
    assert stats.parameters == emb.counts()["total"]
    assert stats.stored_bits == emb.counts()["stored_bits"]
    assert stats.compression == pytest.approx(VOCABULARY * DIMENSION / stats.parameters)
    assert torch.equal(emb.table()[PADDING], torch.zeros(DIMENSION))
    sizes = {"num_embeddings": VOCABULARY, "embedding_dim": DIMENSION, "padding_idx": PADDING}
    again = se.build(method, **sizes, **stats.options)
    again.load_state_dict(emb.state_dict())
    assert torch.equal(again.table(), emb.table())
    assert again.counts() == emb.counts()


@pytest.mark.parametrize("method", se.methods())
def test_same_seed_same_fit_without_global_randomness_or_a_bias(method: str) -> None:
    torch.manual_seed(11)
    without, plain = fitted(method, steps=5)
    drawn = torch.rand(1)
    torch.manual_seed(11)
    assert torch.equal(drawn, torch.rand(1))
    emb, stats = fitted(method, steps=5, output_bias=True)
    added = VOCABULARY + (2 if method == "adaptive" else 0)
    assert stats.options["output_bias"] is True
    assert stats.parameters == plain.parameters + added
    assert torch.equal(emb.output_bias(), torch.zeros(VOCABULARY))
    assert torch.equal(emb.table(), without.table())


def test_projective_is_the_truncated_svd() -> None:
    table = clustered_table()
    emb, _ = se.fit("projective", table, rank=8, progress=False)
    left, values, right = torch.linalg.svd(table.double(), full_matrices=False)
    best = (left[:, :8] * values[:8]) @ right[:8]
    torch.testing.assert_close(emb.table().double(), best, rtol=1e-5, atol=1e-5)


def trained_like_table(scale: float = 0.06) -> Tensor:
    """A table ``(600, 64)`` like a trained one: a common part, a falling spectrum, rows of all lengths."""
    generator = torch.Generator().manual_seed(3)
    directions = torch.linalg.qr(torch.randn(64, 64, generator=generator)).Q
    codes = torch.randn(600, 64, generator=generator) * torch.arange(1.0, 65.0) ** -0.6
    codes[:, 0] = 2.5 + 0.5 * codes[:, 0]
    lengths = 0.3 + torch.rand(600, 1, generator=generator)
    table = lengths * codes @ directions
    return table * (scale / table.square().mean().sqrt())


@pytest.mark.parametrize("rank", [1, 4, 16, 64])
def test_funnel_is_no_worse_than_svd_in_the_loss_of_the_paper(rank: int) -> None:
    table = trained_like_table()
    _, svd = se.fit("projective", table, rank=rank, progress=False)
    _, funnel = se.fit("funnel", table, rank=rank, progress=False)
    assert funnel.parameters == svd.parameters
    assert funnel.loss <= svd.loss + 1e-6


def test_funnel_without_a_common_part_stays_close_to_svd() -> None:
    """Then a ReLU loses one rank; descent must not lose more."""
    table = torch.randn(300, 20, generator=torch.Generator().manual_seed(2))
    _, shorter = se.fit("projective", table, rank=7, progress=False)
    _, funnel = se.fit("funnel", table, rank=8, steps=200, progress=False)
    assert funnel.loss <= shorter.loss


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("funnel", {}),
        ("funnel", {"activation": "tanh", "steps": 20}),
        ("funnel", {"rank": 1}),
        ("group_reduce", {"activation": "relu", "steps": 20}),
        ("group_reduce", {}),
        ("projective", {}),
    ],
)
def test_the_scale_of_the_table_does_not_matter(method: str, changes: dict[str, Any]) -> None:
    _, stats = fitted(method, **changes)
    for scale in (2.0**-10, 2.0**10):
        _, scaled = fitted(method, teacher=clustered_table() * scale, **changes)
        assert scaled.loss == pytest.approx(stats.loss * scale, rel=1e-4)


def test_descent_keeps_the_best_parameters() -> None:
    table = torch.randn(300, 20, generator=torch.Generator().manual_seed(2))
    _, start = se.fit("funnel", table, rank=8, steps=1, learning_rate=1e-9, progress=False)
    _, end = se.fit("funnel", table, rank=8, steps=3, learning_rate=100.0, progress=False)
    assert end.loss <= start.loss + 1e-5


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_losses_that_are_not_finite_are_never_the_best(lost: float, monkeypatch: pytest.MonkeyPatch) -> None:
    losses, tables = iter([lost, 2.0, lost, lost, lost, lost]), []

    def loss(embedding: se.SharedEmbedding, _: object) -> float:
        tables.append(embedding.table().detach().clone())
        return next(losses)

    monkeypatch.setattr("shared_embeddings.fitting.task._STEPS_BETWEEN_EVALUATIONS", 1)
    monkeypatch.setattr("shared_embeddings.fitting.task._loss", loss)
    fitted_one, _ = se.fit("funnel", torch.randn(30, 20), rank=8, steps=2, progress=False)
    # The table is scaled while it is fitted.
    tables = [table / table.norm() for table in [*tables, fitted_one.table().detach()]]
    torch.testing.assert_close(tables[-1], tables[1])
    assert float((tables[0] - tables[1]).norm()) > 1e-3
    with pytest.raises(UserError, match="no loss of 2 steps is finite.*learning_rate"):
        se.fit("funnel", torch.randn(30, 20), rank=8, steps=2, progress=False)


def test_report_by_hand() -> None:
    emb = se.build("standard", num_embeddings=2, embedding_dim=2)
    with torch.no_grad():
        emb.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    teacher = torch.tensor([[4.0, 4.0], [0.0, 0.0]])
    stats = report(emb, teacher, torch.tensor([1.0, 9.0]))
    assert stats.loss == pytest.approx(2.5)
    assert stats.squared_loss == pytest.approx(12.5)
    assert stats.relative_error == pytest.approx(5.0 / math.sqrt(32.0))
    assert stats.weighted_error == pytest.approx(5.0 / math.sqrt(32.0))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"teacher": torch.full((4, 2), float("nan"))}, ["4 rows", "row 0"]),
        ({"teacher": torch.zeros(3)}, ["(3,)", "words by dimensions"]),
        ({"teacher": torch.ones(4, 2), "token_counts": torch.ones(5)}, ["(5,)", "4 words"]),
        ({"teacher": torch.ones(4, 2), "token_counts": -torch.ones(4)}, ["negative"]),
        ({"teacher": torch.ones(4, 2), "metric": torch.eye(3)}, ["metric", "(3, 3)"]),
        ({"teacher": torch.ones(4, 2), "metric": -torch.eye(2)}, ["metric", "semidefinite"]),
        ({"teacher": torch.ones(4, 2), "steps": 0}, ["steps", "0"]),
    ],
)
def test_invalid_input(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        se.fit("projective", **{"rank": 1, "progress": False, **changes})
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(("mode", "seed"), [(torch.no_grad, -1), (torch.inference_mode, 2**40)])
@pytest.mark.parametrize("method", se.methods())
def test_fits_work_without_gradients_in_the_caller(method: str, mode: Any, seed: int) -> None:
    """As when a checkpoint is loaded for evaluation, with any seed; the result can be trained."""
    with mode():
        embedding, _ = fitted(method, teacher=clustered_table(), steps=3, seed=seed)
    embedding(torch.arange(5)).sum().backward()


@pytest.mark.parametrize("method", se.methods())
def test_default_dtype_does_not_matter(method: str) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        embedding, _ = fitted(method, teacher=clustered_table().float(), steps=3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {parameter.dtype for parameter in embedding.parameters()} == {torch.float32}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_counts_follow_the_table_to_a_gpu() -> None:
    table = clustered_table()
    counts = torch.arange(len(table), 0, -1)
    _, stats = se.fit("projective", table.cuda(), token_counts=counts, rank=2, progress=False)
    _, wanted = se.fit("projective", table, token_counts=counts, rank=2, progress=False)
    assert stats.weighted_error == pytest.approx(wanted.weighted_error, rel=1e-3)


@pytest.mark.parametrize("method", ["projective", "group_reduce"])
def test_fitted_codes_are_as_small_as_those_of_a_new_embedding(method: str) -> None:
    """A third of the std of the table; the basis has the inverse factor."""
    embedding, _ = fitted(method)
    for codes, basis in factors(embedding):
        sizes = [float(part.detach().square().mean().sqrt()) for part in (codes, codes @ basis)]
        assert sizes[0] / sizes[1] == pytest.approx(1 / 3, rel=0.05)


@pytest.mark.parametrize(
    ("method", "activation"), [("funnel", "relu"), ("group_reduce", "relu"), ("funnel", "tanh")]
)
def test_lifted_codes_carry_the_scale_of_the_table(method: str, activation: str) -> None:
    """Not the basis, which Adam would then move by more than the table in every step, but after a tanh."""
    settings = {"activation": activation, "steps": 20}
    (codes, basis), (small_codes, small_basis) = (
        factors(fitted(method, teacher=clustered_table() * scale, **settings)[0])[0]
        for scale in (1.0, 2.0**-10)
    )
    if activation == "tanh":
        torch.testing.assert_close(codes, small_codes, rtol=1e-3, atol=1e-4)
        return
    torch.testing.assert_close(basis, small_basis, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(codes * 2.0**-10, small_codes, rtol=1e-3, atol=1e-6)


def factors(embedding: se.SharedEmbedding) -> list[tuple[Tensor, Tensor]]:
    """The codes and the basis of a low-rank embedding, or of each group."""
    if hasattr(embedding, "bases"):
        return list(zip(embedding.codes, embedding.bases, strict=True))
    return [(embedding.codes, embedding.basis)]


def test_gradient_descent_minimizes_distances_and_not_their_squares() -> None:
    """One number for all words: Eq. 5 is least at the median of 0, 0, 0, 0, 4, squares at the mean."""
    teacher = torch.zeros(5, 2)
    teacher[:, 0] = torch.arange(5)
    teacher[4, 1] = 4.0
    emb: Any
    emb, report = se.fit("uncle", teacher, unique_dim=1, num_classes=1, steps=600, progress=False)
    shared = emb.class_tables[0].item()
    assert shared == pytest.approx(0.0, abs=0.05)
    assert report.loss == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize("method", se.methods())
def test_options_of_another_type_fail_before_the_fit(method: str) -> None:
    """Each option separately, by name, before any work of the fit."""
    table = torch.randn(60, 16)
    for option in dataclasses.fields(se.get_method_config(method)):
        for value in ({"a": 1}, ["2.5"]):
            if option.name in ("classes", "map_options"):  # which may be lists and mappings
                continue
            with pytest.raises(ValueError, match=option.name):
                se.fit(method, table, steps=1, **{**example(method, 60, 16), option.name: value})
    if method == "uncle":
        with pytest.raises(se.OptionError, match="option 'unique_dim' is '2', but it must be int"):
            se.fit(method, table, unique_dim="2")


def test_the_loss_is_the_mean_distance_of_all_words_but_padding() -> None:
    """Words differ from the teacher by 5, 0 and 1; the padding word, off by 7, does not count."""
    first = se.build("standard", num_embeddings=3, embedding_dim=2, padding_idx=2)
    second = se.build("standard", num_embeddings=1, embedding_dim=2)
    with torch.no_grad():
        first.get_parameter("weight").copy_(torch.tensor([[3.0, 4.0], [1.0, 1.0], [0.0, 0.0]]))
        second.get_parameter("weight").copy_(torch.tensor([[0.0, 2.0]]))
    teachers = torch.tensor([[0.0, 0.0], [1.0, 1.0], [7.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    learned = Reconstruction([(first, teachers[0]), (second, teachers[1])], alpha=0.25)
    assert learned.loss().item() == pytest.approx(2.0)
    assert learned.current() == pytest.approx(2.0)
    mixed = learned.mixed_with(torch.tensor(8.0), learned.loss())
    assert mixed.item() == pytest.approx(0.25 * 2.0 + 0.75 * 8.0)


# Fits without gradients


def low_rank_table(words: int = 60, dim: int = 12, rank: int = 4, noise: float = 0.1) -> Tensor:
    """A random table that is near one of low rank."""
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(words, rank, generator=generator), torch.randn(rank, dim, generator=generator)
    return first @ second + noise * torch.randn(words, dim, generator=generator)


# Singular values


@pytest.mark.parametrize("shape", [(60, 12), (7, 12), (12, 12), (20_000, 6)], ids=str)
@pytest.mark.parametrize("rank", [1, 3, 6])
def test_truncated_svd_is_the_best_of_its_rank(shape: tuple[int, int], rank: int) -> None:
    table = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(table.double(), full_matrices=False)
    expected = left[:, :rank] * values[:rank] @ right[:rank]
    codes, basis = truncated_svd(table, rank)
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
    codes, basis = truncated_svd(table, 3, weights)
    torch.testing.assert_close((codes @ basis).double(), expected, rtol=0, atol=1e-5)


def test_word_without_weight_gets_its_best_code() -> None:
    """Only the first two words count, and they lie on one axis."""
    table = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 50.0]])
    codes, basis = truncated_svd(table, 1, torch.tensor([1.0, 1, 0]))
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
    cores = tt_svd(table, vocab_shape, dim_shape, ranks)
    rows = expanded(cores)
    torch.testing.assert_close(rows[:37], table, rtol=0, atol=1e-5)
    assert rows[37:].abs().max() < 1e-5


def test_tt_svd_of_two_cores_is_the_svd_of_the_rearranged_table() -> None:
    table = torch.randn(40, 12, generator=torch.Generator().manual_seed(0))
    cores = tt_svd(table, (5, 8), (3, 4), 6)
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
        cores = tt_svd(table, (3, 2, 4), (2, 3, 2), ranks)
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
    rows = sums(codes, least_squares_codebooks(table, codes, 3))
    torch.testing.assert_close(rows.double(), expected, rtol=0, atol=1e-4)


# Loading into embeddings


def test_least_mean_distance_finds_the_best_line() -> None:
    """Rows near a line, and a few long ones that rotate the SVD; against a search over all directions."""
    generator = torch.Generator().manual_seed(6)
    near = torch.randn(60, 1, generator=generator) * torch.tensor([[2.0, 1.0]])
    table = near + 0.2 * torch.randn(60, 2, generator=generator)
    table = torch.cat((table, 4.0 * torch.tensor([[-1.0, 1.0], [-1.2, 1.0], [-1.0, 1.3]])))
    angles = torch.arange(0.0, math.pi, 1e-4)
    across = torch.stack((-angles.sin(), angles.cos()))
    best = float((table @ across).abs().mean(dim=0).min())
    assert float(distances(table, *truncated_svd(table, 1)).mean()) > 1.02 * best
    assert float(distances(table, *least_mean_distance(table, 1)).mean()) == pytest.approx(best, rel=1e-3)


def test_least_mean_distance_is_no_worse_than_svd_and_exact_where_svd_is() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(90, 12, generator=generator) * torch.rand(90, 1, generator=generator)
    for rank in (1, 5, 11):
        svd = float(distances(table, *truncated_svd(table, rank)).mean())
        assert float(distances(table, *least_mean_distance(table, rank)).mean()) < svd
    low = table[:, :3] @ torch.randn(3, 12, generator=generator)
    assert float(distances(low, *least_mean_distance(low, 3)).mean()) < 1e-5
    assert float(distances(torch.zeros(4, 3), *least_mean_distance(torch.zeros(4, 3), 2)).mean()) == 0.0


def test_without_a_common_direction_a_column_is_lost() -> None:
    generator = torch.Generator().manual_seed(4)
    codes, basis = torch.randn(50, 4, generator=generator), torch.randn(4, 7, generator=generator)
    positive, other = without_negatives(codes, basis)
    assert float(positive.min()) >= 0.0 and positive.shape == codes.shape
    torch.testing.assert_close(positive @ other, codes[:, :3] @ basis[:3], rtol=1e-4, atol=1e-4)
    # One column keeps the stronger sign.
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
    codes, means = kmeans(points, 40, seed=1, products=2**40)
    assert float((means[codes] - points).square().sum(1).mean()) < 1.1 * 6 * 0.01
    assert nearest(centers, means)[0].unique().numel() == 40
    again = kmeans(points, 40, seed=1, products=2**40)
    assert torch.equal(codes, again[0]) and torch.equal(means, again[1])


def test_class_vectors_have_the_least_mean_distance() -> None:
    """One level: the geometric median of each class, where the gradient of the distances is zero."""
    generator = torch.Generator().manual_seed(0)
    part = torch.randn(200, 5, generator=generator) ** 3
    classes = torch.randint(4, (200, 1), generator=generator)
    words = torch.arange(1, 200)
    (medians,) = class_centers([part], classes, words, [4])
    for number in range(4):
        members = words[classes[words, 0] == number]
        missed = part[members] - medians[number]
        pull = (missed / missed.norm(dim=1, keepdim=True)).mean(dim=0)
        assert float(pull.norm()) < 0.02
        mean = part[members].mean(dim=0)
        assert missed.norm(dim=1).mean() <= (part[members] - mean).norm(dim=1).mean()
