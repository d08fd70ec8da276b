"""Statistics of word vectors: agreement with human similarity scores, correlation between dimensions.

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
from torch import Tensor

from shared_embeddings.embedding import WordEmbedding
from shared_embeddings.utils.command_line import decimal_number
from shared_embeddings.utils.errors import UserError

# A standard deviation below this fraction of the mean is the rounding error of a constant.
_CONSTANT = 1e-6


def spearman(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray) -> float | None:
    """Spearman's rank correlation of two lists, with average ranks for ties.

    Returns None where it is undefined: fewer than two values, or a constant list.

    Raises:
        UserError: lists of different lengths.
    """
    if len(first) != len(second):
        raise UserError(f"the lists have {len(first)} and {len(second)} values; pass lists of equal length")
    ranks = [_average_ranks(np.asarray(values, dtype=np.float64)) for values in (first, second)]
    centered = [rank - rank.mean() if len(rank) else rank for rank in ranks]
    norm = np.sqrt(np.square(centered[0]).sum() * np.square(centered[1]).sum())
    return float(centered[0] @ centered[1] / norm) if norm > 0 else None


def _average_ranks(values: np.ndarray) -> np.ndarray:
    """The ranks of values ``(n,)``, starting at 1; ties get their average rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[inverse]


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
    places: dict[str, int] = {}
    for place, word in enumerate(words):
        places.setdefault(word, place)
    return places


def _place(word: str, places: dict[str, int]) -> int | None:
    """The index of a word, or else of its lower-cased form."""
    return places.get(word, places.get(word.lower()))


class CorrelationMap:
    """Pearson's correlation between the dimensions of vectors, accumulated in blocks.

    DeFINE's appendix B uses the matrix of products E^T E; here each dimension is standardized, so that maps
    of different layers are comparable. Memory is two float64 matrices ``(D, D)``, for any number of vectors.
    """

    def __init__(self, dim: int) -> None:
        self.count = 0
        self._mean = torch.zeros(dim, dtype=torch.float64)
        self._products = torch.zeros(dim, dim, dtype=torch.float64)

    def add(self, vectors: Tensor) -> None:
        """Add vectors ``(n, D)``.

        Merges centered sums of products with the update of Chan et al. (1979), which avoids cancellation.
        """
        number = len(vectors)
        if number == 0:
            return
        block = vectors.detach().to("cpu", torch.float64)
        mean = block.mean(dim=0)
        block = block - mean
        total = self.count + number
        difference = mean - self._mean
        self._products.addmm_(block.t(), block)
        self._products.addr_(difference, difference, alpha=self.count * number / total)
        self._mean += difference * (number / total)
        self.count = total

    def matrix(self) -> Tensor:
        """The correlations ``(D, D)``; NaN in the rows and columns of constant dimensions."""
        deviations = (self._products.diagonal() / max(self.count, 1)).clamp(min=0.0).sqrt()
        constant = deviations <= _CONSTANT * self._mean.abs()
        scale = deviations.reciprocal().masked_fill(constant, torch.nan)
        found = self._products * scale.unsqueeze(0) * scale.unsqueeze(1) / max(self.count, 1)
        return found.clamp(-1.0, 1.0)


def mean_off_diagonal(correlations: Tensor) -> float | None:
    """The mean absolute correlation between two different dimensions.

    Args:
        correlations: ``(D, D)``; NaN is ignored.

    Returns:
        None for fewer than two dimensions.
    """
    others = ~torch.eye(len(correlations), dtype=torch.bool)
    return _mean_absolute(correlations[others])


def mean_between_groups(correlations: Tensor, groups: int) -> float | None:
    """The mean absolute correlation between dimensions of different groups (DeFINE, Figure 11).

    Args:
        correlations: ``(D, D)``; NaN is ignored.
        groups: the number of groups, each of D / groups adjacent dimensions.
    """
    number = torch.arange(len(correlations)) // (len(correlations) // groups)
    return _mean_absolute(correlations[number.unsqueeze(0) != number.unsqueeze(1)])


def blocks_of_groups(correlations: Tensor, groups: int) -> list[Tensor]:
    """The correlations ``(D / groups, D / groups)`` within each group."""
    width = len(correlations) // groups
    spans = (slice(group * width, (group + 1) * width) for group in range(groups))
    return [correlations[span, span] for span in spans]


def constant_dimensions(correlations: Tensor) -> int:
    """The number of dimensions that have the same value for all words."""
    return int(correlations.diagonal().isnan().sum())


def _mean_absolute(values: Tensor) -> float | None:
    """The mean absolute value, ignoring NaN; None if nothing is left."""
    kept = values[~values.isnan()]
    return float(kept.abs().mean()) if len(kept) else None


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
        fields = _fields(line)
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


def _fields(line: str) -> list[str]:
    """The columns of a line; none if one is longer than the limit of csv."""
    separator = next((mark for mark in "\t;," if mark in line), None)
    try:
        fields = line.split() if separator is None else next(csv.reader([line], delimiter=separator))
    except csv.Error:
        return []
    return [field.strip() for field in fields]


def _is_float(text: str) -> bool:
    """Whether Python reads a text as a number, possibly NaN or infinity."""
    try:
        float(text)
    except ValueError:
        return False
    return True
