"""Tensors of embeddings in fewer bits on disk: 16-bit floats, 8-bit integers with scales, and word codes.

What is read back are plain tensors again, 32-bit floats among them; nothing computes with the packed ones.
Packing what was unpacked gives the same bytes again.

A packed state has, beside its tensors, `HEADER`: JSON in a tensor of bytes, which says how each was packed.

int8 is symmetric: a row of n values is a scale times integers from -127 to 127. Each row has a scale of its
own, because rows differ most: those of tables and codes are words, which are the longer the rarer they are,
and those of a basis are directions, whose lengths fall like singular values. For a trained table of 4,120
words in 128 dimensions the relative error was 0.0066 with a scale for each word, 0.0092 with one for each
dimension, and 0.023 with one for all. Where rows are short, as in the codebooks of pieces, several of them
share a scale, see `_scaled_axes`.

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

from shared_embeddings.errors import UserError
from shared_embeddings.utils.reading import parse_json

STORES = ("fp32", "fp16", "int8")
HEADER = "packed_tensors"
VERSION = 1

_SCALE = ".scale"
# Smaller tensors stay as they are.
_LEAST_VALUES = 256
_LARGEST = 127
# A scale is a bfloat16: its 8 bits of precision times the 7 of an integer are exact in 32-bit floats, so that
# unpacked rows have the same scale again, and its range is that of 32-bit floats.
_SCALE_TYPE = torch.bfloat16
# Values that a scale should stand for at least, lest scales take as much room as values.
_LEAST_IN_ROW = 16
_INTEGERS = {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
}


class Packing(NamedTuple):
    """How a state was packed.

    Attributes:
        names: of the tensors.
        store: of floating-point ones.
    """

    names: list[str]
    store: str


class StorageError(UserError):
    """Tensors that cannot be packed, or were not packed by a program that this one understands."""


def pack(state: Mapping[str, Tensor], prefixes: Iterable[str], store: str) -> dict[str, Tensor]:
    """The state of a model with the tensors of its embeddings packed.

    Floating-point tensors of two axes and more are stored as `store` says, biases and tensors of fewer than
    256 values as they are. Integers such as word codes take the bits of the largest of their column, whatever
    `store` is: nothing of them is lost.

    Args:
        state: each tensor once.
        prefixes: names of tensors, or of modules whose tensors they are; other tensors stay as they are.
        store: one of `STORES`; fp32 leaves floating-point tensors as they are.

    Returns:
        The same names, with those of scales; nothing else changes where nothing is packed.

    Raises:
        StorageError: an unknown storage, a state that is packed already, values that are no finite numbers,
            or too large for 16 bits; the tensor is named.
    """
    check_store(store)
    if HEADER in state:
        raise StorageError("the tensors are packed already; unpack them first")
    chosen = tuple(prefixes)
    packed: dict[str, Tensor] = {}
    forms: dict[str, dict[str, Any]] = {}
    for name, tensor in state.items():
        packed[name] = tensor
        if not any(name == prefix or name.startswith(f"{prefix}.") for prefix in chosen):
            continue
        if is_packed(tensor, store):
            form, parts = _pack_numbers(name, tensor, store)
        elif _is_countable(tensor):
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
    """The state that `pack` was given, with what its storage has lost; other states as they are.

    Raises:
        StorageError: of another version of the storage, or its tensors do not fit its header.
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
                f"the packed tensor {name} does not fit its description ({type(error).__name__}); the file "
                "is damaged"
            ) from error
    return kept


def packing_of(state: Mapping[str, Tensor]) -> Packing | None:
    """How a state was packed, so that one with other values can be packed likewise; None for a plain one.

    Raises:
        StorageError: of another version of the storage.
    """
    if HEADER not in state:
        return None
    forms = _read_header(state[HEADER])
    stores = [form["as"] for form in forms.values() if form.get("as") in STORES]
    return Packing(list(forms), stores[0] if stores else "fp32")


def packed_as(state: Mapping[str, Tensor], packing: Packing | None) -> dict[str, Tensor]:
    """A state packed as one with the same names was; as it is where that was plain."""
    return dict(state) if packing is None else pack(state, *packing)


def check_store(store: str) -> None:
    """Raise `StorageError` unless `store` is one of `STORES`."""
    if store not in STORES:
        raise StorageError(f"unknown storage '{store}'; choose one of {', '.join(STORES)}")


def is_packed(tensor: Tensor, store: str) -> bool:
    """Whether `pack` changes a tensor of floating-point numbers of an embedding."""
    is_large = tensor.dim() >= 2 and tensor.numel() >= _LEAST_VALUES
    return is_large and tensor.is_floating_point() and _bytes_as(tensor, store) < tensor.nbytes


def packed_bytes(tensor: Tensor, store: str) -> int:
    """The bytes of a floating-point tensor of an embedding in a storage, scales included; follows from its
    shape.
    """
    return _bytes_as(tensor, store) if is_packed(tensor, store) else tensor.nbytes


def _bytes_as(tensor: Tensor, store: str) -> int:
    """The bytes of a tensor in a storage, large or not."""
    if store == "int8":
        rows = math.prod(tensor.shape[: _scaled_axes(tensor.shape)])
        return tensor.numel() + rows * _SCALE_TYPE.itemsize
    return tensor.numel() * 2 if store == "fp16" else tensor.nbytes


def _scaled_axes(shape: Sequence[int]) -> int:
    """How many of the first axes number the rows that have a scale of their own: one at least.

    A row spans the last axes, as few as hold 16 values: the vector of a word or of an entry of a codebook;
    the entries of a codebook together, where each is a piece of a vector only.
    """
    axes = len(shape) - 1
    while axes > 1 and math.prod(shape[axes:]) < _LEAST_IN_ROW:
        axes -= 1
    return axes


def _pack_numbers(name: str, tensor: Tensor, store: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """How a floating-point tensor was packed, and its parts by name."""
    values = tensor.detach().float()
    if not bool(values.isfinite().all()):
        raise StorageError(
            f"tensor {name} has values that are no finite numbers and cannot be stored as {store}; take a "
            "model from before the training diverged"
        )
    if store == "int8":
        integers, scales = _quantised(values)
        return {"as": "int8"}, {name: integers, f"{name}{_SCALE}": scales}
    half = values.half()
    if not bool(half.isfinite().all()):
        raise StorageError(
            f"tensor {name} has values up to {float(values.abs().max()):g}, but fp16 ends at 65504; take "
            "another storage"
        )
    return {"as": "fp16"}, {name: half}


def _quantised(values: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of the shape of `values`, and a scale for every row of them."""
    within = list(range(_scaled_axes(values.shape), values.dim()))
    scales = (values.abs().amax(dim=within, keepdim=True) / _LARGEST).to(_SCALE_TYPE)
    # Scales below the smallest normal number would not be exact: such rows become zero.
    scales = scales.masked_fill(scales < torch.finfo(_SCALE_TYPE).tiny, 0.0)
    integers = (values / scales.float()).nan_to_num(0.0, 0.0, 0.0).round()
    return integers.clamp(-_LARGEST, _LARGEST).to(torch.int8), scales


def _is_countable(tensor: Tensor) -> bool:
    """Whether a tensor is of many integers that are nowhere negative."""
    name = str(tensor.dtype).removeprefix("torch.")
    return name in _INTEGERS and tensor.numel() >= _LEAST_VALUES and not bool((tensor < 0).any())


def _pack_codes(name: str, tensor: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """How integers were packed, and the bytes that hold them, every column in the bits of its largest."""
    columns = tensor.size(1) if tensor.dim() == 2 else 1
    codes = tensor.detach().long().reshape(-1, columns).numpy()
    widths = [int(largest).bit_length() for largest in codes.max(axis=0)]
    bits = [codes[:, [column]] >> np.arange(width) & 1 for column, width in enumerate(widths)]
    packed = np.packbits(np.concatenate(bits, axis=1).astype(np.uint8))
    kind = str(tensor.dtype).removeprefix("torch.")
    return {"as": "bits", "type": kind, "shape": list(tensor.shape), "widths": widths}, {
        name: torch.from_numpy(packed)
    }


def _unpacked(name: str, form: Mapping[str, Any], parts: dict[str, Tensor]) -> Tensor:
    """One tensor as it was, but for what its storage has lost; scales are taken out of `parts`."""
    tensor = parts[name]
    if form["as"] == "int8":
        scales = parts.pop(f"{name}{_SCALE}")
        _expect(tensor.dtype == torch.int8 and scales.dtype == _SCALE_TYPE)
        _expect(torch.broadcast_shapes(tensor.shape, scales.shape) == tensor.shape)
        return tensor.float() * scales.float()
    if form["as"] == "fp16":
        _expect(tensor.dtype == torch.float16)
        return tensor.float()
    _expect(form["as"] == "bits" and tensor.dtype == torch.uint8)
    return _unpack_codes(tensor, form["shape"], form["widths"]).to(_INTEGERS[form["type"]])


def _unpack_codes(packed: Tensor, shape: Sequence[int], widths: Sequence[int]) -> Tensor:
    """The integers of a shape from the bytes that hold them."""
    _expect(all(0 <= width < 64 for width in widths))
    rows = math.prod(shape) // len(widths)
    total = rows * sum(widths)
    _expect(packed.numel() == -(-total // 8) and rows * len(widths) == math.prod(shape))
    bits = np.unpackbits(packed.numpy(), count=total).reshape(rows, sum(widths)).astype(np.int64)
    ends = np.cumsum(widths)
    codes = [bits[:, end - width : end] @ (1 << np.arange(width)) for end, width in zip(ends, widths)]
    return torch.from_numpy(np.stack(codes, axis=1)).reshape(tuple(shape))


def _read_header(header: Tensor) -> dict[str, dict[str, Any]]:
    """How each tensor was packed, by name."""
    try:
        content = parse_json(bytes(header.tolist()).decode("utf-8"), HEADER)
        version, forms = content["version"], dict(content["tensors"])
    except (LookupError, TypeError, ValueError) as error:
        raise StorageError(f"'{HEADER}' is no description of packed tensors; the file is damaged") from error
    if version != VERSION:
        raise StorageError(
            f"the tensors are packed in version {version}, this program reads {VERSION}; use the program "
            "that wrote them"
        )
    return forms


def _expect(is_so: bool) -> None:
    """Raise ValueError unless `is_so`."""
    if not is_so:
        raise ValueError("not as described")
