"""Rotation, and pieces of eight dimensions as sums of codebook entries, one for each bit of the width.

A codebook of 256 entries for eight dimensions takes one bit per number. All pieces share the codebooks. The
codebook of a stage is trained on what the stages before it leave (residual vector quantization, Chen et al.,
2010), so that rows of different widths share them, too. The codes of a piece are chosen by beam search.

Axes: ``n`` rows, ``D`` dimensions, ``P`` pieces, ``B`` beam.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.quant import kernels
from shared_embeddings.quant.codec import Codebooks, Codec, Encoded, fitted_scales, row_sizes
from shared_embeddings.utils.extras import require

_PIECE = 8
_ENTRIES = 256
_BEAM = 4
# Pieces that codebooks are trained on, and rows that are encoded together.
_SAMPLE = 2**16
_ROWS = 16


class ResidualCodec(Codec):
    """See the module. Codebooks: ``stages`` ``(widest, 256, 8)``."""

    name = "residual"

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.pieces = -(-dim // _PIECE)

    def row_bytes(self, width: int) -> int:
        """As in the base class: a byte for each stage of each piece."""
        return self.pieces * width

    def codebook_shapes(self, widths: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """As in the base class."""
        return {"stages": (max(widths), _ENTRIES, _PIECE)}

    def initial_codebooks(self, widths: Sequence[int]) -> Codebooks:
        """As in the base class: random entries, each stage smaller than the one before."""
        generator = torch.Generator().manual_seed(0)
        entries = torch.randn(max(widths), _ENTRIES, _PIECE, generator=generator)
        return {"stages": entries * 0.5 ** torch.arange(max(widths)).view(-1, 1, 1)}

    def learn(self, rows: Tensor, widths: Sequence[int], seed: int) -> Codebooks:
        """As in the base class: k-means on a sample of pieces, stage by stage."""
        pieces = self._pieces(rows / row_sizes(rows)).flatten(0, 1)
        generator = torch.Generator().manual_seed(seed)
        sample = pieces[torch.randperm(len(pieces), generator=generator)[:_SAMPLE].to(pieces.device)].cpu()
        stages = []
        for stage in range(max(widths)):
            clusters = min(_ENTRIES, len(sample))
            means = require("sklearn.cluster").MiniBatchKMeans(
                clusters, n_init=1, batch_size=4096, random_state=(seed + stage) % 2**32
            )
            nearest = torch.from_numpy(means.fit_predict(sample.numpy())).long()
            centroids = torch.from_numpy(means.cluster_centers_).float()
            stages.append(F.pad(centroids, (0, 0, 0, _ENTRIES - clusters)))
            sample = sample - centroids[nearest]
        if not stages:  # no word has codes
            return self.initial_codebooks(widths)
        return {"stages": torch.stack(stages).to(rows.device)}

    def encode(self, rows: Tensor, width: int, codebooks: Codebooks) -> Encoded:
        """As in the base class: the best of a beam of sums, then the best scale."""
        stages = codebooks["stages"][:width].float()
        pieces = self._pieces(rows / row_sizes(rows))
        if kernels.usable(pieces, stages):
            codes = kernels.nearest_sums(pieces.flatten(0, 1), stages)
        else:
            codes = torch.cat([_beam_search(part.flatten(0, 1), stages) for part in pieces.split(_ROWS)])
        packed = codes.to(torch.uint8).view(len(rows), -1)
        return Encoded(packed, fitted_scales(rows, self.decode(packed, width, {"stages": stages})))

    def decode(self, codes: Tensor, width: int, codebooks: Codebooks) -> Tensor:
        """As in the base class."""
        stages = codebooks["stages"][:width]
        starts = torch.arange(width, device=codes.device) * _ENTRIES
        numbers = codes.view(-1, width).int() + starts.int()
        pieces = F.embedding_bag(numbers, stages.reshape(-1, _PIECE), mode="sum")
        return pieces.view(codes.size(0), self.pieces * _PIECE)[:, : self.dim]

    def byte_tables(self, hidden: Tensor, width: int, codebooks: Codebooks) -> Tensor | None:
        """As in the base class."""
        stages = codebooks["stages"][:width].to(hidden.dtype)
        products = self._pieces(hidden).unsqueeze(2).unsqueeze(3) @ stages.transpose(1, 2)
        return products.flatten(1, 3)

    def _pieces(self, rows: Tensor) -> Tensor:
        """Rows ``(n, D)`` as pieces ``(n, P, 8)``, padded with zeros."""
        missing = self.pieces * _PIECE - self.dim
        return F.pad(rows, (0, missing)).unflatten(1, (self.pieces, _PIECE))


def _beam_search(pieces: Tensor, stages: Tensor) -> Tensor:
    """Codes ``(n, width)`` of pieces ``(n, 8)`` for codebooks ``(width, 256, 8)``."""
    count = len(pieces)
    left, chosen = pieces.unsqueeze(1), torch.empty((count, 1, 0), dtype=torch.long, device=pieces.device)
    for place, book in enumerate(stages):
        # ||left - entry||², for all entries.
        errors = left.square().sum(-1, keepdim=True) - 2 * left @ book.t() + book.square().sum(-1)
        kept = 1 if place == len(stages) - 1 else min(_BEAM, errors.size(1) * _ENTRIES)
        best = errors.flatten(1).topk(kept, largest=False, sorted=False).indices
        parents, entries = best // _ENTRIES, best % _ENTRIES
        everyone = torch.arange(count, device=pieces.device).unsqueeze(1)
        left = left[everyone, parents] - book[entries]
        chosen = torch.cat([chosen[everyone, parents], entries.unsqueeze(-1)], dim=-1)
    return chosen[:, 0]
