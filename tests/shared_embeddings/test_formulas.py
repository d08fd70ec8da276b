"""Every method against its paper's formula: by hand, by plain loops, and with published sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shared_embeddings as se

from .cases import CASES, Case, by_name
from .support import ACTIVATIONS, MemoryMeter, assert_same_gradients, gradients, tensor_train_row, zero_row


def millions(method: str, num_embeddings: int, embedding_dim: int, **options: object) -> float:
    """Expected parameters, in millions."""
    return (
        se.num_parameters(method, num_embeddings=num_embeddings, embedding_dim=embedding_dim, **options) / 1e6
    )


# ALONE: section 2


def binary_rate(zero_probability: float, codebooks: int) -> float:
    """Probability of a one in a source matrix that makes the OR 0 with ``zero_probability`` (2.1)."""
    return 1 - zero_probability ** (1 / codebooks)


def alone_masks(codes: Tensor, codebooks: Tensor, binary: bool) -> Tensor:
    """Every word's filter ``(V, D_o)``, Eq. 1 and 2, from codes ``(V, M)`` and codebooks ``(M, c, D_o)``."""
    masks = []
    for word in range(len(codes)):
        total = sum(codebooks[book, codes[word, book]] for book in range(codes.shape[1]))
        masks.append((total >= 1).to(total.dtype) if binary else total)
    return torch.stack(masks)


def alone_table(base: Tensor, masks: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """``W2 max(0, W1 (m_w * o))`` for every word (Eq. 3), from W1 ``(H, D_o)`` and W2 ``(D, H)``."""
    return torch.stack([second @ torch.clamp(first @ (mask * base), min=0) for mask in masks])


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


def test_low_rank_worked_example() -> None:
    """Eq. 3: relu(U) V^T with U = [[1, -2], [-1, 3], [-1, -1]] and V^T = [[1, 0, 2], [0, 1, -1]]."""
    emb = se.build("funnel", num_embeddings=3, embedding_dim=3, rank=2)
    with torch.no_grad():
        emb.codes.copy_(torch.tensor([[1.0, -2], [-1, 3], [-1, -1]]))
        emb.basis.copy_(torch.tensor([[1.0, 0, 2], [0, 1, -1]]))
    expected = [[1.0, 0, 2], [0, 3, -3], [0, 0, 0]]
    assert emb.table().tolist() == expected
    assert emb(torch.tensor([1, 0])).tolist() == [expected[1], expected[0]]
    assert emb.logits(torch.tensor([1.0, 2, 3])).tolist() == [7, -3, 0]
    linear = se.build("projective", num_embeddings=3, embedding_dim=3, rank=2, padding_idx=2)
    linear.load_state_dict(emb.state_dict())
    assert linear.table().tolist() == [[1, -2, 4], [-1, 3, -5], [0, 0, 0]]


def test_codes_below_zero_are_trained() -> None:
    """The gradient of row 0 is (1, 1) @ V = (3, 0) for its codes; half of that for those below zero."""
    emb = se.build("funnel", num_embeddings=2, embedding_dim=2, rank=2)
    with torch.no_grad():
        emb.codes.copy_(torch.tensor([[-1.0, 2], [-3, -4]]))
        emb.basis.copy_(torch.tensor([[1.0, 2], [1, -1]]))
    emb.table().sum().backward()
    assert emb.codes.grad.tolist() == [[1.5, 0], [1.5, 0]]
    assert emb.basis.grad.tolist() == [[0, 0], [2, 2]]


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
    """Table 1: D_o + D_inter (D_o + D_e), whatever V is; tables 2 and 3 print 4.2M and 8.4M.

    Section 3.1: 0.4M, 0.7M, 1.1M and 1.4M for D_inter of 600 to 2400 and D_o = D_e = 300.
    """
    sizes = {"base_dim": 512, "filter": "real"}
    for vocabulary in (100, 37000):
        count = se.num_parameters(
            "alone", num_embeddings=vocabulary, embedding_dim=512, hidden_dim=4096, **sizes
        )
        assert count == 512 + 4096 * (512 + 512) == 4_194_816
    assert millions("alone", 37000, 512, hidden_dim=8192, **sizes) == pytest.approx(8.4, abs=0.05)
    for hidden, size in [(600, 0.4), (1200, 0.7), (1800, 1.1), (2400, 1.4)]:
        assert millions("alone", 5000, 300, base_dim=300, hidden_dim=hidden) == pytest.approx(size, abs=0.05)


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


@pytest.mark.parametrize(
    "name", ["alone-real", "alone-binary", "structured", "compositional-code", "uncle-classes"]
)
def test_codes_come_from_their_own_seed(name: str) -> None:
    """Torch's random state does not move, and neither a reset nor another seed changes saved codes."""
    case = by_name(name)

    def codes(emb: se.SharedEmbedding) -> list[Tensor]:
        return [buffer.clone() for _, buffer in emb.named_buffers()]

    def equal(emb: se.SharedEmbedding, other: se.SharedEmbedding) -> bool:
        return all(map(torch.equal, codes(emb), codes(other)))

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


def test_structured_worked_example() -> None:
    """Pieces of two: [1, 2] or [3, 4] first, then [5, 6] or [7, 8]."""
    emb = se.build("structured", num_embeddings=3, embedding_dim=4, num_groups=2, num_clusters=2)
    with torch.no_grad():
        emb.centroids.copy_(torch.tensor([[[1.0, 2], [3, 4]], [[5, 6], [7, 8]]]))
        emb.codes.copy_(torch.tensor([[0, 1], [1, 1], [1, 0]]))
    expected = [[1.0, 2, 7, 8], [3, 4, 7, 8], [3, 4, 5, 6]]
    assert emb.table().tolist() == expected
    assert emb(torch.tensor([[2, 0]])).tolist() == [[expected[2], expected[0]]]
    assert emb.logits(torch.tensor([1.0, 0, 0, 1])).tolist() == [9, 11, 9]
    # Codes are stored in one bit each, and not trained.
    assert [name for name, _ in emb.named_parameters()] == ["centroids"]
    assert emb.counts()["stored_bits"] == 2 * 4 * 32 + 3 * 2 and "codes" in emb.state_dict()


def test_structured_sizes_of_the_distilled_embedding_paper() -> None:
    """Appendix A.1 and tables 1 to 3: K * D + V * G, so every position has its own centroids."""
    for words, dim, clusters, size, factor in [
        (32000, 512, 2048, 2.07, 7.90),
        (37000, 512, 2376, 2.40, 7.89),
        (32000, 256, 4048, 2.06, 3.97),
    ]:
        options = {"num_groups": 32, "num_clusters": clusters}
        trained = se.num_parameters("structured", num_embeddings=words, embedding_dim=dim, **options)
        assert trained == clusters * dim
        fixed = words * 32
        assert (trained + fixed) / 1e6 == pytest.approx(size, abs=0.005)
        assert words * dim / (trained + fixed) == pytest.approx(factor, abs=0.01)


@pytest.mark.parametrize(
    ("clusters", "dtype"),
    [(256, torch.uint8), (257, torch.int16), (32768, torch.int16), (32769, torch.int32)],
)
def test_codes_take_the_smallest_type_that_holds_them(clusters: int, dtype: torch.dtype) -> None:
    sizes = {"num_embeddings": 40_000, "embedding_dim": 2, "num_groups": 1, "num_clusters": clusters}
    emb = se.build("structured", **sizes)
    assert emb.codes.dtype == dtype
    assert int(emb.codes.min()) >= 0 and clusters - 3 < int(emb.codes.max()) + clusters // 100 + 3
    assert emb.table().isfinite().all()


def test_compositional_code_worked_example() -> None:
    """Sums of one of [1, 2] and [3, 4], and one of [10, 20] and [30, 40]."""
    emb = se.build("compositional_code", num_embeddings=3, embedding_dim=2, num_codebooks=2, codebook_size=2)
    with torch.no_grad():
        emb.codebooks.copy_(torch.tensor([[[1.0, 2], [3, 4]], [[10, 20], [30, 40]]]))
        emb.codes.copy_(torch.tensor([[0, 1], [1, 1], [1, 0]]))
    expected = [[31.0, 42], [33, 44], [13, 24]]
    assert emb.table().tolist() == expected
    assert emb(torch.tensor([[2, 0]])).tolist() == [[expected[2], expected[0]]]
    assert emb.logits(torch.tensor([2.0, -1])).tolist() == [20, 22, 2]
    assert emb.output_table().tolist() == expected


def test_sizes_of_the_coding_in_the_paper() -> None:
    """DeFINE's table 5 takes 32 x 16 codes: 32 * 16 * 512 numbers, and 32 codes of 4 bits for each word."""
    options = se.get_method_config("compositional_code")()
    assert (options.num_codebooks, options.codebook_size) == (32, 16)
    sizes = {"num_embeddings": 1000, "embedding_dim": 512}
    assert se.num_parameters("compositional_code", **sizes) == 262_144
    emb = se.build("compositional_code", **sizes)
    assert emb.counts()["stored_bits"] == 262_144 * 16 + 1000 * 32 * 4  # numbers in 16 bits
    assert emb.codes.numel() == 32_000
    assert [name for name, _ in emb.named_parameters()] == ["codebooks"]


SMALL: dict[str, Any] = {"vocab_shape": [2, 4, 5], "dim_shape": [3, 2, 4], "rank": 4}


def small(**changes: Any) -> se.SharedEmbedding:
    """37 words in 24 dimensions."""
    return se.build("tensor_train", **{"num_embeddings": 37, "embedding_dim": 24, **SMALL, **changes})


def naive_table(emb: Any) -> Tensor:
    return torch.stack([tensor_train_row(list(emb.cores), word) for word in range(emb.num_embeddings)])


def test_tensor_train_worked_example() -> None:
    """Two cores of rank one are a Kronecker product: [[1, 2], [3, 4]] x [[1, 10], [0, 5]]."""
    emb = se.build(
        "tensor_train", num_embeddings=4, embedding_dim=4, vocab_shape=(2, 2), dim_shape=(2, 2), rank=1
    )
    with torch.no_grad():
        emb.cores[0].copy_(torch.tensor([[1.0, 2], [3, 4]]).view(1, 2, 2, 1))
        emb.cores[1].copy_(torch.tensor([[1.0, 10], [0, 5]]).view(1, 2, 2, 1))
    expected = [[1.0, 10, 2, 20], [0, 5, 0, 10], [3, 30, 4, 40], [0, 15, 0, 20]]
    assert emb.table().tolist() == expected
    assert emb(torch.tensor([[3, 0], [3, 1]])).tolist() == [
        [expected[3], expected[0]],
        [expected[3], expected[1]],
    ]
    assert emb.logits(torch.tensor([1.0, 0, 0, 1])).tolist() == [21, 10, 43, 20]


def test_four_cores_with_their_own_ranks() -> None:
    emb = se.build(
        "tensor_train",
        num_embeddings=23,
        embedding_dim=12,
        vocab_shape=[2, 3, 2, 2],
        dim_shape=[1, 3, 2, 2],
        rank=[2, 5, 3],
    )
    shapes = [(1, 2, 1, 2), (2, 3, 3, 5), (5, 2, 2, 3), (3, 2, 2, 1)]
    assert [tuple(core.shape) for core in emb.cores] == shapes
    assert emb.counts()["total"] == 1 * 2 * 1 * 2 + 2 * 3 * 3 * 5 + 5 * 2 * 2 * 3 + 3 * 2 * 2 * 1
    torch.testing.assert_close(emb.table(), naive_table(emb))
    ids = torch.tensor([22, 0, 7, 7, 11])
    torch.testing.assert_close(emb(ids), emb.table()[ids])


def test_tensor_train_sizes_of_the_distilled_embedding_paper() -> None:
    """Appendix A.1 and tables 1 to 3.

    Table 2 prints 2.40M beside a factor of 7.75, which is that of 2.44M: 37,000 * 512 / 2.44M = 7.75.
    """
    for words, vocab, dims, rank, size, factor in [
        (32000, [25, 32, 40], [8, 8, 8], 90, 2.12, 7.72),
        (37000, [25, 37, 40], [8, 8, 8], 90, 2.44, 7.75),
        (32000, [25, 32, 40], [8, 4, 8], 125, 2.06, 3.96),
    ]:
        dim = dims[0] * dims[1] * dims[2]
        count = se.num_parameters(
            "tensor_train",
            num_embeddings=words,
            embedding_dim=dim,
            vocab_shape=vocab,
            dim_shape=dims,
            rank=rank,
        )
        assert count / 1e6 == pytest.approx(size, abs=0.0051)
        assert words * dim / count == pytest.approx(factor, abs=0.011)


def test_a_lookup_expands_no_other_rows() -> None:
    """Two words of a vocabulary of a million must not cost a table of a million."""
    emb = se.build(
        "tensor_train",
        num_embeddings=10**6,
        embedding_dim=64,
        vocab_shape=[100, 100, 100],
        dim_shape=[4, 4, 4],
        rank=4,
    )
    ids = torch.tensor([3, 999_999, 3])
    with MemoryMeter(ids, *emb.parameters()) as meter:
        vectors = emb(ids)
    assert meter.peak < 100_000
    digits = [(0, 0, 3), (99, 99, 99), (0, 0, 3)]
    for vector, (first, second, third) in zip(vectors, digits):
        products = torch.einsum(
            "xar,rbs,scy->xabcy", emb.cores[0][:, first], emb.cores[1][:, second], emb.cores[2][:, third]
        )
        torch.testing.assert_close(vector, products.flatten())


def test_a_checkpoint_of_another_vocabulary_with_equal_cores_fails() -> None:
    state = small(num_embeddings=40).state_dict()
    with pytest.raises(RuntimeError, match="size mismatch.*40 words"):
        small().load_state_dict(state)
