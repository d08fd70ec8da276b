"""Loads a model with compressed word embeddings as a plain model of transformers.

shared-embeddings wrote this file into the folder of the model, for ``from_pretrained`` with
``trust_remote_code=True`` where the library is not installed. Embeddings are decoded into tables in the dtype
of the model; with ``import shared_embeddings.hf`` instead, they stay compressed in memory.

Needs torch, numpy and transformers only. Axes: ``V`` vocabulary, ``D`` model dimension, ``n`` rows.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

ENTRY = "shared_embeddings"
HEADER = "packed_tensors"
VERSION = 1
# Rows that are decoded together.
_BLOCK = 2048
_STATE_BITS, _START_BITS = 12, 8  # of trellis codes
_RATES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 0.5, 0.25)  # the bits of a number by width
_GAINS = {0.25: 0.55, 0.5: 0.7, 1: 0.9}  # of entries of spectral codes, by bits
_GROUP = 32  # numbers that share a scale in int4
_LARGEST_HADAMARD = 64
_DEFAULTS = {"codec": "trellis", "group_size": 32, "directions": ()}  # options that config.json leaves out


# Which class is loaded.


@functools.cache
def _model_class(name: str) -> type:
    """The class of transformers with a name, which saving does not mark as code of the folder."""
    base = getattr(transformers, name)
    changed = {
        "__module__": __name__,
        "from_pretrained": classmethod(_complete),
        "is_custom_code": classmethod(_is_false),  # transformers does not rename the tensors of other code
        "register_for_auto_class": classmethod(_do_nothing),
    }
    return type(name, (base,), changed)


def _complete(cls: Any, *arguments: Any, output_loading_info: bool = False, **settings: Any) -> Any:
    """Replaces `from_pretrained`: raises ValueError where transformers fills missing tensors at random.

    A model for another task than that in the folder may have new layers, but no new words.
    """
    load = vars(PreTrainedModel)["from_pretrained"].__func__
    model, info = load(cls, *arguments, output_loading_info=True, **settings)
    is_whole = cls.__name__ in (model.config.architectures or ())
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    words = {id(layer.weight) for layer in layers if layer is not None}
    missing = sorted(
        name for name in info["missing_keys"] if is_whole or id(model.get_parameter_or_buffer(name)) in words
    )
    if missing:
        raise ValueError(
            f"{cls.__name__}: the folder has no {missing[0]}; copy it again, or install shared-embeddings"
        )
    return (model, info) if output_loading_info else model


def _is_false(cls: type) -> bool:
    """Replaces `is_custom_code`."""
    return False


def _do_nothing(cls: type, auto_class: object = None) -> None:
    """Replaces `register_for_auto_class`."""


def __getattr__(name: str) -> type:
    if name.startswith("_") or not hasattr(transformers, name):
        raise AttributeError(name)
    return _model_class(name)


# Loading.


class EmbeddingsConfig(QuantizationConfigMixin):
    """The entry ``quantization_config`` of ``config.json``."""

    def __init__(self, **entry: Any) -> None:
        self.__dict__.update(entry)


class TableQuantizer(HfQuantizer):
    """Decodes the embeddings while the weights are loaded; the model is plain afterwards."""

    def __init__(self, quantization_config: EmbeddingsConfig, **settings: Any) -> None:
        super().__init__(quantization_config, **settings)
        self._conversions: list[WeightConverter] = []

    def is_serializable(self) -> bool:
        """Whether the model can be saved: yes."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained: yes."""
        return True

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **settings: Any
    ) -> None:
        entry = self.quantization_config.to_dict()
        if entry.get("version") != VERSION:
            found = entry.get("version")
            raise ValueError(
                f"version {found!r} of the embeddings is not {VERSION}; install shared-embeddings"
            )
        with torch.device("cpu"):  # transformers builds models on the meta device
            state = _embedding_tensors(entry, checkpoint_files or ())
            self._conversions = [_conversion(name, table) for name, table in _tables(entry, state)]
        ignored = {rf"^{ENTRY}\.", f"^{HEADER}$", *(f"^{path}.weight$" for path in _paths(entry))}
        model._keys_to_ignore_on_load_unexpected.update(ignored)

    def get_weight_conversions(self) -> list[WeightConverter]:
        """Replace the placeholders in the files by tables."""
        return self._conversions

    def _process_model_after_weight_loading(self, model: Any, **settings: Any) -> None:
        model._weight_conversions = [one for one in model._weight_conversions if one not in self._conversions]
        model.is_quantized = False
        for name in ("quantization_config", "auto_map"):
            if hasattr(model.config, name):
                delattr(model.config, name)
        del model.hf_quantizer, model.quantization_method


class _Table(ConversionOps):
    """Puts a table where the files have a placeholder."""

    hf_quantizer = TableQuantizer  # transformers then does not cast the tensors of the files

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def convert(self, input_dict: dict[str, Any], *patterns: Any, **settings: Any) -> dict[str, Any]:
        """The table in the dtype of the model."""
        ((_, (placeholder, *_)),) = input_dict.items()
        name: str = settings["full_layer_name"]
        dtype = settings["model"].get_parameter_or_buffer(name).dtype
        return {name: self.table.to(placeholder.device, dtype)}


def _conversion(name: str, table: Tensor) -> WeightConverter:
    """How the placeholder of a weight becomes its table."""
    return WeightConverter([f"^{name}$"], [name], [_Table(table)])


def _paths(entry: Mapping[str, Any]) -> list[str]:
    """The paths of all layers with a table."""
    return [path for one in entry["tables"].values() for path in (*one["inputs"], *one["outputs"])]


def _tables(entry: Mapping[str, Any], state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The names of placeholders, each with its table."""
    for name, described in entry["tables"].items():
        start = f"{ENTRY}.{name}."
        own = {key.removeprefix(start): tensor for key, tensor in state.items() if key.startswith(start)}
        table = decoded_table(described, own)
        for path in (*described["inputs"], *described["outputs"]):
            yield f"{path}.weight", table


def _embedding_tensors(entry: Mapping[str, Any], files: Sequence[Any]) -> dict[str, Tensor]:
    """The tensors of the embeddings as numbers, by name."""
    state = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            names = [name for name in opened.keys() if name == HEADER or name.startswith(f"{ENTRY}.")]
            state.update({name: opened.get_tensor(name) for name in names})
    header = state.pop(HEADER, None)
    forms = {} if header is None else json.loads(bytes(header.tolist()))["tensors"]
    for name, form in forms.items():
        state[name] = _numbers(state[name], state.pop(f"{name}.scale", None), form)
    return state


# Numbers in few bits.


def _numbers(codes: Tensor, scales: Any, form: Mapping[str, Any]) -> Tensor:
    """A packed tensor as numbers."""
    if form["as"] == "fp16":
        return codes.float()
    if form["as"] == "int8":
        return codes.float() * scales.float()
    if form["as"] == "log8":
        return torch.exp2((codes.float() - 255) / 16).masked_fill(codes == 0, 0.0) * scales.float()
    if form["as"] == "int4":
        shape = form["shape"]
        dim = math.prod(shape) // len(codes)
        rows = torch.stack([codes >> 4, codes & 15], dim=-1).flatten(1)[:, :dim].float() - 8
        group = dim if scales.size(1) == 1 else _GROUP
        return (rows * scales.float().repeat_interleave(group, dim=1)[:, :dim]).reshape(shape)
    widths, ends = form["widths"], np.cumsum(form["widths"])
    rows = math.prod(form["shape"]) // len(widths)
    bits = np.unpackbits(codes.numpy(), count=rows * sum(widths)).reshape(rows, sum(widths)).astype(np.int64)
    columns = [bits[:, end - width : end] @ (1 << np.arange(width)) for end, width in zip(ends, widths)]
    return torch.from_numpy(np.stack(columns, axis=1)).reshape(form["shape"])


def _windows(codes: Tensor, ends: Any, width: int) -> Tensor:
    """Numbers ``(n, count)``: the `width` bits before each position of `ends`, zeros before the first."""
    bits = (codes.unsqueeze(-1) >> torch.arange(7, -1, -1, dtype=torch.uint8) & 1).flatten(1)
    places = torch.as_tensor(ends).unsqueeze(1) + torch.arange(width)
    return (F.pad(bits, (width, 0))[:, places].int() << torch.arange(width - 1, -1, -1)).sum(-1)


# Tables.


def decoded_table(described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    """The table ``(V, D)`` in float32 of an embedding.

    Args:
        described: its method, sizes and options, as in ``config.json``.
        tensors: its numbers by name.
    """
    method = described["method"]
    if method == "standard":
        return tensors["weight"].float()
    if method == "projective":
        return tensors["codes"].float() @ tensors["basis"].float()
    if method == "quantized":
        return _quantized(described, tensors)
    raise ValueError(
        f"embeddings of method {method!r} need shared-embeddings: install it, and import shared_embeddings.hf"
    )


def _quantized(described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    """The table of codes in few bits for each number."""
    dim, options = described["embedding_dim"], {**_DEFAULTS, **described["options"]}
    codec, group = options["codec"], options["group_size"] if options["codec"] == "uniform" else dim
    mean = tensors["basis"][0].float() if codec == "principal" else torch.zeros(dim)
    table, parts = mean.repeat(described["num_embeddings"], 1), {**options, **tensors}
    codes = {name: tensor for name, tensor in tensors.items() if name.startswith("codes")}
    for name, rows in codes.items():
        width = int(name.removeprefix("codes"))
        is_word = tensors["widths"] == width if "widths" in tensors else torch.ones(len(table)) == 1
        words = is_word.nonzero().flatten()
        for ids, part in zip(words.split(_BLOCK), rows.to(torch.uint8).split(_BLOCK)):
            table[ids] = _DECODERS[codec](part, width, dim, parts)
            for scales in (tensors[one] for one in ("scales", "row_scales") if one in tensors):
                table[ids] *= scales[ids].float().repeat_interleave(group, dim=1)[:, :dim]
    return _rotated_back(table, tensors["signs"]) if "signs" in tensors else table


def _uniform(codes: Tensor, width: int, dim: int, parts: Mapping[str, Any]) -> Tensor:
    """Evenly spaced levels around zero."""
    numbers = _windows(codes, width * np.arange(1, dim + 1), width).float()
    return numbers - (0.5 if width == 1 else 2 ** (width - 1))


def _lloyd_max(codes: Tensor, width: int, dim: int, parts: Mapping[str, Any]) -> Tensor:
    """Entries of the levels for this width."""
    return parts[f"levels{width}"].float()[_windows(codes, width * np.arange(1, dim + 1), width)]


def _residual(codes: Tensor, width: int, dim: int, parts: Mapping[str, Any]) -> Tensor:
    """Sums of one entry of each stage, for pieces of eight dimensions."""
    numbers = codes.view(len(codes), -1, width).long()
    entries = [parts["stages"][stage].float()[numbers[:, :, stage]] for stage in range(width)]
    return torch.stack(entries).sum(0).flatten(1)[:, :dim]


def _trellis(codes: Tensor, width: int, dim: int, parts: Mapping[str, Any]) -> Tensor:
    """Entries of the states along a path (after QTIP, Tseng et al., 2024)."""
    return _path_entries(codes, [_RATES[width]] * dim)


def _path_entries(codes: Tensor, rates: Sequence[float]) -> Tensor:
    """Entries of states, each of which gives one number, or two or four with less than one bit for each."""
    ends: list[int] = []
    numbers: list[int] = []
    left = 0
    for place, rate in enumerate(rates):
        is_new = left == 0 or rate != rates[place - 1]
        left = max(1, round(1 / rate)) if is_new else left
        ends.append((ends[-1] + is_new * max(1, int(rate))) if ends else _START_BITS)
        numbers.append(0 if is_new else numbers[-1] + 1)
        left -= 1
    return _trellis_entries()[torch.tensor(numbers), _windows(codes, ends, _STATE_BITS)]


def _spectral(codes: Tensor, width: int, dim: int, parts: Mapping[str, Any]) -> Tensor:
    """Trellis codes with the bits and the size of each direction, reflected back."""
    axes, spread = parts["axes"].float(), parts["spread"].float()
    counts = parts["directions"][1:][len(_RATES) * (width - 1) : len(_RATES) * width]
    counts = counts or [dim * (other == width) for other in range(len(_RATES))]
    rates = [rate for rate, count in sorted(zip(_RATES, counts), reverse=True) if rate for _ in range(count)]
    sizes = torch.cat([spread[:-1], spread[-1:].expand(dim - len(axes))])[: len(rates)]
    values = _path_entries(codes, rates) * sizes * torch.tensor([_GAINS.get(rate, 1.0) for rate in rates])
    rows = F.pad(values, (0, dim - len(rates)))
    for axis in F.normalize(axes).flip(0):
        rows = rows - 2 * (rows @ axis).unsqueeze(1) * axis
    return rows


def _principal(codes: Tensor, width: int, dim: int, parts: Mapping[str, Any]) -> Tensor:
    """The mean plus a sum of directions; each factor is one of the levels for its bits."""
    basis, levels = parts["basis"].float(), parts["levels"].float()
    widths = np.array(_field_widths(parts["directions"], width, dim))
    ends, factors = np.cumsum(widths), []
    for bits in sorted(set(widths.tolist()), reverse=True):
        numbers = _windows(codes, ends[widths == bits], bits)
        factors.append(levels[2**bits - 2 : 2 ** (bits + 1) - 2][numbers])
    found = torch.cat(factors, dim=1) * parts["spread"][width - 1, : len(widths)].float()
    return basis[0] + found @ basis[1 : 1 + len(widths)]


def _field_widths(directions: Sequence[int], width: int, dim: int) -> list[int]:
    """The bits of every direction of words with `width` bits, descending; those without bits are left out."""
    counts = directions[9 * (width - 1) : 9 * width] or [dim * (bits == width) for bits in range(9)]
    return [bits for bits in range(8, 0, -1) for _ in range(counts[bits])]


_DECODERS: dict[str, Callable[..., Tensor]] = {
    "uniform": _uniform,
    "lloyd_max": _lloyd_max,
    "residual": _residual,
    "trellis": _trellis,
    "spectral": _spectral,
    "principal": _principal,
}


@functools.cache
def _trellis_entries() -> Tensor:
    """The entries ``(4, 4096)`` of all states: quantiles of the normal distribution in scrambled orders."""
    count = 2**_STATE_BITS
    hashed = torch.arange(4 * count, device="cpu").view(4, count)
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        hashed = (hashed ^ hashed >> shift) * factor + factor & 0xFFFFFFFF
    hashed = hashed ^ hashed >> 16
    return torch.special.ndtri((hashed.argsort().argsort().double() + 0.5) / count).float()


def _rotated_back(rows: Tensor, signs: Tensor) -> Tensor:
    """Rows ``(V, D)`` before the rotation: small orthogonal matrices along the factors of D, then signs."""
    dim, done = rows.size(1), 1
    for size in _factors(dim):
        parts = rows.reshape(-1, size, dim // (done * size))
        rows = torch.matmul(_orthogonal(size).t(), parts)
        done *= size
    return rows.reshape(-1, dim) * (1 - 2 * signs.float())


def _factors(dim: int) -> list[int]:
    """An odd factor of D, then powers of two up to 64."""
    odd = dim // (dim & -dim)
    rest, factors = dim // odd, [odd] if odd > 1 else []
    while rest > 1:
        factors.append(min(rest, _LARGEST_HADAMARD))
        rest //= factors[-1]
    return factors


def _orthogonal(size: int) -> Tensor:
    """A Hadamard matrix for a power of two, the cosine transform (DCT-II) otherwise."""
    if size & (size - 1) == 0:
        matrix = torch.ones(1, 1, device="cpu")
        for _ in range(size.bit_length() - 1):
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        return matrix / math.sqrt(size)
    places = torch.arange(size, dtype=torch.float64, device="cpu")
    matrix = torch.cos(math.pi / size * (places + 0.5) * places.unsqueeze(1)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.float()


# The library, where it was imported, keeps its own quantizer.
if ENTRY not in AUTO_QUANTIZER_MAPPING:
    register_quantization_config(ENTRY)(EmbeddingsConfig)
    register_quantizer(ENTRY)(TableQuantizer)
