"""The 16 levels of llama.cpp's IQ4_NL, dense around zero, with a scale for each group of numbers.

Axes: ``D`` dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shared_embeddings.quant.codec import register
from shared_embeddings.quant.decoder import windows
from shared_embeddings.quant.grid import GridCodec


def decode_iq4_nl(codes: Any, rate: float, dim: int, parts: Mapping[str, Any]) -> Any:
    """Levels of a table."""
    levels = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    return np.array(levels, np.float32)[windows(codes, 4 * np.arange(1, dim + 1), 4)]


# Of codes 0, 1, ...; computed once, as torch.compile does not trace how.
_LEVELS = decode_iq4_nl(np.arange(0, 256, 16, dtype=np.uint8)[:, None], 4, 1, {})[:, 0]


@register("iq4_nl")
class Iq4NlCodec(GridCodec):
    """See the module."""

    about = "16 levels that are dense around zero, a scale for each group, as IQ4_NL of llama.cpp"
    is_candidate = False
    rates = (0.0, 4.0)
    standalone = (decode_iq4_nl,)

    @staticmethod
    def levels(rate: float) -> np.ndarray:
        return _LEVELS
