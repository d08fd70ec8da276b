"""Scores of some words only, for measurements that need no others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

from shared_embeddings.embedding import RestrictedScores, SharedEmbedding


@contextlib.contextmanager
def score_only(embedding: SharedEmbedding, ids: Tensor, offsets: Tensor | None = None) -> Iterator[None]:
    """Within this context, scores and log-probabilities ``(..., n)`` are those of words `ids` ``(n,)`` only.

    With gradients, scores need rows of these words only; rows without gradients are looked up once, so
    parameters may change between two contexts only.

    Args:
        embedding: with linear scores of its input table.
        ids: of the words.
        offsets: ``(n,)`` added to their scores; None for zeros.
    """
    before = embedding.scored_words
    embedding.scored_words = RestrictedScores(ids, offsets)
    try:
        yield
    finally:
        embedding.scored_words = before
