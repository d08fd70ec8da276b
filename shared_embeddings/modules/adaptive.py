"""Adaptive input and softmax: words in bands by frequency; rarer words have narrower vectors.

Baevski & Auli, Adaptive input representations; Grave et al., Efficient softmax approximation for GPUs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_embeddings.embedding import Layer, SharedEmbedding, without_padding
from shared_embeddings.fitting.factorization import truncated_svd
from shared_embeddings.fitting.task import FitTask, reconstruct
from shared_embeddings.loss import LinearScores, Reduction, ScoreTerms, blockwise_cross_entropy, sum_dtype
from shared_embeddings.nn.layers import entry_std, zero_padding_row
from shared_embeddings.nn.tracing import has_values, needs_fixed_shapes, true_positions, without_autocast
from shared_embeddings.registry import build, get_method_config, num_parameters, register
from shared_embeddings.spec import EmbeddingOptions, Presets, SearchGrid
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import option, require, require_effect

Tie = Literal["all", "tables", "none"]
HeadProjection = Literal["none", "input", "both"]

# The target of ignored tokens inside this module: never a word id, whatever the caller's `ignore_index` is.
_IGNORED = -1
# The number of tokens whose best words are searched at a time.
_BLOCK = 512
# Arguments of `build` that are set for the map, or have no effect on it.
_NOT_OF_THE_MAP = "method num_embeddings embedding_dim padding_idx words output output_bias".split()


def bands_of(ids: Tensor, cutoffs: Sequence[int]) -> Tensor:
    """The band of every id, both ``(n,)``: the number of `cutoffs` that it has reached."""
    bands = torch.zeros_like(ids)
    for cutoff in cutoffs:
        bands += ids >= cutoff
    return bands


def positions_by_group(groups: Tensor, count: int) -> tuple[Tensor, ...]:
    """The positions in `groups` ``(n,)`` of each number from 0 to `count` - 1; synchronizes once."""
    sizes = torch.stack([(groups == group).sum() for group in range(count)]).tolist()
    return groups.argsort(stable=True).split(sizes)


def new_matrices(shapes: Mapping[str, tuple[int, int]]) -> nn.ParameterDict:
    """An uninitialized matrix of each of the `shapes`, by the number of its band."""
    return nn.ParameterDict({band: nn.Parameter(torch.empty(shape)) for band, shape in shapes.items()})


@dataclasses.dataclass(frozen=True)
class SoftmaxPart:
    """Entries that share one softmax: the head, or one cluster."""

    segments: tuple[Tensor, ...]  # one row ``(R,)`` per entry, in tables one after the other
    # ``(R, D)``, which projects hidden states; None if they are multiplied by the codes directly.
    basis: Tensor | None
    masked_entry: int | None  # the entry whose score is always zero
    bias: Tensor | None  # one number per entry, or None without

    def log_prob(self, hidden: Tensor) -> Tensor:
        """The log-probabilities of the entries for hidden states ``(..., D)``, in at least 32 bits."""
        narrowed = hidden if self.basis is None else F.linear(hidden, self.basis)
        scores = torch.cat([F.linear(narrowed, codes) for codes in self.segments], dim=-1)
        if self.bias is not None:
            scores = scores + self.bias
        if self.masked_entry is not None:
            scores[..., self.masked_entry] = 0.0
        return F.log_softmax(scores, dim=-1, dtype=sum_dtype(scores))

    def cross_entropy(self, hidden: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """Return loss and best entries of hidden states ``(n, D)`` for the entries `targets` ``(n,)``."""
        narrowed = hidden if self.basis is None else F.linear(hidden, self.basis)
        factors = (narrowed,) * len(self.segments) + self.segments
        terms = ScoreTerms(LinearScores, factors, targets, _IGNORED, self.bias, self.masked_entry)
        return blockwise_cross_entropy(terms, **options)


@dataclasses.dataclass(frozen=True)
class AdaptiveSoftmax:
    """A head and its clusters."""

    head: SoftmaxPart  # the words below the first cutoff, then one entry per cluster
    tails: Sequence[SoftmaxPart]  # the clusters
    cutoffs: Sequence[int]  # the first word of each cluster
    vocabulary: int  # V

    def log_prob(self, hidden: Tensor) -> Tensor:
        """The log-probabilities ``(..., V)`` of all words for hidden states ``(..., D)``."""
        head = self.head.log_prob(hidden)
        words, clusters = head.split([self.cutoffs[0], len(self.tails)], dim=-1)
        tails = [
            tail.log_prob(hidden) + cluster for tail, cluster in zip(self.tails, clusters.split(1, dim=-1))
        ]
        return torch.cat([words, *tails], dim=-1).to(hidden.dtype)

    def cross_entropy(
        self,
        hidden: Tensor,
        targets: Tensor,
        ignore_index: int,
        label_smoothing: float,
        reduction: Reduction,
        block_size: int | None,
    ) -> tuple[Tensor, Tensor]:
        """The loss, and the best entry of the head ``(N,)`` for every token.

        Args:
            hidden: ``(N, D)``.
            targets: ``(N,)`` word ids.
            ignore_index, label_smoothing, reduction: as in ``F.cross_entropy``; a smoothed target is spread
                over all V words, which needs all clusters for all tokens.
            block_size: as in `blockwise_cross_entropy`.

        Raises:
            IndexError: a target is out of range.
        """
        counted = targets != ignore_index
        bands = bands_of(targets, self.cutoffs)
        # The positions of the tokens with a target in each band that is not ignored.
        count = len(self.cutoffs) + 1
        positions: Sequence[Tensor]
        if has_values(targets):
            is_word = (targets >= 0) & (targets < self.vocabulary)
            groups = bands.masked_fill(~is_word, count + 1).masked_fill(~counted, count)
            *positions, _, wrong = positions_by_group(groups, count + 2)
            if len(wrong):
                word, words = int(targets[wrong[0]]), self.vocabulary
                raise IndexError(f"Target {word} is out of bounds: the vocabulary has {words} words")
        else:  # any token may be in any band
            positions = (torch.arange(targets.size(0), device=targets.device),) * count
        # The mean is taken at the end, over the sum of all parts.
        options = {"reduction": "sum" if reduction == "mean" else reduction, "block_size": block_size}
        clusters = bands + (self.cutoffs[0] - 1)
        entries = torch.where(bands == 0, targets, clusters).masked_fill(~counted, _IGNORED)
        loss, best = self.head.cross_entropy(hidden, entries, label_smoothing=label_smoothing, **options)
        for tail, start, inside in zip(self.tails, self.cutoffs, positions[1:], strict=True):
            entries = targets.index_select(0, inside) - start
            states = hidden.index_select(0, inside)
            of_words, _ = tail.cross_entropy(states, entries, label_smoothing=0.0, **options)
            part = of_words * (1.0 - label_smoothing)
            loss = loss.index_add(0, inside, part) if reduction == "none" else loss + part
        if label_smoothing > 0.0:
            loss = loss + label_smoothing * self._smoothing(hidden, counted, options)
        if reduction == "mean":
            # Without any token that counts nan, like that of ``F.cross_entropy``, but its gradient is zero.
            number = counted.sum()
            loss = torch.where(number > 0, loss / number.clamp(min=1), torch.nan)
        return loss, best

    def _smoothing(self, hidden: Tensor, counted: Tensor, options: dict[str, Any]) -> Tensor:
        """The loss of the uniform part of smoothed targets, minus the part that the head already includes.

        The uniform distribution over V words gives a cluster of n words the weight n / V in the head, and
        each of its words the weight 1 / n inside. The smoothing of the head gave each of its K entries 1 / K.
        """
        entries = self.cutoffs[0] + len(self.tails)
        sizes = [len(tail.segments[0]) for tail in self.tails]
        weights = hidden.new_full((entries,), 1 / entries - 1 / self.vocabulary, dtype=sum_dtype(hidden))
        for entry, size in enumerate(sizes, start=self.cutoffs[0]):
            weights[entry] = 1 / entries - size / self.vocabulary
        if self.head.masked_entry is not None:
            weights[self.head.masked_entry] = 0.0
        narrowed = hidden if self.head.basis is None else F.linear(hidden, self.head.basis)
        with without_autocast(hidden.device):
            parts = weights.unsqueeze(0).split([len(codes) for codes in self.head.segments], dim=1)
            vectors = [part @ codes.to(part.dtype) for part, codes in zip(parts, self.head.segments)]
            loss = narrowed.to(weights.dtype) @ torch.cat(vectors).sum(dim=0)
            if self.head.bias is not None:
                loss = loss + weights @ self.head.bias.to(weights.dtype)
            loss = loss.masked_fill(~counted, 0.0)
        if options["reduction"] != "none":
            loss = loss.sum()
        anywhere = torch.where(counted, 0, _IGNORED)
        for tail, size in zip(self.tails, sizes):
            uniform, _ = tail.cross_entropy(hidden, anywhere, label_smoothing=1.0, **options)
            loss = loss + uniform * (size / self.vocabulary)
        return loss

    @torch.no_grad()
    def predictions(self, hidden: Tensor, best: Tensor) -> Tensor:
        """The most probable words ``(N,)`` for hidden states ``(N, D)``, from `best` of `cross_entropy`.

        Where the best entry of the head is a word, no word of a cluster can be more probable.
        """
        words = best.clone()
        first = self.cutoffs[0]
        for tokens in true_positions(best >= first).split(_BLOCK):
            states = hidden.index_select(0, tokens)
            head = self.head.log_prob(states)
            highest, best_words = head[:, :first].max(dim=1)
            for cluster, (tail, start) in enumerate(zip(self.tails, self.cutoffs, strict=True)):
                of_cluster = head[:, first + cluster]
                # Only a cluster that outweighs the best word so far can hold a better one.
                rows = true_positions(of_cluster > highest)
                inner, entries = tail.log_prob(states.index_select(0, rows)).max(dim=1)
                scores = inner + of_cluster[rows]
                better = scores > highest[rows]
                highest[rows] = torch.where(better, scores, highest[rows])
                best_words[rows] = torch.where(better, entries + start, best_words[rows])
            words[tokens] = best_words
        return words


@dataclasses.dataclass(frozen=True)
class AdaptiveOptions(EmbeddingOptions):
    """Options of `adaptive`. Word ids must be sorted by frequency, the most frequent first.

    A band has a projection if its vectors are narrower than the result: with factor 1 all bands or none, else
    all but the first.
    """

    paper = "Baevski & Auli (2019); output: Grave et al. (2017)"
    summary = "bands by frequency, each V_i x D_i times D_i x D"
    grid_choice = "bands of h words, 2 h words and the rest, with the largest h; factor 4 or 8"
    fit_bound = 0.8
    fullgraph_limit = "the loss computes a cluster for the tokens with targets in it, and their number varies"

    cutoffs: tuple[int, ...] = option(
        "The first word of each band but the first, ascending, each from 1 to V - 1."
    )
    factor: int = option(
        "k: the vectors of band i (from 0) are k**i times narrower than the first band's.", 4, minimum=1
    )
    width: int | None = option(
        "d_0, the width of the vectors of the first band, if it is less than D.", None, minimum=1
    )
    head_projection: HeadProjection = option(
        "Projects the first band although it is D wide (W_1, D x D): on no side, only on the input, as in "
        "fairseq, or on both sides, as in Figure 1 of Baevski & Auli.",
        "none",
    )
    score_dim: int | None = option(
        "S, if it differs from D; every band then has a projection (d_i x S) on the output.", None, minimum=1
    )
    tie: Tie = option(
        "What the output shares with the input: everything, the tables only, or nothing.", "all"
    )
    output: Literal["adaptive", "none"] = option(
        "The output side: an adaptive softmax, or none for an input-only embedding.", "adaptive"
    )
    map: str | None = option("With factor 1, the method of one table (V x d_0) for all bands.", None)
    map_options: Mapping[str, Any] = option("The options of that method.", factory=dict)

    def __post_init__(self) -> None:
        require(len(self.cutoffs) > 0, "option 'cutoffs' is empty; give the first word of each further band")
        require(
            self.cutoffs[0] >= 1 and all(low < high for low, high in pairwise(self.cutoffs)),
            f"option 'cutoffs' is {list(self.cutoffs)}, but cutoffs must ascend from at least 1; sort them",
        )
        if self.width is not None:
            require_effect(self, ("head_projection",), "with 'width': that band always has a projection")
        if self.output == "none":
            require_effect(self, ("tie", "score_dim", "output_bias"), "with output 'none'")
        if self.map is None:
            require_effect(self, ("map_options",), "without 'map'")
        require(
            self.score_dim is None or self.tie != "all",
            f"option 'score_dim' is {self.score_dim}, which requires separate output projections; set "
            "'tie' to 'tables'",
        )
        require(
            self.map is None or (self.factor == 1 and self.tie != "none"),
            f"option 'map' is '{self.map}', one table for all bands on both sides; set 'factor' to 1, and "
            "'tie' to 'all' or 'tables'",
        )
        for name in self.map_options:
            require(
                isinstance(name, str) and name not in _NOT_OF_THE_MAP,
                f"option 'map_options' has {name!r}, which is not an option of maps; remove it",
            )

    def widths(self, embedding_dim: int) -> list[int]:
        """The width d_i of the vectors of each band."""
        first = self.width or embedding_dim
        return [first // self.factor**band for band in range(len(self.cutoffs) + 1)]

    def projection_shapes(self, embedding_dim: int, is_output: bool) -> dict[str, tuple[int, int]]:
        """Return the shape of the projection of every band that has one: (d_i, D), on the output (d_i, S)."""
        if is_output and self.output == "none":
            return {}
        target = self.score_dim or embedding_dim if is_output else embedding_dim
        with_head = self.head_projection in (("both",) if is_output else ("input", "both"))
        return {
            str(band): (width, target)
            for band, width in enumerate(self.widths(embedding_dim))
            if width != target or (with_head and band == 0)
        }

    def check_sizes(self, num_embeddings: int, embedding_dim: int) -> None:
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
        require(
            self.map is None or not hasattr(get_method_config(self.map), "output"),
            f"option 'map' is '{self.map}', which has its own output side; choose another method",
        )
        # Checks the options of the map.
        self.count_parameters(num_embeddings, embedding_dim)

    def count_parameters(self, num_embeddings: int, embedding_dim: int) -> int:
        """Tables V_i d_i, projections d_i D, and d_0 for each cluster; twice if the output has its own.

        With the option `output_bias` each cluster has a bias, too.

        DeFINE counts this way in its Table 1a, with d_0 = D, and in its Table 2, with d_i = n for all bands.
        UnClE's Eq. 9 omits the clusters and gives the first band a projection, its Table 12 does not.
        """
        shapes = list(self.projection_shapes(embedding_dim, is_output=False).values())
        if self.tie != "all":
            shapes += self.projection_shapes(embedding_dim, is_output=True).values()
        widths = self.widths(embedding_dim)
        clusters = len(self.cutoffs) * widths[0] if self.output != "none" else 0
        others = sum(a * b for a, b in shapes) + clusters + (len(self.cutoffs) if self.output_bias else 0)
        if self.map is not None:
            counted = {"num_embeddings": num_embeddings, "embedding_dim": widths[0]}
            return num_parameters(self.map, **counted, **self.map_options) + others
        ends = pairwise((0, *self.cutoffs, num_embeddings))
        tables = sum((end - start) * width for (start, end), width in zip(ends, widths, strict=True))
        return (2 * tables if self.tie == "none" else tables) + others

    @classmethod
    def presets(cls, num_embeddings: int, embedding_dim: int) -> Presets:
        """Three bands, with approximately the proportions and with both factors of UnClE's Table 12."""
        grids = [
            SearchGrid(
                (num_embeddings - 1) // 3,
                lambda h, k=factor: {"cutoffs": [h + 1, 3 * (h + 1)], "factor": k},  # type: ignore[misc]
            )
            for factor in (4, 8)
            if embedding_dim >= factor**2 and num_embeddings > 3
        ]
        return Presets({"": {"cutoffs": [num_embeddings // 18, num_embeddings // 6]}}, grids)


@register("adaptive", AdaptiveOptions)
class AdaptiveEmbedding(SharedEmbedding):
    """Words in bands: the vector of a word of band i is ``tables[i][w] @ projections[i]``.

    The output is an adaptive softmax: words of the first band and one entry per further band, a cluster, are
    scored in the head; words of a cluster are scored within the cluster. Hidden states are projected to the
    width of each band, and to that of the first band for the head. Scores are hierarchical: `logits` are the
    log-probabilities, which are not a matrix product, and `output_table` has the vectors of words within
    their bands. The padding word has score zero in its band, and so a nonzero probability.

    Parameters: `tables` and `projections` by the number of their band, ``(V_i, d_i)`` and ``(d_i, D)`` (for
    bands that need one, see the options), the same for the output if it is not tied, there with S instead of
    D, and `clusters` ``(number of cutoffs, d_0)``; with the option `map` the embedding `map` instead of the
    tables. With the option `output_bias` all entries of the head and of the clusters have a bias, as in Grave
    et al.: ``bias`` ``(V,)`` of the words, and `cluster_bias` of the clusters.
    """

    options: AdaptiveOptions
    per_word = ("tables",)

    def create_parameters(self) -> None:
        self.has_output = self.options.output != "none"
        self.has_linear_scores = False  # words of clusters are scored within their cluster
        self.score_dim = self.options.score_dim or self.embedding_dim
        self.starts = (0, *self.options.cutoffs)
        ends = pairwise((*self.starts, self.num_embeddings))
        self.sizes = [end - start for start, end in ends]
        widths = self.options.widths(self.embedding_dim)
        shapes = {str(band): shape for band, shape in enumerate(zip(self.sizes, widths, strict=True))}
        self.map: Any = None
        if self.options.map is not None:
            sizes = {
                "num_embeddings": self.num_embeddings,
                "embedding_dim": widths[0],
                "padding_idx": self.padding_idx,
            }
            self.map = build(self.options.map, **sizes, **self.options.map_options)  # type: ignore[arg-type]
        self.expensive_rows = self.map is not None and self.map.expensive_rows
        self.tables = new_matrices(shapes if self.map is None else {})
        self.projections = new_matrices(self.options.projection_shapes(self.embedding_dim, is_output=False))
        self.output_tables = new_matrices(shapes) if self.options.tie == "none" else None
        self.output_projections = (
            None
            if self.options.tie == "all"
            else new_matrices(self.options.projection_shapes(self.embedding_dim, is_output=True))
        )
        clusters = len(self.options.cutoffs)
        self.clusters = nn.Parameter(torch.empty(clusters, widths[0])) if self.has_output else None
        self.cluster_bias = nn.Parameter(torch.empty(clusters)) if self.options.output_bias else None

    def init_weights(self) -> None:
        """Normal entries; the vectors of every band, once projected, and the clusters have std D**-0.5."""
        if self.map is not None:
            self.map.reset_parameters()
        for tables in (self.tables, self.output_tables):
            for band, table in enumerate(tables.values() if tables is not None else ()):
                nn.init.normal_(table, std=entry_std(table.size(1)))
                zero_padding_row(table, self._padding_in(band))
        for projections in (self.projections, self.output_projections):
            for projection in projections.values() if projections is not None else ():
                nn.init.normal_(projection, std=entry_std(projection.size(1)))
        if self.clusters is not None:
            nn.init.normal_(self.clusters, std=entry_std(self.clusters.size(1)))
        if self.cluster_bias is not None:
            nn.init.zeros_(self.cluster_bias)

    def token_rows(self, words: Tensor, inverse: Tensor) -> Tensor:
        if self.map is None or not self._draws_per_token:
            return super().token_rows(words, inverse)
        tokens = words.index_select(0, inverse)
        rows = self.rows(tokens, self.map.token_rows(words, inverse))
        return without_padding(rows, self.padding_idx, tokens)

    def rows(self, ids: Tensor, mapped: Tensor | None = None) -> Tensor:
        """Return rows ``(n, D)`` for ids ``(n,)``, or for other vectors of the map ``(n, d_0)``, by bands."""
        projections = [self.projections.get(str(band)) for band in range(len(self.starts))]
        if not needs_fixed_shapes(ids):
            positions, parts = self._in_bands(ids, mapped)
            widened = [part if basis is None else part @ basis for part, basis in zip(parts, projections)]
            vectors = torch.cat(widened)
            return torch.empty_like(vectors).index_copy_(0, torch.cat(positions), vectors)
        if mapped is None and self.map is not None:
            mapped = self.map.rows(ids)
        bands, parts = bands_of(ids, self.options.cutoffs), []
        for band, (start, projection) in enumerate(zip(self.starts, projections)):
            is_other = bands != band
            inside = (ids - start).masked_fill(is_other, 0)
            codes = F.embedding(inside, self.tables[str(band)]) if mapped is None else mapped
            vectors = codes if projection is None else codes @ projection
            parts.append(vectors.masked_fill(is_other.unsqueeze(1), 0.0))
        return torch.stack(parts).sum(dim=0)

    def _in_bands(self, ids: Tensor, mapped: Tensor | None = None) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Return for each band the positions of its words in `ids` ``(n,)``, and vectors ``(n_i, d_i)``."""
        positions = positions_by_group(bands_of(ids, self.options.cutoffs), len(self.starts))
        if self.map is None:
            pairs = zip(positions, self.starts, self.tables.values(), strict=True)
            return positions, [F.embedding(ids[inside] - start, table) for inside, start, table in pairs]
        mapped = self.map.rows(ids) if mapped is None else mapped
        return positions, [mapped.index_select(0, inside) for inside in positions]

    def layers(self, ids: Tensor) -> list[Layer]:
        inner = [Layer(f"band {band}", codes) for band, codes in enumerate(self._in_bands(ids)[1])]
        return [*inner, *super().layers(ids)]

    def _scores(self, hidden: Tensor) -> Tensor:
        """Return the log-probabilities ``(..., V)``: a score means nothing without that of its cluster."""
        softmax: AdaptiveSoftmax = self.cached("output", self._softmax)
        return softmax.log_prob(hidden)

    def _token_loss(
        self, hidden: Tensor, targets: Tensor, ignore_index: int, *settings: Any
    ) -> tuple[Tensor, Callable[[], Tensor]]:
        softmax: AdaptiveSoftmax = self.cached("output", self._softmax)
        loss, best = softmax.cross_entropy(hidden, targets, ignore_index, *settings)
        return loss, lambda: softmax.predictions(hidden, best)

    def inner_embedding(self) -> SharedEmbedding:
        """With factor 1, the table of all bands, which is the `map` or a copy."""
        if self.map is not None:
            return self.map
        if self.options.factor > 1 or self.options.tie == "none":
            return self
        table = torch.cat(list(self.tables.values())).detach()
        plain: Any = build(
            "standard",
            num_embeddings=self.num_embeddings,
            embedding_dim=table.size(1),
            padding_idx=self.padding_idx,
        )
        plain.weight = nn.Parameter(table)
        return plain.train(self.training)  # type: ignore[no-any-return]

    def with_inner_embedding(self, part: SharedEmbedding) -> SharedEmbedding:
        """Drops the part's own bias, because the words have one here."""
        if self.inner_embedding() is self:
            return super().with_inner_embedding(part)
        of_map = {name: value for name, value in part.stored_options().items() if name != "output_bias"}
        new_options: dict[str, Any] = {**self.stored_options(), "map": part.method, "map_options": of_map}
        with torch.device("meta"):
            new: Any = build(
                self.method,
                num_embeddings=self.num_embeddings,
                embedding_dim=self.embedding_dim,
                padding_idx=self.padding_idx,
                **new_options,
            )
        state = {f"map.{name}": tensor for name, tensor in part.state_dict().items() if name != "bias"}
        state |= {name: tensor for name, tensor in self.state_dict().items() if name in new.state_dict()}
        new.load_state_dict(state, assign=True)
        return new.train(self.training)  # type: ignore[no-any-return]

    def stored_options(self) -> dict[str, object]:
        options = super().stored_options()
        if self.map is not None and (of_map := self.map.stored_options()):
            options["map_options"] = of_map
        return options

    def state_for_ids(self, ids: Tensor) -> tuple[dict[str, object], dict[str, Tensor]]:
        """Every band keeps its width, and at least one word."""
        options, state = super().state_for_ids(ids)
        positions = positions_by_group(bands_of(ids, self.options.cutoffs), len(self.starts))
        members = [ids[inside] for inside in positions]
        for band, (start, words) in enumerate(zip(self.starts, members)):
            if len(words) == 0:
                raise UserError(
                    f"no word of band {band} of this adaptive embedding (words from {start:,}) is kept, but "
                    "every band needs one; also keep a word of it"
                )
            for name in (f"tables.{band}", f"output_tables.{band}"):
                if name in state:
                    state[name] = state[name][words - start]
        if self.map is not None:
            options["map_options"], state_of_map = self.map.state_for_ids(ids)
            state |= {f"map.{name}": tensor for name, tensor in state_of_map.items()}
        cutoffs = itertools.accumulate(len(words) for words in members[:-1])
        return {**options, "cutoffs": list(cutoffs)}, state

    def output_table(self) -> Tensor:
        """The vectors ``(V, S)`` of all words; scores are only comparable within a band."""
        self._check_output()
        bands = self._output_bands()
        table = torch.cat([codes if basis is None else codes @ basis for codes, basis in bands])
        return without_padding(table, self.padding_idx)

    def set_output_bias(self, bias: Tensor) -> None:
        """The bias of a cluster becomes the logsumexp of the biases of its words.

        For hidden states of zero, words then have the same probabilities as in one softmax.
        """
        super().set_output_bias(bias)
        word_bias = self.output_bias()
        assert word_bias is not None and self.cluster_bias is not None
        _, *tails = word_bias.detach().split(self.sizes)
        with torch.no_grad():
            self.cluster_bias.copy_(torch.stack([tail.logsumexp(dim=0) for tail in tails]))

    def _softmax(self) -> AdaptiveSoftmax:
        assert self.clusters is not None
        biases: Sequence[Tensor | None] = [None] * len(self.sizes)
        if self.bias is not None and self.cluster_bias is not None:
            of_head, *of_tails = self.bias.split(self.sizes)
            biases = [torch.cat([of_head, self.cluster_bias]), *of_tails]
        bands = zip(self._output_bands(), biases, strict=True)
        head, *tails = (
            SoftmaxPart((codes,) if band else (codes, self.clusters), basis, self._padding_in(band), bias)
            for band, ((codes, basis), bias) in enumerate(bands)
        )
        return AdaptiveSoftmax(head, tails, self.options.cutoffs, self.num_embeddings)

    def _output_bands(self) -> list[tuple[Tensor, nn.Parameter | None]]:
        """Return the output vectors ``(V_i, d_i)`` of every band, and its projection, if it has one."""
        tables = self.tables if self.output_tables is None else self.output_tables
        codes = tables.values() if self.map is None else self.map.table().split(self.sizes)
        projections = self.projections if self.output_projections is None else self.output_projections
        shapes = self.options.projection_shapes(self.embedding_dim, is_output=True)
        names = [str(band) if str(band) in shapes else None for band in range(len(self.sizes))]
        return [(part, projections[name] if name else None) for part, name in zip(codes, names, strict=True)]

    def _padding_in(self, band: int) -> int | None:
        """The position of the padding word within a band, or None if it is in another one."""
        if self.padding_idx is None:
            return None
        word = self.padding_idx - self.starts[band]
        return word if 0 <= word < self.sizes[band] else None

    def parameters_by_side(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        of_map = [] if self.map is None else list(self.map.parameters())
        tables = self.tables if self.output_tables is None else self.output_tables
        projections = self.projections if self.output_projections is None else self.output_projections
        shapes = self.options.projection_shapes(self.embedding_dim, is_output=True)
        others = (self.clusters, self.bias, self.cluster_bias)
        outputs = [*of_map, *tables.values(), *(projections[band] for band in shapes)]
        outputs += [parameter for parameter in others if parameter is not None]
        return [*of_map, *self.tables.values(), *self.projections.values()], outputs

    @classmethod
    @torch.no_grad()
    def fit(cls, task: FitTask) -> AdaptiveEmbedding:
        """A truncated SVD or a copy of every band; the mean of its words for a cluster."""
        embedding: AdaptiveEmbedding = task.build()
        if embedding.map is not None:
            with torch.enable_grad():
                return reconstruct(embedding, task)
        options, dim = embedding.options, embedding.embedding_dim
        blocks = task.teacher.split(embedding.sizes)
        for band, (block, width) in enumerate(zip(blocks, options.widths(dim), strict=True)):
            if width < dim or (band == 0 and options.head_projection == "both"):
                codes, basis = truncated_svd(block, width)
            else:
                codes, basis = block, torch.eye(width, dtype=block.dtype, device=block.device)
            for tables in (embedding.tables, embedding.output_tables):
                if tables is not None:
                    tables[str(band)].copy_(codes)
            for projections in (embedding.projections, embedding.output_projections):
                projection = projections.get(str(band)) if projections is not None else None
                # The table does not determine a projection from hidden states of another width.
                if projection is not None and projection.shape == basis.shape:
                    projection.copy_(basis)
            if band == 0:
                head = basis
            elif embedding.clusters is not None:
                # The rows of the head are orthonormal, so this is the projection of the mean onto them.
                embedding.clusters[band - 1] = head @ block.mean(dim=0)
        return embedding
