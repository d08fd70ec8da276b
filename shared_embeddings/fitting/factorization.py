"""Factorizations of a table: its (weighted) SVD, its tensor train, and low-rank factors without negatives.

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

from shared_embeddings.nn.layers import CODE_SCALE
from shared_embeddings.utils.progress import BAR_DELAY


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
    codes = torch.cat([(block @ basis.t()).to(table.dtype) for _, block in blocks(table)])
    return codes, basis.to(table.dtype)


def best_basis(table: Tensor, rank: int, weights: Tensor | None, progress: bool = False) -> Tensor:
    """The `rank` most important directions ``(R, D)`` of the weighted rows, orthonormal, in 64 bits."""
    gram = torch.zeros((table.size(1), table.size(1)), dtype=torch.float64, device=table.device)
    total = -(-len(table) // BLOCK)
    for rows, block in tqdm(blocks(table), desc="directions", total=total, disable=not progress):
        weighted = block if weights is None else block * weights[rows].to(block).unsqueeze(1)
        gram.addmm_(weighted.t(), block)
    return torch.linalg.eigh(gram).eigenvectors[:, -rank:].flip(1).t().contiguous()


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


# Nonnegative codes, which a ReLU does not change. With a ReLU, codes and basis cannot approximate a table
# better than without it. They are equally good if one direction has an acute angle with all codes: adding a
# multiple of the coordinate along it to the other coordinates makes them nonnegative, and the basis subtracts
# it again (Gillis & Kumar, 2015, on semi-nonnegative matrix factorization). The rows of trained tables often
# share a mean, which provides such a direction.

# Maximum number of reweighting rounds, and the relative gain below which they end.
_ROUNDS = 20
_LEAST_GAIN = 1e-5
# With this many words, a round takes seconds.
_LONG = 2**15
# Errors are clamped to this fraction of their mean, which limits the weights.
_LEAST_ERROR = 1e-3
# Codes shorter than this fraction of the mean length are ignored in the search for a direction.
_LEAST_LENGTH = 1e-2
# Steps of that search. It ends when the smallest cosine is this fraction of the largest possible one, or when
# the latter is below the minimum, where slopes would be too steep for 32 bits.
_STEPS = 1000
_GOOD_SHARE = 0.5
_LEAST_COSINE = 0.01


def distances(table: Tensor, codes: Tensor, basis: Tensor) -> Tensor:
    """``||table[w] - codes[w] @ basis||`` of each word ``(V,)`` (Distilled Embedding, Eq. 5)."""
    pairs = zip(table.split(BLOCK), codes.split(BLOCK))
    return torch.cat([(rows - part @ basis).norm(dim=1) for rows, part in pairs])


def least_mean_distance(table: Tensor, rank: int, progress: bool = False) -> tuple[Tensor, Tensor]:
    """Factors of rank R with the least mean distance between rows; the SVD minimizes the mean square.

    Iteratively reweighted least squares: SVDs with rows weighted by the inverse distance of the previous
        round.
    The result is never worse than the SVD.

    Args:
        table: ``(V, D)``.
        rank: R, from 1 to D.
        progress: whether to show a progress bar.

    Returns:
        Codes ``(V, R)``, and the basis ``(R, D)`` with orthonormal rows.
    """
    # Show the bar immediately if a round takes seconds.
    delay = BAR_DELAY if len(table) < _LONG else 0.0
    with tqdm(total=_ROUNDS + 1, desc="reweighting", delay=delay, disable=not progress) as bar:
        codes, basis = truncated_svd(table, rank)
        best = float(distances(table, codes, basis).mean())
        for _ in range(_ROUNDS):
            bar.update()
            if best == 0.0:
                break
            errors = distances(table, codes, basis).double()
            reweighted = truncated_svd(table, rank, 1.0 / errors.clamp(min=_LEAST_ERROR * best))
            mean = float(distances(table, *reweighted).mean())
            if mean >= best:
                break
            gain, best, (codes, basis) = 1.0 - mean / best, mean, reweighted
            if gain < _LEAST_GAIN:
                break
    return codes, basis


def without_negatives(codes: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the same rank with nonnegative codes.

    Their product is ``codes @ basis`` if the codes have a common direction. Otherwise the last column is
    replaced by a constant; a single column is clamped at zero.

    Args:
        codes, basis: ``(V, R)`` and ``(R, D)``, the most important column first.
    """
    direction = _common_direction(codes)
    if direction is not None:
        return _lifted(codes, basis, direction)
    if codes.size(1) > 1:
        # With a shift s, (c + s) B - 1 (s B) is c B: the last column is constant and undoes the shift.
        codes, basis = codes[:, :-1], basis[:-1]
        shift = -codes.amin(dim=0)
        level = codes.square().mean().sqrt().clamp(min=torch.finfo(codes.dtype).tiny)
        longer = torch.cat((codes + shift, level.expand(len(codes), 1)), dim=1)
        return longer, torch.cat((basis, -(shift @ basis).unsqueeze(0) / level))
    sign = 1.0 if codes.clamp(min=0.0).norm() >= codes.clamp(max=0.0).norm() else -1.0
    return (codes * sign).clamp(min=0.0), basis * sign


def _common_direction(codes: Tensor) -> Tensor | None:
    """A unit vector ``(R,)`` at an acute angle with all codes ``(V, R)`` except tiny ones.

    Gilbert's algorithm, which finds the point closest to zero in the convex hull of the codes' directions.
    None if zero is in the hull or too close to it.
    """
    lengths = codes.norm(dim=1)
    units = codes[lengths > _LEAST_LENGTH * lengths.mean()].double()
    units /= units.norm(dim=1, keepdim=True)
    point = units.mean(dim=0)
    for _ in range(_STEPS):
        length = float(point.norm())
        # No vector has a cosine of more than the point's length with all of them.
        if not length > _LEAST_COSINE:
            return None
        products = units @ point
        if float(products.min()) >= _GOOD_SHARE * length**2:
            return (point / length).to(codes.dtype)
        difference = point - units[products.argmin()]
        share = float(point @ difference / (difference @ difference))
        point = point - min(share, 1.0) * difference
    return None


def _lifted(codes: Tensor, basis: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Factors with nonnegative codes and the product ``codes @ basis``.

    With c the codes' coordinate along `direction`, r the others, and slopes s such that ``r + s c >= 0``, the
    basis of c is reduced by s times that of r. Codes with an obtuse angle to the direction are clamped at
    zero.
    """
    axes = torch.linalg.qr(direction.double().unsqueeze(1), mode="complete").Q[:, 1:]
    turned = torch.cat((direction.double().unsqueeze(1), axes), dim=1)
    slopes = turned.new_zeros(axes.size(1))
    lengths = codes.norm(dim=1)
    for part in codes[lengths > _LEAST_LENGTH * lengths.mean()].split(BLOCK):
        along, others = (part.double() @ turned).tensor_split([1], dim=1)
        slopes = torch.maximum(slopes, (-others / along).amax(dim=0))
    of_others = axes.t() @ basis.double()
    first = direction.double() @ basis.double() - slopes @ of_others
    positive = torch.empty_like(codes)
    for part, lifted_part in zip(codes.split(BLOCK), positive.split(BLOCK)):
        coordinates = part.double() @ turned
        coordinates[:, 1:] += coordinates[:, :1] * slopes
        lifted_part.copy_(coordinates.clamp_(min=0.0))
    return positive, torch.cat((first.unsqueeze(0), of_others)).to(basis.dtype)
