"""Store the tensors of embeddings in fewer bits: fp16, int8 and int4 with scales, and bit-packed word codes.

Tensors are unpacked on loading, to float32 for floats; there is no arithmetic on packed tensors. Packing
unpacked tensors again gives the same bytes.

A packed state contains an extra tensor of bytes, `HEADER`, with JSON that describes how tensors are packed.

int8 is symmetric: a row is a scale times integers from -127 to 127. Each row has its own scale, since norms
differ most between rows: rows of tables and codes are words, whose norms grow with rarity, and rows of a
basis are directions, whose norms decay like singular values. For a trained table of 4,120 x 128, the relative
error was 0.0066 with a scale per word, 0.0092 per dimension, and 0.023 with a single scale. Short rows, as in
codebooks of pieces, share a scale, see `_scaled_axes`.

int4 divides a row into groups of 32 values, the last one maybe smaller. A group is a scale times integers
from -8 to 7; the scale has the least squared error and may be negative, so that -8 is on the side of the
largest value. For a normal table of 4,000 x 128, the relative error is 0.082 with 4.5 bits per value,
compared with 0.0065 for int8 with 8.125 bits. Errors of factors add up: a product of normal factors of rank
64 is off by 0.115, compared with 0.0088. `RepeatableCodec` chooses scales that packing again finds.

Axes: ``V`` vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shared_embeddings.codecs.repeatable import SCALE_TYPE, RepeatableCodec
from shared_embeddings.errors import UserError
from shared_embeddings.utils.reading import parse_json

STORES = ("fp32", "fp16", "int8", "int4")
HEADER = "packed_tensors"
VERSION = 1

_SCALE = ".scale"
# Smaller tensors are not packed.
_LEAST_VALUES = 256
# The largest integer of int8. The 8 bits of precision of a scale times its 7 are exact in float32, so that
# packing unpacked rows finds the same scale; the range of scales is that of float32.
_LARGEST = 127
# Integers are packed if they need at most this share of their bits; codes that are packed already need more.
_MOST_BITS = 0.95
# int4: the bits of a value, and the values that share a scale.
_WIDTH = 4
_GROUP = 32
# int4 is packed and unpacked in parts of this many values, to save memory.
_VALUES_AT_ONCE = 2**20
# The minimum number of values per scale, so that scales stay small compared to values.
_LEAST_IN_ROW = 16
_INTEGERS = {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
}


class Packing(NamedTuple):
    """How a state was packed.

    Attributes:
        names: the names of the packed tensors.
        store: the storage of floating-point tensors.
    """

    names: list[str]
    store: str


class StorageError(UserError):
    """Tensors that cannot be packed, or that were packed in an unsupported format."""


def pack(state: Mapping[str, Tensor], prefixes: Iterable[str], store: str) -> dict[str, Tensor]:
    """Pack the tensors of embeddings in the state of a model.

    Floating-point tensors with two or more axes are converted to `store`; biases and tensors with fewer than
    256 values are unchanged. Integers such as word codes are losslessly bit-packed with the bits of the
    largest value of their column, for any `store`.

    Args:
        state: the state, with each tensor once.
        prefixes: names of tensors or modules to pack; other tensors are unchanged.
        store: one of `STORES`; fp32 leaves floating-point tensors unchanged.

    Returns:
        The packed state, with scales and `HEADER`; equal to `state` if nothing is packed.

    Raises:
        StorageError: an unknown storage, an already packed state, or values that are not finite or too large
            for fp16.
    """
    check_store(store)
    if HEADER in state:
        raise StorageError("the tensors are already packed; unpack them first")
    chosen = tuple(prefixes)
    packed: dict[str, Tensor] = {}
    forms: dict[str, dict[str, Any]] = {}
    for name, tensor in state.items():
        packed[name] = tensor
        if not any(name == prefix or name.startswith(f"{prefix}.") for prefix in chosen):
            continue
        if is_packed(tensor, store):
            form, parts = _pack_numbers(name, tensor, store)
        elif _has_codes(tensor):
            form, parts = _pack_codes(name, tensor)
        else:
            continue
        packed.update(parts)
        forms[name] = form
    if forms:
        header = json.dumps({"version": VERSION, "tensors": forms}, separators=(",", ":")).encode()
        packed[HEADER] = torch.tensor(list(header), dtype=torch.uint8)
    return packed


def unpack(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Unpack a state; the inverse of `pack` up to rounding. Plain states are returned unchanged.

    Raises:
        StorageError: the state has another version, or its tensors do not match its header.
    """
    if HEADER not in state:
        return dict(state)
    forms = _read_header(state[HEADER])
    kept = {name: tensor for name, tensor in state.items() if name != HEADER}
    for name, form in forms.items():
        try:
            kept[name] = _unpacked(name, form, kept)
        except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise StorageError(
                f"the packed tensor {name} does not match its description ({type(error).__name__}); the file "
                "is damaged"
            ) from error
    return kept


def packing_of(state: Mapping[str, Tensor]) -> Packing | None:
    """How a state is packed, for packing another state the same way; None for a plain state.

    Raises:
        StorageError: the state has another version.
    """
    if HEADER not in state:
        return None
    forms = _read_header(state[HEADER])
    stores = [form["as"] for form in forms.values() if form.get("as") in STORES]
    return Packing(list(forms), stores[0] if stores else "fp32")


def packed_as(state: Mapping[str, Tensor], packing: Packing | None) -> dict[str, Tensor]:
    """Pack a state like another state with the same names; unchanged if `packing` is None."""
    return dict(state) if packing is None else pack(state, *packing)


def check_store(store: str) -> None:
    """Raise `StorageError` unless `store` is one of `STORES`."""
    if store not in STORES:
        raise StorageError(f"unknown storage '{store}'; choose one of {', '.join(STORES)}")


def is_packed(tensor: Tensor, store: str) -> bool:
    """Whether `pack` converts a floating-point tensor."""
    is_large = tensor.dim() >= 2 and tensor.numel() >= _LEAST_VALUES
    return is_large and tensor.is_floating_point() and _bytes_as(tensor, store) < tensor.nbytes


def packed_bytes(tensor: Tensor, store: str) -> int:
    """The size of a floating-point tensor in a storage, including scales; depends only on its shape."""
    return _bytes_as(tensor, store) if is_packed(tensor, store) else tensor.nbytes


def _bytes_as(tensor: Tensor, store: str) -> int:
    """The size of a tensor in a storage, ignoring the minimum size for packing."""
    rows = math.prod(tensor.shape[: _scaled_axes(tensor.shape)])
    if store == "int8":
        return tensor.numel() + rows * SCALE_TYPE.itemsize
    if store == "int4":
        codec = _int4_codec(tensor.shape)
        return rows * (codec.row_bytes(_WIDTH) + codec.num_scales * SCALE_TYPE.itemsize)
    return tensor.numel() * 2 if store == "fp16" else tensor.nbytes


def _scaled_axes(shape: Sequence[int]) -> int:
    """The number of leading axes that index rows with their own scale; at least one.

    A row spans the fewest trailing axes with at least 16 values: the vector of a word or of a codebook entry,
    or all entries of a codebook if each is only a piece of a vector.
    """
    axes = len(shape) - 1
    while axes > 1 and math.prod(shape[axes:]) < _LEAST_IN_ROW:
        axes -= 1
    return axes


def _pack_numbers(name: str, tensor: Tensor, store: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Pack a floating-point tensor; returns its description and its parts by name."""
    values = tensor.detach().float()
    if not bool(values.isfinite().all()):
        raise StorageError(
            f"tensor {name} contains NaN or infinity and cannot be stored as {store}; use a checkpoint from "
            "before the training diverged"
        )
    if store == "int8":
        integers, scales = _quantized(values)
        return {"as": "int8"}, {name: integers, f"{name}{_SCALE}": scales}
    if store == "int4":
        codes, scales = _int4_encoded(values)
        return {"as": "int4", "shape": list(values.shape)}, {name: codes, f"{name}{_SCALE}": scales}
    half = values.half()
    if not bool(half.isfinite().all()):
        raise StorageError(
            f"tensor {name} has values up to {float(values.abs().max()):g}, but fp16 is limited to 65504; "
            "use another storage"
        )
    return {"as": "fp16"}, {name: half}


def _quantized(values: Tensor) -> tuple[Tensor, Tensor]:
    """Integers with the shape of `values`, and a scale for every row."""
    within = list(range(_scaled_axes(values.shape), values.dim()))
    scales = (values.abs().amax(dim=within, keepdim=True) / _LARGEST).to(SCALE_TYPE)
    # Scales below the smallest normal number are not exact; such rows become zero.
    scales = scales.masked_fill(scales < torch.finfo(SCALE_TYPE).tiny, 0.0)
    integers = (values / scales.float()).nan_to_num(0.0, 0.0, 0.0).round()
    return integers.clamp(-_LARGEST, _LARGEST).to(torch.int8), scales


def _int4_codec(shape: Sequence[int]) -> RepeatableCodec:
    """The codec of the rows of a tensor, see `_scaled_axes`."""
    return RepeatableCodec(math.prod(shape[_scaled_axes(shape) :]), _GROUP)


def _int4_encoded(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales, with an axis of rows and an axis of bytes or scales."""
    codec = _int4_codec(values.shape)
    parts = values.reshape(-1, codec.dim).split(_rows_at_once(codec))
    encoded = [codec.encode(rows, _WIDTH, {}) for rows in parts]
    return torch.cat([part.codes for part in encoded]), torch.cat([part.scales for part in encoded])


def _int4_decoded(codes: Tensor, scales: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `_int4_encoded` for values of a shape."""
    codec = _int4_codec(shape)
    _expect(codes.dtype == torch.uint8 and scales.dtype == SCALE_TYPE)
    rows = math.prod(shape) // codec.dim
    _expect(codes.shape == (rows, codec.row_bytes(_WIDTH)) and scales.shape == (rows, codec.num_scales))
    parts = zip(codes.split(_rows_at_once(codec)), scales.float().split(_rows_at_once(codec)))
    decoded = [codec.scaled(codec.decode(part, _WIDTH, {}), scale) for part, scale in parts]
    return torch.cat(decoded).reshape(tuple(shape))


def _rows_at_once(codec: RepeatableCodec) -> int:
    """The rows of a part."""
    return max(1, _VALUES_AT_ONCE // codec.dim)


def _has_codes(tensor: Tensor) -> bool:
    """Whether a tensor consists of enough nonnegative integers to pack, and becomes smaller by that."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _INTEGERS or tensor.numel() < _LEAST_VALUES or bool((tensor < 0).any()):
        return False
    widths = _widths(tensor)
    return sum(widths) <= _MOST_BITS * 8 * tensor.element_size() * len(widths)


def _widths(tensor: Tensor) -> list[int]:
    """The bits of the largest value of each column of nonnegative integers."""
    columns = tensor.size(1) if tensor.dim() == 2 else 1
    return [int(largest).bit_length() for largest in tensor.reshape(-1, columns).amax(dim=0)]


def _pack_codes(name: str, tensor: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Pack integers, each column in the bits of its largest value; returns their description and bytes."""
    widths = _widths(tensor)
    codes = tensor.detach().long().reshape(-1, len(widths)).numpy()
    bits = [codes[:, [column]] >> np.arange(width) & 1 for column, width in enumerate(widths)]
    packed = np.packbits(np.concatenate(bits, axis=1).astype(np.uint8))
    kind = str(tensor.dtype).removeprefix("torch.")
    return {"as": "bits", "type": kind, "shape": list(tensor.shape), "widths": widths}, {
        name: torch.from_numpy(packed)
    }


def _unpacked(name: str, form: Mapping[str, Any], parts: dict[str, Tensor]) -> Tensor:
    """Unpack one tensor; removes its scales from `parts`."""
    tensor = parts[name]
    if form["as"] == "int8":
        scales = parts.pop(f"{name}{_SCALE}")
        _expect(tensor.dtype == torch.int8 and scales.dtype == SCALE_TYPE)
        _expect(torch.broadcast_shapes(tensor.shape, scales.shape) == tensor.shape)
        return tensor.float() * scales.float()
    if form["as"] == "int4":
        return _int4_decoded(tensor, parts.pop(f"{name}{_SCALE}"), form["shape"])
    if form["as"] == "fp16":
        _expect(tensor.dtype == torch.float16)
        return tensor.float()
    _expect(form["as"] == "bits" and tensor.dtype == torch.uint8)
    return _unpack_codes(tensor, form["shape"], form["widths"]).to(_INTEGERS[form["type"]])


def _unpack_codes(packed: Tensor, shape: Sequence[int], widths: Sequence[int]) -> Tensor:
    """Unpack integers of a shape from bytes."""
    _expect(all(0 <= width < 64 for width in widths))
    rows = math.prod(shape) // len(widths)
    total = rows * sum(widths)
    _expect(packed.numel() == -(-total // 8) and rows * len(widths) == math.prod(shape))
    bits = np.unpackbits(packed.numpy(), count=total).reshape(rows, sum(widths)).astype(np.int64)
    ends = np.cumsum(widths)
    codes = [bits[:, end - width : end] @ (1 << np.arange(width)) for end, width in zip(ends, widths)]
    return torch.from_numpy(np.stack(codes, axis=1)).reshape(tuple(shape))


def _read_header(header: Tensor) -> dict[str, dict[str, Any]]:
    """The descriptions of packed tensors by name."""
    try:
        content = parse_json(bytes(header.tolist()).decode("utf-8"), HEADER)
        version, forms = content["version"], dict(content["tensors"])
    except (LookupError, TypeError, ValueError) as error:
        raise StorageError(f"'{HEADER}' does not describe packed tensors; the file is damaged") from error
    if version != VERSION:
        raise StorageError(
            f"the tensors are packed in version {version}, but this program supports {VERSION}; use the "
            "program that wrote them"
        )
    return forms


def _expect(condition: bool) -> None:
    """Raise ValueError unless `condition` is true."""
    if not condition:
        raise ValueError("not as described")
