"""`se.fit` for every method, and the reconstruction loss."""

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
from tests.helpers import example

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
    emb, found = fitted(method)
    table = clustered_table()
    kept = torch.arange(VOCABULARY) != PADDING
    missed = (emb.table().detach() - table)[kept]
    assert found.loss == pytest.approx(float(missed.norm(dim=1).mean()), rel=1e-4, abs=1e-6)
    assert found.squared_loss == pytest.approx(float(missed.square().sum(1).mean()), rel=1e-4, abs=1e-6)
    assert found.relative_error == pytest.approx(
        float(missed.norm() / table[kept].norm()), rel=1e-4, abs=1e-6
    )
    roots = zipf_counts().sqrt().unsqueeze(1)[kept]
    assert found.weighted_error == pytest.approx(
        float((missed * roots).norm() / (table[kept] * roots).norm()), rel=1e-4, abs=1e-6
    )
    assert found.relative_error <= se.options(method).fit_bound
    assert found.parameters == emb.counts()["total"]
    assert found.stored_bits == emb.counts()["stored_bits"]
    assert found.compression == pytest.approx(VOCABULARY * DIMENSION / found.parameters)
    assert torch.equal(emb.table()[PADDING], torch.zeros(DIMENSION))
    sizes = {"num_embeddings": VOCABULARY, "embedding_dim": DIMENSION, "padding_idx": PADDING}
    again = se.build(method, **sizes, **found.options)
    again.load_state_dict(emb.state_dict())
    assert torch.equal(again.table(), emb.table())
    assert again.counts() == emb.counts()


@pytest.mark.parametrize("method", se.methods())
def test_same_seed_same_fit_without_global_randomness(method: str) -> None:
    torch.manual_seed(11)
    first, _ = fitted(method, steps=5, seed=4)
    drawn = torch.rand(1)
    torch.manual_seed(11)
    assert torch.equal(drawn, torch.rand(1))
    second, _ = fitted(method, steps=5, seed=4)
    assert torch.equal(first.table(), second.table())


@pytest.mark.parametrize("method", se.methods())
def test_a_fit_changes_neither_bias_nor_teacher(method: str) -> None:
    without, plain = fitted(method, steps=5)
    emb, found = fitted(method, steps=5, output_bias=True)
    added = VOCABULARY + (2 if method == "adaptive" else 0)
    assert found.options["output_bias"] is True
    assert found.parameters == plain.parameters + added
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


def test_funnel_gains_on_svd_where_rows_differ_in_length() -> None:
    """The SVD has the least squared loss, so another loss leaves something to gain."""
    table = trained_like_table()
    _, svd = se.fit("projective", table, rank=16, progress=False)
    _, funnel = se.fit("funnel", table, rank=16, progress=False)
    assert funnel.loss < 0.999 * svd.loss
    assert funnel.squared_loss > svd.squared_loss


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
    _, found = fitted(method, **changes)
    for scale in (2.0**-10, 2.0**10):
        _, scaled = fitted(method, teacher=clustered_table() * scale, **changes)
        assert scaled.loss == pytest.approx(found.loss * scale, rel=1e-4)


@pytest.mark.parametrize("method", ["funnel", "group_reduce"])
def test_lifted_codes_carry_the_scale_of_the_table(method: str) -> None:
    """Not by the basis, which Adam would then move by more than the table in every step."""
    settings = {"activation": "relu", "steps": 20}
    large, _ = fitted(method, **settings)
    small, _ = fitted(method, teacher=clustered_table() * 2.0**-10, **settings)
    large_basis, large_codes = factors(large)
    small_basis, small_codes = factors(small)
    torch.testing.assert_close(large_basis, small_basis, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(large_codes * 2.0**-10, small_codes, rtol=1e-3, atol=1e-6)


def test_the_basis_carries_the_scale_after_a_tanh() -> None:
    settings = {"activation": "tanh", "steps": 20}
    large, _ = fitted("funnel", **settings)
    small, _ = fitted("funnel", teacher=clustered_table() * 2.0**-10, **settings)
    torch.testing.assert_close(large.codes, small.codes, rtol=1e-3, atol=1e-4)


def factors(embedding: se.SharedEmbedding) -> tuple[Tensor, Tensor]:
    """The basis and the codes of a funnel, or of the first group of a group_reduce."""
    if hasattr(embedding, "bases"):
        return embedding.bases[0], embedding.codes[0]
    return embedding.basis, embedding.codes


def test_descent_keeps_the_best_parameters() -> None:
    table = torch.randn(300, 20, generator=torch.Generator().manual_seed(2))
    _, start = se.fit("funnel", table, rank=8, steps=1, learning_rate=1e-9, progress=False)
    _, end = se.fit("funnel", table, rank=8, steps=3, learning_rate=100.0, progress=False)
    assert end.loss <= start.loss + 1e-5


def test_report_by_hand() -> None:
    emb = se.build("standard", num_embeddings=2, embedding_dim=2)
    with torch.no_grad():
        emb.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    teacher = torch.tensor([[4.0, 4.0], [0.0, 0.0]])
    found = report(emb, teacher, torch.tensor([1.0, 9.0]))
    assert found.loss == pytest.approx(2.5)
    assert found.squared_loss == pytest.approx(12.5)
    assert found.relative_error == pytest.approx(5.0 / math.sqrt(32.0))
    assert found.weighted_error == pytest.approx(5.0 / math.sqrt(32.0))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"teacher": torch.full((4, 2), float("nan"))}, ["4 rows", "row 0"]),
        ({"teacher": torch.eye(4).to_sparse()}, ["of layout torch.sparse_coo"]),
        ({"teacher": torch.ones(4, 4, device="meta")}, ["on the meta device"]),
        ({"teacher": torch.zeros(3)}, ["(3,)", "words by dimensions"]),
        ({"teacher": [[1.0]]}, ["list", "words by dimensions"]),
        ({"teacher": torch.ones(4, 2), "token_counts": torch.ones(5)}, ["(5,)", "4 words"]),
        ({"teacher": torch.ones(4, 2), "token_counts": -torch.ones(4)}, ["negative"]),
        ({"teacher": torch.ones(4, 2), "token_counts": torch.zeros(4)}, ["zero"]),
        ({"teacher": torch.ones(4, 2), "rank": 3}, ["rank", "3"]),
        ({"teacher": torch.ones(4, 2), "ranc": 1}, ["ranc"]),
        ({"teacher": torch.ones(4, 2), "steps": 0}, ["steps", "0"]),
        ({"teacher": torch.ones(4, 2), "steps": 1.5}, ["steps", "1.5"]),
        ({"teacher": torch.ones(4, 2), "steps": "5"}, ["steps", "'5'"]),
        ({"teacher": torch.ones(4, 2), "seed": 2**64}, ["seed", str(2**64)]),
        ({"teacher": torch.ones(4, 2), "seed": "today"}, ["seed", "today"]),
        ({"teacher": torch.ones(4, 2), "padding_idx": "a"}, ["padding_idx", "'a'"]),
        ({"teacher": torch.ones(4, 2), "padding_idx": 9}, ["padding_idx", "9"]),
    ],
)
def test_invalid_input(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        se.fit("projective", **{"rank": 1, "progress": False, **changes})
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("method", se.methods())
def test_fits_work_without_gradients_in_the_caller(method: str, mode: Any) -> None:
    """As when a checkpoint is loaded for evaluation; the result can be trained."""
    with mode():
        embedding, _ = fitted(method, teacher=clustered_table(), steps=3)
    embedding(torch.arange(5)).sum().backward()


@pytest.mark.parametrize("method", se.methods())
def test_default_dtype_does_not_matter(method: str) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        embedding, _ = fitted(method, teacher=clustered_table().float(), steps=3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {parameter.dtype for parameter in embedding.parameters()} == {torch.float32}


@pytest.mark.parametrize("seed", [-1, 2**40])
@pytest.mark.parametrize("method", ["structured", "alone", "compositional_code"])
def test_seeds_of_any_size(method: str, seed: int) -> None:
    """OpenNMT-py's default is -1."""
    fitted(method, steps=3, seed=seed)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_counts_follow_the_table_to_a_gpu() -> None:
    table = clustered_table()
    counts = torch.arange(len(table), 0, -1)
    _, found = se.fit("projective", table.cuda(), token_counts=counts, rank=2, progress=False)
    _, wanted = se.fit("projective", table, token_counts=counts, rank=2, progress=False)
    assert found.weighted_error == pytest.approx(wanted.weighted_error, rel=1e-3)


def test_infinity_in_one_row_is_found() -> None:
    table = clustered_table()
    for wrong in (float("inf"), float("nan"), -1e20):  # the square of the last one is infinite in float32
        table[17, 2] = wrong
        with pytest.raises(ValueError, match="1 rows, the first is row 17"):
            se.fit("funnel", table, rank=2)
    se.fit("projective", table, rank=2, padding_idx=17)


@pytest.mark.parametrize("method", ["projective", "group_reduce"])
def test_fitted_codes_are_as_small_as_those_of_a_new_embedding(method: str) -> None:
    """A third of the std of the table; the basis has the inverse factor."""
    embedding, _ = fitted(method)
    factors = [(embedding.codes, embedding.basis)] if method == "projective" else None
    for codes, basis in factors or zip(embedding.codes, embedding.bases, strict=True):
        sizes = [float(part.detach().square().mean().sqrt()) for part in (codes, codes @ basis)]
        assert sizes[0] / sizes[1] == pytest.approx(1 / 3, rel=0.05)


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
    for option in dataclasses.fields(se.options(method)):
        for value in (object(), {"a": 1}, ["2.5"]):
            if option.name in ("classes", "map_options"):  # which may be lists and mappings
                continue
            with pytest.raises(ValueError, match=option.name):
                se.fit(method, table, steps=1, **{**example(method, 60, 16), option.name: value})
    if method == "uncle":
        with pytest.raises(se.OptionError, match="option 'unique_dim' is '2', but it must be a whole number"):
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
