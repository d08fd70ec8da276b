"""What the losses that never hold the (N, V) scores of a batch have in common.

The tokens are walked over in blocks. A block's scores live in one buffer that every block reuses, so the
extra memory is a block of scores and the gradients themselves; and since a block's softmax is at hand when
its loss is computed, its share of the gradients is added up right then instead of being computed again in the
backward pass.

How scores come about, and what their errors mean for the factors that they come from, is the business of a
`Kind`.

Axes: ``N`` tokens, n of them in a block, ``V`` vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

Reduction = Literal["mean", "sum", "none"]
T = TypeVar("T")
Gradients = list[Tensor | None]

# How many scores of a token are looked through for the index of their maximum.
CHUNK = 64
# Smallest block of tokens, and the scores that a block may hold when the vocabulary is small. For a CPU this
# was measured on 2 cores: larger blocks gain nothing.
_CPU_BLOCK = (256, 2**20)
_ACCELERATOR_BLOCK = (1024, 2**25)
# On a CPU, products in 16 bits are compiled anew for every shape, which takes longer than the product itself.
_CPU_EVEN_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """What one call of a loss was asked for.

    Attributes:
        masked_word: a word whose score is fixed at zero: it gets no gradient; None without one.
        ignore_index, label_smoothing, reduction: as in ``F.cross_entropy``.
        product_dtype: the type that matrix products run in.
        wants_gradients: whether gradients are formed in the forward pass.
    """

    masked_word: int | None
    ignore_index: int
    label_smoothing: float
    reduction: Reduction
    product_dtype: torch.dtype
    wants_gradients: bool


class Scorer(Protocol):
    """Scores, loss and predictions block by block, in buffers that all blocks share."""

    def blocks(self) -> Iterator[slice]:
        """The blocks of tokens, in order."""

    def score(self, rows: slice, losses: Tensor, predictions: Tensor) -> Tensor:
        """Fill in the `losses` and `predictions` of the tokens `rows`.

        Returns:
            The probabilities of all words, valid until the next call.
        """


class GradientSums(Protocol):
    """Adds up the gradients of the weighted losses, block by block."""

    def add(self, rows: slice, probabilities: Tensor) -> None:
        """Add the block `rows`; `probabilities` is overwritten."""

    def finish(self) -> Gradients:
        """The gradient of every factor, None where it is not wanted."""


class Kind(NamedTuple):
    """How scores come from factors.

    Attributes:
        scorer: makes a scorer from the factors, the targets and the settings.
        gradient_sums: makes the sums of gradients from a scorer, the weights ``(N,)`` of the tokens, and for
            each factor whether its gradient is wanted.
    """

    scorer: Callable[[Sequence[Tensor], Tensor, LossSettings], Any]
    gradient_sums: Callable[[Any, Tensor, Sequence[bool]], GradientSums]


def _never_compiled(function: Callable[..., T]) -> Callable[..., T]:
    """``torch.compiler.disable``, which imports ``torch._dynamo`` and takes a second, once it is needed."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> T:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*arguments, **named)
        return function(*arguments, **named)

    return call


@_never_compiled
def blockwise_cross_entropy(
    kind: Kind,
    factors: Sequence[Tensor],
    words: int,
    targets: Tensor,
    *,
    masked_word: int | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: Reduction,
) -> tuple[Tensor, Tensor]:
    """Cross entropy of the scores that `kind` makes of `factors`, and the best word of every token.

    Products run in the type that autocast asks for; softmax, loss and gradients are summed up in at least 32
    bits, and the loss is returned so. ``torch.compile`` leaves this as it is: it brings its own gradients.

    Args:
        factors: hidden states ``(N, R)`` first.
        words: V.
        targets: ``(N,)`` word ids.
        masked_word, ignore_index, label_smoothing, reduction: see `LossSettings`.

    Returns:
        The loss, a scalar or ``(N,)`` for reduction "none"; and ``(N,)`` the word with the highest score.

    Raises:
        IndexError: a target is no word of the vocabulary (checked where that needs no wait for the device).
        ValueError: an unknown reduction, or a label smoothing outside 0 to 1.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}, but it must be 'mean', 'sum' or 'none'")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}, but it must be from 0 to 1")
    _check_targets(targets, words, ignore_index)
    settings = LossSettings(
        masked_word=masked_word,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
        product_dtype=_product_dtype(factors[0]),
        wants_gradients=torch.is_grad_enabled() and reduction != "none",
    )
    return _BlockwiseCrossEntropy.apply(targets, kind, settings, *factors)


def with_even_tokens(hidden: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Hidden states ``(N, S)`` and targets ``(N,)``, followed by ignored ones where fewer shapes are quicker.

    That is on a CPU, with products in fewer than 32 bits.
    """
    if targets.device.type != "cpu" or _product_dtype(hidden).itemsize >= 4:
        return hidden, targets
    missing = -targets.size(0) % _CPU_EVEN_TOKENS
    return F.pad(hidden, (0, 0, 0, missing)), F.pad(targets, (0, missing), value=ignore_index)


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


class _BlockwiseCrossEntropy(torch.autograd.Function):
    """The loss as an autograd function of all factors; see `blockwise_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any, targets: Tensor, kind: Kind, settings: LossSettings, *factors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Walk over the blocks; for a reduced loss, form the gradients on the way."""
        ctx.kind, ctx.settings = kind, settings
        ctx.save_for_backward(targets, *factors)
        kept = (targets != settings.ignore_index).to(sum_dtype(factors[0]))
        wants = ctx.needs_input_grad[3:] if settings.wants_gradients else (False,) * len(factors)
        losses, predictions, ctx.gradients = _walk(kind, factors, targets, kept, settings, wants)
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
            weights = (targets != ctx.settings.ignore_index).to(sum_dtype(factors[0])) * factor
            wants = ctx.needs_input_grad[3:]
            _, _, gradients = _walk(ctx.kind, factors, targets, weights, ctx.settings, wants)
        else:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(factor)
        found = (
            None if gradient is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(gradients, factors)
        )
        return None, None, None, *found


def _walk(
    kind: Kind,
    factors: Sequence[Tensor],
    targets: Tensor,
    weights: Tensor,
    settings: LossSettings,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Gradients | None]:
    """One pass over all blocks.

    Args:
        weights: ``(N,)`` what each token's loss counts in the gradients; zero for ignored ones.
        wants: whether the gradient of each of the factors is wanted.

    Returns:
        ``(N,)`` losses (zero for ignored tokens), ``(N,)`` predictions, and the gradients of
        ``(weights * losses).sum()`` by the factors, or None when none is wanted.
    """
    with torch.autocast(targets.device.type, enabled=False):
        scorer = kind.scorer(factors, targets, settings)
        gradients = kind.gradient_sums(scorer, weights, wants) if any(wants) else None
        losses = torch.empty_like(weights)
        predictions = torch.empty_like(targets, dtype=torch.long)
        for rows in scorer.blocks():
            probabilities = scorer.score(rows, losses, predictions)
            if gradients is not None:
                gradients.add(rows, probabilities)
        finished = None if gradients is None else gradients.finish()
        return losses.masked_fill_(targets == settings.ignore_index, 0.0), predictions, finished


def sum_dtype(hidden: Tensor) -> torch.dtype:
    """The type of sums: 32 bits, or 64 for hidden states that have them."""
    return torch.promote_types(hidden.dtype, torch.float32)


def block_size(targets: Tensor, words: int) -> int:
    """How many tokens go into one block."""
    smallest, scores = _CPU_BLOCK if targets.device.type == "cpu" else _ACCELERATOR_BLOCK
    return max(1, min(max(smallest, scores // words), targets.size(0)))


def blocks_of(tokens: int, size: int) -> Iterator[slice]:
    """Slices of `size` tokens each, in order; the last one may be shorter."""
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def error_dtype(settings: LossSettings, sums: torch.dtype) -> torch.dtype:
    """The type of the errors in the products that form gradients.

    float16 would lose small probabilities: it has no exponents for them.
    """
    return settings.product_dtype if settings.product_dtype == torch.bfloat16 else sums


def sum_of_bias(bias: Tensor | None, settings: LossSettings) -> Tensor | float:
    """The sum of the bias ``(V, ...)`` of all words that count, which label smoothing needs."""
    if bias is None:
        return 0.0
    return bias.sum() if settings.masked_word is None else bias.sum() - bias[settings.masked_word].sum()


def finished_bias(gradient: Tensor, weights: Tensor, smoothing: float, settings: LossSettings) -> Tensor:
    """The gradient ``(V, ...)`` of a bias with the constant part of the smoothed targets.

    Args:
        gradient: without that part; is overwritten.
        weights: ``(N, 1)`` of the tokens.
        smoothing: what label smoothing gives to each word.
    """
    gradient.sub_(smoothing * weights.sum())
    if settings.masked_word is not None:
        gradient[settings.masked_word] = 0.0
    return gradient
