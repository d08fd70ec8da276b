"""Adaptive input and softmax: words in bands by frequency, the rarer the narrower their vectors.

Baevski & Auli, Adaptive input representations; Grave et al., Efficient softmax approximation for GPUs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_embeddings.adaptive_softmax import AdaptiveSoftmax, Part, bands_of, positions_by_group
from shared_embeddings.blockwise import Reduction
from shared_embeddings.interface import Layer, SharedEmbedding, entry_std, zero_padding_row
from shared_embeddings.options import EmbeddingOptions, require, require_at_least
from shared_embeddings.registry import register

Tie = Literal["all", "tables", "none"]


@dataclasses.dataclass(frozen=True)
class AdaptiveOptions(EmbeddingOptions):
    """Options of `adaptive`. Word ids must be sorted by frequency, the most frequent first.

    Attributes:
        cutoffs: the first word of each band but the first, ascending, each from 1 to V - 1.
        factor: k; the vectors of band i (from 0) are D // k**i wide.
        head_projection: a projection (D x D) for the first band, too, as in Baevski & Auli's figure 1.
        tie: what the output shares with the input: "all", the "tables" only, with projections of its own, or
            "none", with tables and projections of its own.
        output: "adaptive", or "none" for an embedding without an output side.
    """

    cutoffs: tuple[int, ...]
    factor: int = 4
    head_projection: bool = False
    tie: Tie = "all"
    output: Literal["adaptive", "none"] = "adaptive"

    def __post_init__(self) -> None:
        require(len(self.cutoffs) > 0, "option 'cutoffs' is empty; give the first word of each further band")
        require(
            self.cutoffs[0] >= 1 and all(low < high for low, high in pairwise(self.cutoffs)),
            f"option 'cutoffs' is {list(self.cutoffs)}, but cutoffs must ascend from at least 1; sort them",
        )
        require_at_least("factor", self.factor, 1)
        require(
            self.output != "none" or self.tie == "all",
            f"option 'tie' is '{self.tie}', which has no effect with output 'none'; leave it out",
        )
        require(
            self.output != "none" or not self.output_bias,
            "option 'output_bias' has no effect with output 'none'; leave it out",
        )

    def sizes(self, num_embeddings: int) -> list[int]:
        """The number of words in each band."""
        return [high - low for low, high in pairwise((0, *self.cutoffs, num_embeddings))]

    def widths(self, embedding_dim: int) -> list[int]:
        """The width of the vectors of each band."""
        return [embedding_dim // self.factor**band for band in range(len(self.cutoffs) + 1)]

    def projected(self) -> range:
        """The bands that have a projection."""
        return range(0 if self.head_projection else 1, len(self.cutoffs) + 1)


@register("adaptive", AdaptiveOptions)
class AdaptiveEmbedding(SharedEmbedding):
    """Words in bands: the vector of a word of band i is ``tables[i][w] @ projections[i]``.

    The output is an adaptive softmax: words of the first band and one entry per further band, a cluster,
    compete in the head; a word of a cluster competes inside it. Scores are hierarchical, so `logits` are
    the log-probabilities, and no matrix gives them: `output_table` holds each word's vector inside its own
    band. The padding word scores zero in its band, but has its share in the distribution.

    Parameters: `tables` and `projections` by the number of their band, ``(V_i, d_i)`` and ``(d_i, D)`` (none
    for the first band without `head_projection`), the same for the output where it is not tied, and
    `clusters` ``(number of cutoffs, D)``. With the option `output_bias` all entries of the head and of the
    clusters have one, as in Grave et al.: ``bias`` ``(V,)`` of the words, and `cluster_bias` of the clusters.
    """

    options: AdaptiveOptions
    paper = "Baevski & Auli (2019); output: Grave et al. (2017)"
    idea = "bands by frequency, each V_i x D_i times D_i x D"
    per_word = ("tables",)

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None, options: AdaptiveOptions
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, options)
        self.tables = self._new_tables()
        self.projections = self._new_projections()
        self.output_tables = self._new_tables() if options.tie == "none" else None
        self.output_projections = self._new_projections() if options.tie != "all" else None
        self.has_output = options.output != "none"
        self.clusters = (
            nn.Parameter(torch.empty(len(options.cutoffs), embedding_dim)) if self.has_output else None
        )
        self.cluster_bias = nn.Parameter(torch.empty(len(options.cutoffs))) if options.output_bias else None
        self.reset_parameters()

    def _new_tables(self) -> nn.ParameterDict:
        """Memory for the table ``(V_i, d_i)`` of every band."""
        sizes, widths = self.options.sizes(self.num_embeddings), self.options.widths(self.embedding_dim)
        shapes = enumerate(zip(sizes, widths, strict=True))
        return nn.ParameterDict({str(band): nn.Parameter(torch.empty(shape)) for band, shape in shapes})

    def _new_projections(self) -> nn.ParameterDict:
        """Memory for the projection ``(d_i, D)`` of every band that has one."""
        widths = self.options.widths(self.embedding_dim)
        shapes = {str(band): (widths[band], self.embedding_dim) for band in self.options.projected()}
        return nn.ParameterDict({band: nn.Parameter(torch.empty(shape)) for band, shape in shapes.items()})

    def draw_parameters(self) -> None:
        """Normal entries; the vectors of every band, once projected, and the clusters have std D**-0.5."""
        for tables in (self.tables, self.output_tables):
            for band, table in enumerate(tables.values() if tables is not None else ()):
                nn.init.normal_(table, std=entry_std(table.size(1)))
                zero_padding_row(table, self._padding_in(band))
        for projections in (self.projections, self.output_projections):
            for projection in projections.values() if projections is not None else ():
                nn.init.normal_(projection, std=entry_std(self.embedding_dim))
        if self.clusters is not None:
            nn.init.normal_(self.clusters, std=entry_std(self.embedding_dim))
        if self.cluster_bias is not None:
            nn.init.zeros_(self.cluster_bias)

    @property
    def has_linear_scores(self) -> bool:
        """Never: words of the tails are scored within their cluster."""
        return False

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``(n, D)`` for ids ``(n,)``; a band is touched for the words in it only."""
        positions = positions_by_group(bands_of(ids, self.options.cutoffs), len(self.tables))
        starts = (0, *self.options.cutoffs)
        vectors = torch.cat(
            [
                _projected(F.embedding(ids[inside] - start, band.codes), band.basis)
                for inside, start, band in zip(positions, starts, self._bands(), strict=True)
            ]
        )
        return torch.empty_like(vectors).index_copy_(0, torch.cat(positions), vectors)

    def layers(self, ids: Tensor) -> list[Layer]:
        """The narrow vectors of every band, of those words that are in it, and the output."""
        bands = bands_of(ids, self.options.cutoffs)
        starts = (0, *self.options.cutoffs)
        inner = [
            Layer(f"band {band}", F.embedding(ids[bands == band] - starts[band], table))
            for band, table in enumerate(self.tables.values())
        ]
        return [*inner, *super().layers(ids)]

    def logits(self, hidden: Tensor) -> Tensor:
        """The log-probabilities ``(..., V)``: the scores of a word and of its cluster only count together."""
        return self.log_prob(hidden)

    def log_prob(self, hidden: Tensor) -> Tensor:
        """As in the base class."""
        softmax = self._softmax()
        self.check_hidden(hidden)
        return softmax.log_prob(hidden)

    def cross_entropy(
        self,
        hidden: Tensor,
        targets: Tensor,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """As in the base class, without the work that predictions take."""
        self.check_output()
        self.check_shapes(hidden, targets)
        loss, _ = self._softmax().cross_entropy(
            hidden.reshape(-1, self.score_dim),
            targets.reshape(-1),
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
        return loss.view(targets.shape) if reduction == "none" else loss

    def flat_cross_entropy(self, hidden: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """As in the base class."""
        softmax = self._softmax()
        loss, best = softmax.cross_entropy(hidden, targets, **options)
        return loss, softmax.predictions(hidden, best)

    def selected(self, ids: Tensor) -> tuple[dict[str, object], dict[str, Tensor]]:
        """As in the base class; every band keeps its width, and must keep a word."""
        options, state = super().selected(ids)
        starts = (0, *self.options.cutoffs)
        members = [ids[inside] for inside in positions_by_group(bands_of(ids, starts[1:]), len(starts))]
        for band, words in enumerate(members):
            if len(words) == 0:
                raise ValueError(
                    f"no word of band {band} of this adaptive embedding, words {starts[band]:,} and on, is "
                    "kept, but every band needs one; keep a word of it as well"
                )
            for name in ("tables", "output_tables"):
                if f"{name}.{band}" in state:
                    state[f"{name}.{band}"] = state[f"{name}.{band}"][words - starts[band]]
        sizes = [len(words) for words in members]
        return {**options, "cutoffs": list(itertools.accumulate(sizes[:-1]))}, state

    def output_table(self) -> Tensor:
        """The vectors ``(V, S)`` of all words; their scores compare within a band only, see the class."""
        self.check_output()
        table = torch.cat([_projected(band.codes, band.basis) for band in self._output_bands()])
        return self._without_padding(table, self._all_ids(table.device))

    def set_output_bias(self, bias: Tensor) -> None:
        """As in the base class; a cluster gets the logarithm of the sum of its words' exponentials.

        Words then have the shares that they have in one softmax, as far as the bias alone decides.
        """
        super().set_output_bias(bias)
        own = self.output_bias()
        assert own is not None and self.cluster_bias is not None
        with torch.no_grad():
            _, *tails = own.split(self.options.sizes(self.num_embeddings))
            self.cluster_bias.copy_(torch.stack([tail.logsumexp(dim=0) for tail in tails]))

    def _softmax(self) -> AdaptiveSoftmax:
        """The output side, cached in inference."""
        self.check_output()
        return self.cached("output", self._new_softmax)

    def _new_softmax(self) -> AdaptiveSoftmax:
        """The output side of the parameters as they are."""
        assert self.clusters is not None
        first, *tails = self._output_bands()
        codes = torch.cat([_projected(first.codes, first.basis), self.clusters])
        bias = None
        if self.cluster_bias is not None:
            assert self.bias is not None
            of_head, *of_tails = self.bias.split(self.options.sizes(self.num_embeddings))
            bias = torch.cat([of_head, self.cluster_bias])
            tails = [dataclasses.replace(tail, bias=part) for tail, part in zip(tails, of_tails, strict=True)]
        return AdaptiveSoftmax(Part(codes, None, first.masked_entry, bias), tails, self.options.cutoffs)

    def _bands(self) -> list[Part]:
        """The bands of the input."""
        return self._paired(self.tables, self.projections)

    def _output_bands(self) -> list[Part]:
        """The bands of the output."""
        return self._paired(*self._output_dicts())

    def _output_dicts(self) -> tuple[nn.ParameterDict, nn.ParameterDict]:
        """The tables and the projections of the output."""
        return (
            self.tables if self.output_tables is None else self.output_tables,
            self.projections if self.output_projections is None else self.output_projections,
        )

    def _paired(self, tables: nn.ParameterDict, projections: nn.ParameterDict) -> list[Part]:
        """Each band's table with its projection, if it has one."""
        return [
            Part(table, projections.get(band), self._padding_in(int(band))) for band, table in tables.items()
        ]

    def _padding_in(self, band: int) -> int | None:
        """The number of the padding word within a band, or None if it is not there."""
        if self.padding_idx is None:
            return None
        word = self.padding_idx - (0, *self.options.cutoffs)[band]
        return word if 0 <= word < self.options.sizes(self.num_embeddings)[band] else None

    def input_parameters(self) -> Iterator[nn.Parameter]:
        """The tables and projections of the input."""
        yield from self.tables.parameters()
        yield from self.projections.parameters()

    def output_parameters(self) -> Iterator[nn.Parameter]:
        """The tables and projections of the output, the clusters, and any bias."""
        tables, projections = self._output_dicts()
        yield from tables.parameters()
        yield from projections.parameters()
        for parameter in (self.clusters, self.bias, self.cluster_bias):
            if parameter is not None:
                yield parameter

    @classmethod
    def check_sizes(cls, num_embeddings: int, embedding_dim: int, options: AdaptiveOptions) -> None:
        """Every band needs a word and a width of at least 1."""
        last = options.cutoffs[-1]
        require(
            last < num_embeddings,
            f"option 'cutoffs' ends with {last}, but there are {num_embeddings} words; choose cutoffs from 1 "
            f"to {num_embeddings - 1}",
        )
        width = options.widths(embedding_dim)[-1]
        require(
            width >= 1,
            f"option 'factor' is {options.factor}, which leaves band {len(options.cutoffs)} a width of less "
            f"than 1 (dimension {embedding_dim}); choose a smaller factor or fewer cutoffs",
        )

    @classmethod
    def count_bias(cls, num_embeddings: int, options: AdaptiveOptions) -> int:
        """That of all words and clusters."""
        return num_embeddings + len(options.cutoffs) if options.output_bias else 0

    @classmethod
    def closed_form(cls, num_embeddings: int, embedding_dim: int, options: AdaptiveOptions) -> int:
        """Tables V_i d_i, projections d_i D, and D for each cluster; twice where the output has its own.

        DeFINE's table 1a counts so. UnClE's Eq. 9 leaves the clusters out and gives the first band a
        projection, but its table 12 is computed without that one.
        """
        sizes, widths = options.sizes(num_embeddings), options.widths(embedding_dim)
        tables = sum(size * width for size, width in zip(sizes, widths, strict=True))
        projections = sum(widths[band] for band in options.projected()) * embedding_dim
        clusters = len(options.cutoffs) * embedding_dim if options.output != "none" else 0
        return (
            tables * (2 if options.tie == "none" else 1)
            + projections * (2 if options.tie != "all" else 1)
            + clusters
        )


def _projected(vectors: Tensor, projection: Tensor | None) -> Tensor:
    """Vectors ``(n, d_i)`` of a band in D dimensions ``(n, D)``."""
    return vectors if projection is None else vectors @ projection
