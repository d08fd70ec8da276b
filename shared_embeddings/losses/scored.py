"""Cross entropy of scores that a function computes, for evaluation: there are no gradients of its parameters.

Axes: ``N`` tokens, ``V`` vocabulary, ``S`` width of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.losses.blocks import sum_dtype, tokens_per_block
from shared_embeddings.losses.blockwise import Reduction, check_arguments


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
