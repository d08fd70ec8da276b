"""Low-rank factors with nonnegative codes, which a ReLU does not change.

With a ReLU, codes and basis cannot approximate a table better than without it. They are equally good if one
direction has an acute angle with all codes: adding a multiple of the coordinate along it to the other
coordinates makes them nonnegative, and the basis subtracts it again (Gillis & Kumar, 2015, on
semi-nonnegative matrix factorization). The rows of trained tables often share a mean, which provides such a
direction.

Axes: ``V`` words, ``D`` dimensions, ``R`` rank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from tqdm import tqdm

from shared_embeddings.fitting.factorization import BLOCK, truncated_svd
from shared_embeddings.fitting.task import BAR_DELAY

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
    """``||table[w] - codes[w] @ basis||`` of each word ``(V,)``, computed in blocks."""
    pairs = zip(table.split(BLOCK), codes.split(BLOCK))
    return torch.cat([(rows - part @ basis).norm(dim=1) for rows, part in pairs])


def mean_distance(table: Tensor, codes: Tensor, basis: Tensor) -> float:
    """The mean over the words of `distances` (Distilled Embedding, Eq. 5)."""
    return float(distances(table, codes, basis).mean())


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
        best = mean_distance(table, codes, basis)
        for _ in range(_ROUNDS):
            bar.update()
            if best == 0.0:
                break
            errors = distances(table, codes, basis).double()
            found = truncated_svd(table, rank, 1.0 / errors.clamp(min=_LEAST_ERROR * best))
            mean = mean_distance(table, *found)
            if mean >= best:
                break
            gain, best, (codes, basis) = 1.0 - mean / best, mean, found
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
    direction = common_direction(codes)
    if direction is not None:
        return lifted(codes, basis, direction)
    if codes.size(1) > 1:
        return shifted(codes[:, :-1], basis[:-1])
    sign = 1.0 if codes.clamp(min=0.0).norm() >= codes.clamp(max=0.0).norm() else -1.0
    return (codes * sign).clamp(min=0.0), basis * sign


def common_direction(codes: Tensor) -> Tensor | None:
    """A unit vector ``(R,)`` at an acute angle with all codes ``(V, R)`` except tiny ones.

    Gilbert's algorithm, which finds the point closest to zero in the convex hull of the codes' directions.
    None if zero is in the hull or too close to it.
    """
    units = codes[_counted(codes)].double()
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


def lifted(codes: Tensor, basis: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Factors with nonnegative codes and the product ``codes @ basis``.

    With c the codes' coordinate along `direction`, r the others, and slopes s such that ``r + s c >= 0``, the
    basis of c is reduced by s times that of r. Codes with an obtuse angle to the direction are clamped at
    zero.

    Args:
        codes, basis: ``(V, R)`` and ``(R, D)``.
        direction: ``(R,)`` as from `common_direction`.
    """
    axes = torch.linalg.qr(direction.double().unsqueeze(1), mode="complete").Q[:, 1:]
    turned = torch.cat((direction.double().unsqueeze(1), axes), dim=1)
    slopes = turned.new_zeros(axes.size(1))
    for part in codes[_counted(codes)].split(BLOCK):
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


def shifted(codes: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Factors with nonnegative codes, one more column, and the product ``codes @ basis``.

    With a shift s, ``(c + s) B - 1 (s B)`` is ``c B``: the last column of the codes is constant and undoes
    the shift.

    Args:
        codes, basis: ``(V, R)`` and ``(R, D)``.
    """
    shift = -codes.amin(dim=0)
    level = codes.square().mean().sqrt().clamp(min=torch.finfo(codes.dtype).tiny)
    longer = torch.cat((codes + shift, level.expand(len(codes), 1)), dim=1)
    return longer, torch.cat((basis, -(shift @ basis).unsqueeze(0) / level))


def _counted(codes: Tensor) -> Tensor:
    """Which codes ``(V,)`` are not tiny."""
    lengths = codes.norm(dim=1)
    return lengths > _LEAST_LENGTH * lengths.mean()
