"""How many bits each word, and each direction of its row, gets.

Axes: ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


def even_counts(num_words: int, bits: float) -> dict[int, int]:
    """The number of words of each width for a mean of `bits`, with widths that differ by at most one."""
    low = int(bits)
    high = round((bits - low) * num_words)
    return {width: count for width, count in ((low, num_words - high), (low + 1, high)) if count}


def widths_within(
    importance: Tensor,
    limit: int,
    size_of: Callable[[Mapping[int, int]], int],
    widths: Sequence[int],
    error_shares: Tensor,
) -> Tensor:
    """The widths ``(V,)`` with the least total error that take `limit` bytes at most.

    The squared error of a word is estimated as its importance times the share for its width. Bits go one by
    one to the word whose error they lower most.

    Args:
        importance: ``(V,)`` nonnegative: the squared norm of the row, times a weight.
        limit: bytes.
        size_of: the bytes for numbers of words by width.
        widths: consecutive widths, ascending; all words have at least the first.
        error_shares: for each width; falls by less and less.
    """
    gains = importance.double().unsqueeze(1) * error_shares.diff().neg()
    order = gains.flatten().argsort(descending=True, stable=True)

    def found(extra: int) -> Tensor:
        chosen = torch.zeros(gains.numel(), dtype=torch.uint8)
        chosen[order[:extra]] = 1
        return (widths[0] + chosen.view_as(gains).sum(dim=1)).to(torch.uint8)

    # The size grows with the number of bits but for a few codebooks: bisect.
    least, most = 0, len(order)
    while least < most:
        middle = (least + most + 1) // 2
        counts = torch.bincount(found(middle).long()).tolist()
        if size_of(dict(enumerate(counts))) <= limit:
            least = middle
        else:
            most = middle - 1
    return found(least)


def direction_bits(variances: Tensor, errors: Tensor, total: int) -> Tensor:
    """The bits of each direction ``(R,)`` with the least squared error: `total`, or as many as they can take.

    Args:
        variances: ``(R,)`` of the numbers along each direction.
        errors: the squared error of normal numbers with 0, 1, ... bits; falls by less and less.
        total: the bits of all directions together.
    """
    gains = (variances.unsqueeze(1) * errors.diff().neg()).flatten()
    chosen = gains.argsort(descending=True, stable=True)[:total] // (len(errors) - 1)
    return torch.bincount(chosen, minlength=len(variances))
