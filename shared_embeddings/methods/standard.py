"""The plain table of V vectors, which every other method is compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_embeddings.interface import OutputFactors, SharedEmbedding, entry_std, zero_padding_row
from shared_embeddings.registry import register


@dataclasses.dataclass(frozen=True)
class StandardOptions:
    """Options of `standard`.

    Attributes:
        output_bias: whether every word's score has a trained bias of its own.
    """

    output_bias: bool = False


@register("standard", StandardOptions)
class StandardEmbedding(SharedEmbedding):
    """One trained vector for every word: ``weight`` ``(V, D)``, tied on both sides.

    With the option `output_bias` there is also ``bias`` ``(V,)``, which the scores get.
    """

    options: StandardOptions
    paper = "–"
    idea = "itself"
    per_word = ("weight",)

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None, options: StandardOptions
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, options)
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim))
        self.bias = nn.Parameter(torch.empty(num_embeddings)) if options.output_bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal entries with std D**-0.5, and no bias."""
        nn.init.normal_(self.weight, std=entry_std(self.embedding_dim))
        zero_padding_row(self.weight, self.padding_idx)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``(n, D)`` of the table for ids ``(n,)``."""
        return F.embedding(ids, self.weight)

    def output_factors(self) -> OutputFactors:
        """The table itself ``(V, D)``."""
        return OutputFactors(self.weight, None)

    def output_bias(self) -> Tensor | None:
        """As in the base class; with the option."""
        if self.bias is None or self.padding_idx is None:
            return self.bias
        return self.bias.masked_fill(self._all_ids(self.bias.device) == self.padding_idx, 0.0)

    def input_parameters(self) -> Iterator[nn.Parameter]:
        """The table."""
        yield self.weight

    @classmethod
    def closed_form(cls, num_embeddings: int, embedding_dim: int, options: StandardOptions) -> int:
        """V * D, and V with a bias."""
        return num_embeddings * (embedding_dim + options.output_bias)
