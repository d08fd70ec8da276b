"""Analysis of word vectors: agreement with human scores, and cosines and correlations in their layers.

Axes: ``V`` vocabulary, ``D`` dimension, ``n`` any number of rows.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from shared_embeddings.embedding import WordEmbedding
from shared_embeddings.fitting.task import BAR_DELAY
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.extras import require
from shared_embeddings.utils.files import replacing
from shared_embeddings.utils.reading import read_lines


def spearman(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray) -> float | None:
    """Spearman's rank correlation of two lists of one length, with average ranks for ties.

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

    @property
    def coverage(self) -> float:
        return self.known / self.pairs


class PairCosines(NamedTuple):
    """The cosines of two words."""

    first: str
    second: str
    cosines: dict[str, float | None]  # by layer that both words pass through; None where a vector is zero


def word_similarity(words: Sequence[str], vectors: np.ndarray, test: WordPairs) -> Similarity:
    """Spearman's rho between the cosine similarity of V words with vectors ``(V, D)`` and human scores.

    An unknown word is looked up again in lower case; the first occurrence of a repeated word counts. Pairs
    with an unknown word or an all-zero vector are skipped.
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

    An unknown word is looked up again in lower case; UserError if it is unknown then, or for a single word.
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
    pairs: list[WordPair] = []
    may_be_header = True
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip() or line.startswith("#"):
            continue
        separator = next((mark for mark in "\t;," if mark in line), None)
        try:
            columns = line.split() if separator is None else next(csv.reader([line], delimiter=separator))
        except csv.Error:  # a column is longer than the limit of csv
            columns = []
        fields = [column.strip() for column in columns]
        numbers = [number for number in map(_as_float, fields[2:]) if number is not None]
        score = next(filter(math.isfinite, numbers), None)
        if score is not None and fields[0] and fields[1]:
            pairs.append(WordPair(fields[0], fields[1], score))
        elif not may_be_header or numbers:
            raise UserError(
                f"pairs {path}: line {number} is {line[:60]!r}, expected two words and a score; correct it"
            )
        may_be_header = False
    if not pairs:
        raise UserError(f"pairs {path}: has no lines with two words and a score; use another file")
    return WordPairs(path.stem, pairs)


def _as_float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


# Words per block.
_BLOCK = 2048
# A standard deviation below this fraction of the mean is the rounding error of a constant.
_CONSTANT = 1e-6


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


@dataclasses.dataclass(frozen=True)
class LayerCorrelation:
    """The correlation between the dimensions of one layer, over all words that pass through it."""

    embedding: str  # its name in the host
    layer: str  # its name in the method, followed by the group for a group of dimensions
    words: int  # that pass through it
    correlations: Tensor  # ``(width, width)``; NaN for constant dimensions
    groups: int  # of its dimensions

    def by_group(self) -> list[LayerCorrelation]:
        """The correlation within each group; empty for a single group."""
        width = len(self.correlations) // self.groups
        return [
            LayerCorrelation(
                self.embedding,
                f"{self.layer}, group {group + 1}",
                self.words,
                self.correlations[group * width :, group * width :][:width, :width],
                1,
            )
            for group in range(self.groups if self.groups > 1 else 0)
        ]

    def summary(self) -> dict[str, Any]:
        """Its statistics for a table or JSON; means are of absolute values, None if nothing is left."""
        found = self.correlations
        group = torch.arange(len(found)) // (len(found) // self.groups)
        is_between = group.unsqueeze(0) != group.unsqueeze(1)
        return {
            "embedding": self.embedding,
            "layer": self.layer,
            "words": self.words,
            "width": len(found),
            "constant": int(found.diagonal().isnan().sum()),
            "mean_correlation": _mean_absolute(found[~torch.eye(len(found), dtype=torch.bool)]),
            "groups": self.groups,
            # DeFINE, Figure 11.
            "between_groups": _mean_absolute(found[is_between]),
        }

    def file_name(self) -> str:
        return re.sub(r"[^\w]+", "-", f"{self.embedding} {self.layer}").strip("-") + ".png"


def _mean_absolute(values: Tensor) -> float | None:
    kept = values[~values.isnan()]
    return float(kept.abs().mean()) if len(kept) else None


def layer_correlations(embedding: WordEmbedding, progress: bool = True) -> list[LayerCorrelation]:
    """The correlation maps of all layers of an embedding, over its words except padding.

    Memory depends on the widths of the layers, not on the vocabulary.
    """
    number = len(embedding.words)
    ids = torch.arange(number)
    if embedding.padding_idx is not None:
        ids = ids[ids != embedding.padding_idx]
    maps: dict[str, CorrelationMap] = {}
    groups: dict[str, int] = {}
    bar = tqdm(total=len(ids), desc=embedding.name, unit=" words", delay=BAR_DELAY, disable=not progress)
    for block in ids.split(_BLOCK):
        for layer in embedding.layers(block):
            if layer.name not in maps:
                maps[layer.name] = CorrelationMap(layer.values.size(1))
            maps[layer.name].add(layer.values)
            groups[layer.name] = layer.groups
        bar.update(len(block))
    bar.close()
    return [
        LayerCorrelation(embedding.name, name, found.count, found.matrix(), groups[name])
        for name, found in maps.items()
    ]


def draw_map(found: LayerCorrelation, path: Path) -> None:
    """Plot the absolute correlations, from 0 to 1 as in the paper's figures, to a PNG file.

    Constant dimensions are gray.
    """
    # Not pyplot, which chooses a GUI backend and keeps every figure alive.
    figure = require("matplotlib.figure").Figure(figsize=(4.4, 4.0), dpi=120, layout="constrained")
    require("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colors = require("matplotlib").colormaps["viridis"].with_extremes(bad="lightgrey")
    image = axes.imshow(found.correlations.abs().numpy(), vmin=0.0, vmax=1.0, cmap=colors)
    axes.set_title(f"{found.embedding}: {found.layer}", fontsize=9)
    axes.set_xlabel("dimension")
    figure.colorbar(image, label="absolute correlation")
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})
