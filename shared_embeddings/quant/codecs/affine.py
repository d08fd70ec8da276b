"""Evenly spaced levels with a scale and an offset for each group of numbers: ``code * scale + offset``.

As MLX's affine mode, and Q4_1 and Q5_1 of llama.cpp. Axes: ``D`` dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from shared_embeddings.quant import kernels
from shared_embeddings.quant.codec import Books, register
from shared_embeddings.quant.decoder import windows
from shared_embeddings.quant.grid import GridCodec


def decode_affine(codes: Any, rate: float, dim: int, parts: Mapping[str, Any]) -> Any:
    """Whole numbers from zero; their groups have offsets."""
    return windows(codes, int(rate) * np.arange(1, dim + 1), int(rate)).astype(np.float32)


@register("affine")
class AffineCodec(GridCodec):
    """See the module."""

    about = "evenly spaced levels, a scale and an offset for each group, as in MLX"
    has_offsets = True
    is_candidate = False
    few_states = 16
    standalone = (decode_affine,)

    @staticmethod
    def levels(rate: float) -> np.ndarray:
        return np.arange(2 ** int(rate), dtype=np.float32)

    def direct_scores(
        self, hidden: Tensor, codes: Tensor, scales: Tensor, rate: float, books: Books
    ) -> Tensor | None:
        if self.group_size % 8 or self.dim % self.group_size:
            return None
        factors, offsets = scales.split(self.num_groups, dim=1)
        products = kernels.uniform_scores(hidden, codes, int(rate), 0.0, factors, self.group_size)
        return products.addmm_(hidden.unflatten(1, (-1, self.group_size)).sum(dim=2), offsets.t())
