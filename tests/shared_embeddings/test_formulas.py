"""Every method against its paper's formula: worked by hand, by plain loops, by the sizes in print."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import shared_embeddings as se

from .references import GroupLayer, define_layers


def millions(method: str, num_embeddings: int, embedding_dim: int, **options: object) -> float:
    """Expected parameters, in millions."""
    return (
        se.expected_count(method, num_embeddings=num_embeddings, embedding_dim=embedding_dim, **options) / 1e6
    )


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


@pytest.mark.parametrize(
    ("activation", "function"), [("relu", torch.relu), ("gelu", F.gelu), ("tanh", torch.tanh)], ids=str
)
def test_funnel_applies_its_activation(activation: str, function: object) -> None:
    emb = se.build("funnel", num_embeddings=11, embedding_dim=7, rank=3, activation=activation)
    torch.testing.assert_close(emb.table(), function(emb.codes) @ emb.basis)


def test_funnel_rectifies_by_default() -> None:
    assert se.build("funnel", num_embeddings=11, embedding_dim=7, rank=3).options.activation == "relu"


@pytest.mark.parametrize("method", ["funnel", "projective"])
def test_low_rank_sizes_of_the_distilled_embedding_paper(method: str) -> None:
    """Section 3 and tables 1 to 3: r (V + d)."""
    assert se.expected_count(method, num_embeddings=32000, embedding_dim=512, rank=64) == 64 * (32000 + 512)
    assert millions(method, 32000, 512, rank=64) == pytest.approx(2.08, abs=0.005)
    assert millions(method, 37000, 512, rank=64) == pytest.approx(2.40, abs=0.005)
    assert millions(method, 32000, 256, rank=64) == pytest.approx(2.06, abs=0.005)


def test_standard_sizes_of_the_papers() -> None:
    assert millions("standard", 37000, 512) == pytest.approx(18.94, abs=0.005)
    assert millions("standard", 32000, 256) == pytest.approx(8.19, abs=0.005)


def test_low_rank_compression_of_the_distilled_embedding_paper() -> None:
    """Tables 1 and 3: 7.87x for En-Fr, 3.96x for Pt-En; table 5: ranks 32 and 16 give 7.93x and 15.86x."""
    for vocabulary, dim, rank, factor in [
        (32000, 512, 64, 7.87),
        (37000, 512, 64, 7.89),
        (32000, 256, 64, 3.96),
        (32000, 256, 32, 7.93),
        (32000, 256, 16, 15.86),
    ]:
        full = millions("standard", vocabulary, dim)
        assert full / millions("funnel", vocabulary, dim, rank=rank) == pytest.approx(factor, abs=0.015)


# ALONE


def test_alone_sizes_of_the_paper() -> None:
    """Table 1: D_o + D_inter (D_o + D_e), whatever V is; tables 2 and 3 print 4.2M and 8.4M."""
    sizes = {"base_dim": 512, "filter": "real"}
    for vocabulary in (100, 37000):
        count = se.expected_count(
            "alone", num_embeddings=vocabulary, embedding_dim=512, hidden_dim=4096, **sizes
        )
        assert count == 512 + 4096 * (512 + 512) == 4_194_816
    assert millions("alone", 37000, 512, hidden_dim=8192, **sizes) == pytest.approx(8.4, abs=0.05)


def test_alone_sizes_of_the_reconstruction_experiment() -> None:
    """Section 3.1: 0.4M, 0.7M, 1.1M and 1.4M for D_inter of 600 to 2400 and D_o = D_e = 300."""
    for hidden, size in [(600, 0.4), (1200, 0.7), (1800, 1.1), (2400, 1.4)]:
        assert millions("alone", 5000, 300, base_dim=300, hidden_dim=hidden) == pytest.approx(size, abs=0.05)


# DeFINE


def test_groups_and_widths_worked_by_hand() -> None:
    """n = 16, k = 60, N = 3, g_max = 4: widths 16, 38, 60 become 16, 40, 64; groups are 4, 2, 1."""
    assert define_layers(16, 60, 3, 4, "hgt", "mixer") == [
        GroupLayer(4, 16, 16),
        GroupLayer(2, 16 + 16, 40),
        GroupLayer(1, 16 + 40, 64),
    ]
    assert define_layers(16, 60, 3, 4, "glt", "none") == [
        GroupLayer(4, 16, 16),
        GroupLayer(4, 16, 40),
        GroupLayer(4, 40, 64),
    ]
    assert define_layers(16, 60, 2, 16, "hgt", "residual") == [GroupLayer(16, 16, 32), GroupLayer(8, 32, 32)]


UNIT = {"map_dim": 16, "expand_dim": 60, "depth": 3, "max_groups": 4, "output": "table"}


def test_parameters_of_a_unit_counted_by_hand() -> None:
    """Map 37 x 16; entry 16 x 16; groups of 4, 2, 1; bias and two norm vectors an output; reduction to 24."""
    table = 37 * 16
    entry = 16 * 16 + 16
    first = 4 * (4 * 4) + 3 * 16
    second = 2 * (16 * 20) + 3 * 40
    third = 56 * 64 + 3 * 64
    reduction = 64 * 24 + 24
    expected = table + entry + first + second + third + reduction
    assert se.expected_count("define", num_embeddings=37, embedding_dim=24, **UNIT) == expected


def test_wikitext_maps_have_the_sizes_of_the_paper() -> None:
    """Table 1a, tied input-output of V = 267,735 in bands: 9.25M, 13.90M, 18.55M for n from 256 to 512."""
    bands = {"map": "adaptive", "cutoffs": [20000, 40000, 200000], "factor": 4}
    for n, size in [(256, 9.25), (384, 13.90), (512, 18.55)]:
        unit = {"map_dim": n, "expand_dim": 1024, "depth": 3, "max_groups": 4, "output": "map"}
        full = millions("define", 267735, n, **unit) - 267735 * n / 1e6
        assert millions("define", 267735, n, **unit, **bands) - full == pytest.approx(size, abs=0.03)


def test_hierarchical_groups_cost_less_than_full_layers_and_more_than_fixed_groups() -> None:
    """Table 6a: 42.86M linear, 40.73M HGT, 39.69M GLT; table 8b: no reduction costs more."""
    unit = {"map_dim": 384, "expand_dim": 1024, "depth": 7, "connection": "none", "output": "table"}
    linear = millions("define", 1000, 384, transform="linear", **unit)
    hgt = millions("define", 1000, 384, transform="hgt", max_groups=8, **unit)
    glt = millions("define", 1000, 384, transform="glt", max_groups=8, **unit)
    assert glt < hgt < linear


def test_translation_model_of_the_define_paper() -> None:
    """Table 3: 68M = 44M + plain output of 31k x 512 + two inputs with n = 128, k = 1024, N = 3."""
    unit = {"map_dim": 128, "expand_dim": 1024, "depth": 3, "max_groups": 16, "output": "none"}
    total = 44 + millions("standard", 31000, 512) + 2 * millions("define", 31000, 512, **unit)
    assert total == pytest.approx(68, rel=0.05)


@pytest.mark.parametrize(("n", "total"), [(64, 55.67), (128, 72.90), (256, 107.37)])
def test_transformer_xl_of_the_define_paper(n: int, total: float) -> None:
    """Table 2a: 36.25M context model, map tied with the softmax, D = 384 projected to n, N = 3, k = 4096."""
    unit = {"map_dim": n, "expand_dim": 4096, "depth": 3, "max_groups": 16}
    size = millions("define", 267735, 384, output="map", output_projection=True, **unit)
    assert 36.25 + size == pytest.approx(total, rel=0.05)


def test_penn_treebank_is_four_million_smaller() -> None:
    """Table 1c: AWD-LSTM with 24M has a 10,000 x 400 table; n = 128, k = 1024, N = 7, m = 400 makes it 20M.

    The last LSTM layer shrinks from 400 to 128 outputs, so from 4 (1150 + 400) 400 to 4 (1150 + 128) 128.
    """
    unit = {"map_dim": 128, "expand_dim": 1024, "depth": 7, "max_groups": 16, "output": "map"}
    layer = lambda outputs: 4 * (1150 + outputs + 2) * outputs / 1e6  # noqa: E731
    smaller = 24.2 - millions("standard", 10000, 400) - layer(400) + layer(128)
    assert smaller + millions("define", 10000, 400, **unit) == pytest.approx(20, rel=0.05)


def test_dimension_of_scores_follows_what_the_softmax_is_tied_to() -> None:
    sizes = {"num_embeddings": 37, "embedding_dim": 24}
    unit = {"map_dim": 16, "expand_dim": 48, "depth": 2, "max_groups": 2}
    assert se.build("define", **sizes, **unit, output="map").score_dim == 16
    assert se.build("define", **sizes, **unit, output="map", output_projection=True).score_dim == 24
    assert se.build("define", **sizes, **unit, output="table").score_dim == 24


# ALONE, statistics


def test_probability_of_a_zero_is_shared_out_over_the_codebooks() -> None:
    """0.5 over 8 codebooks: each has ones with 1 - 0.5^(1/8) = 0.083."""
    assert 1 - 0.5 ** (1 / 8) == pytest.approx(0.0830, abs=1e-4)
    assert math.isclose((1 - (1 - 0.5 ** (1 / 8))) ** 8, 0.5)
