"""The papers' formulas in the simplest form: loops, dense matrices, full masks.

Only the values of tensors come from the library. Every function is differentiable, so
that values and gradients can be compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor

import torch
from torch import Tensor


def zero_row(table: Tensor, row: int | None) -> Tensor:
    """The table ``(V, D)`` with a row of zeros, through which no gradient flows."""
    if row is None:
        return table
    keep = torch.ones(len(table), 1, dtype=table.dtype)
    keep[row] = 0
    return table * keep


def with_bias(scores: Tensor, bias: Tensor | None, padding_idx: int | None) -> Tensor:
    """Scores ``(n, V)`` plus the bias ``(V,)`` of their words, if any, but for the padding word's."""
    if bias is None:
        return scores
    return scores + zero_row(bias.unsqueeze(1), padding_idx).squeeze(1)


# Tensor train


def tensor_train_row(cores: Sequence[Tensor], word: int) -> Tensor:
    """A row entry by entry, a product of one matrix of each core; the last digit changes fastest."""
    vocab, widths = [core.shape[1] for core in cores], [core.shape[2] for core in cores]
    digits = list(itertools.product(*map(range, vocab)))[word]
    entries = []
    for place in itertools.product(*map(range, widths)):
        matrix = torch.eye(1, dtype=cores[0].dtype)
        for core, i, j in zip(cores, digits, place):
            matrix = matrix @ core[:, i, j, :]
        entries.append(matrix.squeeze())
    return torch.stack(entries)


# ALONE: section 2


def binary_rate(zero_probability: float, codebooks: int) -> float:
    """Probability of a one in a source matrix that makes the OR 0 with ``zero_probability`` (2.1)."""
    return 1 - zero_probability ** (1 / codebooks)


def alone_masks(codes: Tensor, codebooks: Tensor, binary: bool) -> Tensor:
    """Every word's filter ``(V, D_o)``, Eq. 1 and 2, from codes ``(V, M)`` and codebooks ``(M, c, D_o)``."""
    masks = []
    for word in range(len(codes)):
        total = sum(codebooks[book, codes[word, book]] for book in range(codes.shape[1]))
        masks.append((total >= 1).to(total.dtype) if binary else total)
    return torch.stack(masks)


def alone_table(base: Tensor, masks: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """``W2 max(0, W1 (m_w * o))`` for every word (Eq. 3), from W1 ``(H, D_o)`` and W2 ``(D, H)``."""
    return torch.stack([second @ torch.clamp(first @ (mask * base), min=0) for mask in masks])


# DeFINE: section 3 and appendix A.1


@dataclass(frozen=True)
class GroupLayer:
    """Sizes of one group transformation."""

    groups: int
    inputs: int
    outputs: int


def define_layers(
    map_dim: int, expand_dim: int, depth: int, max_groups: int, transform: str, connection: str
) -> list[GroupLayer]:
    """The expansion layers: groups halve from layer to layer, widths grow linearly (3.2, 4.4, table 8a).

    Layer l of N has ``n + (k - n) l / N`` outputs, rounded down to a multiple of the most groups, which are
    powers of two here; with residual connections all have ``expand_dim / 2``; the mixer and the skip
    connection read the input again from the second layer on.
    """
    groups = [
        {"hgt": max(max_groups // 2**layer, 1), "glt": max_groups, "linear": 1}[transform]
        for layer in range(depth)
    ]
    layers = []
    previous = map_dim
    for layer in range(depth):
        width = map_dim + (expand_dim - map_dim) * (layer + 1) / depth
        width = expand_dim / 2 if connection == "residual" else width
        outputs = floor(round(width, 6) / groups[0]) * groups[0]
        again = map_dim if layer and connection in ("mixer", "skip") else 0
        layers.append(GroupLayer(groups[layer], previous + again, outputs))
        previous = outputs
    return layers


def block_diagonal(blocks: Sequence[Tensor]) -> Tensor:
    """The dense matrix that a group transformation stands for."""
    dense = torch.zeros(sum(len(block) for block in blocks), sum(block.shape[1] for block in blocks))
    dense = dense.to(blocks[0].dtype)
    row = column = 0
    for block in blocks:
        dense[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return dense


def normalized(
    vector: Tensor, gain: Tensor | float = 1.0, shift: Tensor | float = 0.0, epsilon: float = 1e-5
) -> Tensor:
    """Layer normalization of one vector."""
    centered = vector - vector.mean()
    return centered / (centered.square().mean() + epsilon).sqrt() * gain + shift


def mixed(entry: Tensor, previous: Tensor, groups: int) -> Tensor:
    """Chunk i of the entry in front of chunk i of the previous output, for every group (3.3)."""
    chunks = []
    for group in range(groups):
        chunks.append(entry[group * len(entry) // groups : (group + 1) * len(entry) // groups])
        chunks.append(previous[group * len(previous) // groups : (group + 1) * len(previous) // groups])
    return torch.cat(chunks)


def shuffled(vector: Tensor, groups: int) -> Tensor:
    """The elements interleaved: the first of every group, then the second of every group."""
    size = len(vector) // groups
    return torch.stack([vector[group * size + place] for place in range(size) for group in range(groups)])


def define_unit(
    entry: Tensor,
    layers: Sequence[GroupLayer],
    matrices: Sequence[Tensor],
    connection: str,
    activation: Callable[[Tensor], Tensor],
    shuffle: bool = False,
) -> Tensor:
    """The expanded vector of one word, from its vector ``entry`` (Eq. 1, figure 3, figure 5).

    All groups of a layer share a matrix ``(outputs / g, inputs / g)`` (appendix A.1).
    """
    previous = entry
    for position, (layer, matrix) in enumerate(zip(layers, matrices)):
        if position and shuffle:
            previous = shuffled(previous, layers[position - 1].groups)
        inputs = previous
        if position and connection == "mixer":
            inputs = mixed(entry, previous, layer.groups)
        elif position and connection == "skip":
            inputs = torch.cat([entry, previous])
        outputs = block_diagonal([matrix] * layer.groups) @ inputs
        outputs = activation(normalized(outputs))
        if connection == "residual" and len(outputs) == len(previous):
            outputs = outputs + previous
        previous = outputs
    return previous
