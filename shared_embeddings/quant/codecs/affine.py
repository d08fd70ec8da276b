"""Evenly spaced levels with a scale and an offset for each group of numbers: ``code * scale + offset``.

As MLX's affine mode, and Q4_1 and Q5_1 of llama.cpp. Axes: ``D`` dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shared_embeddings.quant.codec import register
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
    standalone = (decode_affine,)

    @staticmethod
    def levels(rate: float) -> np.ndarray:
        return np.arange(2 ** int(rate), dtype=np.float32)
