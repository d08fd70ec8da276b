"""Structured embedding (Shi & Yu, 2018): product quantisation, where words share pieces of their vectors."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_embeddings.embedding import Layer, SharedEmbedding, entry_std
from shared_embeddings.layers.word_codes import code_bits, code_dtype, draw_codes
from shared_embeddings.options import EmbeddingOptions, require, require_at_least, require_seed
from shared_embeddings.registry import register


@dataclasses.dataclass(frozen=True)
class StructuredOptions(EmbeddingOptions):
    """Options of `structured`.

    Attributes:
        num_groups: G, into how many pieces a vector is cut; a divisor of D. Distilled Embedding calls it the
            "group size".
        num_clusters: K, how many different pieces there are for each place; at most V.
        seed: what the codes of an embedding that is not fitted to a table are drawn from.
    """

    num_groups: int
    num_clusters: int
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least("num_groups", self.num_groups, 1)
        require_at_least("num_clusters", self.num_clusters, 1)
        require_seed(self.seed)


@register("structured", StructuredOptions)
class StructuredEmbedding(SharedEmbedding):
    """Piece g of the row of word w is ``centroids[g, codes[w, g]]``.

    Parameters: `centroids` ``(G, K, D / G)``. The index matrix `codes` ``(V, G)`` is fixed: drawn from
    ``options.seed`` or fitted, and saved with the parameters; what is loaded wins over the seed.
    `counts` counts the codes in `stored_bits`, log2(K) bits for each; the papers count every code as a
    parameter, which `index_entries` gives.
    """

    options: StructuredOptions
    paper = "Shi & Yu (2018)"
    idea = "pieces of a row, each one of K centroids"
    per_word = ("codes",)
    codes: Tensor

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None, options: StructuredOptions
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, options)
        groups, clusters = options.num_groups, options.num_clusters
        self.centroids = nn.Parameter(torch.empty(groups, clusters, embedding_dim // groups))
        self.register_buffer("codes", torch.empty(num_embeddings, groups, dtype=code_dtype(clusters)))
        self.reset_parameters()

    def draw_parameters(self) -> None:
        """Codes from the seed, and normal centroids with std D**-0.5."""
        draw_codes(self.codes, self.options.num_clusters, self.options.seed)
        nn.init.normal_(self.centroids, std=entry_std(self.embedding_dim))

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``(n, D)`` for ids ``(n,)``."""
        codes = self.codes.index_select(0, ids).long()
        starts = torch.arange(self.options.num_groups, device=codes.device) * self.options.num_clusters
        return F.embedding(codes + starts, self.centroids.flatten(0, 1)).flatten(1)

    def selected(self, ids: Tensor) -> tuple[dict[str, object], dict[str, Tensor]]:
        """As in the base class; centroids that no word uses go when there are more than words."""
        options, state = super().selected(ids)
        if self.options.num_clusters <= len(ids):
            return options, state
        used = [group.unique(return_inverse=True) for group in state["codes"].long().unbind(dim=1)]
        clusters = max(len(kept) for kept, _ in used)
        centroids = self.centroids.detach()[:, :clusters].clone()
        for group, (kept, _) in enumerate(used):
            centroids[group, : len(kept)] = self.centroids[group, kept].detach()
        codes = torch.stack([renumbered for _, renumbered in used], dim=1)
        return {**options, "num_clusters": clusters}, {**state, "codes": codes, "centroids": centroids}

    def layers(self, ids: Tensor) -> list[Layer]:
        """The output, whose pieces are independent groups."""
        return [Layer("output", self.rows(ids), self.options.num_groups)]

    def buffer_bits(self, name: str, buffer: Tensor) -> int:
        """log2(K) bits, rounded up, for every code."""
        return buffer.numel() * code_bits(self.options.num_clusters)

    @classmethod
    def check_sizes(cls, num_embeddings: int, embedding_dim: int, options: StructuredOptions) -> None:
        """The groups must divide D, and there can be no more clusters than words."""
        require(
            embedding_dim % options.num_groups == 0,
            f"option 'num_groups' is {options.num_groups}, which does not divide the dimension "
            f"{embedding_dim}; choose a divisor",
        )
        require(
            options.num_clusters <= num_embeddings,
            f"option 'num_clusters' is {options.num_clusters}, more than the {num_embeddings} words; "
            f"choose at most {num_embeddings}",
        )

    @classmethod
    def closed_form(cls, num_embeddings: int, embedding_dim: int, options: StructuredOptions) -> int:
        """K * D trained numbers; Distilled Embedding's tables print K * D + V * G, see `index_entries`."""
        return options.num_clusters * embedding_dim

    @classmethod
    def index_entries(cls, num_embeddings: int, embedding_dim: int, options: StructuredOptions) -> int:
        """V * G, the entries of the index matrix, which the papers' tables count as parameters."""
        return num_embeddings * options.num_groups
