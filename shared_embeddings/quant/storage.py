"""Store the tensors of embeddings in fewer bits: fp16, int8 with scales, and bit-packed word codes.

On loading, tensors stay in few bits (`hold`), or become plain ones (`unpack`). Packing either again gives the
same bytes. `shared_embeddings.quant.formats` has the formats.

A packed state contains an extra tensor of bytes, `HEADER`, with JSON that describes how tensors are packed.

Axes: ``V`` vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shared_embeddings.quant import STORES
from shared_embeddings.quant.decoder import HEADER
from shared_embeddings.quant.formats import FORMATS, BitCodes, Logarithms, NumberFormat, Packed
from shared_embeddings.quant.packed_tensor import PackedTensor, dense
from shared_embeddings.utils.errors import UserError, first_line
from shared_embeddings.utils.reading import parse_json

# The last part of the names of tensors with a positive scale for each row.
ROW_SCALES = "row_scales"
VERSION = 1

_SCALE = ".scale"
# Tensors are packed in parts of this many values, to save memory.
_VALUES_AT_ONCE = 2**22
# Smaller tensors are not packed.
_LEAST_VALUES = 256
# Integers are packed if they need at most this share of their bits; codes that are packed already need more.
_MOST_BITS = 0.95
# Integers stay packed in memory if they need at most this share: other tensors may be read by compiled loops.
_MOST_HELD = 5 / 6
_INTEGERS = {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
}


class Packing(NamedTuple):
    """How a state was packed."""

    names: list[str]  # of the packed tensors
    store: str  # the storage of floating-point tensors


class StorageError(UserError):
    """Tensors that cannot be packed, or that were packed in an unsupported format."""


def pack(state: Mapping[str, Tensor], prefixes: Iterable[str], store: str) -> dict[str, Tensor]:
    """Pack the tensors of embeddings in the state of a model.

    Floating-point tensors with two or more axes are converted to `store`, and biases to fp16, unless `store`
    is fp32. Positive scales of rows, the tensors named `ROW_SCALES`, become 8-bit logarithms instead. Tensors
    with fewer than 256 values, and biases that do not fit fp16, are unchanged. Integers such as word codes
    are bit-packed, with the bits of the largest value of their column, for any `store`.

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
    if store not in STORES:
        raise StorageError(f"unknown storage '{store}'; choose one of {', '.join(STORES)}")
    if HEADER in state:
        raise StorageError("the tensors are already packed; unpack them first")
    chosen = tuple(prefixes)
    packed: dict[str, Tensor] = {}
    forms: dict[str, dict[str, Any]] = {}
    for name, tensor in state.items():
        packed[name] = tensor
        held: Tensor | None = tensor
        if not isinstance(tensor, PackedTensor):
            is_chosen = any(name == prefix or name.startswith(f"{prefix}.") for prefix in chosen)
            held = _packed(name, tensor, store) if is_chosen else None
        if not isinstance(held, PackedTensor):
            continue
        forms[name] = {"as": held.form.name}
        packed[name] = held.codes
        if held.form.widths:
            kind = str(held.dtype).removeprefix("torch.")
            forms[name] |= {"type": kind, "shape": list(held.shape), "widths": list(held.form.widths)}
            packed[name] = _reversed_bits(held.codes)
        elif held.codes.shape != held.shape:
            forms[name]["shape"] = list(held.shape)
        if held.scales is not None:
            packed[f"{name}{_SCALE}"] = held.scales
    if forms:
        header = json.dumps({"version": VERSION, "tensors": forms}, separators=(",", ":")).encode()
        packed[HEADER] = torch.tensor(list(header), dtype=torch.uint8)
    return packed


def unpack(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Unpack a state; the inverse of `pack` up to rounding. Plain states are returned unchanged.

    Raises:
        StorageError: the state has another version, or its tensors do not match its header.
    """
    return {name: dense(tensor) for name, tensor in hold(state).items()}


def hold(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`unpack`, except that real numbers and word codes stay in few bits, as `PackedTensor`.

    Raises:
        StorageError: see `unpack`.
    """
    if HEADER not in state:
        return dict(state)
    forms = _read_header(state[HEADER])
    tensors = {name: tensor for name, tensor in state.items() if name != HEADER}
    for name, form in forms.items():
        try:
            codes = tensors[name]
            numbers = FORMATS[form["as"]](form.get("shape", codes.shape), form.get("widths", ()))
            packed = Packed(codes, tensors.pop(f"{name}{_SCALE}", None))
            numbers.check(packed)
            if not numbers.widths:
                tensors[name] = PackedTensor(numbers, packed)
                continue
            held = PackedTensor(numbers, Packed(_reversed_bits(codes), None), _INTEGERS[form["type"]])
            # Integers that hardly become smaller by packing are decoded.
            tensors[name] = held if numbers.bytes <= _MOST_HELD * held.nbytes else held.decoded()
        except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise StorageError(
                f"the packed tensor {name} does not match its description ({first_line(error)}); the file is "
                "damaged"
            ) from error
    return tensors


def packing_of(state: Mapping[str, Tensor]) -> Packing | None:
    """How a state is packed, for packing another state the same way; None for a plain state.

    Raises:
        StorageError: the state has another version.
    """
    if HEADER not in state:
        return None
    forms = _read_header(state[HEADER])
    stores = [form["as"] for form in forms.values() if form.get("as") in STORES]
    # Biases are in fp16, and scales of rows are logarithms, with any storage but fp32.
    others = [store for store in stores if store != "fp16"]
    is_fp32 = not stores and all(form.get("as") != Logarithms.name for form in forms.values())
    return Packing(list(forms), (others or ["fp32" if is_fp32 else "fp16"])[0])


def default_packing(module: torch.nn.Module) -> Packing | None:
    """How the embeddings inside a module are stored by default; None if all are stored in fp32."""
    parts = [
        (name, getattr(getattr(part, "options", None), "default_store", "fp32"))
        for name, part in module.named_modules()
    ]
    packed = [(name, store) for name, store in parts if store != "fp32"]
    return Packing([name for name, _ in packed], packed[0][1]) if packed else None


def packed_as(state: Mapping[str, Tensor], packing: Packing | None) -> dict[str, Tensor]:
    """Pack a state like another state with the same names; unchanged if `packing` is None."""
    return dict(state) if packing is None else pack(state, *packing)


def packed_bytes(tensor: Tensor, store: str, name: str) -> int:
    """The size of a floating-point tensor in a storage, including scales; depends on its shape and name only.

    A packed tensor stays as it is.
    """
    form = tensor.form if isinstance(tensor, PackedTensor) else _number_format(tensor, store, name)
    return tensor.nbytes if form is None else form.bytes


def _number_format(tensor: Tensor, store: str, name: str) -> NumberFormat | None:
    """The format of a floating-point tensor of a name in a storage; None if it stays as it is."""
    is_large = tensor.dim() > 0 and tensor.numel() >= _LEAST_VALUES
    if store == "fp32" or not is_large or not tensor.is_floating_point():
        return None
    if name.rpartition(".")[2] == ROW_SCALES:
        form: NumberFormat = Logarithms(tensor.shape)
    else:
        form = FORMATS[store if tensor.dim() > 1 else "fp16"](tensor.shape)
    return form if form.bytes < tensor.nbytes else None


def _packed(name: str, tensor: Tensor, store: str) -> PackedTensor | None:
    """A packed tensor, or None if it stays as it is.

    That holds for a bias that fp16 cannot store, such as one of minus infinity for words that are unused.
    """
    if str(tensor.dtype).removeprefix("torch.") in _INTEGERS and tensor.numel() >= _LEAST_VALUES:
        if bool((tensor < 0).any()):
            return None
        codes = BitCodes.of(tensor)
        most = _MOST_BITS * 8 * tensor.element_size() * len(codes.widths)
        return PackedTensor(codes, codes.encode(tensor), tensor.dtype) if sum(codes.widths) <= most else None
    form = _number_format(tensor, store, name)
    if form is None or tensor.dim() == 1 and not bool(tensor.half().isfinite().all()):
        return None
    rows = max(1, _VALUES_AT_ONCE // max(tensor[0].numel(), 1))
    if isinstance(form, Logarithms):  # all share a scale
        rows = len(tensor)
    encoded = []
    for values in (part.float() for part in tensor.detach().split(rows)):
        if not bool(values.isfinite().all()):
            raise StorageError(
                f"tensor {name} contains NaN or infinity and cannot be stored as {store}; use a checkpoint "
                "from before the training diverged"
            )
        encoded.append(type(form)(values.shape).encode(values))
    scales = [part.scales for part in encoded if part.scales is not None]
    packed = Packed(torch.cat([part.codes for part in encoded]), torch.cat(scales) if scales else None)
    if packed.codes.is_floating_point() and not bool(packed.codes.isfinite().all()):
        raise StorageError(
            f"tensor {name} has values up to {float(tensor.abs().max()):g}, but fp16 is limited to 65504; "
            "use another storage"
        )
    return PackedTensor(form, packed)


def _reversed_bits(codes: Tensor) -> Tensor:
    """Bytes with their bits in reverse order: in files, the first bit is the highest one."""
    return torch.from_numpy(np.packbits(np.unpackbits(codes.numpy()), bitorder="little"))


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
