"""The unit that stands for DeFINE in the code of DeLighT, against a reference written from its description.

n is the width of the map, D that of the result, k the widest, N the number of group transforms; no layer has
more than g_max groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import shared_embeddings as se

from .references import mixed, normalized


class Sizes(NamedTuple):
    """One layer of the reference."""

    groups: int
    inputs: int
    outputs: int


class Setting(NamedTuple):
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
        """As the library has them."""
        sizes = {"map_dim": self.n, "expand_dim": self.k, "depth": self.N, "max_groups": self.g_max}
        return {**sizes, "unit": "delight", "output": "table"}

    @property
    def layers(self) -> list[Sizes]:
        """The input layer, the group transforms, the output layer."""
        half = self.D // 2
        transforms = [Sizes(self.groups[0], half, self.widths[0])]
        for groups, before, width in zip(self.groups[1:], self.widths, self.widths[1:]):
            transforms.append(Sizes(groups, half + before, width))
        return [Sizes(1, self.n, half), *transforms, Sizes(1, half + self.D, self.D)]


SETTINGS = [
    # From 12 to 48 in steps of 9: 21, 30, 39, 48, in multiples of 8; then 24.
    Setting(16, 24, 48, 5, 4, [2, 1, 4, 2, 1], [24, 32, 40, 48, 24]),
    # From 12 to 49 in steps of 12 1/3: 24, 36, 49. The fraction of 24 1/3 is dropped, so that 24 stays.
    Setting(16, 24, 49, 4, 2, [2, 1, 2, 1], [24, 40, 56, 24]),
    # Groups of 16 on one side of the first width.
    Setting(8, 32, 40, 3, 16, [4, 2, 1], [32, 40, 32]),
    Setting(8, 32, 40, 5, 16, [16, 8, 4, 2, 1], [32, 32, 40, 40, 32]),
    Setting(7, 20, 30, 2, 1, [1, 1], [32, 20]),
    # A dimension that is odd has a half without fraction.
    Setting(6, 17, 20, 2, 2, [2, 1], [24, 17]),
]
each_setting = pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: f"N{setting.N}-D{setting.D}")


@pytest.fixture(autouse=True)
def _single_precision_afterwards() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


class Weights(NamedTuple):
    """Of one layer: a matrix ``(inputs / g, outputs / g)`` and a bias per group, a gain and shift for all."""

    matrices: list[Tensor]
    biases: list[Tensor]
    gain: Tensor
    shift: Tensor


def drawn(sizes: Sizes) -> Weights:
    """Random weights of a layer."""
    inputs, outputs = sizes.inputs // sizes.groups, sizes.outputs // sizes.groups
    return Weights(
        [torch.randn(inputs, outputs) * inputs**-0.5 for _ in range(sizes.groups)],
        [torch.randn(outputs) for _ in range(sizes.groups)],
        torch.rand(outputs) + 0.5,
        torch.randn(outputs),
    )


def layer(vector: Tensor, weights: Weights) -> Tensor:
    """A linear map, a normalization and GELU of every group by itself."""
    groups = []
    for chunk, matrix, bias in zip(vector.chunk(len(weights.biases)), weights.matrices, weights.biases):
        value = normalized(chunk @ matrix + bias, weights.gain, weights.shift)
        groups.append(value * (1 + torch.erf(value / math.sqrt(2))) / 2)
    return torch.cat(groups)


def unit(vector: Tensor, setting: Setting, weights: list[Weights]) -> Tensor:
    """The vector ``(D,)`` of a word that the map gives ``(n,)``."""
    first, *transforms, last = weights
    entry = layer(vector, first)
    output = layer(entry, transforms[0])
    for groups, transform in zip(setting.groups[1:], transforms[1:]):
        output = layer(mixed(entry, output, groups), transform)
    return layer(torch.cat([entry, output]), last)


def copied_into(emb: Any, weights: list[Weights]) -> None:
    """Give an embedding the weights; they have to fit to the last number."""
    parts = ["entry", *(f"expansion.layers.{place}" for place in range(len(weights) - 1))]
    state = {"map.weight": torch.randn(11, emb.options.map_dim)}
    for part, (matrices, biases, gain, shift) in zip(parts, weights):
        state[f"{part}.weight"] = torch.stack(matrices)
        state[f"{part}.bias"] = torch.stack(biases).unsqueeze(1)
        state |= {f"{part}.norm.weight": gain, f"{part}.norm.bias": shift}
    emb.load_state_dict(state)


@each_setting
def test_it_computes_what_the_reference_does(setting: Setting) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    emb: Any = setting.build()
    weights = [drawn(sizes) for sizes in setting.layers]
    copied_into(emb, weights)
    expected = torch.stack([unit(vector, setting, weights) for vector in emb.map.table()])
    ids = torch.tensor([[3, 7], [7, 0]])
    for found, wanted in (
        (emb.table(), expected),
        (emb(ids), expected[ids]),
        (emb.eval().table(), expected),
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@each_setting
def test_its_parameters_are_those_of_the_reference(setting: Setting) -> None:
    expected = 11 * setting.n
    for weights in map(drawn, setting.layers):
        expected += sum(part.numel() for part in [*weights.matrices, *weights.biases])
        expected += weights.gain.numel() + weights.shift.numel()
    sizes: dict[str, Any] = {"num_embeddings": 11, "embedding_dim": setting.D}
    assert se.num_parameters("define", **sizes, **setting.options) == expected
    assert setting.build().counts()["total"] == expected


def test_parameters_counted_by_hand() -> None:
    """The first setting: input layer; groups 2, 1, 4, 2, 1; output layer, which reads 12 + 24."""
    transforms = [
        12 * 24 // 2 + 24 + 2 * 12,
        36 * 32 + 32 + 2 * 32,
        44 * 40 // 4 + 40 + 2 * 10,
        52 * 48 // 2 + 48 + 2 * 24,
        60 * 24 + 24 + 2 * 24,
    ]
    total = 37 * 16 + (16 * 12 + 12 + 2 * 12) + sum(transforms) + (36 * 24 + 24 + 2 * 24)
    sizes: dict[str, Any] = {"num_embeddings": 37, "embedding_dim": 24}
    assert total == 6552 == se.num_parameters("define", **sizes, **SETTINGS[0].options)


def test_it_is_another_unit_than_that_of_the_paper() -> None:
    setting = SETTINGS[0]
    later, paper = setting.options, {**setting.options, "unit": "paper"}
    sizes: dict[str, Any] = {"num_embeddings": 11, "embedding_dim": setting.D}
    assert se.build("define", **sizes, **paper).stored_options().get("unit") is None
    assert se.build("define", **sizes, **later).stored_options()["unit"] == "delight"
    assert se.num_parameters("define", **sizes, **paper) != se.num_parameters("define", **sizes, **later)


def test_it_is_not_the_unit_that_the_paper_counts() -> None:
    """Table 1a, R3, prints 0.41M for n = D = 256, k = 1024, N = 3; this unit has 0.81M."""
    sizes: dict[str, Any] = {"num_embeddings": 1000, "embedding_dim": 256}
    for most in (4, 16, 128):
        options = Setting(256, 256, 1024, 3, most, [], []).options
        unit_alone = se.num_parameters("define", **sizes, **options) - 1000 * 256
        assert round(unit_alone / 1e6, 2) == 0.81


def test_its_layers_are_the_group_transforms() -> None:
    setting = SETTINGS[0]
    found = setting.build().layers(torch.tensor([1, 4]))
    assert [layer.name for layer in found] == ["map", "entry", *(f"layer {n}" for n in range(1, 6)), "output"]
    assert [layer.groups for layer in found[2:-1]] == setting.groups
    assert [layer.values.size(1) for layer in found] == [16, 12, *setting.widths, 24]


def test_a_new_unit_has_the_spread_of_a_table() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_embeddings": 500, "embedding_dim": 64}
    emb = se.build("define", **sizes, map_dim=32, expand_dim=128, depth=5, max_groups=4, unit="delight")
    assert emb.table().square().mean().sqrt().item() == pytest.approx(64**-0.5, rel=0.2)
