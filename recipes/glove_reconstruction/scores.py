"""How far vectors agree with people, set by set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared_embeddings.analysis.similarity import WordPairs, word_similarity
from shared_embeddings.analysis.vectors import WordVectors


def score(vectors: WordVectors, tests: Sequence[WordPairs]) -> dict[str, dict[str, Any]]:
    """Spearman's rho of word vectors for every set of pairs by its name, and how many pairs are known."""
    found = (word_similarity(vectors.words, vectors.vectors, test) for test in tests)
    return {
        result.name: {"rho": result.rho, "known": result.known, "pairs": result.pairs} for result in found
    }
