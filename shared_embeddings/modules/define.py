"""DeFINE: words are mapped to narrow vectors, which group transforms expand and a projection reduces."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shared_embeddings.embedding import Layer, SharedEmbedding, without_padding
from shared_embeddings.nn.layers import entry_std
from shared_embeddings.registry import build, get_method_config, methods, register
from shared_embeddings.spec import EmbeddingOptions, Options, Presets, SearchGrid
from shared_embeddings.utils.options import OptionError, option, require, require_effect

Transform = Literal["hgt", "glt", "linear"]
Connection = Literal["mixer", "skip", "residual", "none"]

# Options of a map that follow from the unit, and arguments of `build` besides the options of the map.
_OF_THE_UNIT = ("output", "output_bias")
_NOT_OF_THE_MAP = ("method", "num_embeddings", "embedding_dim")


class LayerPlan(NamedTuple):
    """The groups, inputs and outputs of one group transform."""

    groups: int
    inputs: int
    outputs: int


class GroupTransform(nn.Module):
    """The group transform of unit "paper" (Eq. 1, appendix A.1), then layer normalization and GELU.

    The input is cut into g chunks, and ``W (inputs / g, outputs / g)`` multiplies each of them. The
    normalization of all outputs has no parameters.
    """

    def __init__(self, plan: LayerPlan) -> None:
        super().__init__()
        self.groups = plan.groups
        self.weight = nn.Parameter(torch.empty(plan.inputs // plan.groups, plan.outputs // plan.groups))

    def forward(self, vectors: Tensor) -> Tensor:
        transformed = (vectors.unflatten(1, (self.groups, -1)) @ self.weight).flatten(1)
        return F.gelu(F.layer_norm(transformed, transformed.shape[1:]))


class GroupLinear(nn.Module):
    """A layer of unit "delight": a matrix and a bias for each group, layer normalization, and GELU.

    Every group is normalized separately, with one gain and shift of its width for all.
    """

    def __init__(self, plan: LayerPlan) -> None:
        super().__init__()
        groups, width = plan.groups, plan.outputs // plan.groups
        self.weight = nn.Parameter(torch.empty(groups, plan.inputs // groups, width))
        self.bias = nn.Parameter(torch.empty(groups, 1, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, vectors: Tensor) -> Tensor:
        chunks = vectors.unflatten(1, self.weight.shape[:2]).transpose(0, 1)
        transformed = torch.baddbmm(self.bias, chunks, self.weight).transpose(0, 1)
        return F.gelu(self.norm(transformed)).flatten(1)


class Expansion(nn.Module):
    """The stack of group transforms that widens n to k (Figures 2, 3 and 5).

    From the second layer on, a layer sees the previous output and, by `connection`:
    "mixer": chunk i of the stack's input in front of chunk i of the previous output (Figure 5c);
    "skip": the whole input in front of the whole previous output, without splitting and mixing (Figure 5d);
    "none": nothing else (Figure 5a). "residual" adds the previous output to a layer's own (Figure 5b).
    """

    def __init__(
        self,
        layer: type[GroupTransform] | type[GroupLinear],
        plans: list[LayerPlan],
        connection: Connection,
        shuffle: bool,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(plan) for plan in plans)
        self.groups = [plan.groups for plan in plans]
        self.width = plans[-1].outputs
        self.connection = connection
        self.shuffle = shuffle
        has_first_link = plans[0].inputs == plans[0].outputs
        # The number of activations that are summed in the output.
        self.summands = len(plans) + has_first_link if connection == "residual" else 1

    def outputs(self, inputs: Tensor) -> Iterator[Tensor]:
        """The outputs ``(n, width)`` of all layers for inputs ``(n, input_dim)``, in order."""
        output = inputs
        for position, (layer, groups) in enumerate(zip(self.layers, self.groups)):
            previous = output
            if position > 0 and self.shuffle:
                # The first element of every group, then the second of every group, and so on.
                previous = previous.unflatten(1, (self.groups[position - 1], -1)).transpose(1, 2).flatten(1)
            linked = previous
            if position > 0 and self.connection == "mixer":
                chunks = (inputs.unflatten(1, (groups, -1)), previous.unflatten(1, (groups, -1)))
                linked = torch.cat(chunks, dim=2).flatten(1)
            elif position > 0 and self.connection == "skip":
                linked = torch.cat((inputs, previous), dim=1)
            output = layer(linked)
            if self.connection == "residual" and output.shape == previous.shape:
                output = output + previous
            yield output


@unset_fake_temporarily()
def rms_of_activations(gain: float, summands: int = 1) -> float:
    """Root mean square of the sum of `summands` independent values gelu(gain * x), x standard normal."""
    points = torch.linspace(-8.0, 8.0, 2001, dtype=torch.float64, device="cpu")
    weights = torch.softmax(-points.square() / 2, dim=0)
    values = F.gelu(gain * points)
    mean, square = float((weights * values).sum()), float((weights * values.square()).sum())
    return math.sqrt(summands * square + summands * (summands - 1) * mean**2)


@dataclasses.dataclass(frozen=True)
class DefineOptions(EmbeddingOptions):
    """Options of `define`; those of the map are given alongside (``map="projective", rank=32``).

    The unit of the authors' later code ("delight") has its own groups, connections and reduction, so that
    `transform`, `shuffle`, `connection` and `reduce` have no effect.
    """

    paper = "DeFINE, section 3"
    summary = "V x n, deepened by group transforms"
    grid_choice = "the largest n in steps of 4, k = 4 n, N = 3 and 4 groups"
    fit_bound = 0.3

    map_dim: int = option(
        'n, the width of the mapped vectors; for unit "paper" divisible by the groups of every layer.',
        minimum=1,
    )
    expand_dim: int = option(
        "k, the width after the last layer that widens, at least n; rounded to a multiple of the groups.",
        minimum=1,
    )
    depth: int = option("N, the number of group transforms.", minimum=1)
    unit: Literal["paper", "delight"] = option(
        'The unit of section 3 ("paper") or of the authors\' later code ("delight").', "paper"
    )
    max_groups: int | None = option(
        'g_max, the groups of the first layer, 4 by default; for unit "delight" the most of any layer, '
        'a power of 2. Not for transform "linear".',
        None,
        minimum=1,
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
        require(
            self.expand_dim >= self.map_dim,
            f"option 'expand_dim' is {self.expand_dim}, less than 'map_dim' {self.map_dim}; raise it",
        )
        if self.transform == "linear":
            require_effect(self, ("max_groups", "shuffle"), "with transform 'linear', which has one group")
        max_groups = self.max_groups or 4
        if self.unit == "paper":
            for layer, plan in enumerate(self.layers(self.map_dim), start=1):
                require(
                    self.map_dim % plan.groups == 0,
                    f"option 'map_dim' is {self.map_dim}, not divisible by the {plan.groups} groups of layer "
                    f"{layer}; change it or 'max_groups' ({max_groups})",
                )
        else:
            require_effect(self, ("transform", "shuffle", "connection", "reduce"), "with unit 'delight'")
            require(
                self.depth >= 2,
                f"option 'depth' is {self.depth}, but unit 'delight' widens in one layer and reduces in "
                "another; choose at least 2",
            )
            require(
                max_groups.bit_count() == 1,
                f"option 'max_groups' is {max_groups}, but with unit 'delight' it must be a power of 2",
            )
        if self.output != "map":
            require_effect(self, ("output_projection",), f"with output '{self.output}'")
        if self.output == "none":
            require_effect(self, ("output_bias",), "with output 'none'")
        require(
            not self.output_projection or "score_dim" not in self.map_options,
            "options 'output_projection' and 'score_dim' both project hidden states to the width of the map; "
            "remove one of them",
        )
        for name in self.map_options:
            require(
                isinstance(name, str) and name not in (*_NOT_OF_THE_MAP, "output"),
                f"option 'map_options' has {name!r}, which is set by the unit; remove it",
            )

    def __getattr__(self, name: str) -> object:
        # The options of the map can be read like the unit's own.
        map_options = self.__dict__.get("map_options", {})
        if name in map_options:
            return map_options[name]
        raise AttributeError(f"'define' has no option '{name}'")

    def layers(self, embedding_dim: int) -> list[LayerPlan]:
        """Return the sizes of the layers.

        Unit "paper": N = `depth` layers expand n to k (section 3.2), whatever D is. The space between n and k
        is sampled linearly, so that the outputs of layer l are n + (k - n) l / N, rounded down to a multiple
        of all groups; with residual connections k / 2 (section 4.4). A direct link to the input widens the
        inputs of all layers but the first by n.

        Unit "delight": all layers after the first in the authors' later code, for inputs of D / 2. From the
        last group transform back, the groups are 1, 2, 4 and so on up to g_max, then 1, 2, 4 again. Outputs
        are spaced linearly from D / 2 to k, without the first of them. Fractions are dropped, and the rest is
        rounded up to a multiple of 8 and of the groups on both sides. The last group transform reduces to D;
        a linear layer to D follows it. All layers but the first read the inputs, too.
        """
        n, k, depth, most = self.map_dim, self.expand_dim, self.depth, self.max_groups or 4
        plans: list[LayerPlan] = []
        if self.unit == "paper":
            groups = [most if self.transform == "glt" else 1] * depth
            if self.transform == "hgt":  # halved from layer to layer (Eq. 1)
                groups = [max(most // 2**layer, 1) for layer in range(depth)]
            step = math.lcm(*groups)
            linked = n if self.connection in ("mixer", "skip") else 0
            for layer, count in enumerate(groups):
                width = (n * depth + (k - n) * (layer + 1)) // depth
                if self.connection == "residual":
                    width = max(k // 2, step)
                inputs = plans[-1].outputs + linked if plans else n
                plans.append(LayerPlan(count, inputs, width // step * step))
            return plans
        cycle = [2**power for power in range(most.bit_length())]
        groups = [cycle[(depth - 1 - layer) % len(cycle)] for layer in range(depth)]
        inputs = embedding_dim // 2
        for layer, count in enumerate(groups, start=1):
            outputs = embedding_dim
            if layer < depth:
                larger = max(groups[layer - 1 : layer + 1])
                step = larger * math.ceil(8 / larger)
                outputs = step * math.ceil((inputs + layer * (k - inputs) // (depth - 1)) / step)
            plans.append(LayerPlan(count, inputs + (plans[-1].outputs if plans else 0), outputs))
        return [*plans, LayerPlan(1, inputs + embedding_dim, embedding_dim)]

    @classmethod
    def normalize(cls, values: dict[str, object], words: Sequence[str] | None = None) -> dict[str, object]:
        """Move the options of the map's method, given next to the unit's own, into `map_options`."""
        map_method = values.get("map", "standard")
        if map_method not in methods() or not isinstance(values.get("map_options", {}), Mapping):
            return values
        of_unit = {field.name for field in dataclasses.fields(DefineOptions)}
        of_map = {field.name for field in dataclasses.fields(get_method_config(str(map_method)))} - of_unit
        beside = {name: values.pop(name) for name in list(values) if name in of_map}
        nested: Any = values.pop("map_options", None) or {}
        for name in beside.keys() & nested.keys():
            raise OptionError(f"define: option '{name}' is also in 'map_options'; remove one of them")
        map_options = {**nested, **beside}
        return {**values, "map_options": map_options}

    def check_sizes(self, num_embeddings: int, embedding_dim: int) -> None:
        maps = [name for name in methods() if name != self.method]
        require(self.map in maps, f"option 'map' is '{self.map}', but it must be one of {', '.join(maps)}")
        # Checks the options of the map without building it.
        self.count_parameters(num_embeddings, embedding_dim)
        if self.unit == "delight":
            half = embedding_dim // 2
            most = max(plan.groups for plan in self.layers(embedding_dim))
            require(
                half >= most and half % most == 0,
                f"option 'max_groups' leads to {most} groups, but with unit 'delight' half of the dimension, "
                f"{half}, must be a multiple of them; lower it",
            )
            require(
                self.expand_dim >= half,
                f"option 'expand_dim' is {self.expand_dim}, less than half of the dimension, {half}, which "
                "unit 'delight' expands; raise it",
            )
        elif not self.reduce:
            width = self.layers(embedding_dim)[-1].outputs
            require(
                width == embedding_dim,
                f"option 'reduce' is off, but the expanded vectors are {width} wide and the dimension is "
                f"{embedding_dim}; change 'expand_dim' or leave 'reduce' on",
            )

    def count_parameters(self, num_embeddings: int, embedding_dim: int) -> int:
        """The map, the first layer, the group transforms, reduction and projection.

        The first layer has n**2, the group transforms in out / g**2 each, the reduction (k + n) D, or k D if
        it does not read the map. All layers of unit "delight" are `GroupLinear`, with in out / g weights, a
        bias for each output, and gain and shift of a group.
        """
        layers = self.layers(embedding_dim)
        if self.unit == "delight":
            entry = LayerPlan(1, self.map_dim, embedding_dim // 2)
            unit = sum(i * o // g + o + 2 * (o // g) for g, i, o in (entry, *layers))
        else:
            unit = self.map_dim**2 + sum(i * o // g**2 for g, i, o in layers)
            # The reduction has the connection of the last layer to the map, too.
            linked = self.map_dim if self.connection in ("mixer", "skip") else 0
            unit += (layers[-1].outputs + linked) * embedding_dim if self.reduce else 0
        projection = self.map_dim * embedding_dim if self.output_projection else 0
        sizes = num_embeddings, self.map_dim
        of_map = get_method_config(self.map).resolve(*sizes, self.build_options_of_map())
        return of_map.count_parameters(*sizes) + unit + projection

    def build_options_of_map(self) -> dict[str, Any]:
        """The options of the map, with an output side only if the unit uses it."""
        if self.output == "map":
            return {**self.map_options, "output_bias": self.output_bias}
        has_output = hasattr(get_method_config(self.map), "output")
        return {**self.map_options, **({"output": "none"} if has_output else {})}

    @classmethod
    def presets(cls, num_embeddings: int, embedding_dim: int) -> Presets:
        """Examples of about n = D / 4, k = 2 D and three layers, tied to either part.

        The grid has units in the proportions of the smallest one of the paper's Table 1a, k = 4 n and N = 3.
        Their output is tied to the whole unit, which every host supports.
        """
        unit: Options = {"depth": 3, "max_groups": 4, "output": "table"}
        n = embedding_dim // 16 * 4
        example = {**unit, "map_dim": n, "expand_dim": 8 * n}
        examples = {
            "tied to its table": example,
            "tied to its map": {**example, "output": "map", "output_projection": True},
        }
        grid = SearchGrid(
            embedding_dim // 4,
            lambda step: {**unit, "map_dim": 4 * (step + 1), "expand_dim": 16 * (step + 1)},
        )
        return Presets(examples, [grid] if embedding_dim >= 4 else [])


@register("define", DefineOptions)
class DefineEmbedding(SharedEmbedding):
    """The DeFINE unit (section 3.3): the map's vector ``e_i`` is expanded, and ``e_o = W [e_i; e_N]``.

    Unit "paper", the default, has the map, a linear layer n -> n, whose output the connections read as
    ``e_i``, the group transforms of Eq. 1 with one matrix for all groups (appendix A.1), and a linear
    reduction. The paper does not say how layers are normalized and activated; we use layer normalization and
    GELU, without dropout, and scale the inputs of the reduction to norm one. docs/papers.md compares this
    reading with the sizes that the paper prints.

    Unit "delight" is DeFINE in the code of the authors' next paper, DeLighT (Mehta et al., 2021). Every layer
    ends in layer normalization and GELU: a linear layer n -> D / 2; N group transforms with mixers, of which
    the last one reduces to D; and a linear layer to D, which reads the D / 2 values again. Every group has
    its own matrix; groups cycle through the powers of 2 up to g_max and end in 1. We omit two parts of that
    code, the dropout after each layer and the factor sqrt(n) on the map; weights are initialized as in
    "paper".
    """

    options: DefineOptions
    expensive_rows = True

    def create_parameters(self) -> None:
        self.ties_map = self.options.output == "map"
        if self.ties_map:
            # The output side is that of the map, which has the bias, too.
            self.bias = None
        width = self.options.map_dim
        layers = self.options.layers(self.embedding_dim)
        self.map = build(
            self.options.map,
            num_embeddings=self.num_embeddings,
            embedding_dim=width,
            padding_idx=self.padding_idx,
            **self.options.build_options_of_map(),
        )
        self.entry: nn.Linear | GroupLinear
        self.reducer: nn.Linear | None = None
        # Unit "paper" multiplies its activations by it.
        self.scale = 1.0
        if self.options.unit == "delight":
            self.entry = GroupLinear(LayerPlan(1, width, self.embedding_dim // 2))
            self.expansion = Expansion(GroupLinear, layers, self.options.connection, self.options.shuffle)
        else:
            self.entry = nn.Linear(width, width, bias=False)
            self.expansion = Expansion(GroupTransform, layers, self.options.connection, self.options.shuffle)
            rms = rms_of_activations(1.0, self.expansion.summands)
            if self.options.reduce:
                expanded = self.expansion.width
                inputs = expanded + (width if self.options.connection in ("mixer", "skip") else 0)
                self.reducer = nn.Linear(inputs, self.embedding_dim, bias=False)
                # All words share the reduction: with inputs of norm one, a step moves a row about as far as
                # in a plain table. With larger ones, the first steps make all rows alike.
                self.scale = (expanded * rms**2 + inputs - expanded) ** -0.5
            else:
                self.scale = entry_std(self.embedding_dim) / rms
        self.output_projection = (
            nn.Linear(self.embedding_dim, width, bias=False) if self.options.output_projection else None
        )
        self.has_output = self.options.output != "none"
        self.has_linear_scores = self.map.has_linear_scores if self.ties_map else self.has_output
        if self.ties_map and not self.options.output_projection:
            self.score_dim = self.map.score_dim
            self.width_advice = "project them first, or build the embedding with output_projection=True"

    def init_weights(self) -> None:
        """The map as its method does; the rest such that the unit's outputs have std D**-0.5."""
        self.map.reset_parameters()
        std = entry_std(self.embedding_dim)
        layers: list[Any] = list(self.expansion.layers)
        if isinstance(self.entry, GroupLinear):
            layers.append(self.entry)
        for layer in layers:
            # Keeps the variance.
            nn.init.normal_(layer.weight, std=layer.weight.size(-2) ** -0.5)
            if isinstance(layer, GroupLinear):
                nn.init.zeros_(layer.bias)
                layer.norm.reset_parameters()
        if isinstance(self.entry, GroupLinear):
            # The gain for which `rms_of_activations` is `std`, by bisection.
            low, high = 0.0, 4.0 * std + 4.0
            for _ in range(60):
                middle = (low + high) / 2
                low, high = (middle, high) if rms_of_activations(middle) < std else (low, middle)
            nn.init.constant_(layers[-2].norm.weight, high)
        else:
            # The map's vectors have norm one, so the values after the entry have std one.
            nn.init.normal_(self.entry.weight)
        if self.reducer is not None:
            nn.init.normal_(self.reducer.weight, std=std)
        if self.output_projection is not None:
            nn.init.normal_(self.output_projection.weight, std=std)

    def token_rows(self, words: Tensor, inverse: Tensor) -> Tensor:
        if not self._draws_per_token:
            return super().token_rows(words, inverse)
        tokens = words.index_select(0, inverse)
        rows = self.rows(tokens, self.map.token_rows(words, inverse))
        return without_padding(rows, self.padding_idx, tokens)

    def rows(self, ids: Tensor, mapped: Tensor | None = None) -> Tensor:
        """Return rows ``(n, D)`` for ids ``(n,)``, or for other vectors of the map ``(n, map_dim)``."""
        entry = self.entry(self.map.rows(ids) if mapped is None else mapped)
        # Keeps only the latest output in memory.
        expanded = deque(self.expansion.outputs(entry), maxlen=1).pop()
        if self.reducer is None:
            return self.scale * expanded
        is_linked = self.reducer.in_features > self.expansion.width
        return self.reducer(self.scale * (torch.cat((entry, expanded), dim=1) if is_linked else expanded))

    def inner_embedding(self) -> SharedEmbedding:
        return self.map.inner_embedding() if self.ties_map else self

    def with_inner_embedding(self, part: SharedEmbedding) -> SharedEmbedding:
        if not self.ties_map:
            return super().with_inner_embedding(part)
        part = self.map.with_inner_embedding(part)
        of_map = {name: value for name, value in part.stored_options().items() if name not in _OF_THE_UNIT}
        new_options: dict[str, Any] = {
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
                **new_options,
            )
        unit.map = part
        for name in ("entry", "expansion", "reducer", "output_projection"):
            setattr(unit, name, getattr(self, name))
        return unit.train(self.training)  # type: ignore[no-any-return]

    def state_for_ids(self, ids: Tensor) -> tuple[dict[str, object], dict[str, Tensor]]:
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

    def _scores(self, hidden: Tensor) -> Tensor:
        if not self.ties_map:
            return super()._scores(hidden)
        return self.map.logits(hidden if self.output_projection is None else self.output_projection(hidden))

    def _token_loss(
        self, hidden: Tensor, targets: Tensor, ignore_index: int, *settings: Any
    ) -> tuple[Tensor, Callable[[], Tensor]]:
        if not self.ties_map:
            return super()._token_loss(hidden, targets, ignore_index, *settings)
        projected = hidden if self.output_projection is None else self.output_projection(hidden)
        return self.map._token_loss(projected, targets, ignore_index, *settings)

    def output_table(self) -> Tensor:
        if not self.ties_map:
            return super().output_table()
        table = self.map.output_table()
        return table if self.output_projection is None else table @ self.output_projection.weight

    def output_bias(self) -> Tensor | None:
        return self.map.output_bias() if self.ties_map else super().output_bias()

    def set_output_bias(self, bias: Tensor) -> None:
        if self.ties_map:
            self.map.set_output_bias(bias)
        else:
            super().set_output_bias(bias)

    def parameters_by_side(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        inputs, outputs = self.map.parameters_by_side()
        for part in (self.entry, self.expansion, self.reducer):
            inputs += part.parameters() if part is not None else ()
        if self.options.output == "table":
            outputs = [*inputs, self.bias] if self.bias is not None else list(inputs)
        if self.output_projection is not None:
            outputs += self.output_projection.parameters()
        return inputs, outputs
