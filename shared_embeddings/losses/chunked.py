"""Cross entropy of a tied softmax layer that never holds the (N, V) scores of a batch.

A vocabulary may come in segments, each with codes and hidden states of its own width, whose scores stand side
by side under one softmax.

Axes: ``N`` tokens, ``V`` vocabulary, ``R`` width of the hidden states and of the codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
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


def linear_cross_entropy(
    hidden: Tensor,
    codes: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    masked_word: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> tuple[Tensor, Tensor]:
    """Cross entropy of the scores ``hidden @ codes.T + bias``, and the best word of every token.

    Equals ``F.cross_entropy`` on those scores in value and in gradients. Products run in the type that
    autocast asks for; softmax, loss and gradients are summed up in at least 32 bits, and the loss is returned
    so.

    Args:
        hidden: ``(N, R)``.
        codes: ``(V, R)``.
        targets: ``(N,)`` word ids.
        bias: ``(V,)``, or None for no bias.
        masked_word: a word whose score is fixed at zero: its row of `codes` and its `bias` have neither
            effect nor gradient.
        ignore_index, label_smoothing, reduction: as in ``F.cross_entropy``.

    Returns:
        The loss, a scalar or ``(N,)`` for reduction "none"; and ``(N,)`` the word with the highest score.

    Raises:
        IndexError: a target is no word of the vocabulary (checked where that needs no wait for the device).
        ValueError: an unknown reduction, or a label smoothing outside 0 to 1.
    """
    return segmented_cross_entropy(
        (hidden,),
        (codes,),
        targets,
        bias=bias,
        masked_word=masked_word,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


def segmented_cross_entropy(
    hiddens: Sequence[Tensor],
    codes: Sequence[Tensor],
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    masked_word: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> tuple[Tensor, Tensor]:
    """As `linear_cross_entropy`, for the scores ``torch.cat([h @ c.T for h, c in zip(hiddens, codes)], 1)``.

    Args:
        hiddens: for each segment ``(N, R_g)``, all of one type.
        codes: for each segment ``(V_g, R_g)``; V is the sum of all V_g, and a word's number is its place in
            the row of all segments.
        targets, bias, masked_word, ignore_index, label_smoothing, reduction: as there; the bias is that of
            the whole row.
    """
    return blockwise_cross_entropy(
        _SEGMENTS,
        (*hiddens, *codes) if bias is None else (*hiddens, *codes, bias),
        sum(part.size(0) for part in codes),
        targets,
        masked_word=masked_word,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


class _Segment:
    """The part of the vocabulary that has codes of one width.

    Attributes:
        hidden, codes: ``(N, R_g)`` and ``(V_g, R_g)`` in the type of the products.
        columns: the segment's place among all words.
        masked: the masked word's place in the segment, None where it is in another.
        code_sum: ``(R_g,)`` the sum of all codes that count, which label smoothing needs; None without it.
    """

    def __init__(self, hidden: Tensor, codes: Tensor, start: int, settings: LossSettings) -> None:
        self.hidden = hidden.to(settings.product_dtype)
        self.codes = codes.to(settings.product_dtype)
        self.columns = slice(start, start + codes.size(0))
        self.masked = None if settings.masked_word is None else settings.masked_word - start
        if self.masked is not None and not 0 <= self.masked < codes.size(0):
            self.masked = None
        self.code_sum: Tensor | None = None
        if settings.label_smoothing != 0.0:
            self.code_sum = codes.sum(dim=0, dtype=sum_dtype(hidden))
            if self.masked is not None:
                self.code_sum -= codes[self.masked]


class _Scorer:
    """Scores, loss and predictions block by block, in buffers that all blocks share.

    The factors are hidden states, as many codes, and at last a bias where there is one.
    """

    def __init__(self, factors: Sequence[Tensor], targets: Tensor, settings: LossSettings) -> None:
        self.settings = settings
        number = len(factors) // 2
        self.sum_dtype = sum_dtype(factors[0])
        self.bias = factors[-1].to(self.sum_dtype) if len(factors) % 2 else None
        self.segments: list[_Segment] = []
        words = 0
        for hidden, codes in zip(factors[:number], factors[number : 2 * number]):
            self.segments.append(_Segment(hidden, codes, words, settings))
            words += codes.size(0)
        # An ignored target may be no word at all; any word will do, as its weight is zero.
        self.targets = targets.masked_fill(targets == settings.ignore_index, 0).unsqueeze(1)
        self.smoothing = settings.label_smoothing / words
        self.bias_sum = sum_of_bias(self.bias, settings)
        self.block = block_size(targets, words)
        self.buffer = factors[0].new_empty((self.block, words), dtype=self.sum_dtype)
        is_low = settings.product_dtype != self.sum_dtype
        self.low_buffer = torch.empty_like(self.buffer, dtype=settings.product_dtype) if is_low else None

    def blocks(self) -> Iterator[slice]:
        """The blocks of tokens, in order."""
        return blocks_of(self.targets.size(0), self.block)

    def score(self, rows: slice, losses: Tensor, predictions: Tensor) -> Tensor:
        """Fill in the `losses` and `predictions` of the tokens `rows` (n of them).

        Returns:
            ``(n, V)`` the probabilities of all words, valid until the next call.
        """
        scores = self._scores(rows)
        highest, predictions[rows] = _row_maxima(scores)
        of_target = scores.gather(1, self.targets[rows])
        probabilities = torch.softmax(scores, dim=1, out=scores)
        # The best word's probability is 1 / sum(exp(score - highest)).
        log_sums = highest - probabilities.gather(1, predictions[rows].unsqueeze(1)).log_()
        loss = log_sums.sub_(of_target, alpha=1.0 - self.settings.label_smoothing).squeeze(1)
        for segment in self.segments:
            if segment.code_sum is not None:
                loss.sub_(segment.hidden[rows].to(self.sum_dtype) @ segment.code_sum, alpha=self.smoothing)
        losses[rows] = loss - self.smoothing * self.bias_sum
        return probabilities

    def _scores(self, rows: slice) -> Tensor:
        """``(n, V)`` scores of the tokens `rows`, in the shared buffer."""
        scores = self.buffer[: rows.stop - rows.start]
        products = scores if self.low_buffer is None else self.low_buffer[: scores.size(0)]
        for segment in self.segments:
            torch.mm(segment.hidden[rows], segment.codes.t(), out=products[:, segment.columns])
        if self.low_buffer is not None:
            scores.copy_(products)
        if self.bias is not None:
            scores.add_(self.bias)
        if self.settings.masked_word is not None:
            scores[:, self.settings.masked_word] = 0.0
        return scores


class _GradientSums:
    """Adds up the gradients of the weighted losses, block by block.

    With p the softmax and q the smoothed target, the gradient by a token's scores is p - q. The weight of a
    token is applied to the narrow sides of the products, never to the ``(n, V)`` block; the constant part of
    q is the same for all words, so it is added once at the end.
    """

    def __init__(self, scorer: _Scorer, weights: Tensor, wants: Sequence[bool]) -> None:
        self.scorer = scorer
        self.weights = weights.unsqueeze(1)
        self.dtype = error_dtype(scorer.settings, scorer.sum_dtype)
        number = len(scorer.segments)
        self.parts = [
            _SegmentGradient(scorer, segment, self.weights, self.dtype, *wanted)
            for segment, *wanted in zip(scorer.segments, wants[:number], wants[number : 2 * number])
        ]
        self.of_bias = None if scorer.bias is None or not wants[-1] else torch.zeros_like(scorer.bias)

    def add(self, rows: slice, probabilities: Tensor) -> None:
        """Add the block `rows`; `probabilities` ``(n, V)`` is overwritten."""
        settings = self.scorer.settings
        errors = probabilities
        targets = self.scorer.targets[rows]
        errors.scatter_add_(1, targets, errors.new_full(targets.shape, settings.label_smoothing - 1.0))
        if settings.masked_word is not None:
            errors[:, settings.masked_word] = 0.0
        if self.of_bias is not None:
            self.of_bias.addmv_(errors.t(), self.weights[rows].squeeze(1))
        if self.dtype != errors.dtype:
            errors = self._lowered(errors)
        for part in self.parts:
            part.add(rows, errors[:, part.segment.columns])

    def finish(self) -> Gradients:
        """The gradients by the factors, in their order and shapes, where wanted."""
        for part in self.parts:
            part.finish()
        scorer = self.scorer
        of_segments = [part.of_hidden for part in self.parts] + [part.of_codes for part in self.parts]
        if scorer.bias is None:
            return of_segments
        if self.of_bias is None:
            return [*of_segments, None]
        return [*of_segments, finished_bias(self.of_bias, self.weights, scorer.smoothing, scorer.settings)]

    def _lowered(self, errors: Tensor) -> Tensor:
        """The block in the type of the products, in the buffer that the scores no longer need."""
        buffer = self.scorer.low_buffer
        assert buffer is not None
        return buffer[: errors.size(0)].copy_(errors)


class _SegmentGradient:
    """The gradients by one segment's hidden states and codes, where wanted."""

    def __init__(
        self,
        scorer: _Scorer,
        segment: _Segment,
        weights: Tensor,
        dtype: torch.dtype,
        wants_hidden: bool,
        wants_codes: bool,
    ) -> None:
        self.scorer, self.segment, self.weights, self.dtype = scorer, segment, weights, dtype
        self.codes = segment.codes.to(dtype)
        hidden, codes = segment.hidden, segment.codes
        self.of_hidden = hidden.new_empty(hidden.shape, dtype=scorer.sum_dtype) if wants_hidden else None
        self.of_codes = codes.new_empty(codes.shape, dtype=scorer.sum_dtype) if wants_codes else None
        is_low = dtype != scorer.sum_dtype
        self.low_sum = torch.empty_like(codes, dtype=dtype) if is_low and wants_codes else None
        self.is_first = True

    def add(self, rows: slice, errors: Tensor) -> None:
        """Add the block `rows` with `errors` ``(n, V_g)``, the gradient by its scores."""
        if self.of_hidden is not None:
            self._add_hidden(rows, errors, self.of_hidden[rows])
        if self.of_codes is not None:
            self._add_codes(rows, errors, self.of_codes)
        self.is_first = False

    def finish(self) -> None:
        """Add the constant part."""
        code_sum = self.segment.code_sum
        if self.of_codes is not None:
            if self.is_first:
                self.of_codes.zero_()
            if code_sum is not None:
                total = (self.segment.hidden.to(self.scorer.sum_dtype) * self.weights).sum(dim=0)
                self.of_codes.sub_(total, alpha=self.scorer.smoothing)
                if self.segment.masked is not None:
                    self.of_codes[self.segment.masked] = 0.0
        if self.of_hidden is not None and code_sum is not None:
            self.of_hidden.sub_(self.weights * code_sum, alpha=self.scorer.smoothing)

    def _add_hidden(self, rows: slice, errors: Tensor, gradient: Tensor) -> None:
        """The gradient ``(n, R_g)`` of the hidden states `rows`."""
        if self.dtype == gradient.dtype:
            torch.mm(errors, self.codes, out=gradient)
        else:
            gradient.copy_(torch.mm(errors, self.codes))
        gradient.mul_(self.weights[rows])

    def _add_codes(self, rows: slice, errors: Tensor, total: Tensor) -> None:
        """The share of the tokens `rows` in the gradient of the codes."""
        hidden = (self.segment.hidden[rows] * self.weights[rows]).to(self.dtype)
        if self.low_sum is None:
            # With beta 0 what is in the fresh memory is ignored.
            total.addmm_(errors.t(), hidden, beta=0.0 if self.is_first else 1.0)
            return
        torch.mm(errors.t(), hidden, out=self.low_sum)
        if self.is_first:
            total.copy_(self.low_sum)
        else:
            total.add_(self.low_sum)


def _row_maxima(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The highest score ``(n, 1)`` of every row of `scores` ``(n, V)``, and its word ``(n,)``.

    Looking for an index costs ten times what looking for a value does, so the index is looked for only in the
    chunk of the row that has the highest value.
    """
    words = scores.size(1)
    whole = words - words % CHUNK
    maxima = scores[:, :whole].unflatten(1, (-1, CHUNK)).amax(dim=2)
    if whole < words:
        maxima = torch.cat((maxima, scores[:, whole:].amax(dim=1, keepdim=True)), dim=1)
    highest, chunk = maxima.max(dim=1, keepdim=True)
    columns = (chunk * CHUNK + torch.arange(CHUNK, device=scores.device)).clamp_(max=words - 1)
    return highest, columns.gather(1, scores.gather(1, columns).argmax(dim=1, keepdim=True)).squeeze(1)


_SEGMENTS = Kind(_Scorer, _GradientSums)
