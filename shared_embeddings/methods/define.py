"""DeFINE: words are mapped to narrow vectors, which group transforms expand and a projection reduces."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shared_embeddings.embedding import Layer, SharedEmbedding
from shared_embeddings.layers.define_unit import (
    Expansion,
    GroupLinear,
    UnitOptions,
    gain_for_rms,
    rms_of_activations,
)
from shared_embeddings.layers.initialization import entry_std
from shared_embeddings.options import OptionError, option, require
from shared_embeddings.registry import build, methods, num_parameters, options, register
from shared_embeddings.spec import Options, SearchGrid

# Options of a map that follow from the unit.
_OF_THE_UNIT = ("output", "output_bias")
# Arguments of `build` besides the options of the map.
_NOT_OF_THE_MAP = ("method", "num_embeddings", "embedding_dim")


@dataclasses.dataclass(frozen=True)
class DefineOptions(UnitOptions):
    """Options of `define`; those of the map are given alongside (``map="projective", rank=32``)."""

    paper = "DeFINE, section 3"
    summary = "V x n, deepened by group transforms"
    grid_choice = "the largest n in steps of 4, k = 4 n, N = 3 and 4 groups"
    fit_bound = 0.3

    map: str = option("The method of the map (V x n).", "standard")
    output: Literal["map", "table", "none"] = option(
        "What the output layer is tied to: the map (hidden states of n dimensions), the table, or nothing "
        "(input only).",
        "map",
    )
    output_projection: bool = option('With output "map", projects hidden states from D to n first.', False)
    map_options: Mapping[str, Any] = option(
        "The options of the map; they can also be given directly.", factory=dict
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.output == "map" or not self.output_projection,
            f"option 'output_projection' has no effect with output '{self.output}'; remove it",
        )
        require(
            self.output != "none" or not self.output_bias,
            "option 'output_bias' has no effect with output 'none'; remove it",
        )
        require(
            not self.output_projection or "score_dim" not in self.map_options,
            "options 'output_projection' and 'score_dim' both project hidden states to the width of the map; "
            "remove one of them",
        )
        require(
            "output" not in self.map_options,
            "option 'map_options' has an 'output', but that of the unit decides; remove it",
        )
        for name in self.map_options:
            require(
                isinstance(name, str) and name not in _NOT_OF_THE_MAP,
                f"option 'map_options' has {name!r}, which is not an option of a map; remove it",
            )

    def __getattr__(self, name: str) -> object:
        # The options of the map can be read like the unit's own.
        map_options = self.__dict__.get("map_options", {})
        if name in map_options:
            return map_options[name]
        raise AttributeError(f"'define' has no option '{name}'")

    @classmethod
    def normalize(cls, given: dict[str, object]) -> dict[str, object]:
        """Move the options of the map's method, given next to the unit's own, into `map_options`."""
        map_method = given.get("map", "standard")
        if map_method not in methods() or not isinstance(given.get("map_options", {}), Mapping):
            return given
        own = {field.name for field in dataclasses.fields(DefineOptions)}
        of_map = {field.name for field in dataclasses.fields(options(str(map_method)))} - own
        beside = {name: given.pop(name) for name in list(given) if name in of_map}
        nested = _mapping(given.pop("map_options", None))
        for name in beside.keys() & nested.keys():
            raise OptionError(f"define: option '{name}' is also in 'map_options'; remove one of them")
        map_options = {**nested, **beside}
        # Older checkpoints have the bias among the options of the map.
        bias = {name: map_options.pop(name) for name in ("output_bias",) if name in map_options}
        return {**bias, **given, "map_options": map_options}

    def check_sizes(self, num_embeddings: int, embedding_dim: int) -> None:
        """Check the map, and D; see `UnitOptions.check_dim`."""
        maps = [name for name in methods() if name != self.method]
        if self.map not in maps:
            raise OptionError(f"option 'map' is '{self.map}', but it must be one of {', '.join(maps)}")
        # Counting checks the options of the map without building it.
        self._count_map(num_embeddings)
        self.check_dim(embedding_dim)

    def count_parameters(self, num_embeddings: int, embedding_dim: int) -> int:
        """The map, the first layer, the group transforms (`LayerPlan.num_parameters`), reduction, projection.

        The first layer has n (n + 1), in unit "delight" (n + 1) D / 2 and D of normalization. The reduction
        has (k + 1) D; that of "delight", (3 / 2 D + 1) D + 2 D, is planned with the group transforms.
        """
        n, layers = self.map_dim, self.layers(embedding_dim)
        is_paper = self.unit == "paper"
        entry = n * (n + 1) if is_paper else self.delight_entry(embedding_dim).num_parameters()
        reduction = (layers[-1].outputs + 1) * embedding_dim if is_paper and self.reduce else 0
        projection = n * embedding_dim if self.output_projection else 0
        transforms = sum(layer.num_parameters() for layer in layers)
        return self._count_map(num_embeddings) + entry + transforms + reduction + projection

    def count_bias(self, num_embeddings: int) -> int:
        """V with the option `output_bias`, unless it is counted with the map."""
        return 0 if self.output == "map" else super().count_bias(num_embeddings)

    def _count_map(self, num_embeddings: int) -> int:
        """The parameters of the map, by the formula of its method."""
        return num_parameters(
            self.map,
            num_embeddings=num_embeddings,
            embedding_dim=self.map_dim,
            **_map_options(self),
        )

    @classmethod
    def search_grids(cls, num_embeddings: int, embedding_dim: int) -> Iterator[SearchGrid]:
        """Units in the proportions of the smallest one of the paper's Table 1a, k = 4 n and N = 3.

        The output is tied to the whole unit, which every host supports.
        """
        if embedding_dim >= 4:
            yield SearchGrid(embedding_dim // 4, lambda step: cls._unit(4 * (step + 1), 16 * (step + 1)))

    @classmethod
    def examples(cls, num_embeddings: int, embedding_dim: int) -> dict[str, Options]:
        """About n = D / 4, k = 2 D and three layers, tied to either part."""
        n = embedding_dim // 16 * 4
        return {
            "tied to its table": cls._unit(n, 8 * n),
            "tied to its map": {**cls._unit(n, 8 * n), "output": "map", "output_projection": True},
        }

    @staticmethod
    def _unit(map_dim: int, expand_dim: int) -> Options:
        """A unit of three layers and at most four groups."""
        return {
            "map_dim": map_dim,
            "expand_dim": expand_dim,
            "depth": 3,
            "max_groups": 4,
            "output": "table",
        }


@register("define", DefineOptions)
class DefineEmbedding(SharedEmbedding):
    """The DeFINE unit (section 3.3): ``e_o = W e_N + b`` over an expansion of ``e_i``, the map's vector.

    Unit "paper", the default, follows the paper in the map, the group transforms with their groups and
    connections, and the linear reduction. The paper does not specify the rest. Our choices are a linear layer
    n -> n with a bias before the group transforms, whose output is their input for connections; one matrix
    per group (see `GroupLinear`); a bias, one layer normalization of all outputs, and GELU after each group
    transform; the rounding of widths (see `plan_layers`); and no dropout.

    Unit "delight" is DeFINE in the code of the authors' next paper, DeLighT (Mehta et al., 2021). Every layer
    ends in layer normalization and GELU: a linear layer n -> D / 2; N group transforms with mixers, of which
    the last one reduces to D; and a linear layer to D, which reads the D / 2 values again. The group
    transforms normalize every group separately, with one gain and shift of its width for all; their groups
    cycle through the powers of 2 up to g_max and end in 1. We omit two parts of that code, the dropout after
    each layer and the factor sqrt(n) on the map; weights are initialized as in "paper".
    """

    options: DefineOptions
    expensive_rows = True

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None, options: DefineOptions
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, options)
        if options.output == "map":
            # The output side is that of the map, which has the bias, too.
            self.bias = None
        width = options.map_dim
        layers = options.layers(embedding_dim)
        self.map = build(
            options.map,
            num_embeddings=num_embeddings,
            embedding_dim=width,
            padding_idx=padding_idx,
            **_map_options(options),
        )
        self.entry: nn.Linear | GroupLinear
        self.reduction: nn.Linear | None = None
        if options.unit == "delight":
            self.entry = GroupLinear(options.delight_entry(embedding_dim))
        else:
            self.entry = nn.Linear(width, width)
            self.reduction = nn.Linear(layers[-1].outputs, embedding_dim) if options.reduce else None
        self.expansion = Expansion(layers, options.connection, options.shuffle)
        self.output_projection = (
            nn.Linear(embedding_dim, width, bias=False) if options.output_projection else None
        )
        self.has_output = options.output != "none"
        if options.output == "map" and not options.output_projection:
            self.score_dim = self.map.score_dim
        self.reset_parameters()

    def init_weights(self) -> None:
        """The map as its method does; the rest such that the unit's outputs have std D**-0.5."""
        self.map.reset_parameters()
        if isinstance(self.entry, GroupLinear):
            self.entry.reset_parameters(gain=1.0)
        else:
            # The map's vectors have norm one, so the values after the entry have std one.
            nn.init.normal_(self.entry.weight)
            nn.init.zeros_(self.entry.bias)
        std = entry_std(self.embedding_dim)
        summands = self.expansion.summands
        if self.reduction is None:
            self.expansion.reset_parameters(gain_for_rms(std, summands))
        else:
            self.expansion.reset_parameters(gain=1.0)
            width_rms = self.reduction.in_features**0.5 * rms_of_activations(1.0, summands)
            nn.init.normal_(self.reduction.weight, std=std / width_rms)
            nn.init.zeros_(self.reduction.bias)
        if self.output_projection is not None:
            nn.init.normal_(self.output_projection.weight, std=std)

    @property
    def has_linear_scores(self) -> bool:
        """That of the part that the output is tied to."""
        return self.map.has_linear_scores if self.options.output == "map" else self.has_output

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``(n, D)`` for ids ``(n,)``: map, expand, reduce."""
        return self._deepened(self.map.rows(ids))

    @property
    def draws_per_token(self) -> bool:
        """Whether the map does."""
        return self.map.draws_per_token

    def token_rows(self, words: Tensor, inverse: Tensor) -> Tensor:
        """As in the base class; the unit transforms every token if the map draws for each of them."""
        if not self.draws_per_token:
            return super().token_rows(words, inverse)
        rows = self._deepened(self.map.token_rows(words, inverse))
        return self.without_padding(rows, words.index_select(0, inverse))

    def _deepened(self, mapped: Tensor) -> Tensor:
        """Rows ``(n, D)`` from vectors of the map ``(n, width)``: expand, reduce."""
        expanded = self.expansion(self.entry(mapped))
        return expanded if self.reduction is None else self.reduction(expanded)

    def inner_embedding(self) -> SharedEmbedding:
        """As in the base class: that of the map if the output is tied to it."""
        return self.map.inner_embedding() if self.options.output == "map" else self

    def with_inner_embedding(self, part: SharedEmbedding) -> SharedEmbedding:
        """As in the base class; the layers after the map are those of this unit."""
        if self.options.output != "map":
            return super().with_inner_embedding(part)
        part = self.map.with_inner_embedding(part)
        # Whether the map has an output side follows from the unit.
        of_map = {name: value for name, value in part.stored_options().items() if name not in _OF_THE_UNIT}
        given: dict[str, Any] = {
            **self.stored_options(),
            "map": part.method,
            "map_options": of_map,
            "output_bias": part.options.output_bias,
        }
        with torch.device("meta"):
            unit: Any = build(
                self.method,
                num_embeddings=part.num_embeddings,
                embedding_dim=self.embedding_dim,
                padding_idx=part.padding_idx,
                **given,
            )
        unit.map = part
        for name in ("entry", "expansion", "reduction", "output_projection"):
            setattr(unit, name, getattr(self, name))
        return unit.train(self.training)  # type: ignore[no-any-return]

    def state_for_ids(self, ids: Tensor) -> tuple[dict[str, object], dict[str, Tensor]]:
        """As in the base class, if the map can remove words."""
        of_map, state_of_map = self.map.state_for_ids(ids)
        state = {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("map.")}
        state |= {f"map.{name}": tensor for name, tensor in state_of_map.items()}
        if "bias" in state:
            state["bias"] = state["bias"].index_select(0, ids)
        options = self.stored_options()
        # Whether the map has an output side follows from the unit.
        if of_map := {name: value for name, value in of_map.items() if name != "output"}:
            options["map_options"] = of_map
        return options, state

    def layers(self, ids: Tensor) -> list[Layer]:
        """The layers of the map, the linear layer after it, every group transform, and the output."""
        *inner, mapped = self.map.layers(ids)
        entry = self.entry(mapped.values)
        depth = self.options.depth
        expanded = zip(range(1, depth + 1), self.expansion.groups, self.expansion.outputs(entry))
        return [
            *(layer._replace(name=f"map: {layer.name}") for layer in inner),
            mapped._replace(name="map"),
            Layer("entry", entry),
            *(Layer(f"layer {number}", out, groups) for number, groups, out in expanded),
            *super().layers(ids),
        ]

    # With output "map", the output side is that of the map.

    def logits(self, hidden: Tensor) -> Tensor:
        """As in the base class."""
        if self.options.output != "map":
            return super().logits(hidden)
        return self.map.logits(self._projected(hidden))

    def log_prob(self, hidden: Tensor) -> Tensor:
        """As in the base class."""
        if self.options.output != "map":
            return super().log_prob(hidden)
        return self.map.log_prob(self._projected(hidden))

    def flat_loss(self, hidden: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """As in the base class."""
        if self.options.output != "map":
            return super().flat_loss(hidden, targets, **options)
        return self.map.flat_loss(self._projected(hidden), targets, **options)

    def flat_loss_and_predictions(
        self, hidden: Tensor, targets: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """As in the base class."""
        if self.options.output != "map":
            return super().flat_loss_and_predictions(hidden, targets, **options)
        return self.map.flat_loss_and_predictions(self._projected(hidden), targets, **options)

    def output_table(self) -> Tensor:
        """As in the base class."""
        if self.options.output != "map":
            return super().output_table()
        table = self.map.output_table()
        return table if self.output_projection is None else table @ self.output_projection.weight

    def output_bias(self) -> Tensor | None:
        """As in the base class."""
        return super().output_bias() if self.options.output != "map" else self.map.output_bias()

    def set_output_bias(self, bias: Tensor) -> None:
        """As in the base class."""
        if self.options.output == "map":
            self.map.set_output_bias(bias)
        else:
            super().set_output_bias(bias)

    def _projected(self, hidden: Tensor) -> Tensor:
        """Hidden states ``(..., S)`` in the width of the map ``(..., n)``."""
        self.check_hidden(hidden)
        return hidden if self.output_projection is None else self.output_projection(hidden)

    def width_advice(self) -> str:
        """As in the base class; `output_projection` accepts hidden states of D dimensions."""
        if self.options.output != "map" or self.output_projection is not None:
            return super().width_advice()
        return "project them first, or build the embedding with output_projection=True"

    def input_parameters(self) -> Iterator[nn.Parameter]:
        """All but the projection of the output side and the parameters that only the map's output uses."""
        yield from self.map.input_parameters()
        for part in (self.entry, self.expansion, self.reduction):
            yield from part.parameters() if part is not None else ()

    def output_parameters(self) -> Iterator[nn.Parameter]:
        """Those of the map and the projection, or of the whole unit."""
        if self.options.output == "table":
            yield from self.input_parameters()
            if self.bias is not None:
                yield self.bias
        else:
            yield from self.map.output_parameters()
        if self.output_projection is not None:
            yield from self.output_projection.parameters()


def _map_options(unit: DefineOptions) -> Mapping[str, Any]:
    """The options of the map, with an output side only if the unit uses it."""
    if unit.output == "map":
        return {**unit.map_options, "output_bias": unit.output_bias}
    return (
        {**unit.map_options, "output": "none"} if hasattr(options(unit.map), "output") else unit.map_options
    )


def _mapping(value: Any) -> Mapping[str, object]:
    """`value`, or an empty mapping for None."""
    return value or {}
