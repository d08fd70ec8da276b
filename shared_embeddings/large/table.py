"""Look-ups in a table that `shared_embeddings.large.coding` wrote, which stays on the disk.

Axes: ``V`` rows, ``D`` dimensions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shared_embeddings.checkpoints import load_tensors
from shared_embeddings.large.mapped import advise_random
from shared_embeddings.modules.quantized import QuantizedEmbedding
from shared_embeddings.quant.formats import NumberFormat, Packed
from shared_embeddings.quant.packed_tensor import PackedTensor
from shared_embeddings.quant.storage import hold
from shared_embeddings.registry import build
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.reading import read_json

INDEX, SHARED = "table.json", "shared.safetensors"
FORMAT = 1


class _Shard(NamedTuple):
    """The rows of a file, which is mapped."""

    codes: Tensor  # ``(n, bytes)``
    scales: Tensor  # ``(n, S)`` in the type of the file
    form: NumberFormat | None  # of the scales; None for plain numbers
    unit: float  # of scales in a format with a unit


class LargeTable(nn.Module):
    """A compressed table ``(V, D)`` in a folder, whose rows are read from the disk when they are looked up.

    Memory grows by the rows that were read, and the system may take it back. Threads and forked processes
    may read at once. There are no gradients.

    Args:
        folder: with ``table.json``.
        dtype: of the vectors.

    Raises:
        UserError: the folder has no complete table.
    """

    def __init__(self, folder: str | os.PathLike[str], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        path = Path(folder)
        if not (path / INDEX).is_file():
            raise UserError(
                f"table {path}: has no {INDEX}; name a folder that compress wrote, or join its parts"
            )
        settings: dict[str, Any] = read_json(path / INDEX)
        if settings["format"] != FORMAT:
            raise UserError(f"table {path}: format {settings['format']!r} is not {FORMAT}; compress it again")
        self.settings, self.dtype = settings, dtype
        self.num_embeddings: int = settings["num_embeddings"]
        self.embedding_dim: int = settings["embedding_dim"]
        self.shared = shared_part(settings, load_tensors(path / SHARED, f"table {path / SHARED}")).to(dtype)
        self._shards = [
            _read_shard(path / shard["file"], shard["rows"], self.shared) for shard in settings["shards"]
        ]
        self._ends = torch.tensor([len(shard.codes) for shard in self._shards]).cumsum(0)

    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors ``(..., D)`` of ids ``(...)``; IndexError if one is out of range."""
        flat = ids.reshape(-1)
        if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < self.num_embeddings:
            raise IndexError(f"an index is out of range: there are {self.num_embeddings} rows")
        # In the order of the files, so that each is read at once.
        flat, order = flat.sort()
        bounds = [0, *torch.searchsorted(flat, self._ends).tolist()]
        first = self._shards[0]
        codes = first.codes.new_empty(len(flat), first.codes.size(1))
        scales = first.scales.new_empty(len(flat), first.scales.size(1))
        units = torch.empty(len(flat), 1)
        for shard, end, begin, stop in zip(self._shards, self._ends.tolist(), bounds, bounds[1:]):
            if begin < stop:
                places = flat[begin:stop] - (end - len(shard.codes))
                torch.index_select(shard.codes, 0, places, out=codes[begin:stop])
                torch.index_select(shard.scales, 0, places, out=scales[begin:stop])
                units[begin:stop] = shard.unit
        if first.form is not None:
            scales = first.form.decode(Packed(scales, units))
        rows = self.shared.decode(codes, scales.to(self.dtype))
        return torch.empty_like(rows).index_copy_(0, order, rows).view(*ids.shape, self.embedding_dim)


def shared_part(settings: Mapping[str, Any], shared: Mapping[str, Tensor]) -> QuantizedEmbedding:
    """Return an embedding with what the rows of a table share, which encodes and decodes rows."""
    options = {**settings["options"]}
    options["words_per_width"] = [int(count > 0) for count in options["words_per_width"]]
    sizes = {"num_embeddings": 1, "embedding_dim": settings["embedding_dim"]}
    with torch.device("meta"):
        made: Any = build(settings["method"], **{**sizes, **options})
    made.load_state_dict(shared, strict=False, assign=True)
    return made.eval().requires_grad_(False)  # type: ignore[no-any-return]


def _read_shard(file: Path, rows: int, shared: QuantizedEmbedding) -> _Shard:
    """Read the description of a file, and map its tensors."""
    tensors = load_tensors(file, f"table {file}")
    for tensor in tensors.values():
        advise_random(tensor)
    [name] = shared.code_names.values()
    [rate] = shared.word_counts
    held = hold(tensors)
    codes, scales = held.get(name), held.get(shared.scales_name)
    sizes = (rows, shared.codec.row_bytes(rate)), (rows, shared.codec.num_scales)
    if codes is None or scales is None or (codes.shape, scales.shape) != sizes:
        raise UserError(f"table {file}: does not match {INDEX}; copy it again")
    if not isinstance(scales, PackedTensor):
        return _Shard(codes, scales, None, 1.0)
    unit = 1.0 if scales.scales is None else float(scales.scales)
    return _Shard(codes, scales.codes, scales.form, unit)
