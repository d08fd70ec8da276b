"""Cross entropy with the scores of only one block of tokens in memory, as an autograd function.

Gradients are computed in the forward pass, see `shared_embeddings.losses.blocks`. ``torch.compile`` cannot
trace such a function, so the loss is also a custom operator.

Axes: ``N`` tokens, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.layers.tracing import autocast_dtype
from shared_embeddings.losses.blocks import (
    Gradients,
    LossSettings,
    ScoreSource,
    sources,
    sum_dtype,
    walk_over,
)

Reduction = Literal["mean", "sum", "none"]

# On a CPU, 16-bit products are compiled for every new shape, which takes longer than the product.
_CPU_EVEN_TOKENS = 64


class LossOptions(TypedDict, total=False):
    """The keyword arguments of all losses.

    Attributes:
        ignore_index, label_smoothing, reduction: as in ``F.cross_entropy``.
        block_size: the number of tokens in a block; by default 256 on a CPU and 1,024 on other devices, more
            for small vocabularies (`shared_embeddings.losses.blocks.tokens_per_block`).
    """

    ignore_index: int
    label_smoothing: float
    reduction: Reduction
    block_size: int | None


class ScoreOptions(LossOptions, total=False):
    """The keyword arguments of losses of the scores of all words.

    Attributes:
        bias: ``(V,)`` added to the scores, or None.
        masked_word: a word whose score is fixed at zero, without gradients for its parameters and its bias.
    """

    bias: Tensor | None
    masked_word: int | None


def blockwise_cross_entropy(
    source: type[ScoreSource],
    factors: Sequence[Tensor],
    index: Sequence[Tensor],
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    masked_word: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    block_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross entropy of the scores that `source` computes from `factors`, and the best word of every token.

    Products run in the type of autocast; softmax, loss and gradients are summed in at least 32 bits, which is
    the type of the loss. ``torch.compile`` treats the loss as one operator.

    Args:
        factors: hidden states ``(N, R)`` first.
        index: integer tensors that the scores depend on.
        targets: ``(N,)`` word ids.
        bias, masked_word, ignore_index, label_smoothing, reduction, block_size: see `ScoreOptions`.

    Returns:
        The loss, a scalar or ``(N,)`` for reduction "none"; and ``(N,)`` the word with the highest score.

    Raises:
        IndexError: a target is out of range (checked on a CPU).
        ValueError: the reduction is unknown, the label smoothing is not in 0 to 1, or the block size below 1.
    """
    check_arguments(reduction, label_smoothing, block_size)
    given = [*factors] if bias is None else [*factors, bias]
    low_dtype = product_dtype(factors[0])
    arguments = (bias is not None, masked_word, ignore_index, label_smoothing, reduction, block_size)
    forms_gradients = torch.is_grad_enabled() and reduction != "none"
    if torch.compiler.is_compiling():
        wants = [forms_gradients and factor.requires_grad for factor in given]
        loss, predictions, _ = _operator(
            source.kind, given, list(index), targets, wants, *arguments, low_dtype
        )
        return loss, predictions
    settings = LossSettings(*arguments, low_dtype)
    return _BlockwiseCrossEntropy.apply(targets, source, index, settings, forms_gradients, *given)


def check_arguments(reduction: str, label_smoothing: float, block_size: int | None) -> None:
    """Raise ValueError if the reduction, the label smoothing or the block size of a loss is invalid."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}, but it must be 'mean', 'sum' or 'none'")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}, but it must be from 0 to 1")
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size is {block_size}, but a block must have at least 1 token")


def check_first_derivative() -> None:
    """Raise RuntimeError in the backward pass of a loss if it is to be differentiated again."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "cross_entropy cannot be differentiated twice (create_graph=True); use "
            "F.cross_entropy(embedding.logits(hidden), targets)"
        )


def pad_to_multiple(hidden: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Hidden states ``(N, S)`` and targets ``(N,)``, padded with ignored ones if fewer shapes are faster.

    That is the case for 16-bit products on a CPU.
    """
    if targets.device.type != "cpu" or product_dtype(hidden).itemsize >= 4:
        return hidden, targets
    missing = -targets.size(0) % _CPU_EVEN_TOKENS
    return F.pad(hidden, (0, 0, 0, missing)), F.pad(targets, (0, missing), value=ignore_index)


def product_dtype(hidden: Tensor) -> torch.dtype:
    """The type of matrix products with `hidden`: that of autocast if it is on."""
    autocast = autocast_dtype(hidden.device)
    return hidden.dtype if autocast is None or hidden.dtype == torch.float64 else autocast


def _reduced(losses: Tensor, targets: Tensor, settings: LossSettings) -> Tensor:
    """The losses ``(N,)``, or their sum or mean; the mean of no tokens is nan, as in ``F.cross_entropy``."""
    if settings.reduction == "none":
        return losses
    total = losses.sum()
    return total / (targets != settings.ignore_index).sum() if settings.reduction == "mean" else total


def _factor(grad_loss: Tensor, targets: Tensor, settings: LossSettings) -> Tensor:
    """The factor of the gradients of the summed losses; finite without tokens."""
    if settings.reduction != "mean":
        return grad_loss
    return grad_loss / (targets != settings.ignore_index).sum().clamp(min=1)


def _gradients(
    source: type[ScoreSource],
    factors: Sequence[Tensor],
    index: Sequence[Tensor],
    targets: Tensor,
    grad_losses: Tensor,
    settings: LossSettings,
    wants: Sequence[bool],
) -> Gradients:
    """The gradients for given gradients of the losses, ``(N,)`` or one for all."""
    weights = (targets != settings.ignore_index).to(sum_dtype(factors[0])) * grad_losses
    return walk_over(source, factors, index, targets, weights, settings, wants)[2] or [None] * len(factors)


class _BlockwiseCrossEntropy(torch.autograd.Function):
    """The loss as an autograd function of all factors; see `blockwise_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any,
        targets: Tensor,
        source: type[ScoreSource],
        index: Sequence[Tensor],
        settings: LossSettings,
        forms_gradients: bool,
        *factors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Walk over the blocks; for a reduced loss, compute the gradients, too."""
        ctx.source, ctx.index, ctx.settings = source, index, settings
        ctx.save_for_backward(targets, *factors)
        kept = (targets != settings.ignore_index).to(sum_dtype(factors[0]))
        wants = ctx.needs_input_grad[5:] if forms_gradients else (False,) * len(factors)
        losses, predictions, ctx.gradients = walk_over(source, factors, index, targets, kept, settings, wants)
        ctx.mark_non_differentiable(predictions)
        return _reduced(losses, targets, settings), predictions

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the forward pass; compute them if there are none, or they were used."""
        check_first_derivative()
        targets, *factors = ctx.saved_tensors
        gradients, ctx.gradients = ctx.gradients, None
        factor = _factor(grad_loss, targets, ctx.settings)
        if gradients is None:
            wants = ctx.needs_input_grad[5:]
            gradients = _gradients(ctx.source, factors, ctx.index, targets, factor, ctx.settings, wants)
        else:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(factor)
        found = (
            None if gradient is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(gradients, factors)
        )
        return None, None, None, None, None, *found


_ARGUMENTS = """str kind, Tensor[] factors, Tensor[] index, Tensor targets, bool[] wants, bool has_bias,
    int? masked_word, int ignore_index, float label_smoothing, str reduction, int? block_size,
    ScalarType product_dtype"""


@torch.library.custom_op(
    "shared_embeddings::blockwise_cross_entropy",
    mutates_args=(),
    schema=f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor[])",
)
def _operator(
    kind: str, factors: list[Tensor], index: list[Tensor], targets: Tensor, wants: list[bool], *arguments: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The loss, the predictions, and the gradients of the summed losses, empty where not in `wants`."""
    settings = LossSettings(*arguments)
    kept = (targets != settings.ignore_index).to(sum_dtype(factors[0]))
    losses, predictions, found = walk_over(sources[kind], factors, index, targets, kept, settings, wants)
    return _reduced(losses, targets, settings), predictions, _without_none(found, factors)


@_operator.register_fake
def _(
    kind: str, factors: list[Tensor], index: list[Tensor], targets: Tensor, wants: list[bool], *arguments: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The shapes of the results."""
    dtype, settings = sum_dtype(factors[0]), LossSettings(*arguments)
    loss = targets.new_empty(targets.shape if settings.reduction == "none" else (), dtype=dtype)
    predictions = torch.empty_like(targets, dtype=torch.long)
    return loss, predictions, _empty_gradients(factors, wants)


@torch.library.custom_op(
    "shared_embeddings::blockwise_gradients",
    mutates_args=(),
    schema=f"(Tensor grad_losses, {_ARGUMENTS}) -> Tensor[]",
)
def _gradient_operator(
    grad_losses: Tensor,
    kind: str,
    factors: list[Tensor],
    index: list[Tensor],
    targets: Tensor,
    wants: list[bool],
    *arguments: Any,
) -> list[Tensor]:
    """The gradients for given gradients ``(N,)`` of the losses, for reduction "none"."""
    settings = LossSettings(*arguments)
    found = _gradients(sources[kind], factors, index, targets, grad_losses, settings, wants)
    return _without_none(found, factors)


@_gradient_operator.register_fake
def _(
    grad_losses: Tensor,
    kind: str,
    factors: list[Tensor],
    index: list[Tensor],
    targets: Tensor,
    wants: list[bool],
    *arguments: Any,
) -> list[Tensor]:
    """The shapes of the results."""
    return _empty_gradients(factors, wants)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    """Keep what the backward pass of the operator needs."""
    kind, factors, index, targets, _, *arguments = inputs
    ctx.kind, ctx.arguments = kind, arguments
    ctx.wants = [bool(wanted) for wanted in (factor.requires_grad for factor in factors)]
    ctx.sizes = (len(factors), len(index), len(output[2]))
    is_reduced = LossSettings(*arguments).reduction != "none"
    ctx.save_for_backward(targets, *(output[2] if is_reduced else (*factors, *index)))
    ctx.dtypes = [factor.dtype for factor in factors]
    ctx.mark_non_differentiable(output[1], *output[2])


def _operator_backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Any, ...]:
    """The gradients of the factors, as in `_BlockwiseCrossEntropy`."""
    targets, *saved = ctx.saved_tensors
    settings = LossSettings(*ctx.arguments)
    if settings.reduction == "none":
        factors, index = saved[: ctx.sizes[0]], saved[ctx.sizes[0] :]
        found = _gradient_operator(grad_loss, ctx.kind, factors, index, targets, ctx.wants, *ctx.arguments)
    else:
        factor = _factor(grad_loss, targets, settings)
        found = [gradient * factor for gradient in saved]
    gradients = [
        gradient.to(dtype) if wanted else None
        for gradient, dtype, wanted in zip(found, ctx.dtypes, ctx.wants, strict=True)
    ]
    return None, gradients, [None] * ctx.sizes[1], None, None, *(None for _ in ctx.arguments)


_operator.register_autograd(_operator_backward, setup_context=_setup_context)


def _without_none(found: Gradients | None, factors: Sequence[Tensor]) -> list[Tensor]:
    """Gradients with an empty tensor in place of None, which operators cannot return."""
    gradients = [None] * len(factors) if found is None else found
    return [
        factor.new_empty(0) if gradient is None else gradient for gradient, factor in zip(gradients, factors)
    ]


def _empty_gradients(factors: Sequence[Tensor], wants: Sequence[bool]) -> list[Tensor]:
    """Uninitialized gradients of the shapes and types of the real ones."""
    dtype = sum_dtype(factors[0])
    return [
        factor.new_empty(factor.shape, dtype=dtype) if wanted else factor.new_empty(0)
        for factor, wanted in zip(factors, wants)
    ]
