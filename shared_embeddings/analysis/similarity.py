"""Similarity of word vectors: agreement with human scores, and cosines in the layers of an embedding.

Axes: ``V`` vocabulary, ``D`` dimension, ``n`` any number of rows.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from shared_embeddings.embedding import WordEmbedding
from shared_embeddings.utils.command_line import decimal_number
from shared_embeddings.utils.errors import UserError


def spearman(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray) -> float | None:
    """Spearman's rank correlation of two lists, with average ranks for ties.

    Returns None where it is undefined: fewer than two values, or a constant list.

    Raises:
        UserError: lists of different lengths.
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
    """Agreement of the cosine similarity of vectors with human scores.

    Attributes:
        name: the name of the set of pairs.
        rho: Spearman's rho over the known pairs; None where it is undefined.
        known: the number of pairs with vectors for both words.
        pairs: the number of pairs.
        lower_cased: the number of known pairs with a word that is known in lower case only.
    """

    name: str
    rho: float | None
    known: int
    pairs: int
    lower_cased: int

    @property
    def coverage(self) -> float:
        """The fraction of pairs that are known."""
        return self.known / self.pairs


class PairCosines(NamedTuple):
    """The cosines of two words.

    Attributes:
        first: a word.
        second: another word.
        cosines: by layer that both words pass through; None where a vector is zero.
    """

    first: str
    second: str
    cosines: dict[str, float | None]


def word_similarity(words: Sequence[str], vectors: np.ndarray, test: WordPairs) -> Similarity:
    """Spearman's rho between the cosine similarity of word vectors and human scores.

    An unknown word is looked up again in lower case. Pairs with an unknown word or an all-zero vector are
    skipped.

    Args:
        words: V words; the first occurrence of a repeated word counts.
        vectors: ``(V, D)``.
        test: the pairs.
    """
    places = _places(words)
    cosines, scores, lower_cased = [], [], 0
    for first, second, score in test.pairs:
        found = [_place(word, places) for word in (first, second)]
        if None in found:
            continue
        similarity = cosine(*(vectors[place] for place in found))
        if similarity is None:
            continue
        cosines.append(similarity)
        scores.append(score)
        lower_cased += any(word not in places for word in (first, second))
    return Similarity(test.name, spearman(cosines, scores), len(scores), len(test.pairs), lower_cased)


def cosine(first: np.ndarray, second: np.ndarray) -> float | None:
    """The cosine of two vectors ``(D,)``; None if one of them is zero.

    It is rounded to 9 digits: rounding errors must not break ties, such as the similarity of words with
    themselves.
    """
    one, other = (np.asarray(vector, dtype=np.float64) for vector in (first, second))
    norm = np.sqrt((one @ one) * (other @ other))
    return None if norm == 0 else round(float(one @ other / norm), 9)


def layer_cosines(embedding: WordEmbedding, words: Sequence[str]) -> list[PairCosines]:
    """The cosines of all pairs of words in every layer of an embedding, as in section 4.6.3 of UnClE.

    Args:
        embedding: of a trained model.
        words: at least two; an unknown word is looked up again in lower case.

    Raises:
        UserError: a word is unknown, or there is only one.
    """
    if len(words) < 2:
        raise UserError("cosines are those of pairs; give at least two words")
    places = _places(embedding.words)
    unknown = [word for word in words if _place(word, places) is None]
    if unknown:
        raise UserError(f"word {unknown[0]!r} is not in the vocabulary of {embedding.name}; give another one")
    found = []
    for first, second in itertools.combinations(words, 2):
        layers = embedding.layers(torch.tensor([_place(first, places), _place(second, places)]))
        # Bands and groups are layers of some words only.
        shared = {layer.name: layer.values.float().numpy() for layer in layers if len(layer.values) == 2}
        found.append(PairCosines(first, second, {name: cosine(*rows) for name, rows in shared.items()}))
    return found


def _places(words: Sequence[str]) -> dict[str, int]:
    """The index of each word; the first occurrence of a repeated word counts."""
    return {word: place for place, word in reversed(list(enumerate(words)))}


def _place(word: str, places: dict[str, int]) -> int | None:
    """The index of a word, or else of its lower-cased form."""
    return places.get(word, places.get(word.lower()))


class WordPair(NamedTuple):
    """Two words and their human similarity score."""

    first: str
    second: str
    score: float


class WordPairs(NamedTuple):
    """A set of pairs and its file name without the suffix."""

    name: str
    pairs: list[WordPair]


def read_pairs(path: Path) -> WordPairs:
    """Read a set of pairs: two words, then columns of which the first number is the score.

    Columns are separated by tabs, or else by semicolons, commas or spaces. The first line may be a header,
    which has no numbers after the second column. Empty lines and lines that start with ``#`` are skipped.

    Raises:
        UserError: the file is missing, not UTF-8, has no pairs, or has a malformed line.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"pairs {path}: is not UTF-8 text (byte {error.start}); convert it") from error
    except OSError as error:
        raise UserError(f"pairs {path}: cannot be read ({error.strerror}); check the path") from error
    pairs: list[WordPair] = []
    may_be_header = True
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        separator = next((mark for mark in "\t;," if mark in line), None)
        try:
            columns = line.split() if separator is None else next(csv.reader([line], delimiter=separator))
        except csv.Error:  # a column is longer than the limit of csv
            columns = []
        fields = [column.strip() for column in columns]
        score = next((found for found in map(decimal_number, fields[2:]) if found is not None), None)
        if score is not None and fields[0] and fields[1]:
            pairs.append(WordPair(fields[0], fields[1], score))
        elif not may_be_header or any(map(_is_float, fields[2:])):
            raise UserError(
                f"pairs {path}: line {number} is {line[:60]!r}, expected two words and a score; correct it"
            )
        may_be_header = False
    if not pairs:
        raise UserError(f"pairs {path}: has no lines with two words and a score; use another file")
    return WordPairs(path.stem, pairs)


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
