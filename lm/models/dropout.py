"""Dropout and regularization of Merity et al. (2018), Regularizing and optimizing LSTM language models.

Axes, time first: ``T`` time, ``B`` batch, ``D`` width, ``V`` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shared_embeddings.layers.dropout import keep_mask


def locked_dropout(inputs: Tensor, probability: float, training: bool) -> Tensor:
    """`inputs` ``(T, B, D)`` with one mask ``(B, D)`` for all time steps (section 4.2)."""
    if probability == 0.0 or not training:
        return inputs
    return inputs * keep_mask(inputs, (1, *inputs.shape[1:]), probability)


def embedding_dropout(
    vectors: Tensor, ids: Tensor, num_words: int, probability: float, training: bool
) -> Tensor:
    """The `vectors` ``(T, B, D)`` of `ids` ``(T, B)`` with some of the V word types dropped (section 4.3).

    A dropped word type is zero at all its positions in the batch.
    """
    if probability == 0.0 or not training:
        return vectors
    return vectors * keep_mask(vectors, (num_words, 1), probability)[ids]


def activation_regularization(outputs: Tensor) -> Tensor:
    """AR (section 4.6): the mean square of `outputs` ``(T, B, D)``; a scalar.

    A mean as in the authors' code; the paper has an L2 norm.
    """
    return outputs.float().square().mean()


def temporal_activation_regularization(outputs: Tensor) -> Tensor:
    """TAR (section 4.6): the mean square of differences of successive `outputs` ``(T, B, D)``; a scalar.

    Zero for segments of one time step.
    """
    if outputs.size(0) < 2:
        return torch.zeros((), device=outputs.device)
    return outputs.float().diff(dim=0).square().mean()


def weight_drop(weights: Tensor, probability: float, training: bool) -> Tensor:
    """DropConnect: `weights` of any shape with dropout applied to their entries (section 2)."""
    if probability == 0.0 or not training:
        return weights
    return weights * keep_mask(weights, weights.shape, probability)
