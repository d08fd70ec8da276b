"""An embedding of some of the words of another one, with the same vectors.

Axes: ``V`` vocabulary, ``n`` words that are kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shared_embeddings.registry import build

if TYPE_CHECKING:
    from shared_embeddings.embedding import SharedEmbedding


def select_rows(embedding: SharedEmbedding, ids: Tensor) -> SharedEmbedding:
    """An embedding of the words `ids` ``(n,)`` alone; see `SharedEmbedding.select_rows`.

    Raises:
        ValueError: the ids do not ascend or are no words, or the method cannot leave words out.
    """
    ids = ids.to("cpu", torch.long)
    _check_ids(ids, embedding.num_embeddings)
    first = next(embedding.parameters())
    options, state = embedding.selected(ids.to(first.device))
    kept = ids.tolist()
    selected = build(
        embedding.method,
        num_embeddings=len(ids),
        embedding_dim=embedding.embedding_dim,
        padding_idx=kept.index(embedding.padding_idx) if embedding.padding_idx in kept else None,
        **options,  # type: ignore[arg-type]
    )
    selected.to(device=first.device, dtype=first.dtype).load_state_dict(state)
    return selected.train(embedding.training)


def _check_ids(ids: Tensor, num_embeddings: int) -> None:
    """Raise ValueError unless the ids ``(n,)`` are words, each once and in their order."""
    if ids.dim() != 1 or len(ids) == 0 or bool((ids.diff() <= 0).any()):
        raise ValueError("the ids of the words to keep must be a list that ascends, of one word at least")
    if ids[0] < 0 or ids[-1] >= num_embeddings:
        wrong = int(ids[0] if ids[0] < 0 else ids[-1])
        raise ValueError(f"word {wrong} is to be kept, but the embedding has words 0 to {num_embeddings - 1}")
