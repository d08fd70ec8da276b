"""A compressed model with dense tables, under the names of the original tensors.

Axes: ``V`` vocabulary, ``D`` model dimension.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.hosts.hf.entry import ENTRY, KEY, Placement, from_entry
from shared_embeddings.utils.errors import UserError

# The largest relative difference of two equal tables in float32.
_ROUNDING = 1e-5


@torch.no_grad()
def dense_model(model: Any) -> Any:
    """A model of transformers without shared embeddings, which computes the same.

    Raises:
        UserError: two sides of an embedding have different tables.
    """
    config = copy.deepcopy(model.config)
    placements = from_entry(config.to_dict()[KEY])[1]
    delattr(config, KEY)
    plain = type(model)._from_config(config, dtype=model.dtype).eval()
    state = {name: value for name, value in model.state_dict().items() if not name.startswith(f"{ENTRY}.")}
    tables = {}
    for name, embedding in getattr(model, ENTRY).items():
        weight = nn.Parameter(_table(name, embedding, placements[name]).to(model.dtype))
        tables.update(dict.fromkeys((*placements[name].inputs, *placements[name].outputs), weight))
    plain.load_state_dict({**state, **{f"{path}.weight": weight for path, weight in tables.items()}})
    # A new model may tie tables that this one does not.
    for path, weight in tables.items():
        plain.get_submodule(path).weight = weight
    return plain


def _table(name: str, embedding: SharedEmbedding, placement: Placement) -> Tensor:
    """The table ``(V, D)`` of all layers that use an embedding.

    Raises:
        UserError: they use different ones.
    """
    if not placement.outputs:
        return embedding.table()
    # In 16 bits, both sides round too much to compare.
    exact = copy.deepcopy(embedding).float()
    error = (exact.output_table() - exact.table()).norm() if placement.inputs else torch.zeros(())
    if embedding.output_bias() is not None or error > _ROUNDING * exact.table().norm():
        raise UserError(
            f"table '{name}': its {embedding.method} embedding scores words with other numbers than it looks "
            "up, so that no single dense table replaces it; use --format onnx"
        )
    return embedding.table() if placement.inputs else embedding.output_table()
