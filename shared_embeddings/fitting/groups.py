"""Groups of words by frequency, each with its own rank (GroupReduce, Chen et al., 2018).

Axes: ``V`` words, ``D`` dimensions, ``G`` groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shared_embeddings.fitting.factorization import (
    best_basis,
    blocks,
    check_counts,
    check_rank,
    check_table,
    codes_in,
)

# Bisection steps for the ranks.
_HALVINGS = 40


class GroupLayout(NamedTuple):
    """How many words each group has, and its rank; the most frequent words first."""

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    def parameters(self, dim: int) -> int:
        """The numbers of all codes and bases in D dimensions."""
        return sum(rank * (size + dim) for size, rank in zip(self.sizes, self.ranks))


def frequency_groups(
    frequencies: np.ndarray, num_groups: int, min_rank: int, max_rank: int | None, dim: int
) -> GroupLayout:
    """Groups of words with similar frequency, and their ranks by average frequency (Chen et al., 2018).

    Each group accounts for an equal share of all tokens. The rank of a group is proportional to the average
    frequency of its words, ``min_rank * average / average of the last group``. It is at most `max_rank`, and
    at most ``V_g * D / (V_g + D)`` rounded up, where the factors are as large as the table of the group.

    Args:
        frequencies: ``(V,)`` from the highest to the lowest, positive, in any unit.
        num_groups: from 1 to V.
        min_rank: the rank of the last group.
        max_rank: by default D / 2, or `min_rank` if that is larger; it reproduces the sizes in Distilled
            Embedding within 5 %.
        dim: D.
    """
    sizes, averages = _equal_shares(frequencies, num_groups)
    return GroupLayout(sizes, _ranks(sizes, averages, min_rank, max_rank, dim))


def groups_within(
    frequencies: np.ndarray, num_groups: int, num_parameters: int, max_rank: int | None, dim: int
) -> GroupLayout:
    """The groups of `frequency_groups` with the largest ranks that have at most `num_parameters` parameters.

    The minimum rank may be fractional before ranks are rounded. Ranks are at least 1, even beyond the limit.
    """
    sizes, averages = _equal_shares(frequencies, num_groups)
    low, high = 0.0, float(dim)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        layout = GroupLayout(sizes, _ranks(sizes, averages, middle, max_rank, dim))
        low, high = (middle, high) if layout.parameters(dim) <= num_parameters else (low, middle)
    ranks = list(_ranks(sizes, averages, low, max_rank, dim))
    limits = _ranks(sizes, averages, dim, max_rank or dim, dim)
    left = num_parameters - GroupLayout(sizes, tuple(ranks)).parameters(dim)
    # Individual groups get the remaining parameters, the largest first, even beyond D / 2.
    by_size = sorted(range(num_groups), key=lambda group: -sizes[group])
    while open_groups := [g for g in by_size if ranks[g] < limits[g] and sizes[g] + dim <= left]:
        ranks[open_groups[0]] += 1
        left -= sizes[open_groups[0]] + dim
    return GroupLayout(sizes, tuple(ranks))


def _equal_shares(frequencies: np.ndarray, num_groups: int) -> tuple[tuple[int, ...], list[float]]:
    """The sizes of groups with equal shares of all tokens, and their average frequencies."""
    words = len(frequencies)
    running = np.cumsum(frequencies, dtype=np.float64)
    shares = running[-1] * np.arange(1, num_groups) / num_groups
    ends = [0]
    # A group ends with the word that reaches its share, except for rounding.
    for group, last in enumerate(np.searchsorted(running, shares * (1.0 - 1e-12)).tolist()):
        # This group and all later ones have at least one word.
        ends.append(min(max(last, ends[-1]) + 1, words - (num_groups - 1 - group)))
    ends.append(words)
    sizes = tuple(end - start for start, end in pairwise(ends))
    return sizes, [float(np.mean(frequencies[start:end])) for start, end in pairwise(ends)]


def _ranks(
    sizes: Sequence[int], averages: Sequence[float], min_rank: float, max_rank: int | None, dim: int
) -> tuple[int, ...]:
    """The ranks of groups, see `frequency_groups`."""
    highest = max(dim // 2, round(min_rank)) if max_rank is None else max_rank
    return tuple(
        max(min(round(min_rank * average / averages[-1]), highest, math.ceil(size * dim / (size + dim))), 1)
        for size, average in zip(sizes, averages)
    )


class GroupRound(NamedTuple):
    """The result of one round of `group_reduce`: weighted squared error, group sizes, and parameters."""

    error: float
    sizes: tuple[int, ...]
    parameters: int


class GroupReduction(NamedTuple):
    """The result of `group_reduce`.

    Attributes:
        groups: ``(V,)`` int64, the group of each word.
        codes: for each group ``(V_g, r_g)``, its words in the order of their ids.
        bases: for each group ``(r_g, D)``.
        rounds: the result of each round; the first is without refinement.
    """

    groups: Tensor
    codes: list[Tensor]
    bases: list[Tensor]
    rounds: list[GroupRound]


def group_reduce(
    table: Tensor,
    token_counts: Tensor,
    num_groups: int,
    min_rank: int | None = None,
    max_rank: int | None = None,
    num_parameters: int | None = None,
    refinements: int = 3,
) -> GroupReduction:
    """Group words by frequency, with a weighted SVD for each group (GroupReduce, Chen et al., 2018).

    Minimizes ``sum_w count[w] * ||table[w] - codes[w] @ basis||^2``. A refinement moves words to the groups
    that fit them best, with a penalty per parameter so that their number never increases, and computes the
    SVD of each group again; a round is kept only if the error decreases. Groups that are too small for the
    minimum rank do not change. The result is deterministic.

    Args:
        table: ``(V, D)``.
        token_counts: ``(V,)``, not negative and not all zero, in any order.
        num_groups, min_rank, max_rank: as in `frequency_groups`.
        num_parameters: as in `groups_within`; exactly one of this and `min_rank` is given.
        refinements: the maximum number of rounds in which words change groups.

    Raises:
        ValueError: the table, the counts or the sizes are invalid.
    """
    check_table(table)
    words, dim = table.shape
    check_counts(token_counts, words)
    if not 1 <= num_groups <= words:
        raise ValueError(f"num_groups is {num_groups}, but it must be from 1 to the {words} words")
    _check_ranks(min_rank, max_rank, num_parameters, dim)
    counts = token_counts.to(table.device, torch.float64)
    frequencies, by_frequency = counts.sort(descending=True, stable=True)
    # Unseen words count like the rarest seen one, since an average of zero would give no ranks.
    seen = frequencies.clamp(min=float(frequencies[frequencies > 0].min())).cpu().numpy()
    if min_rank is not None:
        layout = frequency_groups(seen, num_groups, min_rank, max_rank, dim)
    else:
        assert num_parameters is not None
        layout = groups_within(seen, num_groups, num_parameters, max_rank, dim)
        min_rank = layout.ranks[-1]
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
    codes = [codes_in(table[groups == group], basis) for group, basis in enumerate(bases)]
    return GroupReduction(groups, codes, [basis.to(table.dtype) for basis in bases], rounds)


def _check_ranks(min_rank: int | None, max_rank: int | None, num_parameters: int | None, dim: int) -> None:
    """Raise ValueError unless the options determine ranks from 1 to D."""
    if (min_rank is None) == (num_parameters is None):
        raise ValueError("the ranks follow from min_rank or num_parameters; give exactly one of them")
    if min_rank is not None:
        check_rank(min_rank, dim)
    if max_rank is not None and not (min_rank or 1) <= max_rank <= dim:
        raise ValueError(f"max_rank is {max_rank}, but it must be from min_rank {min_rank or 1} to {dim}")


def _group_bases(table: Tensor, counts: Tensor, groups: Tensor, ranks: list[int]) -> list[Tensor]:
    """The best basis of each group, with at most as many rows as the group has words."""
    bases = []
    for group, rank in enumerate(ranks):
        members = (groups == group).nonzero().squeeze(1)
        # If no word has a count, all count equally.
        weights = counts[members] if counts[members].any() else None
        bases.append(best_basis(table[members], min(rank, len(members)), weights))
    return bases


def _losses(table: Tensor, counts: Tensor, bases: list[Tensor]) -> Tensor:
    """``(V, G)`` the weighted squared error of each word in each group's basis.

    The products, most of the work of the fit, are in the type of the table, their sums in 64 bits.
    """
    stacked, sizes = torch.cat(bases).to(table.dtype), [len(basis) for basis in bases]
    losses = []
    for rows, block in blocks(table):
        parts = (table[rows].detach() @ stacked.t()).square_().split(sizes, dim=1)
        given = torch.stack([part.sum(dim=1, dtype=torch.float64) for part in parts], dim=1)
        left = (block.square().sum(dim=1, keepdim=True) - given).clamp_(min=0.0)
        losses.append(left * counts[rows].unsqueeze(1))
    return torch.cat(losses)


def _round(losses: Tensor, groups: Tensor, bases: list[Tensor]) -> GroupRound:
    """Error, sizes and parameters of an assignment with its bases."""
    sizes = groups.bincount(minlength=len(bases)).tolist()
    parameters = sum(len(basis) * (size + basis.size(1)) for size, basis in zip(sizes, bases))
    return GroupRound(float(losses.gather(1, groups.unsqueeze(1)).sum()), tuple(sizes), parameters)


def _reassigned(losses: Tensor, groups: Tensor, ranks: list[int], min_rank: int) -> Tensor:
    """The groups ``(V,)`` with the least loss for at most as many code entries as `groups` has.

    A word in group g has r_g code entries; the penalty of an entry is found by bisection. The word that would
    lose most by leaving stays in its group, so that no group becomes empty. Groups with a rank below the
    minimum do not change.
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

    # With the highest penalty, every word that may move is in an open group of the smallest rank.
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
    """``(G,)`` for each group, the word that would lose most in the best other group."""
    own = losses.gather(1, groups.unsqueeze(1)).squeeze(1)
    others = losses.scatter(1, groups.unsqueeze(1), math.inf).amin(dim=1)
    gain = others - own
    return torch.stack([gain.masked_fill(groups != group, -math.inf).argmax() for group in range(num_groups)])
