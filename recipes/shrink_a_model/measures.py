"""How far a smaller encoder agrees with people, with the pairs of news, and with the original.

Axes: ``N`` sentences, ``D`` dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recipes.shrink_a_model.encoder import Encoder
from shared_embeddings.analysis.similarity import WordPairs, read_pairs, spearman, word_similarity

# Neighbors that are compared beside the nearest one.
NEIGHBORS = 10
WORDS = "words"
Vectors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Texts:
    """What the models are measured with.

    Attributes:
        captions: sentences.
        headlines: of the news.
        descriptions: of the same news.
    """

    captions: list[str]
    headlines: list[str]
    descriptions: list[str]

    def encode(self, encoder: Encoder, pairs: Path) -> dict[str, np.ndarray]:
        """The vectors of all texts, and of all words of the `pairs`, by name."""
        found = {name: encoder.encode(sentences) for name, sentences in vars(self).items()}
        return {**found, WORDS: encoder.encode(words_of(read_all(pairs)))}


def read_all(pairs: Path) -> list[WordPairs]:
    """The sets of pairs in a folder."""
    return [read_pairs(path) for path in sorted(pairs.iterdir())]


def words_of(tests: Sequence[WordPairs]) -> list[str]:
    """All words of the sets, each once."""
    return list(
        dict.fromkeys(word for test in tests for pair in test.pairs for word in (pair.first, pair.second))
    )


def measure(vectors: Vectors, original: Vectors, tests: Sequence[WordPairs]) -> dict[str, Any]:
    """The scores of an encoder by its vectors.

    Args:
        vectors: of `Texts.encode`.
        original: those of the original model.
        tests: the sets of word pairs.

    Returns:
        ``rho`` by set of word pairs; ``found``, the fraction of headlines whose own description is the
        nearest one; ``top1`` and ``top10``, how many of the nearest neighbors of each caption and headline
        are those of the original; ``correlation``, Spearman's, of the similarities of all pairs of captions
        and headlines with those of the original.
    """
    nearest = (vectors["headlines"] @ vectors["descriptions"].T).argmax(axis=1)
    own, other = (similarities(np.concatenate([v["captions"], v["headlines"]])) for v in (vectors, original))
    above = np.triu_indices(len(own), k=1)
    words = words_of(tests)
    return {
        "rho": {test.name: word_similarity(words, vectors[WORDS], test).rho for test in tests},
        "found": float((nearest == np.arange(len(nearest))).mean()),
        "top1": agreement(own, other, 1),
        f"top{NEIGHBORS}": agreement(own, other, NEIGHBORS),
        "correlation": spearman(own[above], other[above]),
    }


def similarities(vectors: np.ndarray) -> np.ndarray:
    """Cosines of vectors of length one ``(N, D)`` with each other ``(N, N)``; -1 with themselves."""
    found = vectors @ vectors.T
    np.fill_diagonal(found, -1)
    return found


def agreement(own: np.ndarray, other: np.ndarray, number: int) -> float:
    """The mean fraction of the nearest neighbors that two matrices of similarities ``(N, N)`` share."""
    sets = [np.argpartition(-matrix, number - 1, axis=1)[:, :number] for matrix in (own, other)]
    return float(np.mean([len(np.intersect1d(*pair)) / number for pair in zip(*sets, strict=True)]))
