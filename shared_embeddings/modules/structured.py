"""Structured embedding (Shi & Yu, 2018): product quantization, in which words share pieces of vectors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_embeddings.embedding import Layer, SharedEmbedding, scores_of_codes
from shared_embeddings.fitting.codes import product_quantization
from shared_embeddings.fitting.task import FitTask
from shared_embeddings.nn.layers import code_bits, code_dtype, draw_codes, entry_std
from shared_embeddings.quant.packed_tensor import dense
from shared_embeddings.registry import register
from shared_embeddings.spec import EmbeddingOptions, Options, Presets, SearchGrid
from shared_embeddings.utils.options import option, require

# The search grid has at most 2**10 clusters: more are slow to fit and rarely better.
_MOST_BITS = 10


@dataclasses.dataclass(frozen=True)
class StructuredOptions(EmbeddingOptions["StructuredEmbedding"]):
    """Options of `structured`."""

    paper = "Shi & Yu (2018)"
    summary = "pieces of a row, each one of K centroids"
    grid_choice = "pieces and clusters with the least expected error; 32 bits of codes count as a parameter"
    fit_bound = 0.15
    default_store = "fp16"

    num_groups: int = option(
        'G, the number of pieces of a vector, a divisor of D; the "group size" of Distilled Embedding.',
        minimum=1,
    )
    num_clusters: int = option("K, the number of centroids for each piece, at most V.", minimum=1)
    seed: int = option(
        "The seed of the random codes of an embedding that is not fitted to a table.", 0, minimum=0
    )

    def check_sizes(self, num_embeddings: int, embedding_dim: int) -> None:
        require(
            embedding_dim % self.num_groups == 0,
            f"option 'num_groups' is {self.num_groups}, which does not divide the dimension "
            f"{embedding_dim}; choose a divisor",
        )
        require(
            self.num_clusters <= num_embeddings,
            f"option 'num_clusters' is {self.num_clusters}, more than the {num_embeddings} words; "
            f"choose at most {num_embeddings}",
        )

    def count_parameters(self, num_embeddings: int, embedding_dim: int) -> int:
        """K * D trained numbers; Distilled Embedding's tables also count the V * G entries of `codes`."""
        return self.num_clusters * embedding_dim

    def search_size(self, num_embeddings: int, embedding_dim: int) -> int:
        """Parameters, and 32 bits of the codes for one more."""
        codes = num_embeddings * self.num_groups * code_bits(self.num_clusters)
        return self.count_parameters(num_embeddings, embedding_dim) + -(-codes // 32)

    @classmethod
    def presets(cls, num_embeddings: int, embedding_dim: int) -> Presets:
        """As in Distilled Embedding 32 groups, or the next smaller divisor of D, and V / 16 clusters.

        The grid has groups and clusters from small to large, each with a smaller expected error than all
        those before. The error is the approximate relative one of k-means for pieces of normal numbers: with
        many clusters Zador's constant times ``K ** (-2 / d)``; the constant falls from 2.72 for single
        numbers towards 1 for wide pieces.
        """
        divisors = [number for number in range(1, embedding_dim + 1) if embedding_dim % number == 0]
        numbers = {2**bits * part // 8 for bits in range(_MOST_BITS + 1) for part in (5, 6, 7, 8)}
        trials = []
        for groups in divisors:
            width = embedding_dim // groups
            constant = 1.0 + 1.72 * width**-0.77
            for clusters in sorted(number for number in numbers if 1 <= number <= num_embeddings):
                options = StructuredOptions(num_groups=groups, num_clusters=clusters)
                error = 1.0 / (1.0 + (clusters ** (2.0 / width) - 1.0) / constant)
                trials.append((options.search_size(num_embeddings, embedding_dim), error, groups, clusters))
        worthwhile: list[Options] = []
        least = math.inf
        for _, error, groups, clusters in sorted(trials):
            if error < least:
                worthwhile.append({"num_groups": groups, "num_clusters": clusters})
                least = error
        most = max(number for number in divisors if number <= 32)
        example = {"num_groups": most, "num_clusters": min(num_embeddings // 16 + 1, 2048)}
        return Presets({"": example}, [SearchGrid(len(worthwhile), lambda step: dict(worthwhile[step]))])


@register("structured", StructuredOptions)
class StructuredEmbedding(SharedEmbedding):
    """Piece g of the row of word w is ``centroids[g, codes[w, g]]``.

    Parameters: `centroids` ``(G, K, D / G)``. The index matrix `codes` ``(V, G)`` is fixed: drawn with
    ``options.seed`` or fitted, and saved with the parameters; loaded codes replace drawn ones. `stored_bits`
    of `counts` includes log2(K) bits for each; the papers count every code as a parameter.
    """

    options: StructuredOptions
    scores_in_blocks = True
    per_word = ("codes",)
    codes: Tensor

    def create_parameters(self) -> None:
        groups, clusters = self.options.num_groups, self.options.num_clusters
        self.centroids = nn.Parameter(torch.empty(groups, clusters, self.embedding_dim // groups))
        self.register_buffer("codes", torch.empty(self.num_embeddings, groups, dtype=code_dtype(clusters)))
        self.buffer_bits["codes"] = groups * code_bits(clusters)

    def init_weights(self) -> None:
        draw_codes(self.codes, self.options.num_clusters, self.options.seed)
        nn.init.normal_(self.centroids, std=entry_std(self.embedding_dim))

    def _row_function(self) -> Callable[[Tensor], Tensor]:
        centroids = dense(self.centroids).flatten(0, 1)
        starts = torch.arange(self.options.num_groups, device=centroids.device) * self.options.num_clusters

        def rows(ids: Tensor) -> Tensor:
            return F.embedding(self.codes.index_select(0, ids).long() + starts, centroids).flatten(1)

        return rows

    def _block_scores(self, hidden: Tensor) -> Tensor:
        pieces = hidden.unflatten(1, (self.options.num_groups, -1))
        scores = scores_of_codes(
            hidden, self.codes, lambda: torch.einsum("ngd,gkd->ngk", pieces, dense(self.centroids))
        )
        return super()._block_scores(hidden) if scores is None else scores

    def state_for_ids(self, ids: Tensor) -> tuple[dict[str, object], dict[str, Tensor]]:
        """Unused centroids are removed if there are more centroids than words."""
        options, state = super().state_for_ids(ids)
        if self.options.num_clusters <= len(ids):
            return options, state
        used = [group.unique(return_inverse=True) for group in state["codes"].long().unbind(dim=1)]
        clusters = max(len(numbers) for numbers, _ in used)
        centroids = self.centroids.detach()[:, :clusters].clone()
        for group, (numbers, _) in enumerate(used):
            centroids[group, : len(numbers)] = self.centroids[group, numbers].detach()
        codes = torch.stack([renumbered for _, renumbered in used], dim=1)
        return {**options, "num_clusters": clusters}, {**state, "codes": codes, "centroids": centroids}

    def layers(self, ids: Tensor) -> list[Layer]:
        return [Layer("output", self.rows(ids), self.options.num_groups)]

    @classmethod
    def fit(cls, task: FitTask) -> StructuredEmbedding:
        embedding: StructuredEmbedding = task.build()
        sizes = (embedding.options.num_groups, embedding.options.num_clusters)
        codes, centroids = product_quantization(task.teacher, *sizes, task.seed, task.progress)
        with torch.no_grad():
            embedding.codes.copy_(codes)
            embedding.centroids.copy_(centroids)
        return embedding
