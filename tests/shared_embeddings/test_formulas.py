"""Every method against its paper's formula: by hand, by plain loops, and with published sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shared_embeddings as se
from shared_embeddings.methods.alone import AloneOptions

from .cases import CASES, Case, by_name
from .references import alone_masks, alone_table, binary_rate, tensor_train_row, zero_row
from .support import assert_same_gradients, gradients


def millions(method: str, num_embeddings: int, embedding_dim: int, **options: object) -> float:
    """Expected parameters, in millions."""
    return (
        se.num_parameters(method, num_embeddings=num_embeddings, embedding_dim=embedding_dim, **options) / 1e6
    )


# Rows of one word after the other


def codes_of(emb: se.SharedEmbedding, word: int) -> list[Tensor]:
    """The entry of each codebook, or the centroid of each piece, of a word."""
    books = emb.codebooks if emb.method == "compositional_code" else emb.centroids
    return [book[int(code)] for book, code in zip(books, emb.codes[word])]


def naive_uncle(emb: se.SharedEmbedding, word: int) -> Tensor:
    parts = [table[int(level)] for table, level in zip(emb.class_tables, emb.classes[word])]
    return torch.cat([emb.unique[word], *parts])


def naive_alone(emb: se.SharedEmbedding, word: int) -> Tensor:
    binary = emb.options.filter == "binary"
    masks = alone_masks(emb.codes[[word]].long(), emb.codebooks.to(emb.base.dtype), binary)
    return alone_table(emb.base, masks, emb.first, emb.second)[0]


NAIVE: dict[str, Callable[[Any, int], Tensor]] = {
    "projective": lambda emb, word: emb.codes[word] @ emb.basis,
    "funnel": lambda emb, word: ACTIVATIONS[emb.options.activation](emb.codes[word]) @ emb.basis,
    "structured": lambda emb, word: torch.cat(codes_of(emb, word)),
    "compositional_code": lambda emb, word: torch.stack(codes_of(emb, word)).sum(0),
    "tensor_train": lambda emb, word: tensor_train_row(list(emb.cores), word),
    "uncle": naive_uncle,
    "alone": naive_alone,
}
ACTIVATIONS = {"relu": torch.relu, "gelu": F.gelu, "tanh": torch.tanh}


@pytest.mark.parametrize("case", [case for case in CASES if case.method in NAIVE], ids=str)
def test_equals_the_naive_rows_in_value_and_gradient(case: Case) -> None:
    emb = case.build().double()
    rows = [NAIVE[case.method](emb, word) for word in range(case.num_embeddings)]
    expected = zero_row(torch.stack(rows), case.padding_idx)
    weight = torch.randn_like(expected)
    wanted = gradients(emb, (expected * weight).sum())
    ids = torch.randperm(case.num_embeddings)
    torch.testing.assert_close(emb(ids), expected[ids])
    assert_same_gradients(gradients(emb, (emb(ids) * weight[ids]).sum()), wanted)
    for table in (emb.table(), emb.output_table()):
        torch.testing.assert_close(table, expected)
        assert_same_gradients(gradients(emb, (table * weight).sum()), wanted)


# Distilled Embedding


def test_funnel_worked_example() -> None:
    """Eq. 3: relu(U) V^T with U = [[1, -2], [-1, 3], [-1, -1]] and V^T = [[1, 0, 2], [0, 1, -1]]."""
    emb = se.build("funnel", num_embeddings=3, embedding_dim=3, rank=2)
    with torch.no_grad():
        emb.codes.copy_(torch.tensor([[1.0, -2], [-1, 3], [-1, -1]]))
        emb.basis.copy_(torch.tensor([[1.0, 0, 2], [0, 1, -1]]))
    expected = [[1.0, 0, 2], [0, 3, -3], [0, 0, 0]]
    assert emb.table().tolist() == expected
    assert emb(torch.tensor([1, 0])).tolist() == [expected[1], expected[0]]
    assert emb.logits(torch.tensor([1.0, 2, 3])).tolist() == [7, -3, 0]


def test_projective_worked_example() -> None:
    emb = se.build("projective", num_embeddings=3, embedding_dim=3, rank=2, padding_idx=2)
    with torch.no_grad():
        emb.codes.copy_(torch.tensor([[1.0, -2], [-1, 3], [5, 5]]))
        emb.basis.copy_(torch.tensor([[1.0, 0, 2], [0, 1, -1]]))
    assert emb.table().tolist() == [[1, -2, 4], [-1, 3, -5], [0, 0, 0]]


def test_a_funnel_of_few_words_starts_finite() -> None:
    """With a single code, a ReLU zeroes one in forty rows."""
    for seed in range(200):
        torch.manual_seed(seed)
        assert se.build("funnel", num_embeddings=1, embedding_dim=2, rank=1).table().isfinite().all()


@pytest.mark.parametrize("method", ["funnel", "projective"])
def test_low_rank_sizes_of_the_distilled_embedding_paper(method: str) -> None:
    """Section 3 and tables 1 to 3: r (V + d)."""
    assert se.num_parameters(method, num_embeddings=32000, embedding_dim=512, rank=64) == 64 * (32000 + 512)
    assert millions(method, 32000, 512, rank=64) == pytest.approx(2.08, abs=0.005)
    assert millions(method, 37000, 512, rank=64) == pytest.approx(2.40, abs=0.005)
    assert millions(method, 32000, 256, rank=64) == pytest.approx(2.06, abs=0.005)


# ALONE


def test_alone_sizes_of_the_paper() -> None:
    """Table 1: D_o + D_inter (D_o + D_e), whatever V is; tables 2 and 3 print 4.2M and 8.4M."""
    sizes = {"base_dim": 512, "filter": "real"}
    for vocabulary in (100, 37000):
        count = se.num_parameters(
            "alone", num_embeddings=vocabulary, embedding_dim=512, hidden_dim=4096, **sizes
        )
        assert count == 512 + 4096 * (512 + 512) == 4_194_816
    assert millions("alone", 37000, 512, hidden_dim=8192, **sizes) == pytest.approx(8.4, abs=0.05)


def test_alone_sizes_of_the_reconstruction_experiment() -> None:
    """Section 3.1: 0.4M, 0.7M, 1.1M and 1.4M for D_inter of 600 to 2400 and D_o = D_e = 300."""
    for hidden, size in [(600, 0.4), (1200, 0.7), (1800, 1.1), (2400, 1.4)]:
        assert millions("alone", 5000, 300, base_dim=300, hidden_dim=hidden) == pytest.approx(size, abs=0.05)


def test_alone_words_rarely_share_all_codes() -> None:
    """Section 2.1, with the paper's V, c and M; and near the exact value and the share of drawn codes."""
    paper = AloneOptions(hidden_dim=4096).collision_probability(37_000)
    assert paper == pytest.approx(37_000**2 / (2 * 64**8), rel=1e-5) and paper < 3e-6
    options = {"hidden_dim": 1, "base_dim": 1, "codebooks": 6, "codebook_size": 4}
    found = AloneOptions(**options).collision_probability(40)
    distinct = math.prod(1 - others / 4**6 for others in range(40))
    assert found == pytest.approx(1 - distinct, rel=0.03)
    drawn = [se.build("alone", num_embeddings=40, embedding_dim=1, seed=n, **options) for n in range(400)]
    collided = [len(emb.codes.unique(dim=0)) < 40 for emb in drawn]
    assert sum(collided) / 400 == pytest.approx(found, abs=0.06)  # three standard deviations


SMALL_ALONE = {"base_dim": 2, "hidden_dim": 2, "codebooks": 2, "codebook_size": 2}


def small_alone(**options: object) -> se.SharedEmbedding:
    """Three words, two codebooks of two entries, with tensors that can be followed by hand.

    W1 = [[1, 1], [1, -1]], W2 = [[1, 0], [0, 2], [1, 1]], base [1, 2]; words have codes 00, 01 and 10.
    """
    emb = se.build("alone", num_embeddings=3, embedding_dim=3, **SMALL_ALONE, **options)
    with torch.no_grad():
        emb.base.copy_(torch.tensor([1.0, 2]))
        emb.first.copy_(torch.tensor([[1.0, 1], [1, -1]]))
        emb.second.copy_(torch.tensor([[1.0, 0], [0, 2], [1, 1]]))
        emb.codes.copy_(torch.tensor([[0, 0], [0, 1], [1, 0]]))
    return emb


@pytest.mark.parametrize("train_base", [True, False])
def test_alone_with_real_filters_worked_example(train_base: bool) -> None:
    """Filters are sums: [1, 0] + [2, 1], [1, 0] + [0, -1] and [-1, 3] + [2, 1], times the base [1, 2]."""
    emb = small_alone(filter="real", train_base=train_base)
    with torch.no_grad():
        emb.codebooks.copy_(torch.tensor([[[1.0, 0], [-1, 3]], [[2, 1], [0, -1]]]))
    # m * o is [3, 2], [1, -2] and [1, 8]; W1 makes it [5, 1], [-1, 3], [9, -7]; the ReLU removes -1 and -7.
    expected = [[5.0, 2, 6], [0, 6, 3], [9, 0, 9]]
    assert emb.table().tolist() == expected
    assert emb(torch.tensor([[2, 1]])).tolist() == [[expected[2], expected[1]]]
    assert emb.logits(torch.tensor([1.0, 1, 0])).tolist() == [7, 6, 9]


def test_alone_with_binary_filters_worked_example() -> None:
    """Filters are ORs: 10 | 01 = 11, 10 | 10 = 10 and 00 | 01 = 01, times the base [1, 2]."""
    emb = small_alone(filter="binary")
    with torch.no_grad():
        emb.codebooks.copy_(torch.tensor([[[1, 0], [0, 0]], [[0, 1], [1, 0]]]))
    # m * o is [1, 2], [1, 0] and [0, 2]; W1 makes it [3, -1], [1, 1] and [2, -2].
    assert emb.table().tolist() == [[3, 0, 3], [1, 2, 2], [2, 0, 2]]


@pytest.mark.parametrize(("zero_probability", "codebooks"), [(0.5, 8), (0.5, 1), (0.2, 4), (0.9, 2)])
def test_binary_filters_have_the_requested_zero_probability(zero_probability: float, codebooks: int) -> None:
    """Section 2.1; 300 elements of 400 words leave a standard error of about 0.01."""
    emb = se.build(
        "alone",
        num_embeddings=400,
        embedding_dim=8,
        hidden_dim=4,
        base_dim=300,
        filter="binary",
        zero_probability=zero_probability,
        codebooks=codebooks,
    )
    masks = alone_masks(emb.codes.long(), emb.codebooks.float(), binary=True)
    assert (masks == 0).float().mean().item() == pytest.approx(zero_probability, abs=0.03)
    ones = emb.codebooks.float().mean().item()
    assert ones == pytest.approx(binary_rate(zero_probability, codebooks), abs=0.02)


def test_real_filters_are_gaussian_and_use_every_entry() -> None:
    emb = se.build("alone", num_embeddings=2000, embedding_dim=8, hidden_dim=4, base_dim=300, filter="real")
    assert emb.codes.shape == (2000, 8) and emb.codebooks.shape == (8, 64, 300)
    assert emb.codebooks.mean().abs() < 0.02 * emb.codebooks.std()
    # The filter of a word, a sum of 8 entries, has variance one.
    assert 8 * emb.codebooks.var().item() == pytest.approx(1, abs=0.05)
    kurtosis = (emb.codebooks / emb.codebooks.std()).pow(4).mean().item()
    assert kurtosis == pytest.approx(3, abs=0.1)
    for book in range(8):
        assert emb.codes[:, book].unique().tolist() == list(range(64))


@pytest.mark.parametrize("name", ["alone-real", "alone-binary", "structured", "compositional-code"])
def test_codes_come_from_their_own_seed(name: str) -> None:
    """Torch's random state does not move, and neither a reset nor another seed changes saved codes."""
    case = by_name(name)

    def codes(emb: se.SharedEmbedding) -> list[Tensor]:
        return [buffer.clone() for _, buffer in emb.named_buffers()]

    def equal(one: se.SharedEmbedding, other: se.SharedEmbedding) -> bool:
        return all(map(torch.equal, codes(one), codes(other)))

    first, second, other = case.build(1), case.build(2), case.build(1, options=case.options | {"seed": 7})
    assert equal(first, second) and not equal(first, other)
    assert all(map(torch.equal, first.parameters(), other.parameters()))
    other.load_state_dict(first.state_dict())
    assert torch.equal(other.table(), first.table())
    first.reset_parameters()
    assert equal(first, second)


@pytest.mark.parametrize("name", ["alone-real", "alone-binary"])
def test_masks_of_all_words_are_never_stored(name: str) -> None:
    """Only the codes grow with the vocabulary, by one byte for each word and codebook."""
    case = by_name(name)
    small, large = (case.build(num_embeddings=size).state_dict() for size in (1000, 3000))
    grown = {name: value.numel() for name, value in large.items() if value.shape != small[name].shape}
    assert grown == {"codes": 3000 * 3}
    assert large["codes"].element_size() == 1


def test_stored_bits_of_the_paper_setting() -> None:
    """Section 2.3: codebooks of M = 8, c = 64, D_o = 512 add 262k numbers; one of 64 takes 6 bits."""
    counts = se.build("alone", num_embeddings=1000, embedding_dim=512, hidden_dim=64, base_dim=512).counts()
    codebooks = 8 * 64 * 512
    assert codebooks == 262_144
    assert counts["total"] == 512 + 64 * 1024
    assert counts["stored_bits"] == 32 * (counts["total"] + codebooks) + 6 * 8 * 1000


def test_a_fixed_base_is_not_a_parameter() -> None:
    case = by_name("alone-real-fixed-base")
    emb = case.build()
    assert "base" in emb.state_dict() and "base" not in dict(emb.named_parameters())
    assert emb.counts()["total"] == 40 * (18 + 24)
    before = emb.base.clone()
    emb(torch.arange(37)).square().sum().backward()
    torch.optim.SGD(emb.parameters(), lr=1.0).step()
    assert torch.equal(emb.base, before)
