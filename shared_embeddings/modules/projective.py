"""A table of rank R: narrow vectors and one projection, as in Transformer-XL; an SVD when fitted."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_embeddings.embedding import Layer, OutputFactors, SharedEmbedding
from shared_embeddings.fitting.factorization import shrink_codes, truncated_svd
from shared_embeddings.fitting.task import FitTask
from shared_embeddings.nn.layers import code_std, entry_std, zero_padding_row
from shared_embeddings.registry import register
from shared_embeddings.spec import Candidate, EmbeddingClass, EmbeddingOptions, Presets, SearchGrid
from shared_embeddings.utils.options import option, require


@dataclasses.dataclass(frozen=True)
class LowRankOptions(EmbeddingOptions[EmbeddingClass]):
    """Options of methods with codes ``(V, R)`` and a basis ``(R, D)``."""

    grid_choice = "the largest rank"
    fit_bound = 0.6

    rank: int = option("R, the width of the narrow vectors, from 1 to D.", minimum=1)

    def check_sizes(self, num_embeddings: int, embedding_dim: int) -> None:
        require(
            self.rank <= embedding_dim,
            f"option 'rank' is {self.rank}, more than the dimension {embedding_dim}; choose at most "
            f"{embedding_dim}",
        )

    def count_parameters(self, num_embeddings: int, embedding_dim: int) -> int:
        """R * (V + D) (Distilled Embedding, Eq. 2 and 3)."""
        return self.rank * (num_embeddings + embedding_dim)

    @classmethod
    def presets(cls, num_embeddings: int, embedding_dim: int) -> Presets:
        grid = SearchGrid(embedding_dim, lambda step: {"rank": step + 1})
        return Presets({"": {"rank": embedding_dim // 8}}, [grid])


@dataclasses.dataclass(frozen=True)
class ProjectiveOptions(LowRankOptions["ProjectiveEmbedding"]):
    """Options of `projective`."""

    paper = "Transformer-XL (Dai et al., 2019); SVD when fitted"
    summary = "V x R times R x D"

    @classmethod
    def candidates(cls) -> list[Candidate]:
        """Factors in 8 bits."""
        return [Candidate({}, "int8")]


@register("projective", ProjectiveOptions)
class ProjectiveEmbedding(SharedEmbedding):
    """Row w of the table is ``codes[w] @ basis`` (Distilled Embedding, Eq. 2).

    Parameters: `codes` ``(V, R)``, `basis` ``(R, D)``. The output side projects hidden states to R dimensions
    before it multiplies them by the codes.
    """

    options: LowRankOptions[Any]
    per_word = ("codes",)

    def create_parameters(self) -> None:
        self.codes = nn.Parameter(torch.empty(self.num_embeddings, self.options.rank))
        self.basis = nn.Parameter(torch.empty(self.options.rank, self.embedding_dim))

    def init_weights(self) -> None:
        """Small normal codes and a large normal basis, whose product has std D**-0.5."""
        codes, products = code_std(self.embedding_dim), entry_std(self.embedding_dim)
        nn.init.normal_(self.codes, std=codes)
        nn.init.normal_(self.basis, std=products / (codes * self.options.rank**0.5))
        zero_padding_row(self.codes, self.padding_idx)

    def rows(self, ids: Tensor) -> Tensor:
        return self._activated(F.embedding(ids, self.codes)) @ self.basis

    def _activated(self, codes: Tensor) -> Tensor:
        return codes

    def layers(self, ids: Tensor) -> list[Layer]:
        return [Layer("codes", F.embedding(ids, self.codes)), *super().layers(ids)]

    def output_factors(self) -> OutputFactors:
        return OutputFactors(self._activated(self.codes), self.basis)

    @classmethod
    def fit(cls, task: FitTask) -> ProjectiveEmbedding:
        """The truncated SVD (Distilled Embedding, Eq. 2), which has the least squared error of this rank."""
        embedding: ProjectiveEmbedding = task.build()
        codes, basis = truncated_svd(task.teacher, embedding.options.rank)
        with torch.no_grad():
            embedding.codes.copy_(codes)
            embedding.basis.copy_(basis)
        shrink_codes(embedding.codes, embedding.basis)
        return embedding
