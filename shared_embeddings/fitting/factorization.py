"""Factorizations of a table: its SVD, weighted by how often words occur, and its tensor train.

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
from shared_embeddings.utils.errors import UserError


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

    Raises:
        UserError: the table or the weights are invalid, or the rank is out of range.
    """
    check_table(table)
    check_rank(rank, table.size(1))
    if weights is not None:
        check_counts(weights, table.size(0))
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


def check_table(table: Tensor) -> None:
    """Raise UserError unless `table` is ``(V, D)``, not empty, of finite numbers."""
    if table.dim() != 2 or table.numel() == 0 or not table.is_floating_point():
        raise UserError(
            f"the table has shape {tuple(table.shape)} and type {table.dtype}, but it must be (V, D), one "
            "vector of floating-point numbers for each word"
        )
    for start, block in zip(range(0, len(table), BLOCK), table.split(BLOCK)):
        wrong = ~block.isfinite().all(dim=1)
        if wrong.any():
            word = start + int(wrong.nonzero()[0])
            raise UserError(
                f"the table's row {word} holds NaN or infinity: only finite tables can be factorized"
            )


def check_counts(counts: Tensor, words: int) -> None:
    """Raise UserError unless `counts` has one finite number for each word, none negative, not all zero."""
    if counts.shape != (words,):
        raise UserError(
            f"there are counts of shape {tuple(counts.shape)} for {words} words: give one for each word"
        )
    for wrong, what in ((~counts.isfinite(), "not finite"), (counts < 0, "negative")):
        if wrong.any():
            word = int(wrong.nonzero()[0])
            raise UserError(f"the count of word {word} is {counts[word].item()}, which is {what}")
    if not (counts > 0).any():
        raise UserError("all counts are zero: at least one word must have a count above zero")


def check_rank(rank: int, dim: int) -> None:
    """Raise UserError unless 1 <= `rank` <= D."""
    if not 1 <= rank <= dim:
        raise UserError(f"the rank is {rank}, but it must be from 1 to the {dim} dimensions of the table")


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

    Raises:
        UserError: the table is invalid, or the shapes do not match it.
    """
    check_table(table)
    number = len(vocab_shape)
    inner = [ranks] * (number - 1) if isinstance(ranks, int) else list(ranks)
    words, dim = table.shape
    if number < 2 or len(dim_shape) != number or len(inner) != number - 1 or min(inner) < 1:
        raise UserError(
            f"vocab_shape {list(vocab_shape)}, dim_shape {list(dim_shape)} and ranks {inner} do not fit: "
            "K >= 2 factors each and K - 1 ranks of at least 1 are needed"
        )
    padded = math.prod(vocab_shape)
    if padded < words or math.prod(dim_shape) != dim:
        raise UserError(
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


def _balanced(cores: list[Tensor]) -> list[Tensor]:
    """The same tensor train with equal scales of all cores; TT-SVD puts the whole scale into the last one."""
    sizes = [float(core.square().mean().sqrt()) for core in cores]
    if min(sizes) == 0.0:
        return cores
    common = math.prod(size ** (1 / len(sizes)) for size in sizes)
    return [core * (common / size) for core, size in zip(cores, sizes)]


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
