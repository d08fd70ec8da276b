"""Factorising a table: the algorithms that turn a trained ``(V, D)`` table into the parameters of a method.

Nothing here knows of embedding modules. Sums run in 64 bits, a block of words at a time (except in `tt_svd`,
which needs the table as a whole), so that several hundred thousand words take little more than their table.

Axes: ``V`` words, ``D`` dimensions, ``R`` rank, ``G`` groups, ``M`` codebooks, ``K`` clusters or codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

# Words that are turned into 64 bits at a time.
_BLOCK = 8192
# Words per step of the auto-encoder (Shu & Nakayama, section 4).
_AUTOENCODER_BATCH = 128
# The authors take 1e-4 for 200,000 steps; this needs far fewer.
_AUTOENCODER_RATE = 3e-3


def truncated_svd(table: Tensor, rank: int, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The best approximation of rank R: minimises ``sum_w weights[w] * ||table[w] - codes[w] @ basis||^2``.

    The basis comes from the Gram matrix ``(D, D)``, so that V may be large; a word of weight zero gets the
    best code that the basis allows.

    Args:
        table: ``(V, D)``.
        rank: R, from 1 to D.
        weights: ``(V,)``, not negative; all one when left out.

    Returns:
        Codes ``(V, R)``, and the basis ``(R, D)`` with orthonormal rows, the most important first.

    Raises:
        ValueError: a table or weights that cannot be used, or an impossible rank.
    """
    _check_table(table)
    _check_rank(rank, table.size(1))
    if weights is not None:
        _check_counts(weights, table.size(0))
    basis = _best_basis(table, rank, weights)
    return _codes(table, basis), basis.to(table.dtype)


def tt_svd(
    table: Tensor, vocab_shape: Sequence[int], dim_shape: Sequence[int], ranks: int | Sequence[int]
) -> list[Tensor]:
    """The cores of a tensor train near the table (Oseledets, 2011, algorithm 1), exact when no rank is cut.

    Args:
        table: ``(V, D)``; rows of zeros fill it up to the product of `vocab_shape`.
        vocab_shape, dim_shape: v_k and d_k, as in the embedding `tensor_train`.
        ranks: the inner ranks, or one number for all; core slices that a smaller rank does not need are zero.

    Returns:
        K cores ``(r_{k-1}, v_k, d_k, r_k)``.

    Raises:
        ValueError: a table that cannot be used, or shapes that do not fit it.
    """
    _check_table(table)
    number = len(vocab_shape)
    inner = [ranks] * (number - 1) if isinstance(ranks, int) else list(ranks)
    words, dim = table.shape
    if number < 2 or len(dim_shape) != number or len(inner) != number - 1 or min(inner) < 1:
        raise ValueError(
            f"vocab_shape {list(vocab_shape)}, dim_shape {list(dim_shape)} and ranks {inner} do not fit: "
            "K >= 2 factors each and K - 1 ranks of at least 1 are needed"
        )
    padded = math.prod(vocab_shape)
    if padded < words or math.prod(dim_shape) != dim:
        raise ValueError(
            f"vocab_shape {list(vocab_shape)} and dim_shape {list(dim_shape)} have the products {padded} "
            f"and {math.prod(dim_shape)}, but they must be at least {words} and exactly {dim}, as the table's"
        )
    full = F.pad(table.double(), (0, 0, 0, padded - words)).view(*vocab_shape, *dim_shape)
    rest = full.permute([axis for k in range(number) for axis in (k, number + k)])
    cores, rank = [], 1
    for vocab, width, next_rank in zip(vocab_shape, dim_shape, inner):
        left, rest = _split(rest.reshape(rank * vocab * width, -1), next_rank)
        cores.append(left.view(rank, vocab, width, next_rank).to(table.dtype))
        rank = next_rank
    cores.append(rest.reshape(rank, vocab_shape[-1], dim_shape[-1], 1).to(table.dtype))
    return _balanced(cores)


def product_quantisation(
    table: Tensor, num_groups: int, num_clusters: int, seed: int = 0, progress: bool = False
) -> tuple[Tensor, Tensor]:
    """Cut the vectors into G pieces and cluster the pieces at each place by k-means (Shi & Yu, 2018).

    Args:
        table: ``(V, D)``.
        num_groups: G, a divisor of D.
        num_clusters: K, at most V.
        seed: what the first centroids are drawn from.
        progress: whether to show a progress bar.

    Returns:
        Codes ``(V, G)`` int64, and centroids ``(G, K, D / G)``.

    Raises:
        ValueError: a table that cannot be used, or sizes that do not fit it.
    """
    from sklearn.cluster import KMeans  # type: ignore[import-untyped]

    _check_table(table)
    words, dim = table.shape
    if num_groups < 1 or dim % num_groups:
        raise ValueError(f"num_groups is {num_groups}, but it must divide the {dim} dimensions of the table")
    if not 1 <= num_clusters <= words:
        raise ValueError(f"num_clusters is {num_clusters}, but it must be from 1 to the {words} words")
    codes, centroids = [], []
    pieces = table.detach().float().cpu().view(words, num_groups, -1).unbind(1)
    for group, piece in enumerate(tqdm(pieces, desc="k-means", disable=not progress)):
        # Any whole number is a seed elsewhere; this takes 32 bits without a sign.
        means = KMeans(num_clusters, n_init=1, random_state=(seed + group) % 2**32)
        codes.append(torch.from_numpy(means.fit_predict(piece.contiguous().numpy())).long())
        centroids.append(torch.from_numpy(means.cluster_centers_))
    return torch.stack(codes, dim=1).to(table.device), torch.stack(centroids).to(table)


def learn_codes(
    table: Tensor,
    num_codebooks: int,
    codebook_size: int,
    seed: int = 0,
    steps: int = 10_000,
    progress: bool = False,
) -> tuple[Tensor, Tensor]:
    """Codes whose entries add up to the vectors, by an auto-encoder (Shu & Nakayama, 2018, section 4).

    The encoder (a tanh layer of M * K / 2, then a softplus) gives each codebook's scores, from which one
    entry is drawn by the Gumbel-softmax at temperature 1; the decoder adds up the entries. The codes come
    from the trained encoder; the codebooks are then the least-squares solution for these codes, which can
    only be nearer to the table than the decoder's.

    Args:
        table: ``(V, D)``.
        num_codebooks, codebook_size: M and K.
        seed: what all is drawn from; torch's own random state stays as it is.
        steps: steps of Adam, with 128 words each.
        progress: whether to show a progress bar.

    Returns:
        Codes ``(V, M)`` int64, and codebooks ``(M, K, D)``.

    Raises:
        ValueError: a table that cannot be used, or a size below 1.
    """
    _check_table(table)
    for name, size in (("num_codebooks", num_codebooks), ("codebook_size", codebook_size), ("steps", steps)):
        if size < 1:
            raise ValueError(f"{name} is {size}, but it must be at least 1")
    # All entries near one, so that the learning rate fits every table.
    scaled = table.detach().float()
    scaled = scaled / scaled.square().mean().sqrt().clamp(min=1e-12)
    with torch.random.fork_rng(devices=[table.device] if table.is_cuda else []), torch.enable_grad():
        torch.manual_seed(seed)
        coder = _AutoEncoder(table.size(1), num_codebooks, codebook_size).to(scaled)
        optimizer = torch.optim.Adam(coder.parameters(), lr=_AUTOENCODER_RATE)
        for _ in tqdm(range(steps), desc="codes", disable=not progress):
            words = torch.randint(len(scaled), (_AUTOENCODER_BATCH,), device=scaled.device)
            loss = (coder(scaled[words]) - scaled[words]).square().sum(dim=1).mean() / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        codes = torch.cat([coder.log_scores(block).argmax(dim=-1) for block in scaled.split(_BLOCK)])
    return codes, _least_squares_codebooks(table, codes, codebook_size)


class GroupLayout(NamedTuple):
    """How many words each group has, and its rank; the most frequent words first."""

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]


def frequency_groups(
    frequencies: np.ndarray, num_groups: int, min_rank: int, max_rank: int | None, dim: int
) -> GroupLayout:
    """Groups of words of like frequency, and their ranks by average frequency (Chen et al., 2018).

    Each group has an equal share of all running text. The last group has the minimum rank, the others one in
    proportion to the average frequency of their words: ``min_rank * average / average of the last``; but none
    more than `max_rank`, or than at which the factors are as large as the group's own table,
    ``V_g * D / (V_g + D)`` rounded up.

    Args:
        frequencies: ``(V,)`` from the highest to the lowest, positive, in any unit.
        num_groups: from 1 to V.
        min_rank, max_rank: `max_rank` is D / 2 when left out, with which the published settings of Distilled
            Embedding give the published sizes (within 5 %), or `min_rank` where that is more.
        dim: D.
    """
    words = len(frequencies)
    running = np.cumsum(frequencies, dtype=np.float64)
    shares = running[-1] * np.arange(1, num_groups) / num_groups
    ends = [0]
    # A group ends with the word that reaches its share, rounding aside.
    for group, last in enumerate(np.searchsorted(running, shares * (1.0 - 1e-12)).tolist()):
        # Every group has a word, and leaves one for each of those behind it.
        ends.append(min(max(last, ends[-1]) + 1, words - (num_groups - 1 - group)))
    ends.append(words)
    sizes = tuple(end - start for start, end in pairwise(ends))
    averages = [float(np.mean(frequencies[start:end])) for start, end in pairwise(ends)]
    highest = max(dim // 2, min_rank) if max_rank is None else max_rank
    ranks = tuple(
        min(round(min_rank * average / averages[-1]), highest, math.ceil(size * dim / (size + dim)))
        for size, average in zip(sizes, averages)
    )
    return GroupLayout(sizes, ranks)


class GroupRound(NamedTuple):
    """What one round of `group_reduce` came to: the weighted squared error, group sizes, and parameters."""

    error: float
    sizes: tuple[int, ...]
    parameters: int


class GroupReduction(NamedTuple):
    """The result of `group_reduce`.

    Attributes:
        groups: ``(V,)`` int64, the group of each word.
        codes: for each group ``(V_g, r_g)``, its words in the order of their ids.
        bases: for each group ``(r_g, D)``.
        rounds: how each round ended, the first before any refinement.
    """

    groups: Tensor
    codes: list[Tensor]
    bases: list[Tensor]
    rounds: list[GroupRound]


def group_reduce(
    table: Tensor,
    token_counts: Tensor,
    num_groups: int,
    min_rank: int,
    max_rank: int | None = None,
    refinements: int = 3,
) -> GroupReduction:
    """Words in groups by frequency, each with its own weighted SVD (GroupReduce, Chen et al., 2018).

    Minimises ``sum_w count[w] * ||table[w] - codes[w] @ basis||^2``. A refinement moves words to the groups
    that give them best, at a price per number stored such that the parameters never become more, and computes
    each group's SVD anew; it is kept only if the error falls. Groups that are too small for the minimum rank
    keep their words and get no others. Nothing is drawn at random.

    Args:
        table: ``(V, D)``.
        token_counts: ``(V,)``, not negative and not all zero, in any order.
        num_groups, min_rank, max_rank: as in `frequency_groups`.
        refinements: how often at most words change their groups.

    Raises:
        ValueError: a table or counts that cannot be used, or impossible sizes.
    """
    _check_table(table)
    words, dim = table.shape
    _check_counts(token_counts, words)
    if not 1 <= num_groups <= words:
        raise ValueError(f"num_groups is {num_groups}, but it must be from 1 to the {words} words")
    _check_rank(min_rank, dim)
    if max_rank is not None and not min_rank <= max_rank <= dim:
        raise ValueError(f"max_rank is {max_rank}, but it must be from min_rank {min_rank} to {dim}")
    counts = token_counts.to(table.device, torch.float64)
    frequencies, by_frequency = counts.sort(descending=True, stable=True)
    # Words that were never seen count as often as the rarest that was: an average of zero gives no ranks.
    seen = frequencies.clamp(min=float(frequencies[frequencies > 0].min())).cpu().numpy()
    layout = frequency_groups(seen, num_groups, min_rank, max_rank, dim)
    groups = torch.empty(words, dtype=torch.int64, device=table.device)
    groups[by_frequency] = torch.arange(num_groups, device=table.device).repeat_interleave(
        torch.tensor(layout.sizes, device=table.device)
    )
    bases = _group_bases(table, counts, groups, list(layout.ranks))
    rounds = [_round(_losses(table, counts, bases), groups, bases)]
    for _ in range(refinements):
        ranks = [len(basis) for basis in bases]
        moved = _reassigned(_losses(table, counts, bases), groups, ranks, min_rank)
        found = _group_bases(table, counts, moved, ranks)
        after = _round(_losses(table, counts, found), moved, found)
        if after.error >= rounds[-1].error:
            break
        groups, bases = moved, found
        rounds.append(after)
    codes = [_codes(table[groups == group], basis) for group, basis in enumerate(bases)]
    return GroupReduction(groups, codes, [basis.to(table.dtype) for basis in bases], rounds)


# Checks.


def _check_table(table: Tensor) -> None:
    """Raise ValueError unless `table` is ``(V, D)``, not empty, of finite numbers."""
    if table.dim() != 2 or table.numel() == 0 or not table.is_floating_point():
        raise ValueError(
            f"the table has shape {tuple(table.shape)} and type {table.dtype}, but it must be (V, D), one "
            "vector of floating-point numbers for each word"
        )
    for start, block in zip(range(0, len(table), _BLOCK), table.split(_BLOCK)):
        wrong = ~block.isfinite().all(dim=1)
        if wrong.any():
            word = start + int(wrong.nonzero()[0])
            raise ValueError(
                f"the table's row {word} holds NaN or infinity: only finite tables can be factorised"
            )


def _check_counts(counts: Tensor, words: int) -> None:
    """Raise ValueError unless `counts` has one finite number for each word, none negative, not all zero."""
    if counts.shape != (words,):
        raise ValueError(
            f"there are counts of shape {tuple(counts.shape)} for {words} words: give one for each word"
        )
    for wrong, what in ((~counts.isfinite(), "not finite"), (counts < 0, "negative")):
        if wrong.any():
            word = int(wrong.nonzero()[0])
            raise ValueError(f"the count of word {word} is {counts[word].item()}, which is {what}")
    if not (counts > 0).any():
        raise ValueError("all counts are zero: at least one word must have been seen")


def _check_rank(rank: int, dim: int) -> None:
    """Raise ValueError unless 1 <= `rank` <= D."""
    if not 1 <= rank <= dim:
        raise ValueError(f"the rank is {rank}, but it must be from 1 to the {dim} dimensions of the table")


# Low rank.


def _best_basis(table: Tensor, rank: int, weights: Tensor | None) -> Tensor:
    """The `rank` most important directions ``(R, D)`` of the weighted rows, orthonormal, in 64 bits."""
    gram = torch.zeros((table.size(1), table.size(1)), dtype=torch.float64, device=table.device)
    for rows, block in _blocks(table):
        weighted = block if weights is None else block * weights[rows].to(block).unsqueeze(1)
        gram.addmm_(weighted.t(), block)
    return torch.linalg.eigh(gram).eigenvectors[:, -rank:].flip(1).t().contiguous()


def _codes(table: Tensor, basis: Tensor) -> Tensor:
    """The codes ``(n, R)`` that bring rows ``(n, D)`` nearest in an orthonormal basis ``(R, D)``."""
    return torch.cat([(block @ basis.t()).to(table.dtype) for _, block in _blocks(table)])


def _blocks(table: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The rows of the table, a block at a time, in 64 bits."""
    for start in range(0, len(table), _BLOCK):
        rows = slice(start, min(start + _BLOCK, len(table)))
        yield rows, table[rows].detach().double()


def _split(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Orthonormal columns ``(m, rank)`` and the rest ``(rank, n)`` of a matrix ``(m, n)``, padded with 0."""
    if matrix.size(0) < matrix.size(1):
        left = torch.linalg.eigh(matrix @ matrix.t()).eigenvectors.flip(1)[:, :rank]
    else:
        left = torch.linalg.svd(matrix, full_matrices=False).U[:, :rank]
    missing = rank - left.size(1)
    return F.pad(left, (0, missing)), F.pad(left.t() @ matrix, (0, 0, 0, missing))


def _balanced(cores: list[Tensor]) -> list[Tensor]:
    """The same train with cores whose entries are of one size: the SVD leaves all of it in the last."""
    sizes = [float(core.square().mean().sqrt()) for core in cores]
    if min(sizes) == 0.0:
        return cores
    common = math.prod(size ** (1 / len(sizes)) for size in sizes)
    return [core * (common / size) for core, size in zip(cores, sizes)]


# Codes.


class _AutoEncoder(nn.Module):
    """Encoder and decoder of `learn_codes`."""

    def __init__(self, dim: int, num_codebooks: int, codebook_size: int) -> None:
        super().__init__()
        self.sizes = (num_codebooks, codebook_size)
        entries = num_codebooks * codebook_size
        self.hidden = nn.Linear(dim, max(entries // 2, 1))
        self.scores = nn.Linear(max(entries // 2, 1), entries)
        self.codebooks = nn.Parameter(torch.randn(entries, dim) * (1 / num_codebooks) ** 0.5)

    def log_scores(self, vectors: Tensor) -> Tensor:
        """The logarithms ``(n, M, K)`` of the scores of vectors ``(n, D)``."""
        scores = F.softplus(self.scores(torch.tanh(self.hidden(vectors))))
        return scores.clamp(min=1e-20).log().unflatten(1, self.sizes)

    def forward(self, vectors: Tensor) -> Tensor:
        """The vectors ``(n, D)`` that are left of vectors ``(n, D)``."""
        return F.gumbel_softmax(self.log_scores(vectors), tau=1.0).flatten(1) @ self.codebooks


def _least_squares_codebooks(table: Tensor, codes: Tensor, codebook_size: int) -> Tensor:
    """The codebooks ``(M, K, D)`` whose sums for `codes` ``(V, M)`` are nearest to the table."""
    number = codes.size(1)
    entries = number * codebook_size
    places = codes + torch.arange(number, device=codes.device) * codebook_size
    normal = torch.zeros((entries, entries), dtype=torch.float64, device=table.device)
    right = torch.zeros((entries, table.size(1)), dtype=torch.float64, device=table.device)
    for rows, block in _blocks(table):
        ones = block.new_zeros((len(block), entries)).scatter_(1, places[rows], 1.0)
        normal.addmm_(ones.t(), ones)
        right.addmm_(ones.t(), block)
    # What one codebook adds another can take away, so the solution is not unique: prefer small entries.
    normal.diagonal().add_(1e-6 * len(table) / codebook_size)
    solved = torch.linalg.solve(normal, right)
    return solved.view(number, codebook_size, -1).to(table.dtype)


# Groups.


def _group_bases(table: Tensor, counts: Tensor, groups: Tensor, ranks: list[int]) -> list[Tensor]:
    """The best basis of each group, of no more rows than the group has words."""
    bases = []
    for group, rank in enumerate(ranks):
        members = (groups == group).nonzero().squeeze(1)
        # Where no word counts, all count alike.
        weights = counts[members] if counts[members].any() else None
        bases.append(_best_basis(table[members], min(rank, len(members)), weights))
    return bases


def _losses(table: Tensor, counts: Tensor, bases: list[Tensor]) -> Tensor:
    """``(V, G)`` the weighted squared error of each word in each group's basis."""
    stacked, sizes = torch.cat(bases), [len(basis) for basis in bases]
    losses = []
    for rows, block in _blocks(table):
        parts = (block @ stacked.t()).square_().split(sizes, dim=1)
        given = torch.stack([part.sum(dim=1) for part in parts], dim=1)
        left = (block.square().sum(dim=1, keepdim=True) - given).clamp_(min=0.0)
        losses.append(left * counts[rows].unsqueeze(1))
    return torch.cat(losses)


def _round(losses: Tensor, groups: Tensor, bases: list[Tensor]) -> GroupRound:
    """The account of an assignment with its bases."""
    sizes = groups.bincount(minlength=len(bases)).tolist()
    parameters = sum(len(basis) * (size + basis.size(1)) for size, basis in zip(sizes, bases))
    return GroupRound(float(losses.gather(1, groups.unsqueeze(1)).sum()), tuple(sizes), parameters)


def _reassigned(losses: Tensor, groups: Tensor, ranks: list[int], min_rank: int) -> Tensor:
    """The groups ``(V,)`` with the least loss for no more codes than `groups` has.

    A word in group g stores r_g numbers; the price of a number is found by bisection. The word that would
    lose most by leaving stays in its group, so none becomes empty; no word leaves or enters a group whose
    rank is below the minimum.
    """
    sizes = torch.tensor(ranks, dtype=losses.dtype, device=losses.device)
    budget = float(sizes[groups].sum())
    closed = sizes < min_rank
    stays = closed[groups]
    stays[_faithful_words(losses, groups, len(ranks))] = True
    open_losses = losses.masked_fill(closed, math.inf)

    def choice(price: float) -> Tensor:
        return torch.where(stays, groups, (open_losses + price * sizes).argmin(dim=1))

    def is_affordable(chosen: Tensor) -> bool:
        return float(sizes[chosen].sum()) <= budget

    # At the upper price every word that may move is in an open group of the smallest rank.
    low, high = 0.0, float(losses.max()) + 1.0
    for _ in range(100):
        price = (low * high) ** 0.5 if low > 0.0 else high * 2.0**-10
        if is_affordable(choice(price)):
            high = price
        else:
            low = price
        if low > 0.0 and high / low < 1.0 + 1e-9:
            break
    chosen = choice(high)
    return chosen if is_affordable(chosen) else groups


def _faithful_words(losses: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """``(G,)`` of each group, the word that would lose most in the best of the other groups."""
    own = losses.gather(1, groups.unsqueeze(1)).squeeze(1)
    others = losses.scatter(1, groups.unsqueeze(1), math.inf).amin(dim=1)
    gain = others - own
    return torch.stack([gain.masked_fill(groups != group, -math.inf).argmax() for group in range(num_groups)])
