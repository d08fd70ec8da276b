"""Look-ups in a table that `shared_embeddings.large.coding` wrote, which stays on the disk.

Axes: ``V`` rows, ``D`` dimensions.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared_embeddings.checkpoints import load_tensors
from shared_embeddings.large.mapped import advise_random
from shared_embeddings.modules.quantized import QuantizedEmbedding
from shared_embeddings.quant.packed_tensor import install
from shared_embeddings.quant.storage import hold
from shared_embeddings.registry import build
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.reading import read_json

INDEX, SHARED = "table.json", "shared.safetensors"
FORMAT = 1


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

    _ends: Tensor

    def __init__(self, folder: str | os.PathLike[str], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        path = Path(folder)
        if not (path / INDEX).is_file():
            raise UserError(
                f"table {path}: has no {INDEX}; name a folder that compress wrote, or join its parts"
            )
        self.settings: dict[str, Any] = read_json(path / INDEX)
        if self.settings["format"] != FORMAT:
            raise UserError(
                f"table {path}: format {self.settings['format']!r} is not {FORMAT}; compress it again"
            )
        self.num_embeddings: int = self.settings["num_embeddings"]
        self.embedding_dim: int = self.settings["embedding_dim"]
        shared = load_tensors(path / SHARED, f"table {path / SHARED}")
        self.shards = nn.ModuleList(
            _read_shard(path / shard["file"], shard["rows"], self.settings, shared).to(dtype)
            for shard in self.settings["shards"]
        )
        ends = [*itertools.accumulate(shard["rows"] for shard in self.settings["shards"])]
        self.register_buffer("_ends", torch.tensor(ends), persistent=False)
        self.eval().requires_grad_(False)

    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors ``(..., D)`` of ids ``(...)``; IndexError if one is out of range."""
        flat, ends = ids.reshape(-1), self._ends
        shards: list[Any] = [*self.shards]
        if len(shards) == 1:
            return shards[0](flat).view(*ids.shape, self.embedding_dim)  # type: ignore[no-any-return]
        if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < self.num_embeddings:
            raise IndexError(f"an index is out of range: there are {self.num_embeddings} rows")
        flat, order = flat.sort()
        bounds = [0, *torch.searchsorted(flat, ends).tolist()]
        parts, start = [], 0
        for shard, end, first, last in zip(shards, ends.tolist(), bounds, bounds[1:]):
            if first < last:
                parts.append(shard.coded_rows(flat[first:last] - start))
            start = end
        rows = torch.cat(parts) if parts else shards[0].coded_rows(flat)
        rows = torch.empty_like(rows).index_copy_(0, order, rows)
        return shards[0].restore(rows).view(*ids.shape, self.embedding_dim)  # type: ignore[no-any-return]


def shard_options(settings: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return the arguments of `build` for so many rows of a table with these settings."""
    options = dict(settings["options"])
    options["words_per_width"] = [rows * (count > 0) for count in options["words_per_width"]]
    sizes = {"num_embeddings": rows, "embedding_dim": settings["embedding_dim"]}
    return {"method": settings["method"], **sizes, **options}


def _read_shard(
    file: Path, rows: int, settings: dict[str, Any], shared: dict[str, Tensor]
) -> QuantizedEmbedding:
    with torch.device("meta"):
        shard: Any = build(**shard_options(settings, rows))
    tensors = load_tensors(file, f"table {file}")
    for tensor in tensors.values():
        advise_random(tensor)
    state = {**hold(tensors), **shared}
    try:
        shard.load_state_dict(install(shard, state), strict=False, assign=True)
    except RuntimeError as error:
        raise UserError(f"table {file}: does not match {INDEX} ({error}); copy it again") from error
    return shard  # type: ignore[no-any-return]
