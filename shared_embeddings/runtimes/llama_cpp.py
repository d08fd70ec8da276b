"""llama.cpp's types in blocks of 32 numbers, in a copy of a GGUF file of the original.

Axes: ``V`` vocabulary, ``D`` dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared_embeddings.runtimes.base import CodedTable, Grid, Runtime, register
from shared_embeddings.utils.errors import UserError, first_line, require
from shared_embeddings.utils.files import replacing

if TYPE_CHECKING:
    import numpy as np

INPUT, OUTPUT = "token_embd.weight", "output.weight"
# Numbers that share a scale.
_BLOCK = 32
# The version of llama.cpp's types that files name.
_QUANTIZATION_VERSION = 2


@register("llama.cpp")
class LlamaCpp(Runtime):
    """See the module. Types with blocks of 256 numbers, whose scales have codes, too, are not written."""

    about = "a copy of a GGUF file of the model with the table in codes of this one"
    takes_gguf = True
    grids = {
        "Q8_0": Grid("uniform", 8, _BLOCK),
        "Q5_0": Grid("uniform", 5, _BLOCK),
        "Q5_1": Grid("affine", 5, _BLOCK),
        "IQ4_NL": Grid("iq4_nl", 4, _BLOCK),
        "Q4_0": Grid("uniform", 4, _BLOCK),
        "Q4_1": Grid("affine", 4, _BLOCK),
    }


def write_gguf(tables: Mapping[str, CodedTable], grid: str, source: Path, output: Path) -> None:
    """Write a copy of a GGUF file with other tables.

    Args:
        tables: by the name of their tensor, `INPUT` and maybe `OUTPUT`. A file without the latter scores
            words with `INPUT`, so that it needs one table for both.
        grid: one of those of `LlamaCpp`.

    Raises:
        UserError: `source` is not a GGUF file or of another model, or the package gguf cannot copy it.
    """
    gguf = require("gguf")
    try:
        reader = gguf.GGUFReader(source)
        if reader.endianess != gguf.GGUFEndian.LITTLE:
            raise ValueError("its numbers are big-endian")
        if gguf.Keys.General.ARCHITECTURE not in reader.fields:
            raise ValueError("it has no general.architecture")
    except (ValueError, KeyError, IndexError) as error:
        raise UserError(
            f"{source}: not a readable GGUF file ({error}); name a file of the same model"
        ) from error
    parts = reader.get_field("split.count")
    if parts is not None and parts.contents() != 1:
        raise UserError(
            f"{source}: is one of {parts.contents()} parts of a model; merge them with llama.cpp's "
            "gguf-split --merge FIRST_PART MERGED, and name the merged file"
        )
    before = {tensor.name: tensor for tensor in reader.tensors}
    if len({id(table) for table in tables.values()}) > 1 and OUTPUT not in before:
        raise UserError(f"{source}: has one table, but the model has two; convert the model itself")
    new: dict[str, tuple[np.ndarray, Any]] = {}
    for name, table in tables.items():
        if name == OUTPUT and OUTPUT not in before:
            continue
        shape = list(table.codes.shape)
        stored = [int(size) for size in before[name].shape][::-1] if name in before else None
        if stored != shape:
            raise UserError(
                f"{source}: its {name} is {stored}, but the model's table is {shape}; name a file of the "
                "same model, with the same vocabulary"
            )
        new[name] = blocks(table, grid), gguf.GGMLQuantizationType[grid]
    try:
        with replacing(output) as temporary:
            _copy(reader, new, temporary)
    except ValueError as error:
        raise UserError(
            f"{source}: cannot be copied ({first_line(error)}); convert the model again"
        ) from error


def blocks(table: CodedTable, grid: str) -> np.ndarray:
    """Return a table as rows of bytes: each block has the scale, maybe the offset, and the codes."""
    import numpy as np

    codes = table.codes.reshape(len(table.codes), -1, _BLOCK)
    numbers = [table.scales] if table.offsets is None else [table.scales, table.offsets]
    parts: list[Any] = [part.astype("<f2")[:, :, None].view(np.uint8) for part in numbers]
    if grid == "Q8_0":
        parts.append(codes ^ 128)  # signed
    else:
        if grid.startswith("Q5"):  # fifth bits, then the others
            parts.append(np.packbits(codes >> 4, axis=2, bitorder="little"))
        low = codes & 15
        parts.append(low[:, :, : _BLOCK // 2] | low[:, :, _BLOCK // 2 :] << 4)
    return np.concatenate(parts, axis=2).reshape(len(codes), -1)


def _copy(reader: Any, tables: Mapping[str, tuple[np.ndarray, Any]], output: Path) -> None:
    """Write the fields and tensors of a file, some of them replaced."""
    gguf = require("gguf")
    keys, kinds = gguf.Keys.General, gguf.GGUFValueType
    architecture = reader.get_field(keys.ARCHITECTURE).contents()
    writer = gguf.GGUFWriter(output, architecture, endianess=reader.endianess)
    writer.data_alignment = reader.alignment
    for field in reader.fields.values():
        # The writer adds some; the others are about parts of a model.
        if field.name != keys.ARCHITECTURE and not field.name.startswith(("GGUF.", "split.")):
            is_array = field.types[0] == kinds.ARRAY
            if len(field.types) > 2:
                raise ValueError(f"{field.name} is an array of arrays")
            writer.add_key_value(
                field.name, field.contents(), field.types[0], field.types[-1] if is_array else None
            )
    if keys.QUANTIZATION_VERSION not in reader.fields:
        writer.add_quantization_version(_QUANTIZATION_VERSION)
    data = [tables.get(tensor.name, (tensor.data, tensor.tensor_type)) for tensor in reader.tensors]
    for tensor, (values, kind) in zip(reader.tensors, data):
        writer.add_tensor_info(tensor.name, values.shape, values.dtype, values.nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for values, _ in data:
        writer.write_tensor_data(values)
    writer.close()
