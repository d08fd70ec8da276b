"""DeFINE: the unit of the paper and that of the DeLighT code, against independent references."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shared_embeddings as se
from tests.shared_embeddings.cases import CASES, Case
from tests.shared_embeddings.support import assert_same_gradients, each_of, gradients, zero_row
from tests.shared_embeddings.test_formulas import millions

# References: section 3 and appendix A.1 of DeFINE


class GroupLayer(NamedTuple):
    """GroupLayer of one group transformation."""

    groups: int
    inputs: int
    outputs: int


def define_layers(
    map_dim: int, expand_dim: int, depth: int, max_groups: int, transform: str, connection: str
) -> list[GroupLayer]:
    """The expansion layers: groups halve from layer to layer, widths grow linearly (3.2, 4.4, table 8a).

    Layer l of N has ``n + (k - n) l / N`` outputs, rounded down to a multiple of the most groups, which are
    powers of two here; with residual connections all have ``expand_dim / 2``; the mixer and the skip
    connection read the input again from the second layer on.
    """
    groups = [
        {"hgt": max(max_groups // 2**layer, 1), "glt": max_groups, "linear": 1}[transform]
        for layer in range(depth)
    ]
    layers = []
    previous = map_dim
    for layer in range(depth):
        width = map_dim + (expand_dim - map_dim) * (layer + 1) / depth
        width = expand_dim / 2 if connection == "residual" else width
        outputs = math.floor(round(width, 6) / groups[0]) * groups[0]
        again = map_dim if layer and connection in ("mixer", "skip") else 0
        layers.append(GroupLayer(groups[layer], previous + again, outputs))
        previous = outputs
    return layers


def block_diagonal(blocks: Sequence[Tensor]) -> Tensor:
    """The dense matrix that a group transformation stands for."""
    dense = torch.zeros(sum(len(block) for block in blocks), sum(block.shape[1] for block in blocks))
    dense = dense.to(blocks[0].dtype)
    row = column = 0
    for block in blocks:
        dense[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return dense


def normalized(
    vector: Tensor, gain: Tensor | float = 1.0, shift: Tensor | float = 0.0, epsilon: float = 1e-5
) -> Tensor:
    """Layer normalization of one vector."""
    centered = vector - vector.mean()
    return centered / (centered.square().mean() + epsilon).sqrt() * gain + shift


def mixed(entry: Tensor, previous: Tensor, groups: int) -> Tensor:
    """Chunk i of the entry in front of chunk i of the previous output, for every group (3.3)."""
    chunks = []
    for group in range(groups):
        chunks.append(entry[group * len(entry) // groups : (group + 1) * len(entry) // groups])
        chunks.append(previous[group * len(previous) // groups : (group + 1) * len(previous) // groups])
    return torch.cat(chunks)


def shuffled(vector: Tensor, groups: int) -> Tensor:
    """The elements interleaved: the first of every group, then the second of every group."""
    size = len(vector) // groups
    return torch.stack([vector[group * size + place] for place in range(size) for group in range(groups)])


def define_unit(
    entry: Tensor,
    layers: Sequence[GroupLayer],
    matrices: Sequence[Tensor],
    connection: str,
    activation: Callable[[Tensor], Tensor],
    shuffle: bool = False,
) -> Tensor:
    """The expanded vector of one word, from its vector ``entry`` (Eq. 1, figure 3, figure 5).

    All groups of a layer share a matrix ``(outputs / g, inputs / g)`` (appendix A.1).
    """
    previous = entry
    for position, (layer, matrix) in enumerate(zip(layers, matrices)):
        if position and shuffle:
            previous = shuffled(previous, layers[position - 1].groups)
        inputs = previous
        if position and connection == "mixer":
            inputs = mixed(entry, previous, layer.groups)
        elif position and connection == "skip":
            inputs = torch.cat([entry, previous])
        outputs = block_diagonal([matrix] * layer.groups) @ inputs
        outputs = activation(normalized(outputs))
        if connection == "residual" and len(outputs) == len(previous):
            outputs = outputs + previous
        previous = outputs
    return previous


class UnitSetting(NamedTuple):
    """The options of a unit, and the groups and widths of its transforms, worked by hand."""

    n: int
    D: int
    k: int
    N: int
    g_max: int
    groups: list[int]
    widths: list[int]

    def build(self) -> se.SharedEmbedding:
        """The embedding of 11 words, its output tied to the whole unit."""
        return se.build("define", num_embeddings=11, embedding_dim=self.D, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """In the library's format."""
        sizes = {"map_dim": self.n, "expand_dim": self.k, "depth": self.N, "max_groups": self.g_max}
        return {**sizes, "unit": "delight", "output": "table"}

    @property
    def layers(self) -> list[GroupLayer]:
        """The input layer, the group transforms, the output layer."""
        half = self.D // 2
        transforms = [GroupLayer(self.groups[0], half, self.widths[0])]
        for groups, before, width in zip(self.groups[1:], self.widths, self.widths[1:]):
            transforms.append(GroupLayer(groups, half + before, width))
        return [GroupLayer(1, self.n, half), *transforms, GroupLayer(1, half + self.D, self.D)]


SETTINGS = [
    # From 12 to 48 in steps of 9: 21, 30, 39, 48, in multiples of 8; then 24.
    UnitSetting(16, 24, 48, 5, 4, [2, 1, 4, 2, 1], [24, 32, 40, 48, 24]),
    # From 12 to 49 in steps of 12 1/3: 24, 36, 49. The fraction of 24 1/3 is dropped, so that 24 stays.
    UnitSetting(16, 24, 49, 4, 2, [2, 1, 2, 1], [24, 40, 56, 24]),
    # Groups of 16 on one side of the first width.
    UnitSetting(8, 32, 40, 3, 16, [4, 2, 1], [32, 40, 32]),
    UnitSetting(8, 32, 40, 5, 16, [16, 8, 4, 2, 1], [32, 32, 40, 40, 32]),
    UnitSetting(7, 20, 30, 2, 1, [1, 1], [32, 20]),
    # Half of an odd dimension is rounded down.
    UnitSetting(6, 17, 20, 2, 2, [2, 1], [24, 17]),
]
each_setting = pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: f"N{setting.N}-D{setting.D}")


class UnitWeights(NamedTuple):
    """Of one layer: a matrix ``(inputs / g, outputs / g)`` and a bias per group, a gain and shift for all."""

    matrices: list[Tensor]
    biases: list[Tensor]
    gain: Tensor
    shift: Tensor


def drawn(sizes: GroupLayer) -> UnitWeights:
    """Random weights of a layer, in double precision."""
    inputs, outputs = sizes.inputs // sizes.groups, sizes.outputs // sizes.groups
    return UnitWeights(
        [torch.randn(inputs, outputs).double() * inputs**-0.5 for _ in range(sizes.groups)],
        [torch.randn(outputs).double() for _ in range(sizes.groups)],
        torch.rand(outputs).double() + 0.5,
        torch.randn(outputs).double(),
    )


def layer(vector: Tensor, weights: UnitWeights) -> Tensor:
    """A linear map, a normalization and GELU of every group by itself."""
    groups = []
    for chunk, matrix, bias in zip(vector.chunk(len(weights.biases)), weights.matrices, weights.biases):
        value = normalized(chunk @ matrix + bias, weights.gain, weights.shift)
        groups.append(value * (1 + torch.erf(value / math.sqrt(2))) / 2)
    return torch.cat(groups)


def unit(vector: Tensor, setting: UnitSetting, weights: list[UnitWeights]) -> Tensor:
    """The vector ``(D,)`` of a word that the map gives ``(n,)``."""
    first, *transforms, last = weights
    entry = layer(vector, first)
    output = layer(entry, transforms[0])
    for groups, transform in zip(setting.groups[1:], transforms[1:]):
        output = layer(mixed(entry, output, groups), transform)
    return layer(torch.cat([entry, output]), last)


def copied_into(emb: Any, weights: list[UnitWeights]) -> None:
    """Load the weights into an embedding, which must have exactly these sizes."""
    parts = ["entry", *(f"expansion.layers.{place}" for place in range(len(weights) - 1))]
    state = {"map.weight": torch.randn(11, emb.options.map_dim)}
    for part, (matrices, biases, gain, shift) in zip(parts, weights):
        state[f"{part}.weight"] = torch.stack(matrices)
        state[f"{part}.bias"] = torch.stack(biases).unsqueeze(1)
        state |= {f"{part}.norm.weight": gain, f"{part}.norm.bias": shift}
    emb.load_state_dict(state)


@each_setting
def test_computes_what_the_reference_does(setting: UnitSetting) -> None:
    emb: Any = setting.build().double()
    weights = [drawn(sizes) for sizes in setting.layers]
    copied_into(emb, weights)
    expected = torch.stack([unit(vector, setting, weights) for vector in emb.map.table()])
    ids = torch.tensor([[3, 7], [7, 0]])
    for actual, wanted in (
        (emb.table(), expected),
        (emb(ids), expected[ids]),
        (emb.eval().table(), expected),
    ):
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-9)


@each_setting
def test_parameters_match_the_reference(setting: UnitSetting) -> None:
    expected = 11 * setting.n
    for weights in map(drawn, setting.layers):
        expected += sum(part.numel() for part in [*weights.matrices, *weights.biases])
        expected += weights.gain.numel() + weights.shift.numel()
    sizes: dict[str, Any] = {"num_embeddings": 11, "embedding_dim": setting.D}
    assert se.num_parameters("define", **sizes, **setting.options) == expected
    assert setting.build().counts()["total"] == expected


# DeFINE


def test_groups_and_widths_worked_by_hand() -> None:
    """n = 16, k = 60, N = 3, g_max = 4: 30 2/3, 45 1/3 and 60 become 28, 44 and 60; groups are 4, 2, 1."""
    assert define_layers(16, 60, 3, 4, "hgt", "mixer") == [
        GroupLayer(4, 16, 28),
        GroupLayer(2, 28 + 16, 44),
        GroupLayer(1, 44 + 16, 60),
    ]
    assert define_layers(16, 60, 3, 4, "glt", "none") == [
        GroupLayer(4, 16, 28),
        GroupLayer(4, 28, 44),
        GroupLayer(4, 44, 60),
    ]
    assert define_layers(16, 70, 2, 16, "hgt", "residual") == [GroupLayer(16, 16, 32), GroupLayer(8, 32, 32)]


UNIT = {"map_dim": 16, "expand_dim": 60, "depth": 3, "max_groups": 4, "output": "table"}


@pytest.mark.parametrize(
    ("printed", "n", "options"),
    [
        # Table 6a: 42.86M with the other 38.63M of the model, whatever g_max.
        (42.86 - 38.63, 384, {"expand_dim": 1024, "depth": 7, "transform": "linear", "connection": "none"}),
        # Table 1a, R3.
        (0.41, 256, {"expand_dim": 1024, "depth": 3, "max_groups": 32}),
        # Table 2a, for every n, which the map widens to 384.
        (1.92, 384, {"expand_dim": 4096, "depth": 3, "max_groups": 64}),
    ],
)
def test_units_have_the_printed_sizes(printed: float, n: int, options: dict[str, Any]) -> None:
    unit = millions("define", 1000, n, map_dim=n, output="table", **options) - 1000 * n / 1e6
    assert round(unit, 2) == pytest.approx(printed)


def test_the_reduction_is_connected_to_the_map() -> None:
    """Table 6b: DeFINE has about n m more parameters than HGT, whose reduction reads k values alone.

    Map 37 x 16; entry 16 x 16; a matrix for the groups of 4, 2, 1; reduction of 60 and 16 to 24.
    """
    sizes: dict[str, Any] = {"num_embeddings": 37, "embedding_dim": 24}
    transforms = (16 // 4) * (28 // 4) + (44 // 2) * (44 // 2) + 60 * 60
    expected = 37 * 16 + 16 * 16 + transforms + (60 + 16) * 24
    assert se.num_parameters("define", **sizes, **UNIT) == expected
    without = {**UNIT, "connection": "none"}
    transforms = (16 // 4) * (28 // 4) + (28 // 2) * (44 // 2) + 44 * 60
    assert se.num_parameters("define", **sizes, **without) == 37 * 16 + 16 * 16 + transforms + 60 * 24
    emb: Any = se.build("define", **sizes, **UNIT)
    with torch.no_grad():
        emb.reducer.weight[:, 16:] = 0.0
    entries = emb.entry(emb.map.table())
    torch.testing.assert_close(emb.table(), emb.scale * entries @ emb.reducer.weight[:, :16].T)


@pytest.mark.parametrize("connection", ["mixer", "none"])
def test_the_reduction_reads_inputs_of_norm_one(connection: str) -> None:
    """So that a step of its shared matrix moves a row about as far as a step of a plain table does."""
    torch.manual_seed(0)
    options = {**UNIT, "map_dim": 64, "expand_dim": 512, "connection": connection}
    emb: Any = se.build("define", num_embeddings=500, embedding_dim=200, **options)
    inputs: list[Tensor] = []
    emb.reducer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    table = emb.table()
    assert float(inputs[0].square().sum(dim=1).mean()) == pytest.approx(1.0, rel=0.05)
    assert float(table.square().mean()) == pytest.approx(1 / 200, rel=0.1)


def test_wikitext_sizes_of_the_paper() -> None:
    """Table 1a, tied input-output of V = 267,735 in bands: 9.25M, 13.90M, 18.55M for n from 256 to 512.

    Table 2a: 36.25M context model, a map of width n, projected to D = 384 and tied, N = 3, k = 4096.
    """
    bands: dict[str, Any] = {"map": "adaptive", "cutoffs": [20000, 40000, 200000], "factor": 4}
    for n, size in [(256, 9.25), (384, 13.90), (512, 18.55)]:
        unit = {"map_dim": n, "expand_dim": 1024, "depth": 3, "max_groups": 4, "output": "map"}
        full = millions("define", 267735, n, **unit) - 267735 * n / 1e6
        assert millions("define", 267735, n, **unit, **bands) - full == pytest.approx(size, abs=0.03)
    unit = {"map_dim": 384, "expand_dim": 4096, "depth": 3, "max_groups": 64, "output_bias": True}
    for n, total in [(64, 55.67), (128, 72.90), (256, 107.37)]:
        narrow = {**bands, "factor": 1, "width": n}
        size = millions("define", 267735, 384, output="map", **unit, **narrow)
        assert 36.25 + size == pytest.approx(total, abs=0.01)


# The unit of the authors' later code has separate tests.
DEFINE_CASES = [case for case in CASES if case.method == "define" and case.options.get("unit") != "delight"]
each_define = each_of(DEFINE_CASES)


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
        entry = emb.entry.weight @ vector
        matrices = [layer.weight.T for layer in emb.expansion.layers]
        assert len(matrices) == len(layers)
        row = define_unit(entry, layers, matrices, options.connection, F.gelu, options.shuffle)
        if options.reduce and options.connection in ("mixer", "skip"):
            row = torch.cat([entry, row])
        rows.append(emb.reducer.weight @ (emb.scale * row) if options.reduce else emb.scale * row)
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
def test_scores_are_tied_as_the_options_say(case: Case) -> None:
    emb = case.build()
    output = case.options["output"]
    if output == "table":
        torch.testing.assert_close(emb.output_table(), emb.table())
    elif output == "map":
        is_tied = case.options.get("tie", "all") == "all"
        mapped = zero_row(emb.map.table() if is_tied else emb.map.output_table(), emb.padding_idx)
        hidden = narrow = case.hidden(5)
        if case.options.get("output_projection"):
            mapped = mapped @ emb.output_projection.weight
            narrow = hidden @ emb.output_projection.weight.T
        torch.testing.assert_close(emb.output_table(), mapped, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(emb.log_prob(hidden), emb.map.log_prob(narrow))
    else:
        assert emb.has_output is False
