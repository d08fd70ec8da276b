"""How many bits each word ``(V,)`` gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


def rates_within(
    importance: Tensor,
    is_small: Callable[[Mapping[float, int]], bool],
    rates: Sequence[float],
    sizes: Sequence[int],
    errors: Tensor,
) -> Tensor:
    """The rates ``(V,)`` with the least total error that are small enough together.

    The squared error of a word is estimated as its importance times the share for its rate. Words get the
    next rate one by one, first those whose error it lowers most for each byte.

    Args:
        importance: ``(V,)`` nonnegative: the squared norm of the row, times a weight.
        is_small: whether numbers of words by rate take as few bytes as wanted.
        rates: ascending by size; all words have at least the first.
        sizes: the bytes of the codes of a word for each rate.
        errors: the share of the error for each rate; falls.
    """
    # How much each rate lowers the error for each byte, of the convex hull of all: descending.
    points, slopes, start = list(zip(sizes, errors.tolist())), [], 0
    while start < len(points) - 1:
        size, error = points[start]
        steepest = [(error - lower) / max(more - size, 1) for more, lower in points[start + 1 :]]
        best = max(range(len(steepest)), key=lambda place: (steepest[place], place))
        slopes += [steepest[best]] * (best + 1)
        start += best + 1
    gains = importance.double().unsqueeze(1) * torch.tensor(slopes, dtype=torch.float64)
    order = gains.flatten().argsort(descending=True, stable=True)

    def steps(extra: int) -> Tensor:
        chosen = torch.zeros(gains.numel(), dtype=torch.uint8)
        chosen[order[:extra]] = 1
        return chosen.view_as(gains).sum(dim=1)

    # The size grows with the number of bits but for a few codebooks: bisect.
    least, most = 0, len(order)
    while least < most:
        middle = (least + most + 1) // 2
        counts = torch.bincount(steps(middle), minlength=len(rates)).tolist()
        if is_small(dict(zip(rates, counts))):
            least = middle
        else:
            most = middle - 1
    return torch.tensor(rates)[steps(least)]
