"""Evenly spaced levels around zero with a scale for each group of numbers.

As in ONNX Runtime's GatherBlockQuantized and MatMulNBits, a number is ``(code - zero) * scale`` with the zero
point 2**(rate - 1). One bit is -1/2 or 1/2.

Axes: ``D`` dimensions.
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


def decode_uniform(codes: Any, rate: float, dim: int, parts: Mapping[str, Any]) -> Any:
    """Evenly spaced levels around zero."""
    numbers = windows(codes, int(rate) * np.arange(1, dim + 1), int(rate)).astype(np.float32)
    return numbers - (0.5 if rate == 1 else 2 ** (rate - 1))


@register("uniform")
class UniformCodec(GridCodec):
    """See the module."""

    about = "evenly spaced levels, a scale for each group, no rotation, as in ONNX Runtime"
    onnx_rates = (2, 4, 8)
    few_states = 16
    standalone = (decode_uniform,)

    @staticmethod
    def levels(rate: float) -> np.ndarray:
        return np.arange(2 ** int(rate), dtype=np.float32) - np.float32(zero_point(rate))

    def direct_scores(
        self, hidden: Tensor, codes: Tensor, scales: Tensor, rate: float, books: Books
    ) -> Tensor | None:
        if self.group_size % 8 and self.group_size < self.dim:
            return None
        size = -(-self.group_size // 8) * 8
        return kernels.uniform_scores(hidden, codes, int(rate), zero_point(rate), scales, size)


def zero_point(rate: float) -> float:
    """The code of the number 0; with one bit, 0 is between both codes."""
    return 0.5 if rate == 1 else 2 ** (rate - 1)
