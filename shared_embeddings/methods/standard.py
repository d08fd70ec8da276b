"""The plain table of V vectors, which every other method is compared with."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_embeddings.embedding import OutputFactors, SharedEmbedding, entry_std, zero_padding_row
from shared_embeddings.options import EmbeddingOptions
from shared_embeddings.registry import register


@dataclasses.dataclass(frozen=True)
class StandardOptions(EmbeddingOptions):
    """Options of `standard`: none of its own."""


@register("standard", StandardOptions)
class StandardEmbedding(SharedEmbedding):
    """One trained vector for every word: ``weight`` ``(V, D)``, tied on both sides."""

    options: StandardOptions
    paper = "–"
    idea = "itself"
    per_word = ("weight",)

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None, options: StandardOptions
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, options)
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim))
        # Behind the table, where the states of optimisers in older checkpoints have it.
        self.register_parameter("bias", self._parameters.pop("bias"))
        self.reset_parameters()

    def draw_parameters(self) -> None:
        """Normal entries with std D**-0.5."""
        nn.init.normal_(self.weight, std=entry_std(self.embedding_dim))
        zero_padding_row(self.weight, self.padding_idx)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``(n, D)`` of the table for ids ``(n,)``."""
        return F.embedding(ids, self.weight)

    def output_factors(self) -> OutputFactors:
        """The table itself ``(V, D)``."""
        return OutputFactors(self.weight, None)

    @classmethod
    def closed_form(cls, num_embeddings: int, embedding_dim: int, options: StandardOptions) -> int:
        """V * D."""
        return num_embeddings * embedding_dim
