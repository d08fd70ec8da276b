"""The options of the adaptive method, and the sizes that follow from them.

Axes: ``V`` vocabulary, ``D`` model dimension, ``S`` width of the hidden states that are scored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

from shared_embeddings.options import EmbeddingOptions, require, require_at_least

# What a map gets from here, or has no use for.
_NOT_OF_THE_MAP = (
    "method",
    "num_embeddings",
    "embedding_dim",
    "padding_idx",
    "words",
    "output",
    "output_bias",
)

Tie = Literal["all", "tables", "none"]
HeadProjection = Literal["none", "input", "both"]


@dataclasses.dataclass(frozen=True)
class AdaptiveOptions(EmbeddingOptions):
    """Options of `adaptive`. Word ids must be sorted by frequency, the most frequent first.

    A band has a projection wherever its vectors are narrower than what they are projected to: at factor 1
    all bands or none, else all but the first.

    Attributes:
        cutoffs: the first word of each band but the first, ascending, each from 1 to V - 1.
        factor: k; the vectors of band i (from 0) are k**i times narrower than those of the first.
        width: d_0, the width of the vectors of the first band, less than D; without it, D.
        head_projection: whether the first band has a projection W_1 (D x D), although it is D wide: "none",
            on the "input" only, as in fairseq, or on "both" sides, as in Baevski & Auli's figure 1.
        score_dim: S, where it is not D: every band then has a projection (d_i x S) on the output.
        tie: what the output shares with the input: "all", the "tables" only, with projections of its own, or
            "none", with tables and projections of its own.
        output: "adaptive", or "none" for an embedding without an output side.
        map: at factor 1, the method of one table (V x d_0) in place of a plain one for each band.
        map_options: the options of that method.
    """

    cutoffs: tuple[int, ...]
    factor: int = 4
    width: int | None = None
    head_projection: HeadProjection = "none"
    score_dim: int | None = None
    tie: Tie = "all"
    output: Literal["adaptive", "none"] = "adaptive"
    map: str | None = None
    map_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

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
            "first band that is narrower always has a projection; leave it out",
        )
        self._check_output()
        self._check_map()

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
            f"option 'width' is {self.width}, but the dimension is {embedding_dim}; choose less, or leave it "
            "out",
        )
        require(
            self.score_dim != embedding_dim,
            f"option 'score_dim' is {embedding_dim}, as the dimension is anyway; leave it out",
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
        """Raise `OptionError` for options of an output side that there is not, or that contradict another."""
        effects = {
            "tie": self.tie != "all",
            "score_dim": self.score_dim is not None,
            "output_bias": self.output_bias,
        }
        for name, is_given in effects.items():
            require(
                self.output != "none" or not is_given,
                f"option '{name}' is {getattr(self, name)!r}, which has no effect with output 'none'; leave "
                "it out",
            )
        require(
            self.score_dim is None or self.tie != "all",
            f"option 'score_dim' is {self.score_dim}, for which the output needs projections of its own; set "
            "'tie' to 'tables'",
        )

    def _check_map(self) -> None:
        """Raise `OptionError` unless all bands can share one table."""
        require(
            self.map is None or (self.factor == 1 and self.tie != "none"),
            f"option 'map' is '{self.map}', one table for all bands on both sides; set 'factor' to 1, and "
            "'tie' to 'all' or 'tables'",
        )
        require(
            self.map is not None or not self.map_options,
            "option 'map_options' has no effect without 'map'; leave it out",
        )
        for name in self.map_options:
            require(
                isinstance(name, str) and name not in _NOT_OF_THE_MAP,
                f"option 'map_options' has {name!r}, which is no option of a map here; leave it out",
            )
        require(
            self.map not in ("adaptive", "define"),
            f"option 'map' is '{self.map}', which has an output side of its own; choose another method",
        )
