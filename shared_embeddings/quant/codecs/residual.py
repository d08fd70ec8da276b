"""Rotation, and pieces of eight dimensions as sums of codebook entries, one for each bit of the rate.

A codebook of 256 entries for eight dimensions takes one bit per number. All pieces share the codebooks. The
codebook of a stage is trained on what the stages before it leave (residual vector quantization, Chen et al.,
2010), so that rows of different rates share them, too. The codes of a piece are chosen by beam search.

Axes: ``n`` rows, ``D`` dimensions, ``P`` pieces, ``B`` beam.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.quant import kernels
from shared_embeddings.quant.codec import Books, Codec, Encoded, fitted_scales, register, row_sizes
from shared_embeddings.quant.metric import Metric
from shared_embeddings.utils.extras import require

_PIECE = 8
_ENTRIES = 256
_BEAM = 4
# Pieces that codebooks are trained on, and rows that are encoded together.
_SAMPLE = 2**16
_ROWS = 16


def decode_residual(codes: Any, rate: float, dim: int, parts: Mapping[str, Any]) -> Any:
    """Sums of one entry of each stage, for pieces of eight dimensions."""
    numbers = codes.reshape(len(codes), -1, int(rate))
    entries = [parts["stages"][stage][numbers[:, :, stage]] for stage in range(int(rate))]
    return np.sum(entries, axis=0).reshape(len(codes), -1)[:, :dim]


@register("residual")
class ResidualCodec(Codec):
    """See the module. Codebooks: ``stages`` ``(highest rate, 256, 8)``."""

    about = "sums of codebook entries for pieces of eight dimensions"
    example_bits = 2.0
    standalone = (decode_residual,)

    @property
    def pieces(self) -> int:
        """P."""
        return -(-self.dim // _PIECE)

    def row_bytes(self, rate: float) -> int:
        return self.pieces * int(rate)

    def book_shapes(self, rates: Sequence[float]) -> dict[str, tuple[int, ...]]:
        return {"stages": (int(max(rates)), _ENTRIES, _PIECE)}

    def initial_books(self, rates: Sequence[float]) -> Books:
        """Random entries, each stage smaller than the one before."""
        stages = int(max(rates))
        entries = torch.randn(stages, _ENTRIES, _PIECE, generator=torch.Generator().manual_seed(0))
        return {"stages": entries * 0.5 ** torch.arange(stages).view(-1, 1, 1)}

    def learn(self, rows: Tensor, rates: Sequence[float], seed: int) -> Books:
        """K-means on a sample of pieces, stage by stage."""
        pieces = self._pieces(rows / row_sizes(rows)).flatten(0, 1)
        generator = torch.Generator().manual_seed(seed)
        sample = pieces[torch.randperm(len(pieces), generator=generator)[:_SAMPLE].to(pieces.device)].cpu()
        stages = []
        for stage in range(int(max(rates))):
            clusters = min(_ENTRIES, len(sample))
            means = require("sklearn.cluster").MiniBatchKMeans(
                clusters, n_init=1, batch_size=4096, random_state=(seed + stage) % 2**32
            )
            nearest = torch.from_numpy(means.fit_predict(sample.numpy())).long()
            centroids = torch.from_numpy(means.cluster_centers_).float()
            stages.append(F.pad(centroids, (0, 0, 0, _ENTRIES - clusters)))
            sample = sample - centroids[nearest]
        if not stages:  # no word has codes
            return self.initial_books(rates)
        return {"stages": torch.stack(stages).to(rows.device)}

    def encode(self, rows: Tensor, rate: float, books: Books, metric: Metric | None = None) -> Encoded:
        """The best of a beam of sums, then the best scale."""
        stages, targets = books["stages"][: int(rate)].float(), rows / row_sizes(rows)
        if metric is None:
            packed = self._search(self._pieces(targets), stages)
        else:
            parts: list[Tensor] = []

            def quantize(left: Tensor, piece: int) -> Tensor:
                width = min(_PIECE, left.size(1))
                own = F.pad(left[:, :width], (0, _PIECE - width)).unsqueeze(1)
                parts.append(self._search(own, stages))
                return self._sums(parts[-1], stages)[:, :width]

            ends = [min(_PIECE * (piece + 1), self.dim) for piece in range(self.pieces)]
            metric.round(targets, ends, quantize)
            packed = torch.cat(parts, dim=1)
        return Encoded(packed, fitted_scales(rows, self._sums(packed, stages)[:, : self.dim], metric))

    def _search(self, pieces: Tensor, stages: Tensor) -> Tensor:
        """The codes ``(n, P * stages)`` of pieces ``(n, P, 8)``."""
        if kernels.usable(pieces, stages):
            codes = kernels.nearest_sums(pieces.flatten(0, 1), stages)
        else:
            codes = torch.cat([_beam_search(part.flatten(0, 1), stages) for part in pieces.split(_ROWS)])
        return codes.to(torch.uint8).view(len(pieces), -1)

    def decode(self, codes: Tensor, scales: Tensor, rate: float, books: Books) -> Tensor:
        return self._sums(codes, books["stages"][: int(rate)]).to(scales.dtype) * scales

    def direct_scores(
        self, hidden: Tensor, codes: Tensor, scales: Tensor, rate: float, books: Books
    ) -> Tensor | None:
        stages = books["stages"][: int(rate)].to(hidden.dtype)
        products = self._pieces(hidden).unsqueeze(2).unsqueeze(3) @ stages.transpose(1, 2)
        return kernels.table_scores(codes, products.flatten(1, 3), scales)

    def _sums(self, codes: Tensor, stages: Tensor) -> Tensor:
        """Rows ``(n, D)``, or as many pieces as there are codes for, before scaling."""
        starts = torch.arange(len(stages), device=codes.device, dtype=torch.int32) * _ENTRIES
        numbers = codes.view(-1, len(stages)).int() + starts
        pieces = F.embedding_bag(numbers, stages.reshape(-1, _PIECE), mode="sum")
        return pieces.view(codes.size(0), codes.size(1) // len(stages) * _PIECE)[:, : self.dim]

    def _pieces(self, rows: Tensor) -> Tensor:
        """Rows ``(n, D)`` as pieces ``(n, P, 8)``, padded with zeros."""
        missing = self.pieces * _PIECE - self.dim
        return F.pad(rows, (0, missing)).unflatten(1, (self.pieces, _PIECE))


def _beam_search(pieces: Tensor, stages: Tensor) -> Tensor:
    """Codes ``(n, stages)`` of pieces ``(n, 8)`` for codebooks ``(stages, 256, 8)``."""
    count = len(pieces)
    left, chosen = pieces.unsqueeze(1), torch.empty((count, 1, 0), dtype=torch.long, device=pieces.device)
    everyone = torch.arange(count, device=pieces.device).unsqueeze(1)
    for place, book in enumerate(stages):
        # ||left - entry||², for all entries.
        errors = left.square().sum(-1, keepdim=True) - 2 * left @ book.t() + book.square().sum(-1)
        kept = 1 if place == len(stages) - 1 else min(_BEAM, errors.size(1) * _ENTRIES)
        best = errors.flatten(1).topk(kept, largest=False, sorted=False).indices
        parents, entries = best // _ENTRIES, best % _ENTRIES
        left = left[everyone, parents] - book[entries]
        chosen = torch.cat([chosen[everyone, parents], entries.unsqueeze(-1)], dim=-1)
    return chosen[:, 0]
