"""The tensor train of a table (Oseledets, 2011).

Axes: ``V`` words, ``D`` dimensions, ``K`` cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.fitting.table import BLOCK, check_table


def tt_svd(
    table: Tensor, vocab_shape: Sequence[int], dim_shape: Sequence[int], ranks: int | Sequence[int]
) -> list[Tensor]:
    """The cores of a tensor train near the table (Oseledets, 2011, algorithm 1), exact when no rank is cut.

    Args:
        table: ``(V, D)``; rows of zeros fill it up to the product of `vocab_shape`.
        vocab_shape, dim_shape: v_k and d_k, as in the embedding `tensor_train`.
        ranks: the inner ranks, or one number for all; core slices that a smaller rank does not need are zero.

    Returns:
        K cores ``(r_{k-1}, v_k, d_k, r_k)``.

    Raises:
        ValueError: a table that cannot be used, or shapes that do not fit it.
    """
    check_table(table)
    number = len(vocab_shape)
    inner = [ranks] * (number - 1) if isinstance(ranks, int) else list(ranks)
    words, dim = table.shape
    if number < 2 or len(dim_shape) != number or len(inner) != number - 1 or min(inner) < 1:
        raise ValueError(
            f"vocab_shape {list(vocab_shape)}, dim_shape {list(dim_shape)} and ranks {inner} do not fit: "
            "K >= 2 factors each and K - 1 ranks of at least 1 are needed"
        )
    padded = math.prod(vocab_shape)
    if padded < words or math.prod(dim_shape) != dim:
        raise ValueError(
            f"vocab_shape {list(vocab_shape)} and dim_shape {list(dim_shape)} have the products {padded} "
            f"and {math.prod(dim_shape)}, but they must be at least {words} and exactly {dim}, as the table's"
        )
    rows = table.detach() if padded == words else F.pad(table.detach(), (0, 0, 0, padded - words))
    full = rows.reshape(*vocab_shape, *dim_shape)
    rest = full.permute([axis for k in range(number) for axis in (k, number + k)])
    cores, rank = [], 1
    for vocab, width, next_rank in zip(vocab_shape, dim_shape, inner):
        left, rest = _split(rest.reshape(rank * vocab * width, -1), next_rank)
        cores.append(left.view(rank, vocab, width, next_rank).to(table.dtype))
        rank = next_rank
    cores.append(rest.reshape(rank, vocab_shape[-1], dim_shape[-1], 1).to(table.dtype))
    return _balanced(cores)


def _split(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Orthonormal columns ``(m, rank)`` and the rest ``(rank, n)`` of a matrix ``(m, n)``, padded with 0."""
    # Sums over the longer side, block by block in 64 bits.
    if matrix.size(0) < matrix.size(1):
        gram = sum(part @ part.t() for part in map(Tensor.double, matrix.split(BLOCK, dim=1)))
        left = torch.linalg.eigh(gram).eigenvectors.flip(1)[:, :rank]
    else:
        gram = sum(part.t() @ part for part in map(Tensor.double, matrix.split(BLOCK)))
        right = torch.linalg.eigh(gram).eigenvectors.flip(1)[:, :rank]
        left = torch.linalg.qr(torch.cat([part.double() @ right for part in matrix.split(BLOCK)])).Q
    left = left.to(matrix.dtype)
    rest, missing = left.t() @ matrix, rank - left.size(1)
    if missing <= 0:
        return left, rest
    return F.pad(left, (0, missing)), F.pad(rest, (0, 0, 0, missing))


def _balanced(cores: list[Tensor]) -> list[Tensor]:
    """The same train with entries of one scale in all cores: the SVD puts the scale in the last."""
    sizes = [float(core.square().mean().sqrt()) for core in cores]
    if min(sizes) == 0.0:
        return cores
    common = math.prod(size ** (1 / len(sizes)) for size in sizes)
    return [core * (common / size) for core, size in zip(cores, sizes)]
