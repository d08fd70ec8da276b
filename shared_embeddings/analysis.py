"""Word similarity: the agreement of cosines of word vectors with human scores.

Axes: ``V`` vocabulary, ``D`` dimension.
"""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.reading import read_lines

_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


def spearman(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray) -> float | None:
    """Return Spearman's rank correlation of two lists of one length, with average ranks for ties.

    None where it is undefined: fewer than two values, or a constant list.
    """
    if len(first) != len(second):
        raise UserError(f"the lists have {len(first)} and {len(second)} values; pass lists of equal length")
    centered = []
    for values in (first, second):
        _, inverse, counts = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
        ranks = (counts.cumsum() - (counts - 1) / 2)[inverse]
        centered.append(ranks - ranks.mean() if len(ranks) else ranks)
    norm = np.sqrt(np.square(centered[0]).sum() * np.square(centered[1]).sum())
    return float(centered[0] @ centered[1] / norm) if norm > 0 else None


@dataclasses.dataclass(frozen=True)
class Similarity:
    """Agreement of the cosine similarity of vectors with human scores."""

    name: str  # of the set of pairs
    rho: float | None  # Spearman's rho over the known pairs; None where it is undefined
    known: int  # pairs with vectors for both words
    pairs: int
    lower_cased: int  # known pairs with a word that is known in lower case only
    coverage: float  # known pairs over all


def word_similarity(words: Sequence[str], vectors: np.ndarray, test: WordPairs) -> Similarity:
    """Return Spearman's rho between cosines of V words with vectors ``(V, D)`` and human scores.

    An unknown word is looked up again in lower case; the first occurrence of a repeated word counts. Pairs
    with an unknown word or an all-zero vector are skipped.
    """
    rows = {word: row for row, word in reversed(list(enumerate(words)))}
    cosines, scores, lower_cased = [], [], 0
    for first, second, score in test.pairs:
        pair = [rows.get(word, rows.get(word.lower())) for word in (first, second)]
        if None in pair:
            continue
        similarity = cosine(*(vectors[row] for row in pair))
        if similarity is None:
            continue
        cosines.append(similarity)
        scores.append(score)
        lower_cased += any(word not in rows for word in (first, second))
    known, pairs = len(scores), len(test.pairs)
    return Similarity(test.name, spearman(cosines, scores), known, pairs, lower_cased, known / pairs)


def cosine(first: np.ndarray, second: np.ndarray) -> float | None:
    """Return the cosine of two vectors ``(D,)``; None if one of them is zero.

    It is rounded to 9 digits: rounding errors must not break ties, such as the similarity of words with
    themselves.
    """
    first, second = first.astype(np.float64), second.astype(np.float64)
    norm = np.sqrt((first @ first) * (second @ second))
    return None if norm == 0 else round(float(first @ second / norm), 9)


class WordPairs(NamedTuple):
    """A set of pairs and its file name without the suffix."""

    name: str
    pairs: list[tuple[str, str, float]]  # two words and their human similarity score


def read_pairs(path: Path) -> WordPairs:
    """Read a set of pairs: two words, then columns of which the first number is the score.

    Columns are separated by tabs, or else by semicolons, commas or spaces. The first line may be a header,
    which has no numbers after the second column. Empty lines and lines that start with ``#`` are skipped.

    Raises:
        UserError: the file is not UTF-8, has no pairs, or has a malformed line.
    """
    pairs: list[tuple[str, str, float]] = []
    may_be_header = True
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip() or line.startswith("#"):
            continue
        separator = next((mark for mark in "\t;," if mark in line), None)
        columns = line.split() if separator is None else next(csv.reader([line], delimiter=separator))
        first, second, *others = [column.strip() for column in columns] + ["", ""]
        numbers = [float(text) for text in others if _NUMBER.fullmatch(text)]
        if numbers and first and second:
            pairs.append((first, second, numbers[0]))
        elif numbers or not may_be_header:
            raise UserError(
                f"pairs {path}: line {number} is {line[:60]!r}, expected two words and a score; correct it"
            )
        may_be_header = False
    if not pairs:
        raise UserError(f"pairs {path}: has no lines with two words and a score; use another file")
    return WordPairs(path.stem, pairs)
