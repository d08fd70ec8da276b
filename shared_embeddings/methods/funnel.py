"""Funneling decomposition (Distilled Embedding): a narrow table behind a non-linearity, then a projection."""

from __future__ import annotations

import dataclasses
from typing import Literal

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

# The mean of new codes in their std: a ReLU lets most through, and training decides which it stops.
# A small AWD-LSTM was at a validation perplexity of 230 after one epoch with Adam, without the lift at 314.
CODE_LIFT = 2.0

_ACTIVATIONS = {"relu": torch.relu, "gelu": F.gelu, "tanh": torch.tanh}


@dataclasses.dataclass(frozen=True)
class FunnelOptions(EmbeddingOptions):
    """Options of `funnel`.

    Attributes:
        rank: R, the width of the narrow table; at most D, at least 1.
        activation: f of Eq. 3; the paper uses relu throughout.
    """

    rank: int
    activation: Literal["relu", "gelu", "tanh"] = "relu"


@register("funnel", FunnelOptions)
class FunnelEmbedding(SharedEmbedding):
    """Row w of the table is ``f(codes[w]) @ basis`` (Distilled Embedding, Eq. 3).

    Parameters: `codes` ``(V, R)``, `basis` ``(R, D)``.
    """

    options: FunnelOptions
    paper = "Distilled Embedding, Eq. 3"
    idea = "V x R, a non-linearity, then R x D"
    per_word = ("codes",)

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None, options: FunnelOptions
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, options)
        self.codes = nn.Parameter(torch.empty(num_embeddings, options.rank))
        self.basis = nn.Parameter(torch.empty(options.rank, embedding_dim))
        self.reset_parameters()

    def draw_parameters(self) -> None:
        """Small codes, most of them above zero, and a large basis that gives products of std D**-0.5."""
        std = code_std(self.embedding_dim)
        nn.init.normal_(self.codes, mean=CODE_LIFT * std, std=std)
        nn.init.normal_(self.basis)
        with torch.no_grad():
            activated = self._activated(self.codes)
            if self.options.rank > 1:
                # The codes have a mean: without this, one common vector would be part of every row.
                self.basis.sub_(self.basis.mean(dim=0))
                activated = activated - activated.mean()
            # A ReLU may stop all codes where there are few.
            norm = activated.square().sum(dim=1).mean().sqrt().clamp(min=1e-3 * std)
            self.basis.mul_(entry_std(self.embedding_dim) / norm)
        zero_padding_row(self.codes, self.padding_idx)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``(n, D)`` for ids ``(n,)``."""
        return self._activated(F.embedding(ids, self.codes)) @ self.basis

    def layers(self, ids: Tensor) -> list[Layer]:
        """The codes ``(n, R)``, what f makes of them, and the output."""
        codes = F.embedding(ids, self.codes)
        activated = Layer("activated codes", self._activated(codes))
        return [Layer("codes", codes), activated, *super().layers(ids)]

    def output_factors(self) -> OutputFactors:
        """The activated codes ``(V, R)`` and the basis ``(R, D)``."""
        return OutputFactors(self._activated(self.codes), self.basis)

    def _activated(self, codes: Tensor) -> Tensor:
        """f of Eq. 3."""
        return _ACTIVATIONS[self.options.activation](codes)

    @classmethod
    def check_sizes(cls, num_embeddings: int, embedding_dim: int, options: FunnelOptions) -> None:
        """The rank must be from 1 to D."""
        require_rank(options.rank, embedding_dim)

    @classmethod
    def closed_form(cls, num_embeddings: int, embedding_dim: int, options: FunnelOptions) -> int:
        """R * (V + D) (Distilled Embedding, Eq. 3)."""
        return options.rank * (num_embeddings + embedding_dim)
