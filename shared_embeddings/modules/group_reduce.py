"""GroupReduce (Chen et al., 2018): groups of words with their own ranks; or GroupFunneling."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_embeddings.embedding import Layer, SharedEmbedding
from shared_embeddings.fitting.factorization import (
    best_basis,
    blocks,
    restore_scale,
    shrink_codes,
    without_negatives,
)
from shared_embeddings.fitting.task import FitTask, reconstruct
from shared_embeddings.loss import LinearScores, ScoreTerms, blockwise_cross_entropy
from shared_embeddings.nn.layers import ACTIVATIONS, code_bits, code_dtype, entry_std
from shared_embeddings.nn.tracing import needs_fixed_shapes
from shared_embeddings.quant.formats import BitCodes
from shared_embeddings.quant.packed_tensor import PackedTensor, dense, inner_tensors
from shared_embeddings.registry import register
from shared_embeddings.spec import EmbeddingOptions, Options, Presets, SearchGrid
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import (
    OptionError,
    option,
    plain_options,
    require,
    require_effect,
)

# The options that determine the groups without their sizes.
_LAYOUT = ("num_groups", "min_rank", "max_rank", "num_parameters")
# Parameters of one step of the search grid over those of the step before.
_STEP = 1.004
# The target of ignored tokens, after ids have been converted to places.
_IGNORED = -100


class GroupLayout(NamedTuple):
    """How many words each group has, and its rank; the most frequent words first."""

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    def parameters(self, dim: int) -> int:
        return sum(rank * (size + dim) for size, rank in zip(self.sizes, self.ranks))


def group_layout(
    frequencies: np.ndarray,
    dim: int,
    num_groups: int,
    min_rank: int | None = None,
    max_rank: int | None = None,
    num_parameters: int | None = None,
) -> GroupLayout:
    """Groups of words with similar frequency, and their ranks by average frequency (Chen et al., 2018).

    Each group accounts for an equal share of all tokens. The rank of a group is proportional to the average
    frequency of its words, ``min_rank * average / average of the last group``. It is at most `max_rank`, and
    at most ``V_g * D / (V_g + D)`` rounded up, where the factors are as large as the table of the group.

    Args:
        frequencies: ``(V,)`` from the highest to the lowest, positive, in any unit.
        dim: D.
        num_groups: from 1 to V.
        min_rank: the rank of the last group.
        max_rank: by default D / 2, or `min_rank` if that is larger; it reproduces the sizes in Distilled
            Embedding within 5 %.
        num_parameters: instead of `min_rank` the largest ranks with at most so many parameters, or of 1.
    """
    words, running = len(frequencies), np.cumsum(frequencies, dtype=np.float64)
    shares = running[-1] * np.arange(1, num_groups) / num_groups
    ends = [0]
    # A group ends with the word that reaches its share, except for rounding.
    for group, last in enumerate(np.searchsorted(running, shares * (1.0 - 1e-12)).tolist()):
        # This group and all later ones have at least one word.
        ends.append(min(max(last, ends[-1]) + 1, words - (num_groups - 1 - group)))
    ends.append(words)
    sizes = tuple(end - start for start, end in pairwise(ends))
    averages = [float(np.mean(frequencies[start:end])) for start, end in pairwise(ends)]

    def layout(least: float, most: int | None = max_rank) -> GroupLayout:
        highest = max(dim // 2, round(least)) if most is None else most
        limits = [min(highest, math.ceil(size * dim / (size + dim))) for size in sizes]
        wanted = [round(least * average / averages[-1]) for average in averages]
        return GroupLayout(sizes, tuple(max(min(pair), 1) for pair in zip(wanted, limits)))

    if num_parameters is None:
        assert min_rank is not None
        return layout(min_rank)
    low, high = 0.0, float(dim)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if layout(middle).parameters(dim) <= num_parameters else (low, middle)
    ranks, limits = list(layout(low).ranks), layout(dim, max_rank or dim).ranks
    left = num_parameters - layout(low).parameters(dim)
    # Individual groups get the remaining parameters, the largest first, even beyond D / 2.
    by_size = sorted(range(num_groups), key=lambda group: -sizes[group])
    while open_groups := [g for g in by_size if ranks[g] < limits[g] and sizes[g] + dim <= left]:
        ranks[open_groups[0]] += 1
        left -= sizes[open_groups[0]] + dim
    return GroupLayout(sizes, tuple(ranks))


class GroupReduction(NamedTuple):
    """The result of `group_reduce`."""

    groups: Tensor  # ``(V,)`` int64, the group of each word
    codes: list[Tensor]  # for each group ``(V_g, r_g)``, its words in the order of their ids
    bases: list[Tensor]  # for each group ``(r_g, D)``
    errors: list[float]  # the weighted squared error of each round; the first is without refinement


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
        num_groups, min_rank, max_rank, num_parameters: as in `group_layout`.
        refinements: the maximum number of rounds in which words change groups.
    """
    counts = token_counts.to(table.device, torch.float64)
    frequencies, by_frequency = counts.sort(descending=True, stable=True)
    # Unseen words count like the rarest seen one, since an average of zero would give no ranks.
    seen = frequencies.clamp(min=float(frequencies[frequencies > 0].min())).cpu().numpy()
    layout = group_layout(seen, table.size(1), num_groups, min_rank, max_rank, num_parameters)
    groups = torch.empty(len(table), dtype=torch.int64, device=table.device)
    groups[by_frequency] = torch.arange(num_groups, device=table.device).repeat_interleave(
        torch.tensor(layout.sizes, device=table.device)
    )
    bases, losses = _group_bases(table, counts, groups, layout.ranks)
    errors = [float(losses.gather(1, groups.unsqueeze(1)).sum())]
    for _ in range(refinements):
        ranks = [len(basis) for basis in bases]
        moved = _reassigned(losses, groups, ranks, min_rank or layout.ranks[-1])
        refined, losses = _group_bases(table, counts, moved, ranks)
        error = float(losses.gather(1, moved.unsqueeze(1)).sum())
        if error >= errors[-1]:
            break
        groups, bases = moved, refined
        errors.append(error)
    codes = []
    for group, basis in enumerate(bases):
        parts = [block @ basis.t() for _, block in blocks(table[groups == group])]
        codes.append(torch.cat(parts).to(table.dtype))
    return GroupReduction(groups, codes, [basis.to(table.dtype) for basis in bases], errors)


def _group_bases(
    table: Tensor, counts: Tensor, groups: Tensor, ranks: Sequence[int]
) -> tuple[list[Tensor], Tensor]:
    """Return the best basis of each group, and the weighted squared error ``(V, G)`` of each word in each.

    A basis has at most as many rows as the group has words. The products, most of the work of the fit, are in
    the type of the table, their sums in 64 bits.
    """
    bases = []
    for group, rank in enumerate(ranks):
        members = (groups == group).nonzero().squeeze(1)
        # If no word has a count, all count equally.
        weights = counts[members] if counts[members].any() else None
        bases.append(best_basis(table[members], min(rank, len(members)), weights))
    stacked, sizes = torch.cat(bases).to(table.dtype), [len(basis) for basis in bases]
    losses = []
    for rows, block in blocks(table):
        parts = (table[rows] @ stacked.t()).square_().split(sizes, dim=1)
        captured = torch.stack([part.sum(dim=1, dtype=torch.float64) for part in parts], dim=1)
        left = (block.square().sum(dim=1, keepdim=True) - captured).clamp_(min=0.0)
        losses.append(left * counts[rows].unsqueeze(1))
    return bases, torch.cat(losses)


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
    present = losses.gather(1, groups.unsqueeze(1)).squeeze(1)
    gains = losses.scatter(1, groups.unsqueeze(1), math.inf).amin(dim=1) - present
    for group in range(len(ranks)):
        stays[gains.masked_fill(groups != group, -math.inf).argmax()] = True
    open_losses = losses.masked_fill(closed, math.inf)

    def choice(price: float) -> Tensor:
        return torch.where(stays, groups, (open_losses + price * sizes).argmin(dim=1))

    # With the highest penalty, every word that may move is in an open group of the smallest rank.
    low, high = 0.0, float(losses.max()) + 1.0
    for _ in range(100):
        price = (low * high) ** 0.5 if low > 0.0 else high * 2.0**-10
        if float(sizes[choice(price)].sum()) <= budget:
            high = price
        else:
            low = price
        if low > 0.0 and high / low < 1.0 + 1e-9:
            break
    chosen = choice(high)
    return chosen if float(sizes[chosen].sum()) <= budget else groups


@dataclasses.dataclass(frozen=True)
class GroupReduceOptions(EmbeddingOptions["GroupReduceEmbedding"]):
    """Options of `group_reduce`: either groups by frequency, or groups of given sizes and ranks."""

    paper = "GroupReduce (Chen et al., 2018); with an activation GroupFunneling"
    summary = "groups of words, each V_g x R_g times R_g x D"
    grid_choice = "10 groups, the largest ranks"
    fit_bound = 0.3

    num_groups: int | None = option(
        "G, the number of groups; assumes word ids sorted by frequency and frequencies by Zipf's law.",
        None,
        minimum=1,
    )
    min_rank: int | None = option(
        "The rank of the last group; the rank of the others grows with their average frequency.",
        None,
        minimum=1,
    )
    max_rank: int | None = option(
        "The maximum rank of a group; by default D / 2, or `min_rank` if that is larger.", None, minimum=1
    )
    num_parameters: int | None = option(
        "The maximum number of parameters; sets the ranks instead of `min_rank`, also in a fit with counts.",
        None,
        minimum=1,
    )
    activation: Literal["relu", "gelu", "tanh"] | None = option(
        "The activation f between codes and basis, as in `funnel`; none by default.", None
    )
    group_sizes: tuple[int, ...] | None = option(
        "The number of words in each group, with `ranks`; replaces `num_groups`.", None, minimum=1
    )
    ranks: tuple[int, ...] | None = option(
        "The rank of each group, with `group_sizes`; replaces `min_rank` and `max_rank`.", None, minimum=1
    )

    def __post_init__(self) -> None:
        if self.group_sizes is None and self.ranks is None:
            for name in ("num_groups", "min_rank") if self.num_parameters is None else ("num_groups",):
                require(
                    getattr(self, name) is not None,
                    f"option '{name}' is missing; give it a value, or give 'group_sizes' and 'ranks'",
                )
            require(
                self.min_rank is None or self.num_parameters is None,
                "option 'min_rank' contradicts 'num_parameters', which sets the ranks; remove one of them",
            )
            require(
                self.max_rank is None or self.max_rank >= (self.min_rank or 1),
                f"option 'max_rank' is {self.max_rank}, less than 'min_rank' {self.min_rank}; raise it",
            )
            return
        require_effect(self, _LAYOUT, "when 'group_sizes' and 'ranks' are given")
        for name in ("group_sizes", "ranks"):
            require(
                bool(getattr(self, name)), f"option '{name}' is missing or empty; give one for each group"
            )
        sizes, ranks = self.group_sizes or (), self.ranks or ()
        require(
            len(sizes) == len(ranks),
            f"option 'group_sizes' has {len(sizes)} groups, 'ranks' has {len(ranks)}; give as many of both",
        )

    def layout(self, num_embeddings: int, embedding_dim: int) -> GroupLayout:
        """The sizes and ranks of all groups for V words in D dimensions."""
        if self.group_sizes is not None and self.ranks is not None:
            return GroupLayout(self.group_sizes, self.ranks)
        assert self.num_groups is not None
        zipf = 1.0 / np.arange(1, num_embeddings + 1)
        limits = (self.min_rank, self.max_rank, self.num_parameters)
        return group_layout(zipf, embedding_dim, self.num_groups, *limits)

    def check_sizes(self, num_embeddings: int, embedding_dim: int) -> None:
        require(
            self.num_groups is None or self.num_groups <= num_embeddings,
            f"option 'num_groups' is {self.num_groups}, more than the {num_embeddings} words; "
            f"choose at most {num_embeddings}",
        )
        ranks = {"min_rank": self.min_rank, "max_rank": self.max_rank, "ranks": max(self.ranks or (1,))}
        for name, rank in ranks.items():
            require(
                rank is None or rank <= embedding_dim,
                f"option '{name}' has rank {rank}, more than the dimension {embedding_dim}; "
                f"choose at most {embedding_dim}",
            )
        total = num_embeddings if self.group_sizes is None else sum(self.group_sizes)
        require(
            total == num_embeddings,
            f"option 'group_sizes' adds up to {total} words, but the vocabulary has {num_embeddings}; "
            "change the sizes",
        )

    def count_parameters(self, num_embeddings: int, embedding_dim: int) -> int:
        """The sum of r_g (V_g + D) over the groups (Distilled Embedding, Eq. 2, for each)."""
        return self.layout(num_embeddings, embedding_dim).parameters(embedding_dim)

    @classmethod
    def presets(cls, num_embeddings: int, embedding_dim: int) -> Presets:
        """The groups and approximate rank of Distilled Embedding; fewer groups for small vocabularies.

        The grid has up to as many parameters as a plain table.
        """
        groups = min(10, num_embeddings)
        least = num_embeddings + groups * embedding_dim
        steps = max(math.log(num_embeddings * embedding_dim / least, _STEP), 0.0)

        def options_at(step: int) -> Options:
            options = GroupReduceOptions(num_groups=groups, num_parameters=int(least * _STEP**step))
            # The limit for groups from other counts.
            size = options.count_parameters(num_embeddings, embedding_dim)
            return {"num_groups": groups, "num_parameters": size}

        example = {"num_groups": min(10, num_embeddings // 16), "min_rank": max(embedding_dim // 22, 2)}
        return Presets({"": example}, [SearchGrid(int(steps) + 1, options_at)])


@register("group_reduce", GroupReduceOptions)
class GroupReduceEmbedding(SharedEmbedding):
    """The row of word w in group g is ``f(codes[g][w]) @ bases[g]``; without an activation f is the identity.

    Parameters: `codes`, for each group ``(V_g, r_g)`` with its words in the order of their ids, and `bases`,
    ``(r_g, D)``. The assignment `groups` ``(V,)`` is fixed: by id, or fitted, and saved with the parameters.
    The scores of a group are computed from hidden states that are projected to its rank.
    """

    options: GroupReduceOptions
    groups: Tensor
    per_word = ("groups",)
    scores_in_blocks = True
    never_has_table = True

    def create_parameters(self) -> None:
        self.layout = self.options.layout(self.num_embeddings, self.embedding_dim)
        self.codes = nn.ParameterList(torch.empty(shape) for shape in zip(*self.layout))
        self.bases = nn.ParameterList(torch.empty(rank, self.embedding_dim) for rank in self.layout.ranks)
        self.register_buffer(
            "groups", torch.empty(self.num_embeddings, dtype=code_dtype(len(self.layout.sizes)))
        )
        self.buffer_bits["groups"] = code_bits(len(self.layout.sizes))
        # The groups, torch's count of their changes, and the places that they determine.
        self._order: tuple[Tensor, int | None, Tensor] | None = None

    def init_weights(self) -> None:
        """Groups by id, and normal codes and bases that give products of std D**-0.5."""
        numbers = torch.arange(len(self.layout.sizes), device=self.groups.device)
        sizes = torch.tensor(self.layout.sizes, device=self.groups.device)
        self.groups.copy_(numbers.repeat_interleave(sizes, output_size=self.num_embeddings))
        for codes, basis in zip(self.codes, self.bases):
            nn.init.normal_(codes, std=entry_std(codes.size(1)))
            nn.init.normal_(basis)
            with torch.no_grad():
                activated = self._activated(codes)
                if self.options.activation is not None and codes.size(1) > 1:
                    # As in `funnel`: the mean of a ReLU is positive and would add one vector to every row.
                    basis.sub_(basis.mean(dim=0))
                    activated = activated - activated.mean()
                norm = activated.square().sum(dim=1).mean().sqrt().clamp(min=1e-3)
                basis.mul_(entry_std(self.embedding_dim) / norm)

    def stored_options(self) -> dict[str, object]:
        explicit: dict[str, Any] = {
            "group_sizes": self.layout.sizes,
            "ranks": self.layout.ranks,
            **dict.fromkeys(_LAYOUT),
        }
        return plain_options(dataclasses.replace(self.options, **explicit))

    def state_for_ids(self, ids: Tensor) -> tuple[dict[str, object], dict[str, Tensor]]:
        options, state = super().state_for_ids(ids)
        starts = torch.tensor([0, *itertools.accumulate(self.layout.sizes)], device=ids.device)
        places = self._places().index_select(0, ids) - starts[state["groups"].long()]
        present, groups = state["groups"].long().unique(return_inverse=True)
        state = {name: tensor for name, tensor in state.items() if not name.startswith(("codes.", "bases."))}
        state["groups"] = groups
        for new, old in enumerate(present.tolist()):
            state[f"codes.{new}"] = self.codes[old].detach()[places[groups == new]]
            state[f"bases.{new}"] = self.bases[old].detach()
        sizes = groups.bincount().tolist()
        ranks = [self.layout.ranks[group] for group in present.tolist()]
        return {**options, "group_sizes": sizes, "ranks": ranks}, state

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``(n, D)`` for ids ``(n,)``; every group computes its own words only."""
        places = self._places().index_select(0, ids)
        if needs_fixed_shapes(places):
            # All groups for all words.
            products, first = [], 0
            for codes in self.codes:
                inside = places - first
                is_other = (inside < 0) | (inside >= codes.size(0))
                activated = self._activated(F.embedding(inside.masked_fill(is_other, 0), codes))
                products.append(activated.masked_fill(is_other.unsqueeze(1), 0.0))
                first += codes.size(0)
            return torch.cat(products, dim=1) @ torch.cat(list(self.bases))
        places, permutation = places.sort()
        starts = [0, *itertools.accumulate(self.layout.sizes)]
        borders = torch.searchsorted(places, torch.tensor(starts, device=places.device)).tolist()
        parts = []
        for codes, basis, start, (begin, end) in zip(self.codes, self.bases, starts, pairwise(borders)):
            members = places[begin:end] - start
            if len(members) >= len(codes):
                # For a small group of frequent words this is cheaper than one product for each occurrence.
                parts.append(F.embedding(members, self._activated(codes) @ basis))
            else:
                parts.append(self._activated(F.embedding(members, codes)) @ basis)
        return torch.cat(parts).index_select(0, _inverse(permutation))

    def layers(self, ids: Tensor) -> list[Layer]:
        members = self.groups.index_select(0, ids).long()
        places = self._places().index_select(0, ids)
        starts = itertools.accumulate(self.layout.sizes, initial=0)
        inner = [
            Layer(f"codes {group}", self._activated(codes[places[members == group] - start]))
            for group, (codes, start) in enumerate(zip(self.codes, starts))
        ]
        return [*inner, *super().layers(ids)]

    def _all_rows(self) -> Tensor:
        products = [self._activated(codes) @ basis for codes, basis in zip(self.codes, self.bases)]
        return torch.cat(products).index_select(0, self._places())

    def _block_scores(self, hidden: Tensor) -> Tensor:
        parts = zip(*self._projected(hidden))
        scores = torch.cat([F.linear(part, codes) for part, codes in parts], dim=-1)
        return scores.index_select(-1, self._places())

    def _token_loss(
        self, hidden: Tensor, targets: Tensor, ignore_index: int, *settings: Any
    ) -> tuple[Tensor, Callable[[], Tensor]]:
        if self._scores_by_blocks():
            return super()._token_loss(hidden, targets, ignore_index, *settings)
        places = self._places()
        words = _inverse(dense(places))
        bias, masked = self.output_bias(), None
        hiddens, codes = self._projected(hidden)
        if self.padding_idx is not None and needs_fixed_shapes(targets):
            # The place of the padding word is unknown, but its codes can be zeros.
            by_group = words.split(self.layout.sizes)
            paddings = ((part == self.padding_idx).unsqueeze(1) for part in by_group)
            codes = [part.masked_fill(padding, 0.0) for part, padding in zip(codes, paddings)]
        elif self.padding_idx is not None:
            masked = int(places[self.padding_idx])
        ignored = targets == ignore_index
        targets = targets.masked_fill(ignored, 0)
        targets = places.index_select(0, targets).masked_fill(ignored, _IGNORED)
        bias = None if bias is None else bias.index_select(0, words)
        terms = ScoreTerms(LinearScores, (*hiddens, *codes), targets, _IGNORED, bias, masked)
        loss, best = blockwise_cross_entropy(terms, *settings)
        return loss, lambda: words[best]

    def _projected(self, hidden: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Each group's projection ``(..., r_g)`` of hidden states ``(..., D)``; its codes ``(V_g, r_g)``."""
        if self._scores_by_blocks():
            codes = [self._activated(codes) for codes in self.codes]
            return [F.linear(hidden, basis) for basis in self.bases], codes
        codes, basis = self.cached(
            "groups",
            lambda: ([self._activated(codes) for codes in self.codes], torch.cat(list(self.bases))),
        )
        return list(F.linear(hidden, basis).split(self.layout.ranks, dim=-1)), codes

    def _activated(self, codes: Tensor) -> Tensor:
        return codes if self.options.activation is None else ACTIVATIONS[self.options.activation](codes)

    def _places(self) -> Tensor:
        """The place ``(V,)`` of each word in the order of groups and ids, for the current assignment."""
        groups = self.groups
        if needs_fixed_shapes(groups):
            return _inverse(groups.long().argsort(stable=True))
        # torch does not count changes of tensors made in inference mode.
        (memory,) = inner_tensors(groups)
        version = None if memory.is_inference() else memory._version
        order = self._order
        if order is None or version is None or order[0] is not groups or order[1] != version:
            sizes = groups.long().bincount(minlength=len(self.layout.sizes)).tolist()
            if sizes != list(self.layout.sizes):
                raise UserError(
                    f"the assignment 'groups' has groups of {sizes} words, but the codes have groups of "
                    f"{list(self.layout.sizes)}: load the assignment that was saved with these codes"
                )
            with torch.inference_mode(False):  # as in `cache_tensor`
                places = _inverse(groups.long().argsort(stable=True))
            if self._is_packed:
                form = BitCodes.of(places)
                places = PackedTensor(form, form.encode(places.cpu()), places.dtype).to(places.device)
            order = self._order = groups, version, places
        return order[2]

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles derive the order again.
        return {**super().__getstate__(), "_order": None}

    @classmethod
    def fit(cls, task: FitTask) -> GroupReduceEmbedding:
        """Weighted SVDs of frequency groups, refined; with an activation, gradient descent follows.

        Without counts, words are assumed to be sorted by frequency and to follow Zipf's law.
        """
        options: GroupReduceOptions = task.build().options
        if options.num_groups is None:
            raise OptionError(
                "group_reduce: fitting determines 'group_sizes' and 'ranks'; give 'num_groups' and 'min_rank'"
            )
        counts = task.token_counts
        if counts is None:
            counts = 1.0 / torch.arange(1, len(task.teacher) + 1, dtype=torch.float64)
        # Only gradient descent depends on the scale.
        scaled, scale = (task, 1.0) if options.activation is None else task.at_unit_scale()
        layout = {name: getattr(options, name) for name in _LAYOUT}
        reduction = group_reduce(scaled.teacher, counts, **layout)
        others = {name: task.options[name] for name in task.options if name in ("activation", "output_bias")}
        sizes, ranks = map(len, reduction.codes), map(len, reduction.bases)
        embedding: GroupReduceEmbedding = task.build({"group_sizes": [*sizes], "ranks": [*ranks], **others})
        with torch.no_grad():
            embedding.groups.copy_(reduction.groups)
            for group, (codes, basis) in enumerate(zip(reduction.codes, reduction.bases, strict=True)):
                if options.activation == "relu":
                    codes, basis = without_negatives(codes, basis)
                embedding.codes[group].copy_(codes)
                embedding.bases[group].copy_(basis)
        if options.activation is not None:
            reconstruct(embedding, scaled)
        for codes, basis in zip(embedding.codes, embedding.bases, strict=True):
            restore_scale(scale, options.activation, codes, basis)
            if options.activation is None:
                shrink_codes(codes, basis)
        return embedding


def _inverse(permutation: Tensor) -> Tensor:
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(len(permutation), device=permutation.device)
    return inverse
