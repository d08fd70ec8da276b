"""The adaptive softmax of Grave et al. (2017): frequent words in a head, rare words in clusters.

The probability of a frequent word is its share in the head; that of a word in cluster i is the share of the
cluster in the head, times the word's share in the cluster. The loss computes a cluster only for the tokens
whose target is in it. Everything is built from `linear_cross_entropy`, which works in blocks of tokens.

Axes: ``N`` tokens, ``V`` vocabulary, ``D`` width of the hidden states, ``R`` width inside a cluster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.layers.tracing import has_values, true_positions, without_autocast
from shared_embeddings.loss import Reduction, linear_cross_entropy, sum_dtype

# The target of ignored tokens inside this module: never a word id, whatever the caller's `ignore_index` is.
_IGNORED = -1
# The number of tokens whose best words are searched at a time.
_BLOCK = 512


def bands_of(ids: Tensor, cutoffs: Sequence[int]) -> Tensor:
    """The band of every id, both ``(n,)``: the number of `cutoffs` that it has reached."""
    bands = torch.zeros_like(ids)
    for cutoff in cutoffs:
        bands += ids >= cutoff
    return bands


def positions_by_group(groups: Tensor, count: int) -> tuple[Tensor, ...]:
    """The positions in `groups` ``(n,)`` of each number from 0 to `count` - 1; synchronizes once."""
    sizes = torch.stack([(groups == group).sum() for group in range(count)]).tolist()
    return groups.argsort(stable=True).split(sizes)


@dataclasses.dataclass(frozen=True)
class Part:
    """Entries that share one softmax: the head, or one cluster.

    Attributes:
        segments: one row ``(R,)`` per entry, in tables one after the other.
        basis: ``(R, D)``, which projects hidden states; None if they are multiplied by the codes directly.
        masked_entry: the entry whose score is always zero.
        bias: one number per entry, or None without.
    """

    segments: tuple[Tensor, ...]
    basis: Tensor | None
    masked_entry: int | None
    bias: Tensor | None = None

    @property
    def entries(self) -> int:
        """The number of entries."""
        return sum(len(codes) for codes in self.segments)

    def log_prob(self, hidden: Tensor) -> Tensor:
        """The log-probabilities of the entries for hidden states ``(..., D)``, in at least 32 bits."""
        narrowed = self.narrowed(hidden)
        scores = torch.cat([F.linear(narrowed, codes) for codes in self.segments], dim=-1)
        if self.bias is not None:
            scores = scores + self.bias
        if self.masked_entry is not None:
            scores[..., self.masked_entry] = 0.0
        return F.log_softmax(scores, dim=-1, dtype=sum_dtype(scores))

    def cross_entropy(
        self,
        hidden: Tensor,
        targets: Tensor,
        label_smoothing: float,
        reduction: Reduction,
        block_size: int | None,
    ) -> tuple[Tensor, Tensor]:
        """Loss and best entries of hidden states ``(n, D)`` for the entries `targets` ``(n,)``."""
        return linear_cross_entropy(
            (self.narrowed(hidden),) * len(self.segments),
            self.segments,
            targets,
            bias=self.bias,
            masked_word=self.masked_entry,
            ignore_index=_IGNORED,
            label_smoothing=label_smoothing,
            reduction=reduction,
            block_size=block_size,
        )

    def narrowed(self, hidden: Tensor) -> Tensor:
        """Hidden states in the width of the codes."""
        return hidden if self.basis is None else F.linear(hidden, self.basis)


@dataclasses.dataclass(frozen=True)
class AdaptiveSoftmax:
    """A head and its clusters.

    Attributes:
        head: the words below the first cutoff, then one entry per cluster.
        tails: the clusters.
        cutoffs: the first word of each cluster.
    """

    head: Part
    tails: Sequence[Part]
    cutoffs: Sequence[int]

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.cutoffs[-1] + self.tails[-1].entries

    def log_prob(self, hidden: Tensor) -> Tensor:
        """The log-probabilities ``(..., V)`` of all words for hidden states ``(..., D)``."""
        head = self.head.log_prob(hidden)
        words, clusters = head.split([self.cutoffs[0], len(self.tails)], dim=-1)
        tails = [
            tail.log_prob(hidden) + cluster
            for tail, cluster in zip(self.tails, clusters.split(1, dim=-1), strict=True)
        ]
        return torch.cat([words, *tails], dim=-1).to(hidden.dtype)

    def cross_entropy(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        ignore_index: int,
        label_smoothing: float,
        reduction: Reduction,
        block_size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The loss, and the best entry of the head ``(N,)`` for every token.

        Args:
            hidden: ``(N, D)``.
            targets: ``(N,)`` word ids.
            ignore_index, label_smoothing, reduction: as in ``F.cross_entropy``; a smoothed target is spread
                over all V words, which needs all clusters for all tokens.
            block_size: as in `linear_cross_entropy`.

        Raises:
            IndexError: a target is out of range.
            ValueError: as in `linear_cross_entropy`.
        """
        kept = targets != ignore_index
        bands = bands_of(targets, self.cutoffs)
        positions = self._positions_by_band(targets, bands, kept)
        # The mean is taken at the end, over the sum of all parts.
        parts: Reduction = "sum" if reduction == "mean" else reduction
        clusters = bands + (self.cutoffs[0] - 1)
        entries = torch.where(bands == 0, targets, clusters).masked_fill(~kept, _IGNORED)
        loss, best = self.head.cross_entropy(hidden, entries, label_smoothing, parts, block_size)
        for tail, start, inside in zip(self.tails, self.cutoffs, positions[1:], strict=True):
            words = targets.index_select(0, inside) - start
            of_tail = hidden.index_select(0, inside)
            of_words, _ = tail.cross_entropy(of_tail, words, 0.0, parts, block_size)
            loss = _added(loss, of_words * (1.0 - label_smoothing), inside)
        if label_smoothing > 0.0:
            loss = loss + label_smoothing * self._smoothing(hidden, kept, parts, block_size)
        return (_mean(loss, kept) if reduction == "mean" else loss), best

    @torch.no_grad()
    def predictions(self, hidden: Tensor, best: Tensor) -> Tensor:
        """The most probable words ``(N,)`` for hidden states ``(N, D)``.

        Args:
            best: ``(N,)`` the best entries of the head, from `cross_entropy`. Where that is a word, no word
                of a cluster can be more probable, and nothing more is computed.
        """
        words = best.clone()
        for rows in true_positions(best >= self.cutoffs[0]).split(_BLOCK):
            words[rows] = self._best_words(hidden.index_select(0, rows))
        return words

    def _best_words(self, hidden: Tensor) -> Tensor:
        """The most probable words ``(n,)`` for hidden states ``(n, D)``, of the head or of any cluster."""
        head = self.head.log_prob(hidden)
        first = self.cutoffs[0]
        highest, words = head[:, :first].max(dim=1)
        for cluster, (tail, start) in enumerate(zip(self.tails, self.cutoffs, strict=True)):
            of_cluster = head[:, first + cluster]
            # Only a cluster that outweighs the best word so far can hold a better one.
            rows = true_positions(of_cluster > highest)
            inner, entries = tail.log_prob(hidden.index_select(0, rows)).max(dim=1)
            found = inner + of_cluster[rows]
            better = found > highest[rows]
            highest[rows] = torch.where(better, found, highest[rows])
            words[rows] = torch.where(better, entries + start, words[rows])
        return words

    def _positions_by_band(self, targets: Tensor, bands: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
        """The positions of the tokens with a target in each band that is not ignored; checks the targets.

        Raises:
            IndexError: a target is out of range.
        """
        count = len(self.cutoffs) + 1
        if not has_values(targets):  # any token may be in any band
            return (torch.arange(targets.size(0), device=targets.device),) * count
        is_word = (targets >= 0) & (targets < self.vocabulary)
        groups = bands.masked_fill(~is_word, count + 1).masked_fill(~kept, count)
        *positions, _, wrong = positions_by_group(groups, count + 2)
        if len(wrong):
            target = int(targets[wrong[0]])
            raise IndexError(f"Target {target} is out of bounds: the vocabulary has {self.vocabulary} words")
        return tuple(positions)

    def _smoothing(
        self, hidden: Tensor, kept: Tensor, reduction: Reduction, block_size: int | None
    ) -> Tensor:
        """The loss of the uniform part of smoothed targets, minus the part that the head already includes.

        The uniform distribution over V words gives a cluster of n words the weight n / V in the head, and
        each of its words the weight 1 / n inside. The smoothing of the head gave each of its K entries 1 / K.
        """
        entries = self.head.entries
        weights = hidden.new_full((entries,), 1 / entries - 1 / self.vocabulary, dtype=sum_dtype(hidden))
        for entry, tail in enumerate(self.tails, start=self.cutoffs[0]):
            weights[entry] = 1 / entries - tail.entries / self.vocabulary
        if self.head.masked_entry is not None:
            weights[self.head.masked_entry] = 0.0
        narrowed = self.head.narrowed(hidden)
        with without_autocast(hidden.device):
            parts = weights.unsqueeze(0).split([len(codes) for codes in self.head.segments], dim=1)
            vectors = [part @ codes.to(part.dtype) for part, codes in zip(parts, self.head.segments)]
            vector = torch.cat(vectors).sum(dim=0)
            loss = narrowed.to(weights.dtype) @ vector
            if self.head.bias is not None:
                loss = loss + weights @ self.head.bias.to(weights.dtype)
            loss = loss.masked_fill(~kept, 0.0)
        if reduction != "none":
            loss = loss.sum()
        anywhere = torch.where(kept, 0, _IGNORED)
        for tail in self.tails:
            uniform, _ = tail.cross_entropy(hidden, anywhere, 1.0, reduction, block_size)
            loss = loss + uniform * (tail.entries / self.vocabulary)
        return loss


def _added(loss: Tensor, part: Tensor, positions: Tensor) -> Tensor:
    """A summed `loss` plus a summed `part`; or the losses of all tokens plus those of some `positions`."""
    return loss + part if loss.dim() == 0 else loss.index_add(0, positions, part)


def _mean(total: Tensor, kept: Tensor) -> Tensor:
    """`total` per token that counts; nan without any, like ``F.cross_entropy``'s, but its gradient zero."""
    count = kept.sum()
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)
