"""The modules that stand where a model had its word table and its output layer.

Both refer to one embedding, which the model holds elsewhere, so that its state has every tensor once.

Axes: ``B`` batch, ``T`` time, ``V`` vocabulary, ``D`` model dimension.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn

from shared_embeddings.embedding import SharedEmbedding


class _Side(nn.Module):
    """A use of an embedding that is not its owner.

    Attributes:
        embedding: the one that is used; no submodule.
        weight: ``(V, 0)``, nothing. It has the name of the table that it stands for, so that whoever reads
            the model's weights as those of a plain model meets an impossible shape, and not a missing table
            which transformers would fill with random numbers. Code that asks a table for its length, type or
            device finds them.
    """

    embedding: SharedEmbedding

    def __init__(self, embedding: SharedEmbedding) -> None:
        super().__init__()
        # Past nn.Module, which would register it.
        object.__setattr__(self, "embedding", embedding)
        like = next(embedding.parameters())
        self.weight = nn.Parameter(like.new_empty(embedding.num_embeddings, 0), requires_grad=False)

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise RuntimeError(
            "nn.DataParallel cannot copy a model with shared embeddings: start with torchrun, which uses "
            "DistributedDataParallel, or let it see one device (CUDA_VISIBLE_DEVICES=0)"
        )


class InputSide(_Side):
    """In place of an ``nn.Embedding``: ids ``(B, T)`` to vectors ``(B, T, D)``.

    Args:
        embedding: what gives the vectors.
        scale: what they are multiplied by, as in Gemma.
    """

    def __init__(self, embedding: SharedEmbedding, scale: float) -> None:
        super().__init__(embedding)
        self.scale = scale
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx = embedding.padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        """The vectors ``(..., D)`` of ids ``(...)``."""
        vectors = self.embedding(ids)
        # Rounded to the type of the vectors first, as the models do.
        return vectors if self.scale == 1.0 else vectors * torch.tensor(self.scale, dtype=vectors.dtype)

    def extra_repr(self) -> str:
        """What is used, for print(module)."""
        return f"{self.embedding.method}, scale={self.scale:g}"


class OutputSide(_Side):
    """In place of an ``nn.Linear``: hidden states ``(B, T, D)`` to scores ``(B, T, V)``.

    Args:
        embedding: what gives the scores.
        bias: ``(V,)``, which the layer adds, or None.
    """

    bias: nn.Parameter | None

    def __init__(self, embedding: SharedEmbedding, bias: nn.Parameter | None) -> None:
        super().__init__(embedding)
        self.register_parameter("bias", bias)
        self.in_features, self.out_features = embedding.score_dim, embedding.num_embeddings

    def forward(self, hidden: Tensor) -> Tensor:
        """The scores ``(..., V)`` of hidden states ``(..., D)``."""
        scores = self.embedding.logits(hidden)
        return scores if self.bias is None else scores + self.bias

    def extra_repr(self) -> str:
        """What is used, for print(module)."""
        return f"{self.embedding.method}, bias={self.bias is not None}"
