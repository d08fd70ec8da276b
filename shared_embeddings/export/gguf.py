"""The tables of a compressed model in a GGUF file of the same model, for llama.cpp.

Uniform codes with a scale for every 32 numbers are stored as they are: 4 bits as Q4_0, 8 bits as Q8_0, which
have the same levels. Other tables are rounded to Q8_0, or to float16 where rows are no multiple of 32.

Axes: ``V`` vocabulary, ``D`` dimensions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.modules.quantized import QuantizedEmbedding
from shared_embeddings.quant.packed_tensor import dense
from shared_embeddings.utils.errors import UserError, first_line, require
from shared_embeddings.utils.files import replacing

INPUT, OUTPUT = "token_embd.weight", "output.weight"
# Numbers that share a scale.
_BLOCK = 32
# The version of llama.cpp's types that files name.
_QUANTIZATION_VERSION = 2


@torch.no_grad()
def write_gguf(tables: Mapping[str, SharedEmbedding], source: Path, output: Path) -> str:
    """Write a copy of a GGUF file with other tables, and return a line for the user.

    Args:
        tables: the embeddings by the name of their tensor, `INPUT` and maybe `OUTPUT`. A file without the
            latter scores words with `INPUT`, so that it needs one table for both.

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
    if len({id(embedding) for embedding in tables.values()}) > 1 and OUTPUT not in before:
        raise UserError(f"{source}: has one table, but the model has two; convert the model itself")
    new: dict[str, tuple[np.ndarray, Any]] = {}
    for name, embedding in tables.items():
        if name == OUTPUT and OUTPUT not in before:
            continue
        shape = [embedding.embedding_dim, embedding.num_embeddings]
        stored = [int(size) for size in before[name].shape] if name in before else None
        if stored != shape:
            raise UserError(
                f"{source}: its {name} is {stored and stored[::-1]}, but the model's table is {shape[::-1]}; "
                "name a file of the same model, with the same vocabulary"
            )
        new[name] = _blocks(embedding, name == OUTPUT)
    try:
        with replacing(output) as temporary:
            _copy(reader, new, temporary)
    except ValueError as error:
        raise UserError(
            f"{source}: cannot be copied ({first_line(error)}); convert the model again"
        ) from error
    values, table = gguf.quants.dequantize(*new[INPUT]), tables[INPUT].table().float().numpy()
    difference = np.abs(values - table).max() / max(np.abs(table).max(), 1e-30)
    named = ", ".join(f"{name} in {kind.name}" for name, (_, kind) in new.items())
    return f"wrote {output}: {named}, {os.path.getsize(output):,} bytes, within {difference:.1e} of torch"


def _blocks(embedding: SharedEmbedding, is_output: bool) -> tuple[np.ndarray, Any]:
    """A table as rows of bytes, and its type."""
    gguf = require("gguf")
    kinds = gguf.GGMLQuantizationType
    dim = embedding.embedding_dim
    if (
        isinstance(embedding, QuantizedEmbedding)
        and embedding.options.codec == "uniform"
        and embedding.options.group_size == _BLOCK
        and dim % _BLOCK == 0
        and [*embedding.word_counts] in ([4], [8])
    ):
        (rate,) = embedding.word_counts
        codes = embedding.codes(rate).numpy()
        scales = dense(embedding.get_parameter("scales")).view(len(codes), -1).half().clone()
        if embedding.padding_idx is not None:
            scales[embedding.padding_idx] = 0
        heads = scales.unsqueeze(-1).view(torch.uint8).numpy()
        if rate == 8:
            # Codes are 128 more than the signed numbers of Q8_0.
            bodies, kind = codes.reshape(len(codes), -1, _BLOCK) ^ 128, kinds.Q8_0
        else:
            # Here a byte has two neighbors, the first in its upper half; there, numbers i and i + 16.
            numbers = np.stack([codes >> 4, codes & 15], axis=-1).reshape(len(codes), -1, _BLOCK)
            bodies, kind = numbers[..., : _BLOCK // 2] | numbers[..., _BLOCK // 2 :] << 4, kinds.Q4_0
        return np.concatenate([heads, bodies], axis=-1).reshape(len(codes), -1), kind
    table = (embedding.output_table() if is_output else embedding.table()).float().numpy()
    kind = kinds.F16 if dim % _BLOCK else kinds.Q8_0
    return gguf.quants.quantize(table, kind), kind


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
