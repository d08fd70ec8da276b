"""Scores of some words only, for measurements that need no others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from shared_embeddings.embedding import SharedEmbedding


class RestrictedScores:
    """The words that an embedding with linear scores of its input table scores.

    With gradients, scores need rows of these words only; rows without gradients are looked up once.

    Args:
        ids: of the words ``(n,)``.
        offsets: ``(n,)`` added to their scores; None for zeros.
    """

    def __init__(self, ids: Tensor, offsets: Tensor | None) -> None:
        self.ids, self.offsets = ids, offsets
        self._rows: Tensor | None = None

    def logits(self, embedding: SharedEmbedding, hidden: Tensor) -> Tensor:
        """Return the scores ``(..., n)`` of the words for hidden states ``(..., S)``."""
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in embedding.parameters()):
            rows: Tensor = embedding(self.ids)
        else:
            if self._rows is None:
                with torch.no_grad():
                    self._rows = embedding(self.ids)
            rows = self._rows
        bias = embedding.output_bias()
        scores = F.linear(hidden, rows.to(hidden), None if bias is None else bias[self.ids].to(hidden))
        return scores if self.offsets is None else scores + self.offsets.to(hidden)


@contextlib.contextmanager
def score_only(embedding: SharedEmbedding, ids: Tensor, offsets: Tensor | None = None) -> Iterator[None]:
    """Within this context, scores and log-probabilities ``(..., n)`` are those of words `ids` ``(n,)`` only.

    Parameters may change between two contexts only. See `RestrictedScores`.
    """
    before = embedding.scored_words
    embedding.scored_words = RestrictedScores(ids, offsets)
    try:
        yield
    finally:
        embedding.scored_words = before
