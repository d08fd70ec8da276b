"""The plain table of V vectors, the baseline of all other methods."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_embeddings.embedding import OutputFactors, SharedEmbedding
from shared_embeddings.fitting.task import FitTask
from shared_embeddings.nn.layers import entry_std, zero_padding_row
from shared_embeddings.registry import register
from shared_embeddings.spec import EmbeddingOptions, Presets, SearchGrid


@dataclasses.dataclass(frozen=True)
class StandardOptions(EmbeddingOptions["StandardEmbedding"]):
    """Options of `standard`: only the common ones."""

    paper = "–"
    summary = "itself"
    grid_choice = "the table itself"
    fit_bound = 1e-6

    def count_parameters(self, num_embeddings: int, embedding_dim: int) -> int:
        return num_embeddings * embedding_dim

    @classmethod
    def presets(cls, num_embeddings: int, embedding_dim: int) -> Presets:
        return Presets({"": {}}, [SearchGrid(1, lambda step: {})])


@register("standard", StandardOptions)
class StandardEmbedding(SharedEmbedding):
    """One trained vector for every word: ``weight`` ``(V, D)``, tied on both sides."""

    options: StandardOptions
    per_word = ("weight",)

    def create_parameters(self) -> None:
        self.weight = nn.Parameter(torch.empty(self.num_embeddings, self.embedding_dim))
        # After the table, the order in the optimizer states of older checkpoints.
        self.register_parameter("bias", self._parameters.pop("bias"))

    def init_weights(self) -> None:
        nn.init.normal_(self.weight, std=entry_std(self.embedding_dim))
        zero_padding_row(self.weight, self.padding_idx)

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight, sparse=self.has_sparse_gradients)

    def output_factors(self) -> OutputFactors:
        return OutputFactors(self.weight, None)

    @classmethod
    def fit(cls, task: FitTask) -> StandardEmbedding:
        """The teacher's table itself, which is the task's own copy: two would not fit into memory."""
        with torch.device("meta"):
            embedding: StandardEmbedding = task.make(task.options)
        embedding.weight = nn.Parameter(task.teacher)
        if embedding.bias is not None:
            embedding.bias = nn.Parameter(task.teacher.new_zeros(len(task.teacher)))
        return embedding
