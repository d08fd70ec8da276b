"""Cross entropy of a tied softmax whose words share parts of their vectors with their class.

A word's score is that of its unique part plus that of its class (at every level of classes). The scores of a
block of tokens are stored as ``(V, n)``: then adding the score of a class to its words, and summing the
errors of its words, move whole rows of memory.

Axes: ``N`` tokens, n of them in a block, ``V`` vocabulary, ``D`` width of the hidden states, ``U`` of their
unique part, ``L`` levels of classes, ``C`` classes of a level, ``K`` classes of all levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.layers.packed_tensor import column_sums
from shared_embeddings.loss import (
    Gradients,
    LossSettings,
    ScoreOptions,
    Scores,
    blockwise_cross_entropy,
    sum_dtype,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing from Python 3.11

# Words whose scores are added at a time if there are several levels of classes.
_PIECE = 2048


class ClassIndex(NamedTuple):
    """The classes of the words, and the words of the classes; all levels are in one stack of K classes.

    Attributes:
        classes: ``(L, V)`` the position of a word's class in the stack, for every level.
        words: ``(L * V,)`` the words of the first class of the stack, then of the second, ...
        starts: ``(K + 1,)`` where the words of each class begin in `words`, and the end.
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
    **options: Unpack[ScoreOptions],
) -> tuple[Tensor, Tensor]:
    """Cross entropy of the scores of words with shared parts, and the best word of every token.

    Equals ``F.cross_entropy(hidden @ table.T + bias, targets)`` for the table of rows
    ``(U_i, C_class(i), ...)`` in values and in gradients; precision as in `linear_cross_entropy`.

    Args:
        hidden: ``(N, D)``.
        unique: ``(V, U)``, for the first U dimensions of `hidden`.
        class_tables: ``(C, width)`` for every level, for the dimensions that follow; D in total.
        index: the classes of the words.
        targets: ``(N,)`` word ids.
        options: see `ScoreOptions`.

    Returns:
        The loss, a scalar or ``(N,)`` for reduction "none"; and ``(N,)`` the word with the highest score.

    Raises:
        IndexError, ValueError: as in `linear_cross_entropy`.
    """
    return blockwise_cross_entropy(
        _ClassScores,
        (hidden, unique, *class_tables),
        index,
        targets,
        **options,
    )


class _ClassScores(Scores):
    """Scores of words with shared parts. The factors are hidden states, unique parts and class tables."""

    kind = "classes"
    word_axis = 0

    def __init__(self, factors: Sequence[Tensor], index: Sequence[Tensor], settings: LossSettings) -> None:
        hidden, *tables = factors
        self.index = ClassIndex(*index)
        self.masked_word = settings.masked_word
        self.words = tables[0].size(0)
        self.dtype = sum_dtype(hidden)
        self.tables = [table.to(settings.product_dtype) for table in tables]
        self.widths = [table.size(1) for table in tables]
        self.hidden = hidden.to(settings.product_dtype)
        self.parts = self.hidden.split(self.widths, dim=1)
        self.class_sizes = self._count_words()
        self.table_sum = self._sum_of_tables(tables) if settings.label_smoothing else None

    def _count_words(self) -> Tensor:
        """``(K,)`` the number of words of each class, without the masked one."""
        sizes = self.index.starts.diff().to(self.dtype)
        if self.masked_word is not None:
            sizes[self.index.classes[:, self.masked_word]] -= 1.0
        return sizes

    def _sum_of_tables(self, tables: Sequence[Tensor]) -> Tensor:
        """``(D,)`` the sum of the rows of all words but the masked one, for label smoothing."""
        unique, *levels = tables
        total = column_sums(unique, self.dtype)
        if self.masked_word is not None:
            total = total - unique[self.masked_word].to(self.dtype)
        sizes = self.class_sizes.split([level.size(0) for level in levels])
        sums = (size @ level.to(self.dtype) for size, level in zip(sizes, levels))
        return torch.cat((total, *sums))

    def fill(self, rows: slice, scores: Tensor, low: Tensor | None) -> None:
        """The scores of the classes, then those of the unique parts on top."""
        unique, *levels = self.tables
        of_unique, *of_levels = (part[rows].t() for part in self.parts)
        by_class = torch.cat([level @ part for level, part in zip(levels, of_levels)]).to(self.dtype)
        first, *others = self.index.classes
        torch.index_select(by_class, 0, first, out=scores)
        for classes in others:
            # In pieces, so that no second block of scores is needed.
            for piece, some in zip(scores.split(_PIECE), classes.split(_PIECE)):
                piece.add_(by_class.index_select(0, some))
        if low is None:
            scores.addmm_(unique, of_unique)
        else:
            scores.add_(torch.mm(unique, of_unique, out=low))

    def summed(self, rows: slice) -> Tensor:
        assert self.table_sum is not None
        return self.hidden[rows].to(self.dtype) @ self.table_sum

    def start_gradients(self, weights: Tensor, wants: Sequence[bool], dtype: torch.dtype) -> None:
        self.weights, self.error_dtype = weights, dtype
        self.error_tables = [table.to(dtype) for table in self.tables]
        wants_hidden, *wants_tables = wants
        self.of_hidden = self.hidden.new_empty(self.hidden.shape, dtype=self.dtype) if wants_hidden else None
        self.of_tables = [
            torch.zeros_like(table, dtype=self.dtype) if wanted else None
            for table, wanted in zip(self.tables, wants_tables)
        ]

    def add_gradients(self, rows: slice, errors: Tensor, low: Tensor | None) -> None:
        """The error of a class is the sum of the errors of its words."""
        words, starts = self.index.words, self.index.starts
        by_class = F.embedding_bag(words, errors, starts, mode="sum", include_last_offset=True)
        by_level = by_class.to(self.error_dtype).split([table.size(0) for table in self.tables[1:]])
        errors = errors if low is None else low.copy_(errors)
        weights, columns = self.weights[rows], 0
        for number, part_errors in enumerate((errors, *by_level)):
            if self.of_hidden is not None:
                part = self.of_hidden[rows, columns : columns + self.widths[number]]
                part.copy_(torch.mm(part_errors.t(), self.error_tables[number])).mul_(weights)
            columns += self.widths[number]
            gradient = self.of_tables[number]
            if gradient is not None:
                hidden = (self.parts[number][rows] * weights).to(self.error_dtype)
                _add_product(gradient, part_errors, hidden)

    def finish_gradients(self, smoothing: float) -> Gradients:
        if self.table_sum is None:
            return [self.of_hidden, *self.of_tables]
        if self.of_hidden is not None:
            self.of_hidden.sub_(self.weights * self.table_sum, alpha=smoothing)
        total = (self.hidden.to(self.dtype) * self.weights).sum(dim=0)
        of_unique, *of_levels = total.split(self.widths)
        unique, *levels = self.of_tables
        if unique is not None:
            unique.sub_(of_unique, alpha=smoothing)
            if self.masked_word is not None:
                unique[self.masked_word] = 0.0
        sizes = self.class_sizes.split([table.size(0) for table in self.tables[1:]])
        for level, size, of_level in zip(levels, sizes, of_levels):
            if level is not None:
                level.addr_(size, of_level, alpha=-smoothing)
        return [self.of_hidden, *self.of_tables]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to `total`, which may be of a wider type."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(torch.mm(left, right))
