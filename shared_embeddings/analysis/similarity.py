"""What vectors are like: agreement with people about similar words, correlation between dimensions.

Axes: ``V`` vocabulary, ``D`` dimension, ``n`` any number of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shared_embeddings.analysis.word_pairs import WordPairs

# A standard deviation below this share of the mean is what rounding makes of a constant.
_CONSTANT = 1e-6


def spearman(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray) -> float | None:
    """Spearman's rank correlation of two lists: Pearson's of their ranks, ties with their average rank.

    None where it is not defined: fewer than two values, or all of a list alike.

    Raises:
        ValueError: lists of different lengths.
    """
    if len(first) != len(second):
        raise ValueError(f"the lists have {len(first)} and {len(second)} values; give as many of both")
    ranks = [_average_ranks(np.asarray(values, dtype=np.float64)) for values in (first, second)]
    centred = [rank - rank.mean() if len(rank) else rank for rank in ranks]
    norm = np.sqrt(np.square(centred[0]).sum() * np.square(centred[1]).sum())
    return float(centred[0] @ centred[1] / norm) if norm > 0 else None


def _average_ranks(values: np.ndarray) -> np.ndarray:
    """The ranks of values ``(n,)`` from 1 on; those that are alike have the average of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[inverse]


@dataclasses.dataclass(frozen=True)
class Similarity:
    """How far the cosine similarity of vectors agrees with people.

    Attributes:
        name: of the set of pairs.
        rho: Spearman's, over the known pairs; None where it is not defined.
        known: how many pairs have a vector for both words.
        pairs: how many there are.
        lower_cased: how many of the known pairs have a word that is known in lower case only.
    """

    name: str
    rho: float | None
    known: int
    pairs: int
    lower_cased: int

    @property
    def coverage(self) -> float:
        """The share of the pairs that is known."""
        return self.known / self.pairs


def word_similarity(words: Sequence[str], vectors: np.ndarray, test: WordPairs) -> Similarity:
    """Spearman's rho between the cosine similarity of word vectors and the scores that people gave.

    A word that is not known as it is written is looked up in lower case. Pairs with an unknown word are left
    out; so are those with a vector of zeros, which has no direction.

    Args:
        words: V words; of one that is there twice, the first counts.
        vectors: ``(V, D)``.
        test: the pairs.
    """
    places: dict[str, int] = {}
    for place, word in enumerate(words):
        places.setdefault(word, place)
    cosines, scores, lower_cased = [], [], 0
    for first, second, score in test.pairs:
        found = [_place(word, places) for word in (first, second)]
        if None in found:
            continue
        one, other = (np.asarray(vectors[place], dtype=np.float64) for place in found)
        norm = np.sqrt((one @ one) * (other @ other))
        if norm == 0:
            continue
        # Rounding must not tell apart what is the same, such as the similarity of a word with itself.
        cosines.append(round(float(one @ other / norm), 9))
        scores.append(score)
        lower_cased += any(word not in places for word in (first, second))
    return Similarity(test.name, spearman(cosines, scores), len(scores), len(test.pairs), lower_cased)


def _place(word: str, places: dict[str, int]) -> int | None:
    """The place of a word, or else of its lower-cased form."""
    return places.get(word, places.get(word.lower()))


class CorrelationMap:
    """Pearson's correlation between the dimensions of vectors that come in blocks.

    DeFINE's appendix B takes the matrix of products E^T E; here the means are taken out and each dimension
    is divided by its standard deviation, so that maps of different layers compare. Memory is that of two
    matrices ``(D, D)`` of 64 bits, however many vectors there are.
    """

    def __init__(self, dim: int) -> None:
        self.count = 0
        self._mean = torch.zeros(dim, dtype=torch.float64)
        self._products = torch.zeros(dim, dim, dtype=torch.float64)

    def add(self, vectors: Tensor) -> None:
        """Take in vectors ``(n, D)``.

        The sums of products around the means of two sets are those of each, and the difference of the means
        with itself, weighted by ``n m / (n + m)`` (Chan et al., 1979): nothing large is subtracted.
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
        """The correlations ``(D, D)``; NaN in the row and the column of a dimension that is constant."""
        deviations = (self._products.diagonal() / max(self.count, 1)).clamp(min=0.0).sqrt()
        constant = deviations <= _CONSTANT * self._mean.abs()
        scale = deviations.reciprocal().masked_fill(constant, torch.nan)
        found = self._products * scale.unsqueeze(0) * scale.unsqueeze(1) / max(self.count, 1)
        return found.clamp(-1.0, 1.0)


def mean_off_diagonal(correlations: Tensor) -> float | None:
    """The mean absolute correlation between two different dimensions, or of two different groups of them.

    Args:
        correlations: ``(D, D)``; NaN is left out.

    Returns:
        None where there are no two dimensions.
    """
    others = ~torch.eye(len(correlations), dtype=torch.bool)
    return _mean_absolute(correlations[others])


def mean_between_groups(correlations: Tensor, groups: int) -> float | None:
    """The mean absolute correlation between dimensions of different groups (DeFINE, Figure 11).

    Args:
        correlations: ``(D, D)``; NaN is left out.
        groups: how many groups, each of D / groups dimensions that stand together.
    """
    number = torch.arange(len(correlations)) // (len(correlations) // groups)
    return _mean_absolute(correlations[number.unsqueeze(0) != number.unsqueeze(1)])


def blocks_of_groups(correlations: Tensor, groups: int) -> list[Tensor]:
    """The correlations ``(D / groups, D / groups)`` within each group."""
    width = len(correlations) // groups
    spans = (slice(group * width, (group + 1) * width) for group in range(groups))
    return [correlations[span, span] for span in spans]


def constant_dimensions(correlations: Tensor) -> int:
    """How many dimensions have the same value for all words."""
    return int(correlations.diagonal().isnan().sum())


def _mean_absolute(values: Tensor) -> float | None:
    """The mean absolute value of those that are no NaN; None where there are none."""
    kept = values[~values.isnan()]
    return float(kept.abs().mean()) if len(kept) else None
