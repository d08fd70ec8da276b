"""Cross entropy of a tied softmax layer that never holds the (N, V) scores of a batch.

The tokens are walked over in blocks. A block's scores live in one buffer that every block reuses, so the
extra memory is a block of scores and the gradients themselves; and since a block's softmax is at hand when
its loss is computed, its share of the gradients is added up right then instead of being computed again in the
backward pass.

A vocabulary may come in segments, each with codes and hidden states of its own width, whose scores stand side
by side under one softmax.

Axes: ``N`` tokens, ``V`` vocabulary, ``R`` width of the hidden states and of the codes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Reduction = Literal["mean", "sum", "none"]

# Smallest block of tokens, and the scores that a block may hold when the vocabulary is small. For a CPU this
# was measured on 2 cores: larger blocks gain nothing.
_CPU_BLOCK = (256, 2**20)
_ACCELERATOR_BLOCK = (1024, 2**25)
# How many scores of a row are looked through for the index of their maximum.
_CHUNK = 64


def linear_cross_entropy(
    hidden: Tensor,
    codes: Tensor,
    targets: Tensor,
    *,
    masked_word: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> tuple[Tensor, Tensor]:
    """Cross entropy of the scores ``hidden @ codes.T``, and the best word of every token.

    Equals ``F.cross_entropy`` on those scores in value and in gradients. Products run in the type that
    autocast asks for; softmax, loss and gradients are summed up in at least 32 bits, and the loss is returned
    so.

    Args:
        hidden: ``(N, R)``.
        codes: ``(V, R)``.
        targets: ``(N,)`` word ids.
        masked_word: a word whose score is fixed at zero: its row of `codes` has neither effect nor gradient.
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
        targets, masked_word, ignore_index, label_smoothing, reduction: as there.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}, but it must be 'mean', 'sum' or 'none'")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}, but it must be from 0 to 1")
    _check_targets(targets, sum(part.size(0) for part in codes), ignore_index)
    settings = _Settings(
        masked_word=masked_word,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
        product_dtype=_product_dtype(hiddens[0]),
        wants_gradients=torch.is_grad_enabled() and reduction != "none",
    )
    return _SegmentedCrossEntropy.apply(targets, settings, *hiddens, *codes)


def _check_targets(targets: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Raise IndexError for a target that is no word, where looking costs no wait for a device."""
    if targets.device.type != "cpu" or targets.numel() == 0:
        return
    words = targets[targets != ignore_index]
    if words.numel() and (int(words.min()) < 0 or int(words.max()) >= vocabulary):
        wrong = int(words.min()) if int(words.min()) < 0 else int(words.max())
        raise IndexError(f"Target {wrong} is out of bounds: the vocabulary has {vocabulary} words")


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """The type that matrix products with `hidden` run in: autocast's where it is on."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What one call of the loss was asked for."""

    masked_word: int | None
    ignore_index: int
    label_smoothing: float
    reduction: Reduction
    product_dtype: torch.dtype
    wants_gradients: bool


class _SegmentedCrossEntropy(torch.autograd.Function):
    """The loss as an autograd function of all hidden states, then all codes; see `linear_cross_entropy`."""

    @staticmethod
    def forward(ctx: Any, targets: Tensor, settings: _Settings, *factors: Tensor) -> tuple[Tensor, Tensor]:
        """Walk over the blocks; for a reduced loss, form the gradients on the way."""
        ctx.settings = settings
        ctx.save_for_backward(targets, *factors)
        kept = (targets != settings.ignore_index).to(_sum_dtype(factors[0]))
        wants = ctx.needs_input_grad[2:] if settings.wants_gradients else (False,) * len(factors)
        losses, predictions, ctx.gradients = _walk(factors, targets, kept, settings, wants)
        ctx.mark_non_differentiable(predictions)
        # Without kept tokens the mean is 0 / 0 like F.cross_entropy's, and its gradients are zero, not nan.
        ctx.scale = 1.0 / kept.sum().clamp(min=1.0) if settings.reduction == "mean" else 1.0
        if settings.reduction == "none":
            return losses, predictions
        total = losses.sum()
        return (total / kept.sum() if settings.reduction == "mean" else total), predictions

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Hand out the gradients of the forward pass; form them now if it had none, or they are used up."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "cross_entropy cannot be differentiated twice (create_graph=True): its gradients are not "
                "functions that autograd knows; use F.cross_entropy(embedding.logits(hidden), targets)"
            )
        targets, *factors = ctx.saved_tensors
        gradients, ctx.gradients = ctx.gradients, None
        factor = grad_loss * ctx.scale
        if gradients is None:
            kept = (targets != ctx.settings.ignore_index).to(_sum_dtype(factors[0]))
            _, _, gradients = _walk(factors, targets, kept * factor, ctx.settings, ctx.needs_input_grad[2:])
        else:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(factor)
        found = (
            None if gradient is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(gradients, factors)
        )
        return None, None, *found


_Gradients = list[Tensor | None]


def _walk(
    factors: Sequence[Tensor],
    targets: Tensor,
    weights: Tensor,
    settings: _Settings,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, _Gradients | None]:
    """One pass over all blocks.

    Args:
        factors: the hidden states of all segments, then the codes of all segments.
        weights: ``(N,)`` what each token's loss counts in the gradients; zero for ignored ones.
        wants: whether the gradient of each of the factors is wanted.

    Returns:
        ``(N,)`` losses (zero for ignored tokens), ``(N,)`` predictions, and the gradients of
        ``(weights * losses).sum()`` by the factors, or None when none is wanted.
    """
    with torch.autocast(targets.device.type, enabled=False):
        scorer = _Scorer(factors, targets, settings)
        gradients = _GradientSums(scorer, weights, wants) if any(wants) else None
        losses = torch.empty_like(weights)
        predictions = torch.empty_like(targets, dtype=torch.long)
        for rows in scorer.blocks():
            probabilities = scorer.score(rows, losses, predictions)
            if gradients is not None:
                gradients.add(rows, probabilities)
        ignored = targets == settings.ignore_index
        finished = None if gradients is None else gradients.finish()
        return losses.masked_fill_(ignored, 0.0), predictions, finished


class _Segment:
    """The part of the vocabulary that has codes of one width.

    Attributes:
        hidden, codes: ``(N, R_g)`` and ``(V_g, R_g)`` in the type of the products.
        columns: the segment's place among all words.
        masked: the masked word's place in the segment, None where it is in another.
        code_sum: ``(R_g,)`` the sum of all codes that count, which label smoothing needs; None without it.
    """

    def __init__(self, hidden: Tensor, codes: Tensor, start: int, settings: _Settings) -> None:
        self.hidden = hidden.to(settings.product_dtype)
        self.codes = codes.to(settings.product_dtype)
        self.columns = slice(start, start + codes.size(0))
        self.masked = None if settings.masked_word is None else settings.masked_word - start
        if self.masked is not None and not 0 <= self.masked < codes.size(0):
            self.masked = None
        self.code_sum: Tensor | None = None
        if settings.label_smoothing != 0.0:
            self.code_sum = codes.sum(dim=0, dtype=_sum_dtype(hidden))
            if self.masked is not None:
                self.code_sum -= codes[self.masked]


class _Scorer:
    """Scores, loss and predictions block by block, in buffers that all blocks share."""

    def __init__(self, factors: Sequence[Tensor], targets: Tensor, settings: _Settings) -> None:
        self.settings = settings
        number = len(factors) // 2
        self.sum_dtype = _sum_dtype(factors[0])
        self.segments: list[_Segment] = []
        words = 0
        for hidden, codes in zip(factors[:number], factors[number:]):
            self.segments.append(_Segment(hidden, codes, words, settings))
            words += codes.size(0)
        # An ignored target may be no word at all; any word will do, as its weight is zero.
        self.targets = targets.masked_fill(targets == settings.ignore_index, 0).unsqueeze(1)
        self.smoothing = settings.label_smoothing / words
        self.block = _block_size(targets, words)
        self.buffer = factors[0].new_empty((self.block, words), dtype=self.sum_dtype)
        is_low = settings.product_dtype != self.sum_dtype
        self.low_buffer = torch.empty_like(self.buffer, dtype=settings.product_dtype) if is_low else None

    def blocks(self) -> Iterator[slice]:
        """The blocks of tokens, in order."""
        tokens = self.targets.size(0)
        return (slice(start, min(start + self.block, tokens)) for start in range(0, tokens, self.block))

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
        losses[rows] = loss
        return probabilities

    def _scores(self, rows: slice) -> Tensor:
        """``(n, V)`` scores of the tokens `rows`, in the shared buffer."""
        scores = self.buffer[: rows.stop - rows.start]
        products = scores if self.low_buffer is None else self.low_buffer[: scores.size(0)]
        for segment in self.segments:
            torch.mm(segment.hidden[rows], segment.codes.t(), out=products[:, segment.columns])
        if self.low_buffer is not None:
            scores.copy_(products)
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
        low = scorer.settings.product_dtype
        # float16 would lose small probabilities: it has no exponents for them.
        self.dtype = low if low == torch.bfloat16 else scorer.sum_dtype
        number = len(scorer.segments)
        self.parts = [
            _SegmentGradient(scorer, segment, self.weights, self.dtype, *wanted)
            for segment, *wanted in zip(scorer.segments, wants[:number], wants[number:])
        ]

    def add(self, rows: slice, probabilities: Tensor) -> None:
        """Add the block `rows`; `probabilities` ``(n, V)`` is overwritten."""
        settings = self.scorer.settings
        errors = probabilities
        targets = self.scorer.targets[rows]
        errors.scatter_add_(1, targets, errors.new_full(targets.shape, settings.label_smoothing - 1.0))
        if settings.masked_word is not None:
            errors[:, settings.masked_word] = 0.0
        if self.dtype != errors.dtype:
            errors = self._lowered(errors)
        for part in self.parts:
            part.add(rows, errors[:, part.segment.columns])

    def finish(self) -> _Gradients:
        """The gradients ``(N, R_g)`` by all hidden states, then ``(V_g, R_g)`` by all codes, where wanted."""
        for part in self.parts:
            part.finish()
        return [part.of_hidden for part in self.parts] + [part.of_codes for part in self.parts]

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
    whole = words - words % _CHUNK
    maxima = scores[:, :whole].unflatten(1, (-1, _CHUNK)).amax(dim=2)
    if whole < words:
        maxima = torch.cat((maxima, scores[:, whole:].amax(dim=1, keepdim=True)), dim=1)
    highest, chunk = maxima.max(dim=1, keepdim=True)
    columns = (chunk * _CHUNK + torch.arange(_CHUNK, device=scores.device)).clamp_(max=words - 1)
    return highest, columns.gather(1, scores.gather(1, columns).argmax(dim=1, keepdim=True)).squeeze(1)


def _sum_dtype(hidden: Tensor) -> torch.dtype:
    """The type of sums: 32 bits, or 64 for hidden states that have them."""
    return torch.promote_types(hidden.dtype, torch.float32)


def _block_size(targets: Tensor, words: int) -> int:
    """How many tokens go into one block."""
    smallest, scores = _CPU_BLOCK if targets.device.type == "cpu" else _ACCELERATOR_BLOCK
    return max(1, min(max(smallest, scores // words), targets.size(0)))
