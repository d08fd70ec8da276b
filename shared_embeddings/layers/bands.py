"""Bands of words by frequency: their options, sizes, widths and projections.

Axes: ``V`` vocabulary, ``D`` model dimension, ``S`` width of the hidden states that are scored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from shared_embeddings.options import EmbeddingOptions, option, require, require_at_least

Tie = Literal["all", "tables", "none"]
HeadProjection = Literal["none", "input", "both"]


@dataclasses.dataclass(frozen=True)
class BandOptions(EmbeddingOptions):
    """The options of words in bands. Word ids must be sorted by frequency, the most frequent first.

    A band has a projection if its vectors are narrower than the result: with factor 1 all bands or none, else
    all but the first.
    """

    cutoffs: tuple[int, ...] = option(
        "The first word of each band but the first, ascending, each from 1 to V - 1."
    )
    factor: int = option(
        "k: the vectors of band i (from 0) are k**i times narrower than the first band's.", 4
    )
    width: int | None = option("d_0, the width of the vectors of the first band, if it is less than D.", None)
    head_projection: HeadProjection = option(
        "Projects the first band although it is D wide (W_1, D x D): on no side, only on the input, as in "
        "fairseq, or on both sides, as in Figure 1 of Baevski & Auli.",
        "none",
    )
    score_dim: int | None = option(
        "S, if it differs from D; every band then has a projection (d_i x S) on the output.", None
    )
    tie: Tie = option(
        "What the output shares with the input: everything, the tables only, or nothing.", "all"
    )
    output: Literal["adaptive", "none"] = option(
        "The output side: an adaptive softmax, or none for an input-only embedding.", "adaptive"
    )

    def __post_init__(self) -> None:
        require(len(self.cutoffs) > 0, "option 'cutoffs' is empty; give the first word of each further band")
        require(
            self.cutoffs[0] >= 1 and all(low < high for low, high in pairwise(self.cutoffs)),
            f"option 'cutoffs' is {list(self.cutoffs)}, but cutoffs must ascend from at least 1; sort them",
        )
        for name in ("factor", "width", "score_dim"):
            require_at_least(name, getattr(self, name), 1)
        require(
            self.width is None or self.head_projection == "none",
            f"option 'head_projection' is '{self.head_projection}', which has no effect with 'width': a "
            "narrower first band always has a projection; remove it",
        )
        self._check_output()

    def sizes(self, num_embeddings: int) -> list[int]:
        """The number of words in each band."""
        return [high - low for low, high in pairwise((0, *self.cutoffs, num_embeddings))]

    def widths(self, embedding_dim: int) -> list[int]:
        """The width d_i of the vectors of each band."""
        first = self.width or embedding_dim
        return [first // self.factor**band for band in range(len(self.cutoffs) + 1)]

    def input_shapes(self, embedding_dim: int) -> dict[str, tuple[int, int]]:
        """The shape (d_i, D) of the projection of every band that has one on the input."""
        return self._shapes(embedding_dim, embedding_dim, self.head_projection != "none")

    def output_shapes(self, embedding_dim: int) -> dict[str, tuple[int, int]]:
        """The shape (d_i, S) of the projection of every band that has one on the output."""
        if self.output == "none":
            return {}
        return self._shapes(embedding_dim, self.score_dim or embedding_dim, self.head_projection == "both")

    def check_sizes(self, num_embeddings: int, embedding_dim: int) -> None:
        """Raise `OptionError` unless every band has a word, and a width of at least 1."""
        last = self.cutoffs[-1]
        require(
            last < num_embeddings,
            f"option 'cutoffs' ends with {last}, but there are {num_embeddings} words; choose cutoffs from 1 "
            f"to {num_embeddings - 1}",
        )
        require(
            self.width is None or self.width < embedding_dim,
            f"option 'width' is {self.width}, but the dimension is {embedding_dim}; choose a smaller width, "
            "or leave it out",
        )
        require(
            self.score_dim != embedding_dim,
            f"option 'score_dim' is {embedding_dim}, which is the dimension already; remove it",
        )
        require(
            self.widths(embedding_dim)[-1] >= 1,
            f"option 'factor' is {self.factor}, which leaves band {len(self.cutoffs)} a width of less than 1 "
            f"(the first band has {self.width or embedding_dim}); choose a smaller factor or fewer cutoffs",
        )

    def _shapes(self, embedding_dim: int, target: int, with_head: bool) -> dict[str, tuple[int, int]]:
        """The shapes of projections to `target` dimensions, by the number of their band."""
        return {
            str(band): (width, target)
            for band, width in enumerate(self.widths(embedding_dim))
            if width != target or (with_head and band == 0)
        }

    def _check_output(self) -> None:
        """Raise `OptionError` for output options without an output side, or that contradict each other."""
        effects = {
            "tie": self.tie != "all",
            "score_dim": self.score_dim is not None,
            "output_bias": self.output_bias,
        }
        for name, is_given in effects.items():
            require(
                self.output != "none" or not is_given,
                f"option '{name}' is {getattr(self, name)!r}, which has no effect with output 'none'; "
                "remove it",
            )
        require(
            self.score_dim is None or self.tie != "all",
            f"option 'score_dim' is {self.score_dim}, which requires separate output projections; set "
            "'tie' to 'tables'",
        )


def new_matrices(shapes: Mapping[str, tuple[int, int]]) -> nn.ParameterDict:
    """An uninitialized matrix of each of the `shapes`, by the number of its band."""
    return nn.ParameterDict({band: nn.Parameter(torch.empty(shape)) for band, shape in shapes.items()})


def projected(vectors: Tensor, projection: Tensor | None) -> Tensor:
    """Vectors ``(n, d_i)`` of a band in D dimensions ``(n, D)``."""
    return vectors if projection is None else vectors @ projection
