"""Transformer-XL: attention over a segment and a memory of earlier segments (Dai et al., 2019).

Axes: ``B`` batch, ``T`` positions of the segment, ``M`` positions of the memory, ``K`` = M + T keys, ``D``
model dimension, ``H`` heads, ``C`` head dimension.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import shared_embeddings as se
from lm.models import LanguageModel, Output, State
from shared_embeddings.nn.layers import Dropout
from shared_embeddings.utils.options import OptionError, option, require

Kernel = Literal["sdpa", "flex"]
_flex_attention: Callable[..., Tensor] = flex_attention  # type: ignore[assignment]  # overloaded

# Standard deviation of all initial weights in the published code.
_WEIGHT_STD = 0.02


@dataclasses.dataclass(frozen=True)
class TransformerXLOptions:
    """Options of `transformer_xl`; defaults are the published ones for WikiText-103 ("base" model)."""

    embedding_dim: int = option("D, width of the embedding and the layers; even.", 410, minimum=1)
    num_layers: int = option("number of layers.", 16, minimum=1)
    num_heads: int = option("H, number of attention heads.", 10, minimum=1)
    head_dim: int = option("C, dimension of a head; H times C may differ from D.", 41, minimum=1)
    feed_forward_dim: int = option("inner width of the feed-forward networks.", 2100, minimum=1)
    dropout: float = option(
        "dropout of word vectors, position encodings, both outputs of a layer, inside the feed-forward "
        "networks, and of the last hidden states.",
        0.1,
        minimum=0,
        below=1,
    )
    attention_dropout: float = option("dropout of the attention weights.", 0.0, minimum=0, below=1)
    norm: Literal["post", "pre"] = option(
        'layer normalization after each residual connection ("post") or before each sublayer ("pre", '
        "without a final one, as published).",
        "post",
    )
    memory_length: int = option(
        "M, number of positions of earlier segments in the memory of each layer.", 150, minimum=0
    )
    same_length: bool = option(
        "limit every position to the `memory_length` positions before it; otherwise, later "
        "positions of a segment have a longer context than earlier ones.",
        False,
    )
    clamp_length: int | None = option(
        "treat larger distances as this one; null for no limit.", None, minimum=1
    )
    attention: Kernel = option(
        'the implementation of the attention: scaled dot-product attention ("sdpa") or flex attention '
        '("flex", without attention_dropout), which skips masked keys and does not copy the scores of '
        'positions. CPUs always use "sdpa", because flex attention has no backward pass there.',
        "sdpa",
    )

    def __post_init__(self) -> None:
        require(
            self.embedding_dim % 2 == 0,
            f"option 'embedding_dim' is {self.embedding_dim}, but sinusoids need an even number",
        )
        require(
            self.attention == "sdpa" or not self.attention_dropout,
            f"option 'attention_dropout' is {self.attention_dropout}, but flex attention has none; set "
            "it to 0, or attention: sdpa",
        )


class Geometry(NamedTuple):
    """Position encodings and attention mask of a segment; the same for all layers."""

    encodings: Tensor  # (K + 1, D): sinusoids of the distances K - 1, …, 0, and -1, which is always masked
    hidden_keys: Tensor  # (T, K), True where a query must not attend to a key
    blocks: BlockMask | None = None  # the mask for flex attention


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
    if clamp is not None:
        distances = distances.clamp(max=clamp)
    rates = 10000.0 ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    angles = torch.outer(distances.float(), rates)
    encodings = torch.cat([angles.sin(), angles.cos()], dim=-1)
    queries = torch.arange(memory, keys, device=device)
    apart = queries.unsqueeze(1) - torch.arange(keys, device=device)
    hidden_keys = apart < 0
    if reach is not None:
        hidden_keys |= apart > reach
    if kernel == "sdpa":
        return Geometry(encodings, hidden_keys)
    blocks = create_block_mask(
        lambda batch, head, query, key: ~hidden_keys[query, key], None, None, length, keys, device
    )
    return Geometry(encodings, hidden_keys, blocks)


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    """Flex attention as one kernel: without compilation, it builds all scores."""
    return torch.compile(_flex_attention)


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
        by_distance = torch.einsum("bthc,khc->bhtk", by_position, encodings)
        # From distances K - 1, …, 0, -1 to keys, without a copy: each row starts one distance later than the
        # row before, so rows of K entries are aligned. Negative distances get undefined scores.
        length, keys = by_distance.size(-2), by_distance.size(-1) - 1
        aligned = by_distance.flatten(-2)[..., length - 1 : length - 1 + length * keys]
        scores = aligned.unflatten(-1, (length, keys))
        if geometry.blocks is None:
            gathered = F.scaled_dot_product_attention(
                by_content,
                key,
                value,
                attn_mask=scores.masked_fill(geometry.hidden_keys, float("-inf")),
                dropout_p=self.dropout if self.training else 0.0,
            )
        else:
            attend = _compiled_flex_attention() if query.is_cuda else _flex_attention
            gathered = attend(
                by_content,
                key,
                value,
                score_mod=lambda score, batch, head, query, key: score + scores[batch, head, query, key],
                block_mask=geometry.blocks,
            )
        return self.output(gathered.transpose(1, 2).flatten(2))


class TransformerXLLayer(nn.Module):
    """Attention and feed-forward network; see the option `norm` for the place of layer normalization."""

    def __init__(self, options: TransformerXLOptions) -> None:
        super().__init__()
        dim, inner = options.embedding_dim, options.feed_forward_dim
        self.norm = options.norm
        self.attention = RelativeAttention(
            dim, options.num_heads, options.head_dim, options.attention_dropout
        )
        self.attention_norm = nn.LayerNorm(dim)
        self.feed_forward = nn.Sequential(
            nn.Linear(dim, inner),
            nn.ReLU(),
            Dropout(options.dropout),
            nn.Linear(inner, dim),
            Dropout(options.dropout),
        )
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.dropout = Dropout(options.dropout)

    def forward(
        self, hidden: Tensor, memory: Tensor, places: Geometry, content_bias: Tensor, position_bias: Tensor
    ) -> Tensor:
        """Map inputs ``(B, T, D)`` and memory ``(B, M, D)`` to outputs ``(B, T, D)``."""
        is_post = self.norm == "post"
        context = torch.cat([memory, hidden], dim=1)
        if not is_post:
            context = self.attention_norm(context)
        queries = hidden if is_post else context[:, memory.size(1) :]
        hidden = hidden + self.dropout(self.attention(queries, context, places, content_bias, position_bias))
        if not is_post:
            return hidden + self.feed_forward(self.feed_forward_norm(hidden))  # type: ignore[no-any-return]
        hidden = self.attention_norm(hidden)
        normalized: Tensor = self.feed_forward_norm(hidden + self.feed_forward(hidden))
        return normalized


class TransformerXL(LanguageModel, kind="transformer_xl", options_class=TransformerXLOptions):
    """Attention layers that also attend to the memory of their inputs in earlier segments.

    The state has one detached tensor ``(m, B, D)`` per layer with the last m <= M inputs of the layer; it is
    empty at first. `memory_length`, `same_length` and `clamp_length` may be changed between segments.

    Raises:
        OptionError: the score_dim of the embedding is not D.
    """

    def __init__(self, embedding: se.SharedEmbedding, options: TransformerXLOptions) -> None:
        super().__init__(embedding, options)
        dim = options.embedding_dim
        if embedding.score_dim != dim:
            raise OptionError(
                f"transformer_xl: the {embedding.method} embedding has score_dim {embedding.score_dim}, "
                f"but the layers have {dim} dimensions; set its option 'output_projection: true'"
            )
        self.memory_length = options.memory_length
        self.same_length = options.same_length
        self.clamp_length = options.clamp_length
        self.layers = nn.ModuleList(TransformerXLLayer(options) for _ in range(options.num_layers))
        self.content_bias = nn.Parameter(torch.empty(options.num_heads, options.head_dim))
        self.position_bias = nn.Parameter(torch.empty(options.num_heads, options.head_dim))
        self.dropout = Dropout(options.dropout)

    def initial_layers(self, batch_size: int) -> State:
        """An empty memory ``(0, B, D)`` per layer."""
        empty = self.content_bias.new_empty(0, batch_size, self.embedding.embedding_dim)
        return (empty,) * len(self.layers)

    def read(self, ids: Tensor, added: Tensor | None, state: State) -> Output:
        dim = self.embedding.embedding_dim
        vectors = self.embedding(ids) * dim**0.5
        hidden = self.dropout(vectors if added is None else vectors + added)
        reach = self.memory_length if self.same_length else None
        kernel: Kernel = self.options.attention if ids.is_cuda else "sdpa"
        places = geometry(ids.size(1), state[0].size(0), dim, ids.device, reach, self.clamp_length, kernel)
        places = places._replace(encodings=self.dropout(places.encodings.to(hidden.dtype)))
        memories = []
        for layer, memory in zip(self.layers, state, strict=True):
            new = hidden.detach().transpose(0, 1)
            new = new[max(0, new.size(0) - self.memory_length) :]
            length = min(memory.size(0), self.memory_length - new.size(0))
            # torch.cat copies, which releases the memory of older inputs.
            memories.append(torch.cat([memory[memory.size(0) - length :], new]))
            hidden = layer(hidden, memory.transpose(0, 1), places, self.content_bias, self.position_bias)
        return Output(self.dropout(hidden), tuple(memories), hidden.new_zeros(()))

    def reset_parameters(self) -> None:
        """Initialize weights and biases u, v from N(0, 0.02²) and other biases with 0, as published."""
        for module in self.layers.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=_WEIGHT_STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        for bias in (self.content_bias, self.position_bias):
            nn.init.normal_(bias, std=_WEIGHT_STD)
        self.embedding.reset_parameters()
