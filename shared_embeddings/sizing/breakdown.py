"""The parameters and bytes of every part of an embedding, compared with a plain table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.registry import num_parameters
from shared_embeddings.sizing.accounting import stored_buffers

# The bits of a value by storage dtype. int4 has a 16-bit scale for every 32 values. The scales of int8, one
# for each row, are ignored.
BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4.5}


@dataclasses.dataclass(frozen=True)
class Part:
    """A stored tensor of the embedding, or the sum of all.

    Attributes:
        name: the tensor's name; "total", or "plain table" for the table that the embedding replaces.
        kind: "parameter", "buffer" or "sum".
        shape: its shape; empty for sums and for single numbers.
        count: its number of elements; for sums, the number of parameters.
        bytes: its size by storage dtype.
        compression: parameters of the plain table over those of the embedding; only for sums.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    count: int
    bytes: dict[str, int]
    compression: float | None = None


def storage_breakdown(embedding: SharedEmbedding) -> list[Part]:
    """Every parameter and persistent buffer of `embedding` once, then their total, then the plain table.

    Floating-point tensors take the bits of the storage dtype; the bits of others, such as word codes, do not
    depend on it (`SharedEmbedding.buffer_bits`). Works on the meta device.
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


def describe_storage(embedding: SharedEmbedding) -> str:
    """The breakdown as aligned columns."""
    parts = storage_breakdown(embedding)
    rows = [["part", "shape", "numbers", *(f"bytes {name}" for name in BITS), "compression"]]
    rows += [_cells(part) for part in parts]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(_aligned(row, widths) for row in rows)


def _parameters(embedding: SharedEmbedding) -> Iterator[Part]:
    """The parameters, each once."""
    for name, parameter in embedding.named_parameters():
        count = parameter.numel()
        yield Part(name, "parameter", tuple(parameter.shape), count, _bytes_of_values(count))


def _buffers(embedding: SharedEmbedding) -> Iterator[Part]:
    """The persistent buffers."""
    for name, buffer, bits in stored_buffers(embedding):
        count = buffer.numel()
        is_float = buffer.is_floating_point()
        size = _bytes_of_values(count) if is_float else dict.fromkeys(BITS, math.ceil(bits / 8))
        yield Part(name, "buffer", tuple(buffer.shape), count, size)


def _bytes_of_values(count: int) -> dict[str, int]:
    """The bytes of `count` floating-point values by storage dtype."""
    return {name: math.ceil(count * bits / 8) for name, bits in BITS.items()}


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
    """A row with left-aligned texts and right-aligned numbers."""
    texts = [cell.ljust(width) for cell, width in zip(row[:2], widths)]
    numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:])]
    return "  ".join([*texts, *numbers]).rstrip()
