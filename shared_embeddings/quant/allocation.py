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
    margin: float = 1.0,
) -> Tensor:
    """The rates ``(V,)`` with the least total error that are small enough together.

    The squared error of a word is estimated as its importance times the share for its rate. Words get the
    next rate one by one, first those whose error it lowers most for each byte. Then all get the same one if
    the error of that is less: words with different rates take bytes for these, too.

    Args:
        importance: ``(V,)`` nonnegative: the squared norm of the row, times a weight.
        is_small: whether numbers of words by rate take as few bytes as wanted.
        rates: ascending by size; all words have at least the first.
        sizes: the bytes of the codes of a word for each rate.
        errors: the share of the error for each rate; falls.
        margin: how many times the error of different rates that of the same one may be.
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

    # The size grows with the number of bits but for a few codebooks, and for one rate: bisect.
    least, most = 0, len(order)
    while least < most:
        middle = (least + most + 1) // 2
        counts = torch.bincount(steps(middle), minlength=len(rates)).tolist()
        if is_small(dict(zip(rates, counts))):
            least = middle
        else:
            most = middle - 1
    alike = [place for place, rate in enumerate(rates) if is_small({rate: len(importance)})]
    equal, mixed = torch.full_like(importance, max(alike, default=0), dtype=torch.long), steps(least)
    left_equal, left_mixed = (
        float(importance.double() @ errors.double()[places]) for places in (equal, mixed)
    )
    return torch.tensor(rates)[equal if left_equal <= margin * left_mixed else mixed]
