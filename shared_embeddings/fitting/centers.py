"""The vectors of classes of words with the least mean distance to the words.

Axes: ``V`` words, ``L`` levels of classes, ``C`` classes of a level, ``W`` dimensions of a level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Rounds of reweighting, and the relative gain at which they end.
_ROUNDS = 50
_LEAST_GAIN = 1e-5
# A word whose distance is smaller than this share of the mean weighs no more than one at such a distance.
_LEAST_DISTANCE = 1e-3
_BLOCK = 16384


def class_centers(
    parts: Sequence[Tensor], classes: Tensor, words: Tensor, num_classes: Sequence[int]
) -> list[Tensor]:
    """The class vectors of each level that minimize the mean of the distances ``||e - ê||``.

    Means in which a word counts by the inverse of the distance that it had in the round before (Weiszfeld,
    1937); each round can only lower the mean distance.

    Args:
        parts: for each level the numbers ``(V, W)`` that its class vectors stand for.
        classes: ``(V, L)`` the classes of each word.
        words: ``(n,)`` the words that count.
        num_classes: C of each level.

    Returns:
        For each level ``(C, W)``.
    """
    weights = torch.ones(len(classes), dtype=torch.float64, device=classes.device)
    best, kept = math.inf, []
    for _ in range(_ROUNDS):
        tables = [
            _weighted_means(part, level.long(), words, weights, count)
            for part, level, count in zip(parts, classes.unbind(dim=1), num_classes)
        ]
        distances = torch.zeros_like(weights)
        for ids in words.split(_BLOCK):
            for part, level, table in zip(parts, classes[ids].long().unbind(dim=1), tables):
                distances[ids] += (part[ids] - table[level]).square().sum(dim=1)
        distances.sqrt_()
        mean = float(distances[words].mean())
        if mean >= best:
            break
        gain, best, kept = 1.0 - mean / best, mean, tables
        if gain < _LEAST_GAIN or best == 0.0:
            break
        weights = 1.0 / distances.clamp(min=_LEAST_DISTANCE * best)
    return kept


def _weighted_means(part: Tensor, classes: Tensor, words: Tensor, weights: Tensor, count: int) -> Tensor:
    """The weighted means ``(C, W)`` of the words of each class; zero for classes without words."""
    sums = part.new_zeros((count, part.size(1)))
    sizes = weights.new_zeros(count)
    for ids in words.split(_BLOCK):
        sums.index_add_(0, classes[ids], part[ids] * weights[ids].to(part).unsqueeze(1))
        sizes.index_add_(0, classes[ids], weights[ids])
    return sums / sizes.clamp(min=1e-30).to(part).unsqueeze(1)
