"""Relative attention over a segment and its memory (Dai et al., 2019, section 3.3).

Axes: ``B`` batch, ``T`` positions of the segment, ``M`` positions of the memory, ``K`` = M + T
keys, ``D`` model dimension, ``H`` heads, ``C`` head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

Kernel = Literal["sdpa", "flex"]
_flex_attention: Callable[..., Tensor] = flex_attention  # type: ignore[assignment]  # overloaded


class Geometry(NamedTuple):
    """Position encodings and attention mask of a segment; the same for all layers.

    Attributes:
        encodings: ``(K + 1, D)`` sinusoids of the distances K - 1, …, 0, and -1, which is always masked.
        hidden_keys: ``(T, K)``, True where a query must not attend to a key.
        blocks: the mask for flex attention; None for scaled dot-product attention.
    """

    encodings: Tensor
    hidden_keys: Tensor
    blocks: BlockMask | None = None


def sinusoids(distances: Tensor, dim: int) -> Tensor:
    """Encodings R ``(n, D)`` of distances ``(n,)``: sines in the first half, cosines in the second."""
    rates = 10000.0 ** (-torch.arange(0, dim, 2, device=distances.device, dtype=torch.float32) / dim)
    angles = torch.outer(distances.float(), rates)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def geometry(
    length: int,
    memory: int,
    dim: int,
    device: torch.device,
    reach: int | None = None,
    clamp: int | None = None,
    kernel: Kernel = "sdpa",
) -> Geometry:
    """Geometry of `length` (T) positions after `memory` (M) positions.

    Args:
        reach: maximum attention distance; None for no limit.
        clamp: larger distances are treated as this one; None for no limit.
        kernel: what computes the attention, "sdpa" or "flex".
    """
    keys = memory + length
    distances = torch.arange(keys - 1, -2, -1, device=device)
    encodings = sinusoids(distances if clamp is None else distances.clamp(max=clamp), dim)
    queries = torch.arange(memory, keys, device=device)
    apart = queries.unsqueeze(1) - torch.arange(keys, device=device)
    hidden_keys = apart < 0
    if reach is not None:
        hidden_keys |= apart > reach
    blocks = _block_mask(~hidden_keys) if kernel == "flex" else None
    return Geometry(encodings, hidden_keys, blocks)


def _block_mask(visible: Tensor) -> BlockMask:
    """The mask of flex attention for keys ``(T, K)`` that are visible to a query."""

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible[query, key]

    queries, keys = visible.shape
    return create_block_mask(is_visible, None, None, queries, keys, visible.device)


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    """Flex attention as one kernel: without compilation, it builds all scores."""
    return torch.compile(_flex_attention)


def by_key(scores: Tensor) -> Tensor:
    """Convert scores by distance ``(..., T, K + 1)`` to scores by key ``(..., T, K)``, without a copy.

    The columns of `scores` have distances K - 1, …, 0, -1. Entry (i, j) of the result is the score of the
    distance of query i and key j, and undefined for negative distances.
    """
    length, columns = scores.shape[-2:]
    keys = columns - 1
    # Each row starts one distance later than the row before, so rows of K entries are aligned.
    aligned = scores.flatten(-2)[..., length - 1 : length - 1 + length * keys]
    return aligned.unflatten(-1, (length, keys))


class RelativeAttention(nn.Module):
    """Multi-head attention with the four terms of section 3.3.

    The score of query i and key j is ``(q_i + u) . k_j + (q_i + v) . W_R R_{i - j}``, over sqrt(C): content
    and position terms, with biases u and v that are shared by all layers.

    Parameters: `query` ``(H C, D)``, `key_value` ``(2 H C, D)``, `position` (W_R) ``(H C, D)`` and `output`
    ``(D, H C)``, without biases.
    """

    def __init__(self, dim: int, num_heads: int, head_dim: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.dropout = dropout
        width = num_heads * head_dim
        self.query = nn.Linear(dim, width, bias=False)
        self.key_value = nn.Linear(dim, 2 * width, bias=False)
        self.position = nn.Linear(dim, width, bias=False)
        self.output = nn.Linear(width, dim, bias=False)

    def forward(
        self, hidden: Tensor, context: Tensor, geometry: Geometry, content_bias: Tensor, position_bias: Tensor
    ) -> Tensor:
        """Attend from positions ``(B, T, D)`` to their context ``(B, K, D)``; returns ``(B, T, D)``.

        Args:
            context: memory followed by the segment.
            content_bias: u ``(H, C)``.
            position_bias: v ``(H, C)``.
        """
        heads = (self.num_heads, self.head_dim)
        query = self.query(hidden).unflatten(-1, heads)
        key, value = self.key_value(context).unflatten(-1, (2, *heads)).permute(2, 0, 3, 1, 4)
        encodings = self.position(geometry.encodings).unflatten(-1, heads)
        # Queries have a narrower dtype than the biases under autocast.
        by_content = (query + content_bias.to(query.dtype)).transpose(1, 2)
        by_position = (query + position_bias.to(query.dtype)) * self.head_dim**-0.5
        scores = by_key(torch.einsum("bthc,khc->bhtk", by_position, encodings))
        if geometry.blocks is not None:
            gathered = _flex(by_content, key, value, scores, geometry.blocks)
        else:
            gathered = F.scaled_dot_product_attention(
                by_content,
                key,
                value,
                attn_mask=scores.masked_fill(geometry.hidden_keys, float("-inf")),
                dropout_p=self.dropout if self.training else 0.0,
            )
        return self.output(gathered.transpose(1, 2).flatten(2))


def _flex(query: Tensor, key: Tensor, value: Tensor, scores: Tensor, blocks: BlockMask) -> Tensor:
    """Attention ``(B, H, T, C)`` with scores ``(B, H, T, K)`` added to those of the content."""

    def with_position(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + scores[batch, head, query, key]

    attend = _compiled_flex_attention() if query.is_cuda else _flex_attention
    return attend(query, key, value, score_mod=with_position, block_mask=blocks)
