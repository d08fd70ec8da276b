"""The unit of DeFINE: its options, and its stack of group linear transforms (section 3, appendix A.1).

The paper gives the transforms, their groups and their connections. Normalization, activation, biases and the
rounding of widths are our choices for the paper's unit; `plan_delight_layers` follows code that the authors
published later.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shared_embeddings.options import option, require, require_at_least
from shared_embeddings.spec import EmbeddingOptions

Transform = Literal["hgt", "glt", "linear"]
Connection = Literal["mixer", "skip", "residual", "none"]

# Widths between layers are multiples of at least this.
_SMALLEST_MULTIPLE = 8


class LayerPlan(NamedTuple):
    """The sizes of one group linear transform.

    Attributes:
        groups: g, the number of groups of inputs and outputs.
        inputs: the number of inputs.
        outputs: the number of outputs.
        norm_width: how many neighboring outputs are normalized together; all runs of outputs of this width
            share one gain and one shift.
    """

    groups: int
    inputs: int
    outputs: int
    norm_width: int

    def num_parameters(self) -> int:
        """The parameters: in * out / g weights (Eq. 1, appendix A.1), biases, gain and shift."""
        return self.inputs * self.outputs // self.groups + self.outputs + 2 * self.norm_width


def plan_groups(transform: Transform, max_groups: int, depth: int) -> list[int]:
    """The number of groups of each layer: halved from layer to layer (Eq. 1), constant, or one."""
    if transform == "hgt":
        return [max(max_groups // 2**layer, 1) for layer in range(depth)]
    return [max_groups if transform == "glt" else 1] * depth


def plan_layers(
    input_dim: int, expand_dim: int, depth: int, max_groups: int, transform: Transform, connection: Connection
) -> list[LayerPlan]:
    """The sizes of all layers of an expansion from n = `input_dim` to k = `expand_dim`.

    Output widths are spaced linearly from n to k, rounded up to a multiple of the groups on both sides; with
    residual connections all are k / 2 (section 4.4). A direct link to the input widens all layers but the
    first by n.
    """
    groups = plan_groups(transform, max_groups, depth)
    linked = input_dim if connection in ("mixer", "skip") else 0
    plans: list[LayerPlan] = []
    for layer in range(depth):
        share = layer / (depth - 1) if depth > 1 else 1.0
        width = expand_dim / 2 if connection == "residual" else input_dim + share * (expand_dim - input_dim)
        outputs = _round_up(width, math.lcm(*groups[layer : layer + 2]))
        inputs = plans[-1].outputs + linked if plans else input_dim
        plans.append(LayerPlan(groups[layer], inputs, outputs, norm_width=outputs))
    return plans


def plan_delight_groups(max_groups: int, depth: int) -> list[int]:
    """The number of groups of each layer in the authors' later code.

    From the last layer back they are 1, 2, 4 and so on up to g_max, then 1, 2, 4 again.
    """
    cycle = [2**power for power in range(max_groups.bit_length())]
    return [cycle[(depth - 1 - layer) % len(cycle)] for layer in range(depth)]


def plan_delight_layers(embedding_dim: int, expand_dim: int, depth: int, max_groups: int) -> list[LayerPlan]:
    """The sizes of all layers after the first in the authors' later code, for inputs of D / 2.

    Output widths are spaced linearly from D / 2 to k = `expand_dim`, without the first of them. Fractions are
    dropped, and the rest is rounded up to a multiple of 8 and of the groups on both sides. The last group
    transform reduces to D; a linear layer to D follows it. All layers but the first read the inputs, too.
    """
    groups = plan_delight_groups(max_groups, depth)
    inputs = embedding_dim // 2
    widths = [inputs + layer * (expand_dim - inputs) // (depth - 1) for layer in range(1, depth)]
    outputs = [_round_up(width, max(groups[layer : layer + 2])) for layer, width in enumerate(widths)]
    outputs.append(embedding_dim)
    plans = [
        LayerPlan(
            count, inputs + (outputs[layer - 1] if layer else 0), outputs[layer], outputs[layer] // count
        )
        for layer, count in enumerate(groups)
    ]
    return [*plans, LayerPlan(1, inputs + embedding_dim, embedding_dim, norm_width=embedding_dim)]


def _round_up(width: float, groups: int) -> int:
    """The smallest multiple of `groups`, in steps of at least 8, that is at least `width`."""
    step = groups * math.ceil(_SMALLEST_MULTIPLE / groups)
    # Spacing by fractions can overshoot a whole number by a rounding error.
    return step * math.ceil(round(width / step, 6))


class GroupLinear(nn.Module):
    """A group linear transform (appendix A.1), then layer normalization and GELU.

    The input is cut into g chunks, chunk i is multiplied by its own matrix ``(inputs / g, outputs / g)``, and
    the results are concatenated; every output has a bias. Appendix A.1 uses one matrix W for all chunks; in
    the group transform of Mehta et al. (2018) that Eq. 1 refers to, and in the authors' later code, each
    group has its own.

    Args:
        plan: the sizes.
    """

    def __init__(self, plan: LayerPlan) -> None:
        super().__init__()
        groups, inputs, outputs, norm_width = plan
        self.weight = nn.Parameter(torch.empty(groups, inputs // groups, outputs // groups))
        self.bias = nn.Parameter(torch.empty(groups, 1, outputs // groups))
        self.norm = nn.LayerNorm(norm_width)

    def reset_parameters(self, gain: float) -> None:
        """Weights that keep the variance, no bias, and a normalization to std `gain`."""
        nn.init.normal_(self.weight, std=self.weight.size(1) ** -0.5)
        nn.init.zeros_(self.bias)
        nn.init.constant_(self.norm.weight, gain)
        nn.init.zeros_(self.norm.bias)

    def forward(self, vectors: Tensor) -> Tensor:
        """``(n, inputs)`` -> ``(n, outputs)``."""
        groups, width, _ = self.weight.shape
        chunks = vectors.reshape(-1, groups, width).transpose(0, 1)
        transformed = torch.baddbmm(self.bias, chunks, self.weight).transpose(0, 1).flatten(1)
        runs = transformed.unflatten(1, (-1, self.norm.normalized_shape[0]))
        return F.gelu(self.norm(runs).flatten(1))


class Expansion(nn.Module):
    """The stack of group linear transforms that widens n to k (Figures 2, 3 and 5).

    From the second layer on, a layer sees the previous output and, by `connection`:
    "mixer": chunk i of the stack's input in front of chunk i of the previous output (Figure 5c);
    "skip": the whole input in front of the whole previous output, without splitting and mixing (Figure 5d);
    "none": nothing else (Figure 5a). "residual" adds the previous output to a layer's own (Figure 5b).
    """

    def __init__(self, plans: list[LayerPlan], connection: Connection, shuffle: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GroupLinear(plan) for plan in plans)
        self.groups = [plan.groups for plan in plans]
        self.connection = connection
        self.shuffle = shuffle
        has_first_link = plans[0].inputs == plans[0].outputs
        # The number of activations that are summed in the output.
        self.summands = len(plans) + has_first_link if connection == "residual" else 1

    def reset_parameters(self, gain: float) -> None:
        """Reset all layers; those whose outputs are used are normalized to std `gain`."""
        for layer in self.layers:
            is_read = layer is self.layers[-1] or self.connection == "residual"
            assert isinstance(layer, GroupLinear)
            layer.reset_parameters(gain if is_read else 1.0)

    def forward(self, inputs: Tensor) -> Tensor:
        """``(n, input_dim)`` -> ``(n, width of the last layer)``."""
        # Keeps only the latest output in memory.
        return deque(self.outputs(inputs), maxlen=1).pop()

    def outputs(self, inputs: Tensor) -> Iterator[Tensor]:
        """The outputs ``(n, width)`` of all layers for inputs ``(n, input_dim)``, in order."""
        output = inputs
        for position, layer in enumerate(self.layers):
            previous = output
            if position > 0 and self.shuffle:
                previous = _shuffled(previous, self.groups[position - 1])
            linked = self._linked(inputs, previous, self.groups[position]) if position > 0 else previous
            output = layer(linked)
            if self.connection == "residual" and output.shape == previous.shape:
                output = output + previous
            yield output

    def _linked(self, inputs: Tensor, previous: Tensor, groups: int) -> Tensor:
        """The input of a layer with `groups` groups: the previous output, and the stack's input if linked."""
        if self.connection == "mixer":
            chunks = (inputs.unflatten(1, (groups, -1)), previous.unflatten(1, (groups, -1)))
            return torch.cat(chunks, dim=2).flatten(1)
        if self.connection == "skip":
            return torch.cat((inputs, previous), dim=1)
        return previous


def _shuffled(vectors: Tensor, groups: int) -> Tensor:
    """``(n, width)`` interleaved: the first element of every group, then the second of every group, ..."""
    return vectors.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1)


@unset_fake_temporarily()
def rms_of_activations(gain: float, summands: int = 1) -> float:
    """Root mean square of the sum of `summands` independent values gelu(gain * x), x standard normal."""
    points = torch.linspace(-8.0, 8.0, 2001, dtype=torch.float64, device="cpu")
    weights = torch.softmax(-points.square() / 2, dim=0)
    values = F.gelu(gain * points)
    mean, square = float((weights * values).sum()), float((weights * values.square()).sum())
    return math.sqrt(summands * square + summands * (summands - 1) * mean**2)


def gain_for_rms(rms: float, summands: int = 1) -> float:
    """The gain for which `rms_of_activations` is `rms`, by bisection."""
    low, high = 0.0, 4.0 * rms + 4.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rms_of_activations(middle, summands) < rms else (low, middle)
    return high


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
                f"option '{name}' has no effect with transform 'linear', which has one group; remove it",
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
                f"option '{name}' has no effect with unit 'delight', but it is {value!r}; remove it",
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
        """Raise `OptionError` unless D / 2 is divisible by the number of groups and at most k."""
        most = max(plan_delight_groups(self._groups(), self.depth))
        require(
            entry_width >= most and entry_width % most == 0,
            f"option 'max_groups' leads to {most} groups, but with unit 'delight' half of the dimension, "
            f"{entry_width}, must be a multiple of them; lower it",
        )
        require(
            self.expand_dim >= entry_width,
            f"option 'expand_dim' is {self.expand_dim}, less than half of the dimension, {entry_width}, "
            "which unit 'delight' expands; raise it",
        )
