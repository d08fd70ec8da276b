"""Funneling decomposition (Distilled Embedding): a narrow table behind a non-linearity, then a projection."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_embeddings.embedding import SCORED_ROWS, Layer
from shared_embeddings.fitting.factorization import (
    distances,
    least_mean_distance,
    restore_scale,
    without_negatives,
)
from shared_embeddings.fitting.task import FitTask, reconstruct
from shared_embeddings.modules.projective import LowRankOptions, ProjectiveEmbedding
from shared_embeddings.nn.layers import ACTIVATIONS, code_std, entry_std, zero_padding_row
from shared_embeddings.registry import register
from shared_embeddings.utils.options import option

# The mean of new codes in units of their std: most pass the ReLU, and training decides which do not. A small
# AWD-LSTM had a validation perplexity of 230 after one epoch with Adam, and of 314 without this offset.
CODE_LIFT = 2.0

# A fit without gradient descent is accepted if its distance from the table exceeds the best one by no more
# than this share, or by the rounding error of 32-bit rows.
_ACCEPTED_LOSS = 1e-3
_ROUNDING = 1e-5


@dataclasses.dataclass(frozen=True)
class FunnelOptions(LowRankOptions["FunnelEmbedding"]):
    """Options of `funnel`."""

    paper = "Distilled Embedding, Eq. 3"
    summary = "V x R, a non-linearity, then R x D"

    activation: Literal["relu", "gelu", "tanh"] = option("f of Eq. 3; the paper always uses relu.", "relu")


@register("funnel", FunnelOptions)
class FunnelEmbedding(ProjectiveEmbedding):
    """Row w of the table is ``f(codes[w]) @ basis`` (Distilled Embedding, Eq. 3).

    Negative codes, which a ReLU sets to zero, still get a gradient (`relu_of_codes`).

    Parameters: `codes` ``(V, R)``, `basis` ``(R, D)``.
    """

    options: FunnelOptions
    scores_in_blocks = True

    def init_weights(self) -> None:
        """Small codes, most of them above zero, and a large basis that gives products of std D**-0.5."""
        std = code_std(self.embedding_dim)
        nn.init.normal_(self.codes, mean=CODE_LIFT * std, std=std)
        nn.init.normal_(self.basis)
        with torch.no_grad():
            activated = self._activated(self.codes)
            if self.options.rank > 1:
                # The codes have a mean: without this, one common vector would be part of every row.
                self.basis.sub_(self.basis.mean(dim=0))
                activated = activated - activated.mean()
            # A ReLU may zero all codes if there are few.
            norm = activated.square().sum(dim=1).mean().sqrt().clamp(min=1e-3 * std)
            self.basis.mul_(entry_std(self.embedding_dim) / norm)
        zero_padding_row(self.codes, self.padding_idx)

    def layers(self, ids: Tensor) -> list[Layer]:
        codes, *others = super().layers(ids)
        return [codes, Layer("activated codes", self._activated(codes.values)), *others]

    def _block_scores(self, hidden: Tensor) -> Tensor:
        projected = F.linear(hidden, self.basis)
        ids = torch.arange(self.num_embeddings, device=hidden.device)
        blocks = (F.embedding(block, self.codes) for block in ids.split(SCORED_ROWS))
        return torch.cat([F.linear(projected, self._activated(codes)) for codes in blocks], dim=-1)

    def _activated(self, codes: Tensor) -> Tensor:
        return ACTIVATIONS[self.options.activation](codes)

    @classmethod
    def fit(cls, task: FitTask) -> FunnelEmbedding:
        """The factors with the least mean distance; gradient descent if a ReLU would change them."""
        scaled, scale = task.at_unit_scale()
        embedding: FunnelEmbedding = scaled.build()
        activation, table = embedding.options.activation, scaled.teacher
        is_good = False
        if activation == "relu":
            codes, basis = least_mean_distance(table, embedding.options.rank, task.progress)
            best = float(distances(table, codes, basis).mean())
            codes, basis = without_negatives(codes, basis)
            with torch.no_grad():
                embedding.codes.copy_(codes)
                embedding.basis.copy_(basis)
                # The row of padding is zero and does not count.
                zero_padding_row(embedding.codes, task.padding_idx)
            allowed = best * (1.0 + _ACCEPTED_LOSS) + _ROUNDING * float(table.norm(dim=1).mean())
            is_good = float(distances(table, codes, basis).mean()) <= allowed
        if not is_good:
            reconstruct(embedding, scaled)
        restore_scale(scale, activation, embedding.codes, embedding.basis)
        return embedding
