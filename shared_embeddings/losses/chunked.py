"""Cross entropy of linear scores, in blocks of tokens; in evaluation, also of scores from a function.

A vocabulary may consist of segments, each with codes and hidden states of a different width, whose scores are
concatenated in one softmax.

Axes: ``N`` tokens, ``V`` vocabulary, ``R`` width of the hidden states and of the codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.layers.packed_tensor import column_sums
from shared_embeddings.losses.blocks import Gradients, LossSettings, ScoreSource, sum_dtype, tokens_per_block
from shared_embeddings.losses.blockwise import (
    Reduction,
    ScoreOptions,
    blockwise_cross_entropy,
    check_arguments,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing from Python 3.11


def linear_cross_entropy(
    hidden: Tensor,
    codes: Tensor,
    targets: Tensor,
    **options: Unpack[ScoreOptions],
) -> tuple[Tensor, Tensor]:
    """Cross entropy of the scores ``hidden @ codes.T + bias``, and the best word of every token.

    Equals ``F.cross_entropy`` on those scores in value and in gradients. At most the scores of a block of
    tokens exist at a time. Products run in the type of autocast; softmax, loss and gradients are summed in at
    least 32 bits, which is the type of the loss.

    Args:
        hidden: ``(N, R)``.
        codes: ``(V, R)``.
        targets: ``(N,)`` word ids.
        options: see `ScoreOptions`.

    Returns:
        The loss, a scalar or ``(N,)`` for reduction "none"; and ``(N,)`` the word with the highest score.

    Raises:
        IndexError: a target is out of range (checked on a CPU).
        ValueError: the reduction is unknown, the label smoothing is not in 0 to 1, or the block size below 1.
    """
    return segmented_cross_entropy(
        (hidden,),
        (codes,),
        targets,
        **options,
    )


def segmented_cross_entropy(
    hiddens: Sequence[Tensor],
    codes: Sequence[Tensor],
    targets: Tensor,
    **options: Unpack[ScoreOptions],
) -> tuple[Tensor, Tensor]:
    """`linear_cross_entropy` of the scores ``torch.cat([h @ c.T for h, c in zip(hiddens, codes)], 1)``.

    Args:
        hiddens: for each segment ``(N, R_g)``, all of one type.
        codes: for each segment ``(V_g, R_g)``; V is the sum of all V_g, and a word's number is its position
            in the concatenated segments.
        targets: ``(N,)`` word ids.
        options: see `ScoreOptions`; the bias covers all segments.
    """
    return blockwise_cross_entropy(
        _Segments,
        (*hiddens, *codes),
        (),
        targets,
        **options,
    )


class _Segments(ScoreSource):
    """Linear scores of segments. The factors are hidden states, and as many codes."""

    kind = "segments"
    word_axis = 1

    def __init__(self, factors: Sequence[Tensor], index: Sequence[Tensor], settings: LossSettings) -> None:
        number = len(factors) // 2
        self.segments: list[_Segment] = []
        self.words = 0
        for hidden, codes in zip(factors[:number], factors[number:]):
            self.segments.append(_Segment(hidden, codes, self.words, settings))
            self.words += codes.size(0)

    def fill(self, rows: slice, scores: Tensor, low: Tensor | None) -> None:
        """As in the base class: a product for each segment."""
        products = scores if low is None else low
        for segment in self.segments:
            torch.mm(segment.hidden[rows], segment.codes.t(), out=products[:, segment.columns])
        if low is not None:
            scores.copy_(low)

    def summed(self, rows: slice) -> Tensor:
        """As in the base class: the hidden states times the sums of the codes."""
        first, *others = (segment.summed(rows) for segment in self.segments)
        return sum(others, first)

    def start_gradients(self, weights: Tensor, wants: Sequence[bool], dtype: torch.dtype) -> None:
        """As in the base class."""
        number = len(self.segments)
        for segment, *wanted in zip(self.segments, wants[:number], wants[number:]):
            segment.start_gradients(weights, dtype, *wanted)

    def add_gradients(self, rows: slice, errors: Tensor, low: Tensor | None) -> None:
        """As in the base class."""
        if low is not None:
            errors = low.copy_(errors)
        for segment in self.segments:
            segment.add_gradients(rows, errors[:, segment.columns])

    def finish_gradients(self, smoothing: float) -> Gradients:
        """As in the base class."""
        for segment in self.segments:
            segment.finish_gradients(smoothing)
        of_hidden = [segment.of_hidden for segment in self.segments]
        return [*of_hidden, *(segment.of_codes for segment in self.segments)]


class _Segment:
    """The part of the vocabulary that has codes of one width, with its gradients.

    Attributes:
        hidden, codes: ``(N, R_g)`` and ``(V_g, R_g)`` in the type of the products.
        columns: the segment's position among all words.
        masked: the masked word's position in the segment, None if it is in another.
        code_sum: ``(R_g,)`` the sum of all codes but the masked one, for label smoothing; else None.
        of_hidden, of_codes: the gradients where needed, once they have been started.
    """

    of_hidden: Tensor | None
    of_codes: Tensor | None

    def __init__(self, hidden: Tensor, codes: Tensor, start: int, settings: LossSettings) -> None:
        self.hidden = hidden.to(settings.product_dtype)
        self.codes = codes.to(settings.product_dtype)
        self.columns = slice(start, start + codes.size(0))
        self.dtype = sum_dtype(hidden)
        self.masked = None if settings.masked_word is None else settings.masked_word - start
        if self.masked is not None and not 0 <= self.masked < codes.size(0):
            self.masked = None
        self.code_sum: Tensor | None = None
        if settings.label_smoothing != 0.0:
            self.code_sum = column_sums(codes, self.dtype)
            if self.masked is not None:
                self.code_sum = self.code_sum - codes[self.masked]

    def summed(self, rows: slice) -> Tensor:
        """The sum ``(n,)`` of the scores of all words of the segment but the masked one."""
        assert self.code_sum is not None
        return self.hidden[rows].to(self.dtype) @ self.code_sum

    def start_gradients(
        self, weights: Tensor, dtype: torch.dtype, wants_hidden: bool, wants_codes: bool
    ) -> None:
        """Allocate the gradients that are needed."""
        self.weights, self.error_dtype = weights, dtype
        self.error_codes = self.codes.to(dtype)
        hidden, codes = self.hidden, self.codes
        self.of_hidden = hidden.new_empty(hidden.shape, dtype=self.dtype) if wants_hidden else None
        self.of_codes = codes.new_empty(codes.shape, dtype=self.dtype) if wants_codes else None
        is_low = dtype != self.dtype
        self.low_sum = torch.empty_like(codes, dtype=dtype) if is_low and wants_codes else None
        self.is_first = True

    def add_gradients(self, rows: slice, errors: Tensor) -> None:
        """Add the block `rows` with `errors` ``(n, V_g)``, the gradient by its scores."""
        if self.of_hidden is not None:
            self._add_hidden(rows, errors, self.of_hidden[rows])
        if self.of_codes is not None:
            self._add_codes(rows, errors, self.of_codes)
        self.is_first = False

    def finish_gradients(self, smoothing: float) -> None:
        """Add the constant part of the smoothed targets."""
        if self.of_codes is not None:
            if self.is_first:
                self.of_codes.zero_()
            if self.code_sum is not None:
                total = (self.hidden.to(self.dtype) * self.weights).sum(dim=0)
                self.of_codes.sub_(total, alpha=smoothing)
                if self.masked is not None:
                    self.of_codes[self.masked] = 0.0
        if self.of_hidden is not None and self.code_sum is not None:
            self.of_hidden.sub_(self.weights * self.code_sum, alpha=smoothing)

    def _add_hidden(self, rows: slice, errors: Tensor, gradient: Tensor) -> None:
        """The gradient ``(n, R_g)`` of the hidden states `rows`."""
        if self.error_dtype == gradient.dtype:
            torch.mm(errors, self.error_codes, out=gradient)
        else:
            gradient.copy_(torch.mm(errors, self.error_codes))
        gradient.mul_(self.weights[rows])

    def _add_codes(self, rows: slice, errors: Tensor, total: Tensor) -> None:
        """The share of the tokens `rows` in the gradient of the codes."""
        hidden = (self.hidden[rows] * self.weights[rows]).to(self.error_dtype)
        if self.low_sum is None:
            # With beta 0 the content of new memory is ignored.
            total.addmm_(errors.t(), hidden, beta=0.0 if self.is_first else 1.0)
            return
        torch.mm(errors.t(), hidden, out=self.low_sum)
        if self.is_first:
            total.copy_(self.low_sum)
        else:
            total.add_(self.low_sum)


def scored_cross_entropy(
    scores_of: Callable[[Tensor], Tensor],
    num_words: int,
    hidden: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    block_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``F.cross_entropy(scores_of(hidden), targets)`` in blocks of tokens, and the best word of every token.

    Args:
        scores_of: computes scores ``(n, V)`` for hidden states ``(n, S)``.
        num_words: V.
        hidden: ``(N, S)``.
        targets: ``(N,)`` word ids.
        ignore_index, label_smoothing, reduction, block_size: as in `SharedEmbedding.cross_entropy`.

    Raises:
        IndexError: a target is out of range (checked on a CPU).
        ValueError: the reduction is unknown, the label smoothing is not in 0 to 1, or the block size below 1.
    """
    check_arguments(reduction, label_smoothing, block_size)
    size = tokens_per_block(len(targets), num_words, block_size, hidden.device)
    losses, predictions = [], []
    for states, words in zip(hidden.split(size), targets.split(size)):
        scores = scores_of(states).to(sum_dtype(hidden))
        losses.append(
            F.cross_entropy(
                scores,
                words.long(),
                ignore_index=ignore_index,
                label_smoothing=label_smoothing,
                reduction="none",
            )
        )
        predictions.append(scores.argmax(dim=-1))
    loss, best = torch.cat(losses), torch.cat(predictions)
    if reduction == "none":
        return loss, best
    total = loss.sum()
    return (total / (targets != ignore_index).sum() if reduction == "mean" else total), best
