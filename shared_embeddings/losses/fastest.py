"""The loss of linear scores in training on a GPU: torch's ``linear_cross_entropy`` or ours.

``torch.nn.functional.linear_cross_entropy`` also works in blocks of tokens. It is used where it is faster
and gives the same loss and gradients: not with label smoothing, and not with 16-bit products, because torch
sums the loss and the gradients in that type. The first loss of each shape measures which one is faster.

Axes: ``N`` tokens, ``V`` vocabulary, ``R`` width of the hidden states and of the codes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_embeddings.losses.blocks import sum_dtype
from shared_embeddings.losses.blockwise import (
    Reduction,
    check_arguments,
    check_first_derivative,
    product_dtype,
)
from shared_embeddings.losses.chunked import linear_cross_entropy

# The device types on which times are compared; others use our loss.
DEVICES = ("cuda",)
_RUNS = 3
# Whether torch's loss is faster, by shape.
_torch_is_faster: dict[tuple[object, ...], bool] = {}


def fastest_cross_entropy(
    hidden: Tensor,
    codes: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None,
    masked_word: int | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: Reduction,
    block_size: int | None,
) -> Tensor:
    """The loss of `linear_cross_entropy`, without predictions, by the faster of two implementations.

    With torch's deterministic algorithms or a given block size, it is always ours.

    Args:
        hidden, codes, targets, bias, masked_word, ignore_index, label_smoothing, reduction, block_size: as in
            `linear_cross_entropy`.
    """
    check_arguments(reduction, label_smoothing, block_size)
    factors = [hidden, codes] if bias is None else [hidden, codes, bias]

    def by_torch(hidden: Tensor, codes: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch_cross_entropy(hidden, codes, targets, bias, masked_word, ignore_index, reduction)

    def own(hidden: Tensor, codes: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_cross_entropy(
            hidden,
            codes,
            targets,
            bias=bias,
            masked_word=masked_word,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
            block_size=block_size,
        )[0]

    if label_smoothing or block_size or not _is_comparable(factors):
        return own(*factors)
    sizes = (_rounded(len(hidden)), *codes.shape, masked_word is None, reduction == "none")
    key = (hidden.device, hidden.dtype, *sizes, *(factor.requires_grad for factor in factors))
    if key not in _torch_is_faster:
        _torch_is_faster[key] = _is_faster(by_torch, own, factors)
    return (by_torch if _torch_is_faster[key] else own)(*factors)


def torch_cross_entropy(
    hidden: Tensor,
    codes: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    masked_word: int | None,
    ignore_index: int,
    reduction: Reduction,
) -> Tensor:
    """The loss of `linear_cross_entropy` by torch; the arguments are as there."""
    if masked_word is not None:
        masked = torch.tensor([masked_word], device=codes.device)
        codes = codes.index_fill(0, masked, 0.0)
        bias = None if bias is None else bias.index_fill(0, masked, 0.0)
    loss = F.linear_cross_entropy(
        hidden,
        codes,
        targets.long(),
        linear_bias=bias,
        ignore_index=ignore_index,
        reduction="none" if reduction == "none" else "sum",
        options=nn.LinearCrossEntropyOptions(allow_retain_graph=True),
    )
    if loss.requires_grad:
        loss.register_hook(_check_derivative)
    if reduction != "mean":
        return loss
    # torch's mean of no tokens has gradients that are nan.
    count = (targets != ignore_index).sum()
    return torch.where(count == 0, torch.nan, loss / count.clamp(min=1))


def _check_derivative(_: Tensor) -> None:
    """A hook of the loss, whose second derivatives would be wrong."""
    check_first_derivative()


def _is_comparable(factors: Sequence[Tensor]) -> bool:
    """Whether torch's loss may be used for these factors: in training with products in 32 or 64 bits."""
    hidden = factors[0]
    return (
        hidden.device.type in DEVICES
        and not torch.compiler.is_compiling()
        and hasattr(F, "linear_cross_entropy")
        and torch.is_grad_enabled()
        and any(factor.requires_grad for factor in factors)
        and all(type(factor) in (Tensor, nn.Parameter) for factor in factors)
        and {factor.dtype for factor in factors} == {sum_dtype(hidden)}
        and product_dtype(hidden) == hidden.dtype
        and not torch.are_deterministic_algorithms_enabled()
        and not (hidden.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _rounded(number: int) -> int:
    """The next power of two, since the number of tokens differs from batch to batch."""
    return 1 << max(0, number - 1).bit_length()


def _is_faster(one: Callable[..., Tensor], other: Callable[..., Tensor], factors: Sequence[Tensor]) -> bool:
    """Whether forward and backward pass of one loss take less time than those of another."""
    copies = [factor.detach().requires_grad_(factor.requires_grad) for factor in factors]
    try:
        return seconds(one, copies) < seconds(other, copies)
    except torch.OutOfMemoryError:
        return False


def seconds(loss: Callable[..., Tensor], factors: Sequence[Tensor]) -> float:
    """The shortest time of a forward and backward pass, after a warm-up."""
    learned = [factor for factor in factors if factor.requires_grad]
    taken = []
    for _ in range(1 + _RUNS):
        start = _now(factors[0].device)
        torch.autograd.grad(loss(*factors).sum(), learned)
        taken.append(_now(factors[0].device) - start)
    return min(taken[1:])


def _now(device: torch.device) -> float:
    """The time when all work on a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
