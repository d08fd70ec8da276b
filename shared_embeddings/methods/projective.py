"""A table of rank R: narrow vectors and one projection, as in Transformer-XL; an SVD when it is fitted."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_embeddings.embedding import (
    Layer,
    OutputFactors,
    SharedEmbedding,
    code_std,
    entry_std,
    zero_padding_row,
)
from shared_embeddings.options import EmbeddingOptions, require_rank
from shared_embeddings.registry import register


@dataclasses.dataclass(frozen=True)
class ProjectiveOptions(EmbeddingOptions):
    """Options of `projective`.

    Attributes:
        rank: R, the width of the narrow vectors; at most D, at least 1.
    """

    rank: int


@register("projective", ProjectiveOptions)
class ProjectiveEmbedding(SharedEmbedding):
    """Row w of the table is ``codes[w] @ basis`` (Distilled Embedding, Eq. 2).

    Parameters: `codes` ``(V, R)``, `basis` ``(R, D)``. On the output side the hidden states are projected to
    R dimensions before they meet the codes.
    """

    options: ProjectiveOptions
    paper = "Transformer-XL (Dai et al., 2019); SVD when fitted"
    idea = "V x R times R x D"
    per_word = ("codes",)

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None, options: ProjectiveOptions
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, options)
        self.codes = nn.Parameter(torch.empty(num_embeddings, options.rank))
        self.basis = nn.Parameter(torch.empty(options.rank, embedding_dim))
        self.reset_parameters()

    def draw_parameters(self) -> None:
        """Small codes and a large basis, normal both, whose product has std D**-0.5."""
        codes, products = code_std(self.embedding_dim), entry_std(self.embedding_dim)
        nn.init.normal_(self.codes, std=codes)
        nn.init.normal_(self.basis, std=products / (codes * self.options.rank**0.5))
        zero_padding_row(self.codes, self.padding_idx)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``(n, D)`` for ids ``(n,)``."""
        return F.embedding(ids, self.codes) @ self.basis

    def layers(self, ids: Tensor) -> list[Layer]:
        """The codes ``(n, R)`` and the output."""
        return [Layer("codes", F.embedding(ids, self.codes)), *super().layers(ids)]

    def output_factors(self) -> OutputFactors:
        """The codes ``(V, R)`` and the basis ``(R, D)``."""
        return OutputFactors(self.codes, self.basis)

    @classmethod
    def check_sizes(cls, num_embeddings: int, embedding_dim: int, options: ProjectiveOptions) -> None:
        """The rank must be from 1 to D."""
        require_rank(options.rank, embedding_dim)

    @classmethod
    def closed_form(cls, num_embeddings: int, embedding_dim: int, options: ProjectiveOptions) -> int:
        """R * (V + D) (Distilled Embedding, after Eq. 2)."""
        return options.rank * (num_embeddings + embedding_dim)
