"""Factorizations of a table: its SVD, weighted by how often words occur, and its tensor train.

`shared_embeddings.fit` has checked the table, the counts and the sizes.

Axes: ``V`` words, ``D`` dimensions, ``R`` rank, ``K`` cores of a tensor train.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from shared_embeddings.layers.initialization import CODE_SCALE


def truncated_svd(table: Tensor, rank: int, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The best approximation of rank R: minimizes ``sum_w weights[w] * ||table[w] - codes[w] @ basis||^2``.

    The basis comes from the Gram matrix ``(D, D)``, so that V may be large; a word of weight zero gets the
    best code that the basis allows.

    Args:
        table: ``(V, D)``.
        rank: R, from 1 to D.
        weights: ``(V,)``, not negative; by default all one.

    Returns:
        Codes ``(V, R)``, and the basis ``(R, D)`` with orthonormal rows, the most important first.
    """
    basis = best_basis(table, rank, weights)
    return codes_in(table, basis), basis.to(table.dtype)


def best_basis(table: Tensor, rank: int, weights: Tensor | None, progress: bool = False) -> Tensor:
    """The `rank` most important directions ``(R, D)`` of the weighted rows, orthonormal, in 64 bits."""
    gram = torch.zeros((table.size(1), table.size(1)), dtype=torch.float64, device=table.device)
    total = -(-len(table) // BLOCK)
    for rows, block in tqdm(blocks(table), desc="directions", total=total, disable=not progress):
        weighted = block if weights is None else block * weights[rows].to(block).unsqueeze(1)
        gram.addmm_(weighted.t(), block)
    return torch.linalg.eigh(gram).eigenvectors[:, -rank:].flip(1).t().contiguous()


def codes_in(table: Tensor, basis: Tensor) -> Tensor:
    """The best codes ``(n, R)`` of rows ``(n, D)`` in an orthonormal basis ``(R, D)``."""
    return torch.cat([(block @ basis.t()).to(table.dtype) for _, block in blocks(table)])


# Words converted to 64 bits at a time.
BLOCK = 8192


def blocks(table: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The rows of the table, a block at a time, in 64 bits."""
    for start in range(0, len(table), BLOCK):
        rows = slice(start, min(start + BLOCK, len(table)))
        yield rows, table[rows].detach().double()


def tt_svd(
    table: Tensor, vocab_shape: Sequence[int], dim_shape: Sequence[int], ranks: int | Sequence[int]
) -> list[Tensor]:
    """TT-SVD (Oseledets, 2011, algorithm 1): a tensor train of a table, exact if no rank is truncated.

    Args:
        table: ``(V, D)``; padded with zeros to the product of `vocab_shape`.
        vocab_shape, dim_shape: v_k and d_k, as in the method `tensor_train`.
        ranks: the inner ranks, or one number for all; unused slices of cores are zero.

    Returns:
        K cores ``(r_{k-1}, v_k, d_k, r_k)``.
    """
    number = len(vocab_shape)
    inner = [ranks] * (number - 1) if isinstance(ranks, int) else list(ranks)
    padded, words = math.prod(vocab_shape), len(table)
    rows = table if padded == words else F.pad(table, (0, 0, 0, padded - words))
    full = rows.reshape(*vocab_shape, *dim_shape)
    rest = full.permute([axis for k in range(number) for axis in (k, number + k)])
    cores, rank = [], 1
    for vocab, width, next_rank in zip(vocab_shape, dim_shape, inner):
        left, rest = _split(rest.reshape(rank * vocab * width, -1), next_rank)
        cores.append(left.view(rank, vocab, width, next_rank).to(table.dtype))
        rank = next_rank
    cores.append(rest.reshape(rank, vocab_shape[-1], dim_shape[-1], 1).to(table.dtype))
    # TT-SVD puts the whole scale into the last core; equal scales of all train better.
    sizes = [float(core.square().mean().sqrt()) for core in cores]
    common = math.prod(size ** (1 / len(sizes)) for size in sizes)
    return cores if common == 0.0 else [core * (common / size) for core, size in zip(cores, sizes)]


def _split(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors ``(m, rank)``, orthonormal, and ``(rank, n)`` of a matrix ``(m, n)``, padded with zeros."""
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


# Activations with f(a x) = a f(x) for all a > 0; None means no activation.
_HOMOGENEOUS = (None, "relu")


@torch.no_grad()
def shrink_codes(codes: Tensor, basis: Tensor) -> None:
    """Scale the codes down and the basis up, so that their product stays the same.

    The codes become as small relative to the table as those of a new embedding (`CODE_SCALE`), so that
    training continues as quickly as it does from there. Not for codes that enter a ReLU: their common offset
    is larger than the differences between them.
    """
    size = codes.square().mean().sqrt()
    if size > 0:
        # The squares of the products, from small matrices instead of the table.
        squares = ((codes.t() @ codes).double() * (basis @ basis.t()).double()).sum().clamp(min=0.0)
        factor = (CODE_SCALE * (squares / (len(codes) * basis.size(1))).sqrt() / size).to(codes.dtype)
        codes.mul_(factor)
        basis.div_(factor)


@torch.no_grad()
def restore_scale(scale: float, activation: str | None, codes: Tensor, basis: Tensor) -> None:
    """Scale factors of a table that was divided by `scale` back to the table's own scale.

    The codes take the factor if the activation is homogeneous: Adam moves all entries equally, so with codes
    of unit scale every step of the basis would move the table by a multiple of itself. A small AWD-LSTM with
    GroupReduce ended an epoch at a validation perplexity of 131.7 with such codes and at 118.9 without; the
    fit was at 120.9.
    """
    (codes if activation in _HOMOGENEOUS else basis).mul_(scale)
