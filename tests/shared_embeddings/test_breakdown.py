"""The breakdown of an embedding into its tensors."""

from __future__ import annotations

import math

import torch
from torch import nn

import shared_embeddings as se
from shared_embeddings.sizing import accounting
from shared_embeddings.sizing.breakdown import describe_storage, storage_breakdown

from .cases import Case
from .contract.checks import each_case


def by_name(embedding: se.SharedEmbedding) -> dict[str, tuple[str, tuple[int, ...], int, list[int]]]:
    """Name -> kind, shape, count and bytes in fp32, fp16 and int8."""
    return {
        part.name: (part.kind, part.shape, part.count, [part.bytes[t] for t in ("fp32", "fp16", "int8")])
        for part in storage_breakdown(embedding)
    }


def test_low_rank_by_hand() -> None:
    found = by_name(se.build("projective", num_embeddings=10, embedding_dim=6, rank=2))
    assert found == {
        "codes": ("parameter", (10, 2), 20, [80, 40, 20]),
        "basis": ("parameter", (2, 6), 12, [48, 24, 12]),
        "total": ("sum", (), 32, [128, 64, 32]),
        "plain table": ("sum", (), 60, [240, 120, 60]),
    }


def test_bias_by_hand() -> None:
    found = by_name(se.build("projective", num_embeddings=10, embedding_dim=6, rank=2, output_bias=True))
    assert found["bias"] == ("parameter", (10,), 10, [40, 20, 10])
    assert found["total"] == ("sum", (), 42, [168, 84, 42])
    assert found["plain table"] == ("sum", (), 60, [240, 120, 60])


ALONE = {"num_embeddings": 10, "embedding_dim": 6, "hidden_dim": 3, "base_dim": 4}


def test_real_codebooks_shrink_and_codes_do_not() -> None:
    """30 codes of 3 bits (c = 5) take 90 bits, 12 bytes; codebooks 3 x 5 x 4 are real numbers."""
    found = by_name(se.build("alone", **ALONE, codebooks=3, codebook_size=5))
    assert found["codes"] == ("buffer", (10, 3), 30, [12, 12, 12])
    assert found["codebooks"] == ("buffer", (3, 5, 4), 60, [240, 120, 60])
    assert found["base"] == ("parameter", (4,), 4, [16, 8, 4])
    trained = 4 + 3 * (4 + 6)
    assert found["total"][2:] == (trained, [12 + (60 + trained) * width for width in (4, 2, 1)])


def test_binary_codebooks_take_a_bit_each() -> None:
    found = by_name(
        se.build("alone", **ALONE, codebooks=3, codebook_size=5, filter="binary", train_base=False)
    )
    assert found["codebooks"] == ("buffer", (3, 5, 4), 60, [8, 8, 8])
    assert found["base"] == ("buffer", (4,), 4, [16, 8, 4])


def test_compression_is_that_of_the_parameters() -> None:
    parts = storage_breakdown(se.build("projective", num_embeddings=10, embedding_dim=6, rank=2))
    assert [part.compression for part in parts] == [None, None, 60 / 32, 1.0]


@each_case
def test_nothing_is_left_out_or_counted_twice(case: Case) -> None:
    emb = case.build()
    *parts, total, dense = storage_breakdown(emb)
    names = [part.name for part in parts]
    assert len(names) == len(set(names))
    assert set(names) == set(emb.state_dict())
    assert total.count == emb.counts()["total"] == sum(p.count for p in parts if p.kind == "parameter")
    assert dense.count == case.num_embeddings * case.embedding_dim
    # Each buffer is rounded up to whole bytes.
    stored = accounting.stored_bits(emb, "fp32")
    assert 0 <= total.bytes["fp32"] - math.ceil(stored / 8) <= len(parts)
    assert total.bytes["int4"] <= total.bytes["int8"] <= total.bytes["fp16"] <= total.bytes["fp32"]


def test_a_tensor_with_two_names_counts_once() -> None:
    emb = se.build("standard", num_embeddings=5, embedding_dim=2)
    emb.twin = emb.weight
    emb.register_buffer("marks", torch.zeros(4, dtype=torch.int16))
    emb.register_buffer("same_marks", emb.marks)
    emb.register_buffer("passing", torch.zeros(9), persistent=False)
    found = by_name(emb)
    assert list(found) == ["weight", "marks", "total", "plain table"]
    assert found["total"][2:] == (10, [40 + 8, 20 + 8, 10 + 8])


def test_buffers_of_plain_modules_keep_their_size() -> None:
    emb = se.build("standard", num_embeddings=5, embedding_dim=2)
    emb.helper = nn.Module()
    emb.helper.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
    assert by_name(emb)["helper.steps"] == ("buffer", (3,), 3, [24, 24, 24])


def test_no_weights_are_needed() -> None:
    with torch.device("meta"):
        emb = se.build("funnel", num_embeddings=10**9, embedding_dim=512, rank=64)
    assert by_name(emb)["codes"][2] == 64 * 10**9


def test_columns_are_aligned() -> None:
    text = describe_storage(se.build("projective", num_embeddings=1000, embedding_dim=60, rank=2))
    lines = text.splitlines()
    assert [line.split()[0] for line in lines] == ["part", "codes", "basis", "total", "plain"]
    assert lines[1].split() == ["codes", "1000", "x", "2", "2,000", "8,000", "4,000", "2,000", "1,125"]
    assert lines[3].endswith("28.30x") and lines[4].endswith("1.00x")
    ends = {line.index(number) + len(number) for line, number in zip(lines[1:4], ["8,000", "480", "8,480"])}
    assert len(ends) == 1
