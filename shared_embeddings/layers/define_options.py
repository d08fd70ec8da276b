"""The options of DeFINE, and what of them fits together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from shared_embeddings.layers.group_transform import (
    Connection,
    LayerPlan,
    Transform,
    plan_delight_groups,
    plan_delight_layers,
    plan_groups,
    plan_layers,
)
from shared_embeddings.options import EmbeddingOptions, require, require_at_least

_DEFAULT_GROUPS = 4
# What `build` is told beside the options of the map.
_OF_THE_MAP = ("method", "num_embeddings", "embedding_dim")


@dataclasses.dataclass(frozen=True)
class DefineOptions(EmbeddingOptions):
    """Options of `define`; those of the map's own method stand beside them (``map="projective", rank=32``).

    Attributes:
        map_dim: n, the width of the mapped vectors; for unit "paper" divisible by the groups of every layer.
        expand_dim: k, the width after the last layer that widens; at least n.
        depth: N, the number of group transforms.
        unit: "paper" is the unit of section 3; "delight" that of the authors' later code, which has its own
            groups, connections and reduction, so that `transform`, `shuffle`, `connection` and `reduce` have
            no effect. See `DefineEmbedding`.
        max_groups: g_max (default 4): the groups of the first layer; with unit "delight" the most groups, a
            power of 2. Not for transform "linear".
        transform: "hgt" halves the groups from layer to layer, "glt" keeps them, "linear" has one.
        shuffle: deal the outputs of the groups out anew between layers; not for transform "linear".
        connection: what a layer sees beside the previous output, see `Expansion`. "residual" makes all layers
            k / 2 wide (section 4.4).
        reduce: project the expanded vector to D; without it its width must be D.
        map: the method of the map (V x n).
        output: what the output layer is tied to: "map" (hidden states of n dimensions), "table" (the whole
            unit) or "none" (input only).
        output_projection: with output "map", project hidden states from D to n first.
        map_options: the options of the map, also accepted beside the others.
    """

    map_dim: int
    expand_dim: int
    depth: int
    unit: Literal["paper", "delight"] = "paper"
    max_groups: int | None = None
    transform: Transform = "hgt"
    shuffle: bool = False
    connection: Connection = "mixer"
    reduce: bool = True
    map: str = "standard"
    output: Literal["map", "table", "none"] = "map"
    output_projection: bool = False
    map_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

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
        require(
            self.output == "map" or not self.output_projection,
            f"option 'output_projection' has no effect with output '{self.output}'; leave it out",
        )
        require(
            self.output != "none" or not self.output_bias,
            "option 'output_bias' has no effect with output 'none'; leave it out",
        )
        require(
            not self.output_projection or "score_dim" not in self.map_options,
            "option 'output_projection' projects hidden states to the width of the map, and 'score_dim' has "
            "each band of it do so; leave one of them out",
        )
        require(
            "output" not in self.map_options,
            "option 'map_options' has an 'output', but that of the unit decides; leave it out",
        )
        for name in self.map_options:
            require(
                isinstance(name, str) and name not in _OF_THE_MAP,
                f"option 'map_options' has {name!r}, which is no option of a map; leave it out",
            )
        if self.unit == "paper":
            self._check_groups()
        else:
            self._check_delight()

    def __getattr__(self, name: str) -> object:
        # The options of the map read like the unit's own.
        map_options = self.__dict__.get("map_options", {})
        if name in map_options:
            return map_options[name]
        raise AttributeError(f"'define' has no option '{name}'")

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
        """Raise `OptionError` unless vectors of D dimensions can come out of the unit."""
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
        """Raise `OptionError` for what the unit of the authors' later code does not have."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
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
