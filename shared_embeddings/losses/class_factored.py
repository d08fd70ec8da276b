"""Cross entropy of a tied softmax whose words share parts of their vectors with their class.

A word's score is that of its unique part plus that of its class (of every level of classes). The scores of a
block of tokens are kept as ``(V, n)``: then adding the score of a class to its words, and summing the errors
of its words, move whole rows of memory. For the rest this is `softmax.linear_cross_entropy`: one shared
buffer of scores, gradients formed in the forward pass.

Axes: ``N`` tokens, n of them in a block, ``V`` vocabulary, ``D`` width of the hidden states, ``U`` of their
unique part, ``L`` levels of classes, ``C`` classes of a level, ``K`` classes of all levels.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.losses.blockwise import (
    CHUNK,
    Gradients,
    Kind,
    LossSettings,
    Reduction,
    block_size,
    blocks_of,
    blockwise_cross_entropy,
    error_dtype,
    finished_bias,
    sum_dtype,
    sum_of_bias,
)


class ClassIndex(NamedTuple):
    """The classes of the words, and the words of the classes; all levels stand in one stack of K classes.

    Attributes:
        classes: ``(L, V)`` the place of a word's class in the stack, for every level.
        words: ``(L * V,)`` the words of the first class of the stack, then of the second, ...
        starts: ``(K + 1,)`` where the words of each class begin in `words`; at last, their end.
    """

    classes: Tensor
    words: Tensor
    starts: Tensor


def class_index(classes: Tensor, sizes: Sequence[int]) -> ClassIndex:
    """The index of `classes` ``(V, L)``, the class of each word in levels of `sizes` classes."""
    firsts = [sum(sizes[:level]) for level in range(len(sizes))]
    stacked = torch.stack([classes[:, level].long() + first for level, first in enumerate(firsts)])
    ordered, places = torch.sort(stacked.flatten(), stable=True)
    starts = torch.searchsorted(ordered, torch.arange(sum(sizes) + 1, device=classes.device))
    return ClassIndex(stacked, places % classes.size(0), starts)


def class_cross_entropy(
    hidden: Tensor,
    unique: Tensor,
    class_tables: Sequence[Tensor],
    index: ClassIndex,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    masked_word: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> tuple[Tensor, Tensor]:
    """Cross entropy of the scores of words with shared parts, and the best word of every token.

    Equals ``F.cross_entropy(hidden @ table.T + bias, targets)`` for the table of rows
    ``(U_i, C_class(i), ...)`` in values and in gradients; precision as in `softmax.linear_cross_entropy`.

    Args:
        hidden: ``(N, D)``.
        unique: ``(V, U)``, met by the first U dimensions of `hidden`.
        class_tables: ``(C, width)`` for every level, met by the dimensions that follow; D in all.
        index: which word has which classes.
        targets: ``(N,)`` word ids.
        bias: ``(V,)`` what the words' scores get added, or None for nothing.
        masked_word: a word whose score is fixed at zero and that gives no gradient to itself, its class or
            its bias.
        ignore_index, label_smoothing, reduction: as in ``F.cross_entropy``.

    Returns:
        The loss, a scalar or ``(N,)`` for reduction "none"; and ``(N,)`` the word with the highest score.

    Raises:
        IndexError: a target is no word of the vocabulary (checked where that needs no wait for the device).
        ValueError: an unknown reduction, or a label smoothing outside 0 to 1.
    """
    kind = Kind(functools.partial(_Scorer, index), _GradientSums)
    return blockwise_cross_entropy(
        kind,
        (hidden, unique, *class_tables) if bias is None else (hidden, unique, *class_tables, bias),
        unique.size(0),
        targets,
        masked_word=masked_word,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


class _Scorer:
    """Scores, loss and predictions block by block, in buffers that all blocks share.

    The factors are hidden states, a table of unique parts, one for each level, and at last a bias if any.
    """

    def __init__(
        self, index: ClassIndex, factors: Sequence[Tensor], targets: Tensor, settings: LossSettings
    ) -> None:
        levels = index.classes.size(0)
        hidden, *tables = factors[: levels + 2]
        self.index, self.settings = index, settings
        self.sum_dtype = sum_dtype(hidden)
        self.bias = factors[-1].to(self.sum_dtype).unsqueeze(1) if len(factors) > levels + 2 else None
        self.tables = [table.to(settings.product_dtype) for table in tables]
        self.widths = [table.size(1) for table in tables]
        self.hidden = hidden.to(settings.product_dtype)
        self.parts = self.hidden.split(self.widths, dim=1)
        # An ignored target may be no word at all; any word will do, as its weight is zero.
        self.targets = targets.masked_fill(targets == settings.ignore_index, 0).unsqueeze(0)
        self.smoothing = settings.label_smoothing / tables[0].size(0)
        self.class_sizes = self._count_words()
        self.table_sum = self._sum_of_tables(tables) if settings.label_smoothing else None
        self.bias_sum = sum_of_bias(self.bias, settings)
        self.block = block_size(hidden, tables[0].size(0))
        self.buffer = hidden.new_empty(tables[0].size(0) * self.block, dtype=self.sum_dtype)
        is_low = settings.product_dtype != self.sum_dtype
        self.low_buffer = torch.empty_like(self.buffer, dtype=settings.product_dtype) if is_low else None

    def _count_words(self) -> Tensor:
        """``(K,)`` how many words each class has, without the masked one."""
        sizes = self.index.starts.diff().to(self.sum_dtype)
        if self.settings.masked_word is not None:
            sizes[self.index.classes[:, self.settings.masked_word]] -= 1.0
        return sizes

    def _sum_of_tables(self, tables: Sequence[Tensor]) -> Tensor:
        """``(D,)`` the sum of the rows of all words that count, which label smoothing needs."""
        unique, *levels = tables
        total = unique.sum(dim=0, dtype=self.sum_dtype)
        if self.settings.masked_word is not None:
            total = total - unique[self.settings.masked_word].to(self.sum_dtype)
        sizes = self.class_sizes.split([level.size(0) for level in levels])
        sums = (size @ level.to(self.sum_dtype) for size, level in zip(sizes, levels))
        return torch.cat((total, *sums))

    def blocks(self) -> Iterator[slice]:
        """The blocks of tokens, in order."""
        return blocks_of(self.hidden.size(0), self.block)

    def score(self, rows: slice, losses: Tensor, predictions: Tensor) -> Tensor:
        """Fill in the `losses` and `predictions` of the tokens `rows` (n of them).

        Returns:
            ``(V, n)`` the probabilities of all words, valid until the next call.
        """
        scores = self._scores(rows)
        highest, predictions[rows] = _column_maxima(scores)
        of_target = scores.gather(0, self.targets[:, rows])
        probabilities = torch.softmax(scores, dim=0, out=scores)
        # The best word's probability is 1 / sum(exp(score - highest)).
        log_sums = highest - probabilities.gather(0, predictions[rows].unsqueeze(0)).log_()
        loss = log_sums.sub_(of_target, alpha=1.0 - self.settings.label_smoothing).squeeze(0)
        if self.table_sum is not None:
            loss.sub_(self.hidden[rows].to(self.sum_dtype) @ self.table_sum, alpha=self.smoothing)
        losses[rows] = loss - self.smoothing * self.bias_sum
        return probabilities

    def _scores(self, rows: slice) -> Tensor:
        """``(V, n)`` scores of the tokens `rows`, in the shared buffer."""
        unique, *levels = self.tables
        of_unique, *of_levels = (part[rows].t() for part in self.parts)
        by_class = torch.cat([level @ part for level, part in zip(levels, of_levels)]).to(self.sum_dtype)
        shape = (unique.size(0), by_class.size(1))
        scores = self.buffer[: shape[0] * shape[1]].view(shape)
        first, *others = self.index.classes
        torch.index_select(by_class, 0, first, out=scores)
        for classes in others:
            # In pieces, so that no second block of scores is needed.
            for piece, some in zip(scores.split(_PIECE), classes.split(_PIECE)):
                piece.add_(by_class.index_select(0, some))
        if self.low_buffer is None:
            scores.addmm_(unique, of_unique)
        else:
            scores.add_(torch.mm(unique, of_unique, out=self.low_buffer[: scores.numel()].view(shape)))
        if self.bias is not None:
            scores.add_(self.bias)
        if self.settings.masked_word is not None:
            scores[self.settings.masked_word] = 0.0
        return scores


class _GradientSums:
    """Adds up the gradients of the weighted losses, block by block.

    With p the softmax and q the smoothed target, the gradient by a token's scores is p - q; by the score of a
    class, the sum over its words. The weight of a token is applied to the narrow sides of the products; the
    constant part of q is added once at the end.
    """

    def __init__(self, scorer: _Scorer, weights: Tensor, wants: Sequence[bool]) -> None:
        self.scorer = scorer
        self.weights = weights.unsqueeze(1)
        self.dtype = error_dtype(scorer.settings, scorer.sum_dtype)
        self.tables = [table.to(self.dtype) for table in scorer.tables]
        wants_hidden, *wants_tables = wants[: len(self.tables) + 1]
        self.of_bias = None if scorer.bias is None or not wants[-1] else torch.zeros_like(scorer.bias)
        hidden = scorer.hidden
        self.of_hidden = hidden.new_empty(hidden.shape, dtype=scorer.sum_dtype) if wants_hidden else None
        self.of_tables = [
            torch.zeros_like(table, dtype=scorer.sum_dtype) if wanted else None
            for table, wanted in zip(scorer.tables, wants_tables)
        ]

    def add(self, rows: slice, probabilities: Tensor) -> None:
        """Add the block `rows`; `probabilities` ``(V, n)`` is overwritten."""
        scorer, settings = self.scorer, self.scorer.settings
        errors = probabilities
        targets = scorer.targets[:, rows]
        errors.scatter_add_(0, targets, errors.new_full(targets.shape, settings.label_smoothing - 1.0))
        if settings.masked_word is not None:
            errors[settings.masked_word] = 0.0
        if self.of_bias is not None:
            self.of_bias.addmm_(errors, self.weights[rows])
        index = scorer.index
        by_class = F.embedding_bag(index.words, errors, index.starts, mode="sum", include_last_offset=True)
        by_level = by_class.to(self.dtype).split([table.size(0) for table in self.tables[1:]])
        if self.dtype != errors.dtype:
            errors = self._lowered(errors)
        weights = self.weights[rows]
        columns = 0
        for number, part_errors in enumerate((errors, *by_level)):
            if self.of_hidden is not None:
                part = self.of_hidden[rows, columns : columns + scorer.widths[number]]
                part.copy_(torch.mm(part_errors.t(), self.tables[number])).mul_(weights)
            columns += scorer.widths[number]
            gradient = self.of_tables[number]
            if gradient is not None:
                _add_product(gradient, part_errors, (scorer.parts[number][rows] * weights).to(self.dtype))

    def finish(self) -> Gradients:
        """The gradients by the factors, in their order and shapes, where wanted."""
        scorer, settings = self.scorer, self.scorer.settings
        of_bias = [] if scorer.bias is None else [self._finished_bias()]
        if scorer.table_sum is None:
            return [self.of_hidden, *self.of_tables, *of_bias]
        if self.of_hidden is not None:
            self.of_hidden.sub_(self.weights * scorer.table_sum, alpha=scorer.smoothing)
        total = (scorer.hidden.to(scorer.sum_dtype) * self.weights).sum(dim=0)
        of_unique, *of_levels = total.split(scorer.widths)
        unique, *levels = self.of_tables
        if unique is not None:
            unique.sub_(of_unique, alpha=scorer.smoothing)
            if settings.masked_word is not None:
                unique[settings.masked_word] = 0.0
        sizes = scorer.class_sizes.split([table.size(0) for table in scorer.tables[1:]])
        for level, size, of_level in zip(levels, sizes, of_levels):
            if level is not None:
                level.addr_(size, of_level, alpha=-scorer.smoothing)
        return [self.of_hidden, *self.of_tables, *of_bias]

    def _finished_bias(self) -> Tensor | None:
        """The gradient ``(V,)`` of the bias with its constant part, where wanted."""
        if self.of_bias is None:
            return None
        scorer = self.scorer
        return finished_bias(self.of_bias, self.weights, scorer.smoothing, scorer.settings).squeeze(1)

    def _lowered(self, errors: Tensor) -> Tensor:
        """The block in the type of the products, in the buffer that the scores no longer need."""
        buffer = self.scorer.low_buffer
        assert buffer is not None
        return buffer[: errors.numel()].view(errors.shape).copy_(errors)


def _column_maxima(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The highest score ``(1, n)`` of every column of `scores` ``(V, n)``, and its word ``(n,)``.

    As in `softmax`, the index is looked for only in the chunk of words that has the highest value.
    """
    words = scores.size(0)
    whole = words - words % CHUNK
    maxima = scores[:whole].unflatten(0, (-1, CHUNK)).amax(dim=1)
    if whole < words:
        maxima = torch.cat((maxima, scores[whole:].amax(dim=0, keepdim=True)))
    highest, chunk = maxima.max(dim=0, keepdim=True)
    candidates = chunk * CHUNK + torch.arange(CHUNK, device=scores.device).unsqueeze(1)
    candidates.clamp_(max=words - 1)
    return highest, candidates.gather(0, scores.gather(0, candidates).argmax(dim=0, keepdim=True)).squeeze(0)


# Words whose scores are added up at a time where there are several levels of classes.
_PIECE = 2048


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to `total`, which may be of a wider type."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(torch.mm(left, right))
