"""Structured embeddings, compositional code and tensor train, by hand, by loops, and by published sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shared_embeddings as se

from .cases import CASES
from .references import tensor_train_row
from .support import MemoryMeter

SIZES: dict[str, Any] = {"num_embeddings": 37, "embedding_dim": 24, "num_groups": 6, "num_clusters": 9}


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


def test_structured_sizes_of_the_distilled_embedding_paper() -> None:
    """Appendix A.1 and tables 1 to 3: K * D + V * G, so every position has its own centroids."""
    from shared_embeddings.methods.structured import StructuredOptions

    for words, dim, clusters, size, factor in [
        (32000, 512, 2048, 2.07, 7.90),
        (37000, 512, 2376, 2.40, 7.89),
        (32000, 256, 4048, 2.06, 3.97),
    ]:
        options = {"num_groups": 32, "num_clusters": clusters}
        trained = se.num_parameters("structured", num_embeddings=words, embedding_dim=dim, **options)
        assert trained == clusters * dim
        fixed = StructuredOptions(**options).index_entries(words, dim)
        assert fixed == words * 32
        assert (trained + fixed) / 1e6 == pytest.approx(size, abs=0.005)
        assert words * dim / (trained + fixed) == pytest.approx(factor, abs=0.01)


def test_codes_are_stored_and_not_trained() -> None:
    """37 * 6 codes of 4 bits each, and 9 * 24 numbers."""
    emb = se.build("structured", **SIZES)
    assert [name for name, _ in emb.named_parameters()] == ["centroids"]
    assert emb.counts()["stored_bits"] == 9 * 24 * 32 + 37 * 6 * 4
    assert "codes" in emb.state_dict()


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


CODE_SIZES: dict[str, Any] = {
    "num_embeddings": 37,
    "embedding_dim": 24,
    "num_codebooks": 4,
    "codebook_size": 5,
}


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
    options = se.options("compositional_code")()
    assert (options.num_codebooks, options.codebook_size) == (32, 16)
    sizes = {"num_embeddings": 1000, "embedding_dim": 512}
    assert se.num_parameters("compositional_code", **sizes) == 262_144
    emb = se.build("compositional_code", **sizes)
    assert emb.counts()["stored_bits"] == 262_144 * 16 + 1000 * 32 * 4  # numbers in 16 bits
    assert emb.options.index_entries(1000, 512) == 32_000
    assert [name for name, _ in emb.named_parameters()] == ["codebooks"]


@pytest.mark.parametrize("name", ["compositional-code", "compositional-code-table"])
def test_codes_get_no_gradient(name: str) -> None:
    emb = next(case for case in CASES if case.name == name).build()
    codes, basis = emb.output_factors()
    assert codes.requires_grad is (basis is None)


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


def test_count_worked_by_hand() -> None:
    """1*2*3*4 + 4*4*2*6 + 6*5*4*1 = 24 + 192 + 120."""
    assert small(rank=[4, 6]).counts()["total"] == 336


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
