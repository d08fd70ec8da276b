"""The unit of DeFINE: its options, and the layers that follow from them."""

from __future__ import annotations

import dataclasses
from typing import Literal

from shared_embeddings.layers.group_transform import (
    Connection,
    LayerPlan,
    Transform,
    plan_delight_groups,
    plan_delight_layers,
    plan_groups,
    plan_layers,
)
from shared_embeddings.options import EmbeddingOptions, option, require, require_at_least

_DEFAULT_GROUPS = 4


@dataclasses.dataclass(frozen=True)
class UnitOptions(EmbeddingOptions):
    """The options of the layers between the map and the D-wide vectors; see `DefineEmbedding`.

    The unit of the authors' later code ("delight") has its own groups, connections and reduction, so that
    `transform`, `shuffle`, `connection` and `reduce` have no effect.
    """

    map_dim: int = option(
        'n, the width of the mapped vectors; for unit "paper" divisible by the groups of every layer.'
    )
    expand_dim: int = option("k, the width after the last layer that widens, at least n.")
    depth: int = option("N, the number of group transforms.")
    unit: Literal["paper", "delight"] = option(
        'The unit of section 3 ("paper") or of the authors\' later code ("delight").', "paper"
    )
    max_groups: int | None = option(
        'g_max, the groups of the first layer, 4 by default; for unit "delight" the most of any layer, '
        'a power of 2. Not for transform "linear".',
        None,
    )
    transform: Transform = option(
        "Groups are halved from layer to layer (hgt), constant (glt), or one (linear).", "hgt"
    )
    shuffle: bool = option(
        'Interleaves the outputs of the groups between layers; not for transform "linear".', False
    )
    connection: Connection = option(
        "The input of a layer besides the previous output, see `Expansion`; residual connections make all "
        "layers k / 2 wide (section 4.4).",
        "mixer",
    )
    reduce: bool = option("Projects the expanded vector to D; otherwise its width must be D.", True)

    def __post_init__(self) -> None:
        for name in ("map_dim", "expand_dim", "depth", "max_groups"):
            require_at_least(name, getattr(self, name), 1)
        require(
            self.expand_dim >= self.map_dim,
            f"option 'expand_dim' is {self.expand_dim}, less than 'map_dim' {self.map_dim}; raise it",
        )
        for name in ("max_groups", "shuffle"):
            require(
                self.transform != "linear" or not getattr(self, name),
                f"option '{name}' has no effect with transform 'linear', which has one group; leave it out",
            )
        if self.unit == "paper":
            self._check_groups()
        else:
            self._check_delight()

    def delight_entry(self, embedding_dim: int) -> LayerPlan:
        """The first layer of unit "delight", from n to D / 2."""
        half = embedding_dim // 2
        return LayerPlan(1, self.map_dim, half, norm_width=half)

    def layers(self, embedding_dim: int) -> list[LayerPlan]:
        """The sizes of the group transforms; in unit "delight" also of the linear layer that follows them."""
        if self.unit == "delight":
            return plan_delight_layers(embedding_dim, self.expand_dim, self.depth, self._groups())
        return plan_layers(
            self.map_dim, self.expand_dim, self.depth, self._groups(), self.transform, self.connection
        )

    def check_dim(self, embedding_dim: int) -> None:
        """Raise `OptionError` unless the unit can output vectors of D dimensions."""
        if self.unit == "delight":
            self._check_halves(embedding_dim // 2)
            return
        width = self.layers(embedding_dim)[-1].outputs
        require(
            self.reduce or width == embedding_dim,
            f"option 'reduce' is off, but the expanded vectors are {width} wide and the dimension is "
            f"{embedding_dim}; change 'expand_dim' or leave 'reduce' on",
        )

    def _groups(self) -> int:
        """g_max."""
        return self.max_groups or _DEFAULT_GROUPS

    def _check_groups(self) -> None:
        """Raise `OptionError` unless the mapped vector splits into the groups of each layer that reads it."""
        groups = plan_groups(self.transform, self._groups(), self.depth)
        reading = groups if self.connection in ("mixer", "skip") else groups[:1]
        for layer, count in enumerate(reading, start=1):
            require(
                self.map_dim % count == 0,
                f"option 'map_dim' is {self.map_dim}, not divisible by the {count} groups of layer {layer}; "
                f"change it or 'max_groups' ({self._groups()})",
            )

    def _check_delight(self) -> None:
        """Raise `OptionError` for options that the unit of the authors' later code does not have."""
        defaults = {field.name: field.default for field in dataclasses.fields(UnitOptions)}
        for name in ("transform", "shuffle", "connection", "reduce"):
            value = getattr(self, name)
            require(
                value == defaults[name],
                f"option '{name}' has no effect with unit 'delight', but it is {value!r}; leave it out",
            )
        require(
            self.depth >= 2,
            f"option 'depth' is {self.depth}, but unit 'delight' widens in one layer and reduces in another; "
            "choose at least 2",
        )
        require(
            self._groups().bit_count() == 1,
            f"option 'max_groups' is {self._groups()}, but with unit 'delight' it must be a power of 2",
        )

    def _check_halves(self, entry_width: int) -> None:
        """Raise `OptionError` unless D / 2 splits into the groups and is no more than k."""
        most = max(plan_delight_groups(self._groups(), self.depth))
        require(
            entry_width >= most and entry_width % most == 0,
            f"option 'max_groups' leads to {most} groups, but with unit 'delight' half of the dimension, "
            f"{entry_width}, must be a multiple of them; lower it",
        )
        require(
            self.expand_dim >= entry_width,
            f"option 'expand_dim' is {self.expand_dim}, less than the half of the dimension, {entry_width}, "
            "that unit 'delight' expands; raise it",
        )
