"""Clustering: k-means for many points (greedy k-means++, then Lloyd's iterations), and vectors of classes.

Axes: ``n`` points, ``K`` clusters, ``d`` dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from shared_embeddings.fitting.task import BAR_DELAY

# Centroids are trained on a sample of this many points per cluster, but at least the second number. The final
# centroids are the means of all points.
_PER_CLUSTER = 64
_LEAST_SAMPLE = 2**14
# The same for the points that the initial centroids are drawn from.
_DRAWN_PER_CLUSTER = 16
_LEAST_DRAWN = 2**13
# Maximum number of distances for drawing initial centroids. Beyond it, the points are split into parts with a
# share of the clusters each. On 10,000 rows of 180 dimensions, the error of 900 clusters is 1.6 % higher with
# four parts than with one, in a quarter of the time; it is 6 % higher if a coarser k-means defines the parts.
_DRAWN_DISTANCES = 2**27
# Iterations end at this number, or when the squared error falls by less than this fraction.
_MOST_ITERATIONS = 100
_LEAST_GAIN = 1e-4
# Iterations within each part.
_PART_ITERATIONS = 5
# Distances computed at a time, so that they stay in the cache, and the minimum number of points.
_BLOCK = 2**18
_LEAST_ROWS = 256
# Overhead of a distance, in multiplications.
_COST = 8


def kmeans(
    points: Tensor, clusters: int, seed: int, products: int, progress: bool = False
) -> tuple[Tensor, Tensor]:
    """Cluster points by k-means.

    Args:
        points: ``(n, d)`` float32 on the CPU.
        clusters: K, at most n.
        seed: the seed of samples and initial centroids.
        products: the budget of the iterations, in multiplications.
        progress: whether to show progress bars.

    Returns:
        The cluster ``(n,)`` int64 of every point, and the centroids ``(K, d)``.
    """
    generator = torch.Generator().manual_seed(seed % 2**64)
    order = torch.randperm(len(points), generator=generator)
    centroids = _drawn(points, order, clusters, generator, progress)
    size = max(_PER_CLUSTER * clusters, _LEAST_SAMPLE)
    sample = points if size >= len(points) else points[order[:size]]
    best = math.inf
    iterations = products // (len(sample) * clusters * (points.size(1) + _COST))
    for _ in range(min(max(iterations, 1), _MOST_ITERATIONS)):
        codes, error = nearest(sample, centroids, progress)
        if error >= best * (1.0 - _LEAST_GAIN):
            break
        best, centroids = error, _means(sample, codes, centroids)
    if sample is not points:
        centroids = _means(points, nearest(points, centroids, progress)[0], centroids)
    return nearest(points, centroids, progress)[0], centroids


def nearest(points: Tensor, centroids: Tensor, progress: bool = False) -> tuple[Tensor, float]:
    """The nearest centroid ``(n,)`` of every point, and the sum of the squared distances."""
    clusters = len(centroids)
    rows = max(_BLOCK // clusters, _LEAST_ROWS)
    sizes, turned = centroids.square().sum(dim=1), -2.0 * centroids.t().contiguous()
    buffer = centroids.new_empty(rows, clusters)
    codes, error = torch.empty(len(points), dtype=torch.int64), 0.0
    hidden = not progress
    bar = tqdm(total=len(points), desc="distances", delay=BAR_DELAY, leave=False, disable=hidden)
    with bar:
        for start in range(0, len(points), rows):
            block = points[start : start + rows]
            # ||a - b||² without ||a||²; NumPy finds the least several times faster than torch.
            scores = torch.addmm(sizes, block, turned, out=buffer[: len(block)])
            found = torch.from_numpy(scores.numpy().argmin(axis=1))
            codes[start : start + rows] = found
            least = scores.gather(1, found.unsqueeze(1)).sum(dtype=torch.float64)
            error += float(least + block.square().sum(dtype=torch.float64))
            bar.update(len(block))
    return codes, error


def _means(points: Tensor, codes: Tensor, centroids: Tensor) -> Tensor:
    """The means ``(K, d)`` of the points of each cluster; clusters without points keep their centroids."""
    sizes = codes.bincount(minlength=len(centroids)).unsqueeze(1)
    sums = torch.zeros_like(centroids).index_add_(0, codes, points)
    return torch.where(sizes > 0, sums / sizes.clamp(min=1), centroids)


def _drawn(
    points: Tensor, order: Tensor, clusters: int, generator: torch.Generator, progress: bool
) -> Tensor:
    """Initial centroids ``(K, d)`` from points in random `order`, in several parts if there are many."""
    order = order[: max(_DRAWN_PER_CLUSTER * clusters, _LEAST_DRAWN)]
    parts = min(max(len(order) * clusters // _DRAWN_DISTANCES, 1), clusters)
    if parts == 1:
        return _spread(points[order], clusters, generator)
    found = []
    bar = tqdm(order.chunk(parts), desc="first centroids", leave=False, disable=not progress)
    for number, ids in enumerate(bar):
        share = clusters * (number + 1) // len(bar) - clusters * number // len(bar)
        part = points[ids]
        centroids = _spread(part, share, generator)
        for _ in range(_PART_ITERATIONS):
            centroids = _means(part, nearest(part, centroids)[0], centroids)
        found.append(centroids)
    return torch.cat(found)


def _spread(points: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """K of the points ``(K, d)``, far from each other (greedy k-means++, Arthur & Vassilvitskii, 2007).

    Each is the best of a few candidates, drawn with probabilities proportional to their squared distance from
    the chosen points.
    """
    trials = 2 + int(math.log(clusters))
    sizes = points.square().sum(dim=1)
    chosen = torch.randint(len(points), (clusters,), generator=generator)
    left = (points - points[chosen[0]]).square().sum(dim=1)
    for place in range(1, clusters):
        left[chosen[place - 1]] = 0.0
        shares = left.cumsum(0)
        draws = torch.rand(trials, generator=generator, dtype=points.dtype) * shares[-1]
        tried = torch.searchsorted(shares, draws, right=True).clamp_(max=len(points) - 1)
        # ||a - b||² of all points and the candidates.
        errors = torch.addmm(sizes, points[tried], points.t(), alpha=-2.0).add_(sizes[tried].unsqueeze(1))
        errors.clamp_(min=0.0)
        torch.minimum(errors, left, out=errors)
        best = int(errors.sum(dim=1).argmin())
        left, chosen[place] = errors[best], tried[best]
    return points[chosen]


# Maximum number of reweighting rounds, and the relative gain below which they end.
_CENTER_ROUNDS = 50
_LEAST_CENTER_GAIN = 1e-5
# Distances are clamped to this fraction of their mean, which limits the weights.
_LEAST_DISTANCE = 1e-3
_CENTER_BLOCK = 16384


def class_centers(
    parts: Sequence[Tensor], classes: Tensor, words: Tensor, num_classes: Sequence[int]
) -> list[Tensor]:
    """The class vectors of each level that minimize the mean of the distances ``||e - ê||``.

    Iterates means weighted by the inverse distance of the previous round (Weiszfeld, 1937); a round never
    increases the mean distance.

    Args:
        parts: for each level ``(V, W)``, the part of the rows that its class vectors approximate.
        classes: ``(V, L)`` the classes of each word.
        words: ``(n,)`` the words that count.
        num_classes: C of each level.

    Returns:
        For each level ``(C, W)``.
    """
    weights = torch.ones(len(classes), dtype=torch.float64, device=classes.device)
    best, kept = math.inf, []
    for _ in range(_CENTER_ROUNDS):
        tables = []
        for part, level, count in zip(parts, classes.long().unbind(dim=1), num_classes):
            # Weighted means; zero for classes without words.
            sums, sizes = part.new_zeros((count, part.size(1))), weights.new_zeros(count)
            for ids in words.split(_CENTER_BLOCK):
                sums.index_add_(0, level[ids], part[ids] * weights[ids].to(part).unsqueeze(1))
                sizes.index_add_(0, level[ids], weights[ids])
            tables.append(sums / sizes.clamp(min=1e-30).to(part).unsqueeze(1))
        distances = torch.zeros_like(weights)
        for ids in words.split(_CENTER_BLOCK):
            for part, level, table in zip(parts, classes[ids].long().unbind(dim=1), tables):
                distances[ids] += (part[ids] - table[level]).square().sum(dim=1)
        distances.sqrt_()
        mean = float(distances[words].mean())
        if mean >= best:
            break
        gain, best, kept = 1.0 - mean / best, mean, tables
        if gain < _LEAST_CENTER_GAIN or best == 0.0:
            break
        weights = 1.0 / distances.clamp(min=_LEAST_DISTANCE * best)
    return kept
