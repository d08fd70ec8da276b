"""Every method against its paper's formula: worked by hand, by plain loops, by the sizes in print."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shared_embeddings as se
from tests.helpers import in_turn

from .cases import CASES, Case, by_name
from .contract.checks import each_of
from .references import (
    GroupLayer,
    GroupWeights,
    alone_masks,
    alone_table,
    binary_rate,
    define_layers,
    define_unit,
    with_bias,
    zero_row,
)
from .support import assert_same_gradients, gradients


def millions(method: str, num_embeddings: int, embedding_dim: int, **options: object) -> float:
    """Expected parameters, in millions."""
    return (
        se.num_parameters(method, num_embeddings=num_embeddings, embedding_dim=embedding_dim, **options) / 1e6
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
    ("activation", "function"), [("relu", torch.relu), ("gelu", F.gelu), ("tanh", torch.tanh)]
)
def test_funnel_applies_its_activation(activation: str, function: Callable[[Tensor], Tensor]) -> None:
    emb = se.build("funnel", num_embeddings=11, embedding_dim=7, rank=3, activation=activation)
    torch.testing.assert_close(emb.table(), function(emb.codes) @ emb.basis)


def test_a_funnel_of_few_words_starts_with_numbers() -> None:
    """Of one code alone, a ReLU stops every fortieth."""
    for seed in range(200):
        torch.manual_seed(seed)
        assert se.build("funnel", num_embeddings=1, embedding_dim=2, rank=1).table().isfinite().all()


def test_funnel_rectifies_by_default() -> None:
    assert se.build("funnel", num_embeddings=11, embedding_dim=7, rank=3).options.activation == "relu"


@pytest.mark.parametrize("method", ["funnel", "projective"])
def test_low_rank_sizes_of_the_distilled_embedding_paper(method: str) -> None:
    """Section 3 and tables 1 to 3: r (V + d)."""
    assert se.num_parameters(method, num_embeddings=32000, embedding_dim=512, rank=64) == 64 * (32000 + 512)
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
        count = se.num_parameters(
            "alone", num_embeddings=vocabulary, embedding_dim=512, hidden_dim=4096, **sizes
        )
        assert count == 512 + 4096 * (512 + 512) == 4_194_816
    assert millions("alone", 37000, 512, hidden_dim=8192, **sizes) == pytest.approx(8.4, abs=0.05)


def test_alone_sizes_of_the_reconstruction_experiment() -> None:
    """Section 3.1: 0.4M, 0.7M, 1.1M and 1.4M for D_inter of 600 to 2400 and D_o = D_e = 300."""
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


ALONE_CASES = [case for case in CASES if case.method == "alone"]
each_alone = in_turn("case", ALONE_CASES)


def naive_alone(emb: se.SharedEmbedding) -> Tensor:
    """The table with every word's filter written out."""
    binary = emb.options.filter == "binary"
    masks = alone_masks(emb.codes.long(), emb.codebooks.to(emb.base.dtype), binary)
    return zero_row(alone_table(emb.base, masks, emb.first, emb.second), emb.padding_idx)


@each_alone
def test_alone_equals_the_naive_filters_in_value_and_gradient(case: Case) -> None:
    emb = case.build()
    expected = naive_alone(emb)
    torch.testing.assert_close(emb.table(), expected, rtol=1e-4, atol=1e-6)
    weight = torch.randn_like(expected)
    assert_same_gradients(
        gradients(emb, (emb.table() * weight).sum()), gradients(emb, (expected * weight).sum())
    )
    hidden, targets = case.hidden(9), torch.randint(case.num_embeddings, (9,))
    scores = with_bias(hidden @ naive_alone(emb).T, emb.bias, case.padding_idx)
    dense = F.cross_entropy(scores, targets)
    loss = emb.cross_entropy(hidden, targets)
    torch.testing.assert_close(loss, dense, rtol=1e-4, atol=1e-5)
    assert_same_gradients(gradients(emb, loss, hidden), gradients(emb, dense, hidden))


@pytest.mark.parametrize(("zero_probability", "codebooks"), [(0.5, 8), (0.5, 1), (0.2, 4), (0.9, 2)])
def test_binary_filters_are_zero_as_often_as_asked(zero_probability: float, codebooks: int) -> None:
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


def test_binary_filters_are_half_zeros_by_default() -> None:
    emb = se.build("alone", num_embeddings=400, embedding_dim=8, hidden_dim=4, base_dim=300, filter="binary")
    masks = alone_masks(emb.codes.long(), emb.codebooks.float(), binary=True)
    assert masks.mean().item() == pytest.approx(0.5, abs=0.03)


def test_real_filters_are_gaussian_and_every_entry_is_in_use() -> None:
    emb = se.build("alone", num_embeddings=2000, embedding_dim=8, hidden_dim=4, base_dim=300, filter="real")
    assert emb.codes.shape == (2000, 8) and emb.codebooks.shape == (8, 64, 300)
    assert emb.codebooks.mean().abs() < 0.02 * emb.codebooks.std()
    # The filter of a word, a sum of 8 entries, has variance one.
    assert 8 * emb.codebooks.var().item() == pytest.approx(1, abs=0.05)
    kurtosis = (emb.codebooks / emb.codebooks.std()).pow(4).mean().item()
    assert kurtosis == pytest.approx(3, abs=0.1)
    for book in range(8):
        assert emb.codes[:, book].unique().tolist() == list(range(64))


def stored_filters(emb: se.SharedEmbedding) -> list[Tensor]:
    """Copies of the codes and codebooks."""
    return [emb.codes.clone(), emb.codebooks.clone()]


@pytest.mark.parametrize("name", ["alone-real", "alone-binary"])
def test_filters_come_from_their_own_seed(name: str) -> None:
    case = by_name(name)
    first, second = case.build(1), case.build(2)
    for one, other in zip(stored_filters(first), stored_filters(second)):
        assert torch.equal(one, other)
    assert not torch.equal(first.first, second.first)
    third = case.build(1, options=case.options | {"seed": 7})
    assert not torch.equal(third.codes, first.codes)
    assert not torch.equal(third.codebooks, first.codebooks)
    assert torch.equal(third.first, first.first)


@pytest.mark.parametrize("name", ["alone-real", "alone-binary"])
def test_filters_neither_read_nor_move_the_global_random_state(name: str) -> None:
    case = by_name(name)
    torch.manual_seed(3)
    case.build(None)
    after_one = torch.rand(1)
    torch.manual_seed(3)
    case.build(None, options=case.options | {"seed": 7, "codebooks": 5})
    assert torch.equal(torch.rand(1), after_one)


@pytest.mark.parametrize("name", ["alone-real", "alone-binary"])
def test_filters_of_a_checkpoint_win_over_the_seed(name: str) -> None:
    case = by_name(name)
    saved, other = case.build(1), case.build(2, options=case.options | {"seed": 7})
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.table(), saved.table())
    torch.testing.assert_close(other.eval()(torch.tensor([4, 5])), saved.table()[[4, 5]])


@pytest.mark.parametrize("name", ["alone-real", "alone-binary"])
def test_filters_survive_new_parameters(name: str) -> None:
    emb = by_name(name).build()
    before = stored_filters(emb)
    emb.reset_parameters()
    for one, other in zip(before, stored_filters(emb)):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["alone-real", "alone-binary"])
def test_no_mask_of_all_words_is_ever_stored(name: str) -> None:
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


def test_a_fixed_base_is_no_parameter() -> None:
    case = by_name("alone-real-fixed-base")
    emb = case.build()
    assert "base" in emb.state_dict() and "base" not in dict(emb.named_parameters())
    assert emb.counts()["total"] == 40 * (18 + 24)
    before = emb.base.clone()
    emb(torch.arange(37)).square().sum().backward()
    torch.optim.SGD(emb.parameters(), lr=1.0).step()
    assert torch.equal(emb.base, before)


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
    """Map 37 x 16; entry 16 x 16; groups of 4, 2, 1 with bias, gain and shift; reduction to 24."""
    table = 37 * 16
    entry = 16 * 16 + 16
    first = 4 * (4 * 4) + 3 * 16
    second = 2 * (16 * 20) + 3 * 40
    third = 56 * 64 + 3 * 64
    reduction = 64 * 24 + 24
    expected = table + entry + first + second + third + reduction
    assert se.num_parameters("define", num_embeddings=37, embedding_dim=24, **UNIT) == expected


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
    unit = {"map_dim": 128, "expand_dim": 1024, "depth": 7, "max_groups": 128, "output": "map"}
    layer = lambda outputs: 4 * (1150 + outputs + 2) * outputs / 1e6  # noqa: E731
    smaller = 24.2 - millions("standard", 10000, 400) - layer(400) + layer(128)
    assert smaller + millions("define", 10000, 400, **unit) == pytest.approx(20, rel=0.05)


def test_dimension_of_scores_follows_what_the_softmax_is_tied_to() -> None:
    sizes = {"num_embeddings": 37, "embedding_dim": 24}
    unit = {"map_dim": 16, "expand_dim": 48, "depth": 2, "max_groups": 2}
    assert se.build("define", **sizes, **unit, output="map").score_dim == 16
    assert se.build("define", **sizes, **unit, output="map", output_projection=True).score_dim == 24
    assert se.build("define", **sizes, **unit, output="table").score_dim == 24


# The unit of the authors' later code has tests of its own.
DEFINE_CASES = [case for case in CASES if case.method == "define" and case.options.get("unit") != "delight"]
each_define = each_of(DEFINE_CASES)


def group_weights(layer: torch.nn.Module) -> GroupWeights:
    """The tensors of one group transformation, its blocks as ``(outputs / g, inputs / g)``."""
    return GroupWeights(
        blocks=[block.T for block in layer.weight],
        bias=layer.bias.flatten(),
        gain=layer.norm.weight,
        shift=layer.norm.bias,
    )


def naive_define(emb: se.SharedEmbedding) -> Tensor:
    """The table, one word at a time, with dense block-diagonal matrices."""
    options = emb.options
    layers = define_layers(
        options.map_dim,
        options.expand_dim,
        options.depth,
        options.max_groups or 4,
        options.transform,
        options.connection,
    )
    rows = []
    for vector in emb.map.table():
        entry = emb.entry.weight @ vector + emb.entry.bias
        weights = [group_weights(layer) for layer in emb.expansion.layers]
        assert len(weights) == len(layers)
        row = define_unit(entry, layers, weights, options.connection, F.gelu, options.shuffle)
        rows.append(emb.reduction.weight @ row + emb.reduction.bias if options.reduce else row)
    return zero_row(torch.stack(rows), emb.padding_idx)


@each_define
def test_define_equals_the_naive_unit_in_value_and_gradient(case: Case) -> None:
    emb = case.build()
    with torch.no_grad():
        for parameter in emb.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    expected = naive_define(emb)
    torch.testing.assert_close(emb.table(), expected, rtol=1e-3, atol=1e-5)
    weight = torch.randn_like(expected)
    assert_same_gradients(
        gradients(emb, (emb.table() * weight).sum()),
        gradients(emb, (expected * weight).sum()),
        atol=1e-4,
    )


@each_define
def test_define_counts_its_layers(case: Case) -> None:
    """Every block, with bias, gain and shift for each output; map, entry and reduction beside them."""
    options = case.options
    n, d = options["map_dim"], case.embedding_dim
    layers = define_layers(
        n,
        options["expand_dim"],
        options["depth"],
        options.get("max_groups", 4),
        options["transform"] if "transform" in options else "hgt",
        options.get("connection", "mixer"),
    )
    expansion = sum(layer.inputs * layer.outputs // layer.groups + 3 * layer.outputs for layer in layers)
    reduction = (layers[-1].outputs + 1) * d if options.get("reduce", True) else 0
    projection = n * d if options.get("output_projection") else 0
    names = ("rank", "cutoffs", "factor", "tie", "score_dim")
    map_options = {name: options[name] for name in names if name in options} | options.get("map_options", {})
    if options.get("map") == "adaptive" and options["output"] != "map":
        map_options["output"] = "none"
    mapping = se.num_parameters(
        options.get("map", "standard"), num_embeddings=case.num_embeddings, embedding_dim=n, **map_options
    )
    bias = case.num_embeddings if options.get("output_bias") else 0
    if bias and options.get("map") == "adaptive":
        bias += len(options["cutoffs"])
    unit = n * (n + 1) + expansion + reduction + projection
    assert case.build().counts()["total"] == mapping + unit + bias


@each_define
def test_scores_are_tied_to_what_the_options_say(case: Case) -> None:
    emb = case.build()
    output = case.options["output"]
    if output == "table":
        torch.testing.assert_close(emb.output_table(), emb.table())
    elif output == "map":
        is_tied = case.options.get("tie", "all") == "all"
        mapped = zero_row(emb.map.table() if is_tied else emb.map.output_table(), emb.padding_idx)
        if case.options.get("output_projection"):
            mapped = mapped @ emb.output_projection.weight
        torch.testing.assert_close(emb.output_table(), mapped, rtol=1e-4, atol=1e-6)
    else:
        assert emb.has_output is False


def test_define_for_language_models_is_tied_to_its_map_by_default() -> None:
    unit = {name: value for name, value in UNIT.items() if name != "output"}
    emb = se.build("define", num_embeddings=37, embedding_dim=24, **unit)
    assert emb.options.output == "map" and emb.score_dim == 16


def test_widths_grow_and_groups_halve() -> None:
    """Section 3.2, for the unit of the Penn Treebank model: n = 128, k = 1024, N = 7."""
    layers = define_layers(128, 1024, 7, 16, "hgt", "mixer")
    assert [layer.groups for layer in layers] == [16, 8, 4, 2, 1, 1, 1]
    assert all(first.outputs < second.outputs for first, second in pairwise(layers))
    assert layers[0].outputs == 128 and layers[-1].outputs == 1024
    assert all(layer.inputs % layer.groups == 0 == layer.outputs % layer.groups for layer in layers)
