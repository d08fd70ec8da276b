"""The parameters and bytes of every part of an embedding, compared with a plain table."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator

from torch import Tensor

from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.registry import num_parameters

# The bits of a value in the types that embeddings are stored in. int4 has a 16-bit scale for every 32 values;
# the scales of int8, one for a row, are left out.
BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4.5}


@dataclasses.dataclass(frozen=True)
class Part:
    """One tensor that a checkpoint of the embedding holds, or the sum of all.

    Attributes:
        name: the tensor's name; "total", or "plain table" for the table that the embedding replaces.
        kind: "parameter", "buffer" or "sum".
        shape: its shape; empty for sums and for single numbers.
        count: its numbers; for sums, those of parameters alone.
        bytes: type -> the bytes that it takes when real numbers are stored in that type.
        compression: how many times fewer parameters than the plain table; of sums only.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    count: int
    bytes: dict[str, int]
    compression: float | None = None


def storage_breakdown(embedding: SharedEmbedding) -> list[Part]:
    """Every parameter and saved buffer of `embedding` once, then their total, then the plain table.

    Real numbers, trained or not, take the bits of the type; word codes and the like keep their own bits in
    every type (`SharedEmbedding.buffer_bits`). Works without weights, on the meta device.
    """
    parts = [*_parameters(embedding), *_buffers(embedding)]
    dense = num_parameters(
        "standard", num_embeddings=embedding.num_embeddings, embedding_dim=embedding.embedding_dim
    )
    trained = sum(part.count for part in parts if part.kind == "parameter")
    total = {name: sum(part.bytes[name] for part in parts) for name in BITS}
    return [
        *parts,
        Part("total", "sum", (), trained, total, dense / max(trained, 1)),
        Part("plain table", "sum", (), dense, _bytes_of_values(dense), 1.0),
    ]


def describe_storage(embedding: SharedEmbedding, as_json: bool = False) -> str:
    """The breakdown as aligned columns, or as a JSON list of objects."""
    parts = storage_breakdown(embedding)
    if as_json:
        return json.dumps([dataclasses.asdict(part) for part in parts], indent=1)
    rows = [["part", "shape", "numbers", *(f"bytes {name}" for name in BITS), "compression"]]
    rows += [_cells(part) for part in parts]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(_aligned(row, widths) for row in rows)


def _parameters(embedding: SharedEmbedding) -> Iterator[Part]:
    """The parameters; torch gives those with several names once."""
    for name, parameter in embedding.named_parameters():
        count = parameter.numel()
        yield Part(name, "parameter", tuple(parameter.shape), count, _bytes_of_values(count))


def _buffers(embedding: SharedEmbedding) -> Iterator[Part]:
    """The buffers that a checkpoint holds, each once."""
    seen: set[int] = set()
    saved = embedding.state_dict(keep_vars=True)
    for path, module in embedding.named_modules():
        bits_of: Callable[[str, Tensor], int] = getattr(module, "buffer_bits", _bits_in_memory)
        for name, buffer in module.named_buffers(recurse=False):
            full_name = f"{path}.{name}" if path else name
            if full_name not in saved or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            count = buffer.numel()
            if buffer.is_floating_point():
                size = _bytes_of_values(count)
            else:
                size = dict.fromkeys(BITS, math.ceil(bits_of(name, buffer) / 8))
            yield Part(full_name, "buffer", tuple(buffer.shape), count, size)


def _bytes_of_values(count: int) -> dict[str, int]:
    """The bytes of `count` real numbers in every type."""
    return {name: math.ceil(count * bits / 8) for name, bits in BITS.items()}


def _bits_in_memory(name: str, buffer: Tensor) -> int:
    """The size of a buffer of a module that is not an embedding."""
    return buffer.numel() * buffer.element_size() * 8


def _cells(part: Part) -> list[str]:
    """The texts of one row."""
    return [
        part.name,
        " x ".join(str(size) for size in part.shape),
        f"{part.count:,}",
        *(f"{part.bytes[name]:,}" for name in BITS),
        "" if part.compression is None else f"{part.compression:.2f}x",
    ]


def _aligned(row: list[str], widths: list[int]) -> str:
    """Texts to the left, numbers to the right."""
    texts = [cell.ljust(width) for cell, width in zip(row[:2], widths)]
    numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:])]
    return "  ".join([*texts, *numbers]).rstrip()
