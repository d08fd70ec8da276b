"""How many bits each word gets, so that the mean is as requested.

Axes: ``V`` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def even_counts(num_words: int, bits: float) -> dict[int, int]:
    """The number of words of each width for a mean of `bits`, with widths that differ by at most one."""
    low = int(bits)
    high = round((bits - low) * num_words)
    return {width: count for width, count in ((low, num_words - high), (low + 1, high)) if count}


def widths_for(importance: Tensor, bits: float, widths: range) -> Tensor:
    """The widths ``(V,)`` with the least total error for a mean of `bits`.

    The squared error of a word at b bits is estimated as its importance times 4**-b, the limit for normal
    numbers. Every bit goes to the word whose error it lowers most, after all words have the smallest width.

    Args:
        importance: ``(V,)`` nonnegative; the squared norm of the row, times a weight.
        bits: the mean width, which is reached to 1 / V.
        widths: the widths that the codec supports.
    """
    count, least = len(importance), widths.start
    steps = torch.arange(least, widths.stop - 1, dtype=torch.float64, device=importance.device)
    gains = importance.double().unsqueeze(1) * 4.0**-steps
    # A word without importance still has an order of its own: ties go to the first words.
    extra = min(round((bits - least) * count), gains.numel())
    chosen = torch.zeros(gains.numel(), dtype=torch.uint8, device=importance.device)
    chosen[gains.flatten().argsort(descending=True, stable=True)[:extra]] = 1
    return (least + chosen.view_as(gains).sum(dim=1)).to(torch.uint8)
