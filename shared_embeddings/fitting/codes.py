"""Words that share vectors: k-means, product quantization, sums of codebook entries, and vectors of classes.

Axes: ``V`` words, ``n`` points, ``D`` or ``d`` dimensions, ``G`` groups, ``M`` codebooks, ``K`` clusters or
codes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from shared_embeddings.fitting.factorization import BLOCK, best_basis, blocks
from shared_embeddings.nn.layers import code_dtype
from shared_embeddings.utils.progress import BAR_DELAY

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
_LEAST_KMEANS_GAIN = 1e-4
# Iterations within each part.
_PART_ITERATIONS = 5
# Distances computed at a time, so that they stay in the cache, and the minimum number of points.
_DISTANCES = 2**18
_LEAST_ROWS = 256
# Overhead of a distance, in multiplications.
_DISTANCE_COST = 8


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
    # Initial centroids, from several parts of the points if there are many.
    first = order[: max(_DRAWN_PER_CLUSTER * clusters, _LEAST_DRAWN)]
    parts = min(max(len(first) * clusters // _DRAWN_DISTANCES, 1), clusters)
    drawn = []
    chunks = first.chunk(parts)
    hidden = not progress or parts == 1
    for number, ids in enumerate(tqdm(chunks, desc="first centroids", leave=False, disable=hidden)):
        share = clusters * (number + 1) // len(chunks) - clusters * number // len(chunks)
        part = points[ids]
        centroids = _spread(part, share, generator)
        for _ in range(_PART_ITERATIONS if parts > 1 else 0):
            centroids = _means(part, nearest(part, centroids)[0], centroids)
        drawn.append(centroids)
    centroids = torch.cat(drawn)
    size = max(_PER_CLUSTER * clusters, _LEAST_SAMPLE)
    sample = points if size >= len(points) else points[order[:size]]
    best = math.inf
    iterations = products // (len(sample) * clusters * (points.size(1) + _DISTANCE_COST))
    for _ in range(min(max(iterations, 1), _MOST_ITERATIONS)):
        codes, error = nearest(sample, centroids, progress)
        if error >= best * (1.0 - _LEAST_KMEANS_GAIN):
            break
        best, centroids = error, _means(sample, codes, centroids)
    if sample is not points:
        centroids = _means(points, nearest(points, centroids, progress)[0], centroids)
    return nearest(points, centroids, progress)[0], centroids


def nearest(points: Tensor, centroids: Tensor, progress: bool = False) -> tuple[Tensor, float]:
    """The nearest centroid ``(n,)`` of every point, and the sum of the squared distances."""
    clusters = len(centroids)
    rows = max(_DISTANCES // clusters, _LEAST_ROWS)
    sizes, turned = centroids.square().sum(dim=1), -2.0 * centroids.t().contiguous()
    buffer = centroids.new_empty(rows, clusters)
    codes, error = torch.empty(len(points), dtype=torch.int64), 0.0
    with tqdm(total=len(points), desc="distances", delay=BAR_DELAY, leave=False, disable=not progress) as bar:
        for start in range(0, len(points), rows):
            block = points[start : start + rows]
            # ||a - b||² without ||a||²; NumPy finds the least several times faster than torch.
            scores = torch.addmm(sizes, block, turned, out=buffer[: len(block)])
            closest = torch.from_numpy(scores.numpy().argmin(axis=1))
            codes[start : start + rows] = closest
            least = scores.gather(1, closest.unsqueeze(1)).sum(dtype=torch.float64)
            error += float(least + block.square().sum(dtype=torch.float64))
            bar.update(len(block))
    return codes, error


def _means(points: Tensor, codes: Tensor, centroids: Tensor) -> Tensor:
    """The means ``(K, d)`` of the points of each cluster; clusters without points keep their centroids."""
    sizes = codes.bincount(minlength=len(centroids)).unsqueeze(1)
    sums = torch.zeros_like(centroids).index_add_(0, codes, points)
    return torch.where(sizes > 0, sums / sizes.clamp(min=1), centroids)


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
    best, centers = math.inf, []
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
        gain, best, centers = 1.0 - mean / best, mean, tables
        if gain < _LEAST_CENTER_GAIN or best == 0.0:
            break
        weights = 1.0 / distances.clamp(min=_LEAST_DISTANCE * best)
    return centers


# Multiplications in all k-means iterations, about two minutes on one core.
_PRODUCTS = 2**42
# Maximum number of multiplications for solving for the codebooks by least squares.
_SOLVED = 2**41


def product_quantization(
    table: Tensor, num_groups: int, num_clusters: int, seed: int = 0, progress: bool = False
) -> tuple[Tensor, Tensor]:
    """Split the vectors into G pieces and cluster each piece by k-means (Shi & Yu, 2018).

    Args:
        table: ``(V, D)``.
        num_groups: G, a divisor of D.
        num_clusters: K, at most V.
        seed: the seed of the initial centroids.
        progress: whether to show a progress bar.

    Returns:
        Codes ``(V, G)`` int64, and centroids ``(G, K, D / G)``.
    """
    words = len(table)
    codes = torch.empty(words, num_groups, dtype=torch.int64)
    centroids = []
    pieces = table.detach().float().cpu().view(words, num_groups, -1).unbind(1)
    is_one = num_groups == 1
    bar = tqdm(pieces, desc="k-means", unit=" pieces", disable=not progress or is_one)
    for group, piece in enumerate(bar):
        products = _PRODUCTS // num_groups
        clustered = kmeans(piece.contiguous(), num_clusters, seed + group, products, progress and is_one)
        codes[:, group] = clustered[0]
        centroids.append(clustered[1])
    return codes.to(table.device), torch.stack(centroids).to(table)


def learn_codes(
    table: Tensor, num_codebooks: int, codebook_size: int, seed: int = 0, progress: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes whose entries add up to the vectors (the form of Shu & Nakayama, 2018).

    The codebooks are initialized by k-means of the principal directions, with bits allocated by variance.
    Then each codebook in turn is fitted to the residual of the others, and each word gets its best entry,
    until the error converges. On a trained table of 10,000 x 200 with 56 codebooks of 16 entries, the
    relative error is 0.38 after a minute; that of the paper's auto-encoder is 0.43 after four.

    Args:
        table: ``(V, D)``.
        num_codebooks, codebook_size: M and K.
        seed: the seed of all random numbers; the global random state does not change.
        progress: whether to show progress bars.

    Returns:
        Codes ``(V, M)`` in the smallest type that holds them, and codebooks ``(M, K, D)``.
    """
    rotation = best_basis(table, table.size(1), None, progress).t().to(table).cpu()
    # The residual (V, D), table minus sums: columns by descending variance.
    left = torch.cat([block.cpu() @ rotation for block in table.split(BLOCK)]).float()
    codes = torch.zeros(len(table), num_codebooks, dtype=code_dtype(codebook_size))
    codebooks = left.new_zeros(num_codebooks, codebook_size, left.size(1))
    # Each codebook clusters a few columns of the residual.
    bar = tqdm(total=num_codebooks, desc="codebooks", unit=" codebooks", disable=not progress)
    for first in range(0, num_codebooks, left.size(1)):
        number = min(left.size(1), num_codebooks - first)
        shares = _shares(left.var(dim=0, correction=0), number, math.log2(codebook_size))
        for place, columns in enumerate(shares, first):
            products = _SUM_PRODUCTS // num_codebooks
            clusters, entries = kmeans(left[:, columns], codebook_size, seed + place, products)
            codes[:, place] = clusters
            codebooks[place][:, columns] = entries
            left[:, columns] -= entries[clusters]
            bar.update()
    bar.close()
    # Codebooks and codes are fitted to a sample of words; then the codes of the others are chosen.
    words = torch.randperm(len(left), generator=torch.Generator().manual_seed(seed % 2**64))
    sample, others, initial = words[:_SAMPLE].sort().values, words[_SAMPLE:], codebooks.clone()
    if len(others):
        sampled = left[sample], codes[sample]
        _fit_sums(*sampled, codebooks, progress)
        left[sample], codes[sample] = sampled
        _choose_codes(left, codes, others, initial, codebooks, progress)
    else:
        _fit_sums(left, codes, codebooks, progress)
    codes, codebooks = codes.to(table.device), (codebooks @ rotation.t()).to(table)
    if len(table) * (num_codebooks * codebook_size) ** 2 <= _SOLVED:
        codebooks = least_squares_codebooks(table, codes, codebook_size)
    return codes, codebooks


def least_squares_codebooks(table: Tensor, codes: Tensor, codebook_size: int) -> Tensor:
    """The codebooks ``(M, K, D)`` whose sums for `codes` ``(V, M)`` have the least squared error."""
    number = codes.size(1)
    entries = number * codebook_size
    places = codes.long() + torch.arange(number, device=codes.device) * codebook_size
    normal = torch.zeros((entries, entries), dtype=torch.float64, device=table.device)
    right = torch.zeros((entries, table.size(1)), dtype=torch.float64, device=table.device)
    for rows, block in blocks(table):
        # Sums of ones are exact in 32 bits.
        ones = torch.zeros((len(block), entries), device=block.device).scatter_(1, places[rows], 1.0)
        normal += ones.t() @ ones
        right.addmm_(ones.t().double(), block)
    # The solution is not unique, since codebooks can be shifted against each other: prefer small entries.
    normal.diagonal().add_(1e-6 * len(table) / codebook_size)
    solved = torch.linalg.solve(normal, right)
    return solved.view(number, codebook_size, -1).to(table.dtype)


# Words that the codebooks are fitted to, and words whose codes are chosen at a time, so that they stay in the
# cache.
_SAMPLE = 2**16
_ROWS = 1024
# Limits of the rounds over all codebooks: their number, all multiplications (minutes), and the relative gain
# below which they end. The last number is the overhead of an entry, in multiplications.
_SUM_ROUNDS = 20
_SUM_PRODUCTS = 3 * 10**12
_LEAST_GAIN = 2e-3
_COST = 48
# Rounds for the words outside of the sample.
_OTHER_ROUNDS = 2


def _fit_sums(left: Tensor, codes: Tensor, codebooks: Tensor, progress: bool) -> None:
    """Update codebooks and the codes of a sample with the residual `left` ``(n, D)``, in place."""
    number, size, dim = codebooks.shape
    rounds = min(max(_SUM_PRODUCTS // (left.numel() * number * (size + _COST)), 1), _SUM_ROUNDS)
    error = float(left.square().sum())
    bar = tqdm(total=rounds * number, desc="sums", unit=" codebooks", disable=not progress)
    for _ in range(rounds):
        for place, entries in enumerate(codebooks):
            old = codes[:, place].long()
            counts = old.bincount(minlength=size).clamp(min=1).unsqueeze(1)
            fitted = entries + torch.zeros_like(entries).index_add_(0, old, left) / counts
            new = _best(left, entries, fitted, old)
            left += (entries.unsqueeze(1) - fitted).view(-1, dim)[old * size + new]
            codes[:, place] = new
            codebooks[place] = fitted
            bar.update()
        before, error = error, float(left.square().sum())
        bar.set_postfix(error=f"{error:.4g}")
        if error >= before * (1.0 - _LEAST_GAIN):
            break
    bar.close()


def _choose_codes(
    left: Tensor, codes: Tensor, words: Tensor, initial: Tensor, codebooks: Tensor, progress: bool
) -> None:
    """Update the residual and the codes of `words`, which are those of `initial` codebooks, in place."""
    bar = tqdm(total=len(words), desc="codes", unit=" words", disable=not progress)
    for ids in words.split(_ROWS):
        rest, chosen = left[ids], codes[ids].long()
        for before, after, entry in zip(initial, codebooks, chosen.unbind(1)):
            rest += (before - after)[entry]
        for _ in range(_OTHER_ROUNDS):
            for place, entries in enumerate(codebooks):
                old = chosen[:, place]
                new = _best(rest, entries, entries, old)
                changed = (new != old).nonzero().squeeze(1)
                if len(changed):
                    rest.index_add_(0, changed, entries[old[changed]] - entries[new[changed]])
                    chosen[:, place] = new
        left[ids], codes[ids] = rest, chosen.to(codes)
        bar.update(len(ids))
    bar.close()


def _best(left: Tensor, before: Tensor, entries: Tensor, codes: Tensor) -> Tensor:
    """The best entries ``(n,)`` for the residual `left` plus the current entries, `codes` of `before`."""
    scores = (before @ entries.t() - entries.square().sum(dim=1) / 2)[codes]
    return scores.addmm_(left, entries.t()).argmax(dim=1)


def _shares(variances: Tensor, number: int, bits: float) -> list[Tensor]:
    """The columns of each of `number` codebooks of `bits` bits: each bit goes to the largest variance."""
    bits_of_column = torch.zeros(len(variances))
    rest = variances.clone()
    for _ in range(int(number * bits)):
        column = int(rest.argmax())
        bits_of_column[column] += 1
        # A bit removes three quarters of the variance; a column has at most the bits of one codebook.
        rest[column] = rest[column] / 4 if bits_of_column[column] < int(bits) else -1.0
    loads = torch.zeros(number)
    columns: list[list[int]] = [[] for _ in range(number)]
    for column in bits_of_column.argsort(descending=True, stable=True).tolist():
        codebook = int(loads.argmin())
        columns[codebook].append(column)
        # Columns without bits are distributed evenly.
        loads[codebook] += max(float(bits_of_column[column]), 1e-3)
    return [torch.tensor(sorted(places)) for places in columns]
