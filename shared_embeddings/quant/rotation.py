"""A seeded rotation: signs, then small orthogonal matrices along the factors of D.

After it, the entries of any row are close to normal with one variance, so that one codebook fits all tables.

Axes: ``D`` dimensions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shared_embeddings.quant.decoder import factors_of


def rotate(values: Tensor, signs: Tensor) -> Tensor:
    """Rotated vectors ``(n, D)``.

    Args:
        values: ``(n, D)``.
        signs: ``(D,)`` of 0 and 1; dimensions with a 1 are negated first.
    """
    return _mixed(values * _as_factors(signs, values), inverted=False)


def rotate_back(values: Tensor, signs: Tensor) -> Tensor:
    """The inverse of `rotate`."""
    return _mixed(values, inverted=True) * _as_factors(signs, values)


def _as_factors(signs: Tensor, values: Tensor) -> Tensor:
    """1 or -1 for every dimension, in the type of `values`."""
    return 1 - 2 * signs.to(values.dtype)


def _mixed(values: Tensor, inverted: bool) -> Tensor:
    """Vectors ``(n, D)`` times the Kronecker product of the orthogonal matrices, or of their transposes."""
    mixed, done = values, 1
    for size in factors_of(values.size(1)):
        matrix = _orthogonal(size, values)
        # The axis of this factor has `done` entries of earlier factors before it.
        parts = mixed.reshape(-1, size, values.size(1) // (done * size))
        mixed = torch.matmul(matrix.t() if inverted else matrix, parts)
        done *= size
    return mixed.reshape(values.shape)


def _orthogonal(size: int, like: Tensor) -> Tensor:
    """A Hadamard matrix for a power of two, the cosine transform (DCT-II) otherwise."""
    if size & (size - 1) == 0:
        matrix = torch.ones(1, 1, dtype=like.dtype, device=like.device)
        for _ in range(size.bit_length() - 1):
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        return matrix / math.sqrt(size)
    places = torch.arange(size, dtype=torch.float64, device=like.device)
    matrix = torch.cos(math.pi / size * (places + 0.5) * places.unsqueeze(1)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.to(like.dtype)
