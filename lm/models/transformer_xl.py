"""Transformer-XL: attention over the segment and a memory of earlier ones (Dai et al., 2019)."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor, nn

import shared_embeddings as se
from lm.models.interface import LanguageModel, Output, State, register
from lm.models.relative_attention import Geometry, RelativeAttention, geometry
from shared_embeddings.layers.dropout import Dropout
from shared_embeddings.options import (
    OptionError,
    require,
    require_at_least,
    require_layers,
    require_probability,
)

# The published code draws all weights of the network with this standard deviation.
_WEIGHT_STD = 0.02


@dataclasses.dataclass(frozen=True)
class TransformerXLOptions:
    """Options of `transformer_xl`; the defaults are the published ones for WikiText-103 (the "base" model).

    Attributes:
        embedding_dim: D, the width of the embedding and of the layers; even.
        num_layers: layers of attention and feed-forward net.
        num_heads: H, heads of the attention.
        head_dim: C, width of a head; H times C need not be D.
        feed_forward_dim: inner width of the feed-forward nets.
        dropout: of word vectors, position encodings, both results of a layer, inside the feed-forward net and
            of the last hidden states.
        attention_dropout: of the attention weights.
        norm: layer normalisation behind each residual connection ("post") or in front of each net ("pre",
            without one behind the last layer, as published).
        memory_length: M, how many positions of earlier segments each layer remembers; 0 for none.
        same_length: every position sees itself and the `memory_length` positions before it, no more; without
            it, later positions of a segment see further back than earlier ones.
        clamp_length: distances above it count as this one; null for none.
    """

    embedding_dim: int = 410
    num_layers: int = 16
    num_heads: int = 10
    head_dim: int = 41
    feed_forward_dim: int = 2100
    dropout: float = 0.1
    attention_dropout: float = 0.0
    norm: Literal["post", "pre"] = "post"
    memory_length: int = 150
    same_length: bool = False
    clamp_length: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "embedding_dim",
            "num_heads",
            "head_dim",
            "feed_forward_dim",
            "clamp_length",
        ):
            require_at_least(name, getattr(self, name), 1)
        require_layers("num_layers", self.num_layers)
        require_at_least("memory_length", self.memory_length, 0)
        for name in ("dropout", "attention_dropout"):
            require_probability(name, getattr(self, name))
        require(
            self.embedding_dim % 2 == 0,
            f"option 'embedding_dim' is {self.embedding_dim}, but sinusoids need an even one; add 1",
        )


class PostNormLayer(nn.Module):
    """Attention and a feed-forward net, a normalisation behind each residual connection."""

    def __init__(self, options: TransformerXLOptions) -> None:
        super().__init__()
        dim, inner = options.embedding_dim, options.feed_forward_dim
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
        """The next layer's input ``(B, T, D)`` from this one's ``(B, T, D)`` and its memory ``(B, M, D)``."""
        context = torch.cat([memory, hidden], dim=1)
        gathered = self.attention(hidden, context, places, content_bias, position_bias)
        hidden = self.attention_norm(hidden + self.dropout(gathered))
        normalised: Tensor = self.feed_forward_norm(hidden + self.feed_forward(hidden))
        return normalised


class PreNormLayer(PostNormLayer):
    """Attention and a feed-forward net, a normalisation in front of each."""

    def forward(
        self, hidden: Tensor, memory: Tensor, places: Geometry, content_bias: Tensor, position_bias: Tensor
    ) -> Tensor:
        """As in `PostNormLayer`."""
        context = self.attention_norm(torch.cat([memory, hidden], dim=1))
        queries = context[:, memory.size(1) :]
        hidden = hidden + self.dropout(self.attention(queries, context, places, content_bias, position_bias))
        added: Tensor = hidden + self.feed_forward(self.feed_forward_norm(hidden))
        return added


@register("transformer_xl", TransformerXLOptions)
class TransformerXL(LanguageModel):
    """A stack of attention layers, each of which also sees its own input for earlier segments.

    The state has one tensor ``(m, B, D)`` for each layer, the m <= M last inputs of that layer; it starts
    empty and grows. No gradient flows into it (section 3.2). `memory_length`, `same_length` and
    `clamp_length` may be set anew between segments, as is done for evaluation.

    Args:
        embedding: of D dimensions; must score D, too.
        options: the sizes.

    Raises:
        OptionError: the embedding scores hidden states of another width than D.
    """

    def __init__(self, embedding: se.SharedEmbedding, options: TransformerXLOptions) -> None:
        super().__init__(embedding, options)
        dim = options.embedding_dim
        if embedding.score_dim != dim:
            raise OptionError(
                f"transformer_xl: the {embedding.method} embedding scores {embedding.score_dim} dimensions, "
                f"but the layers end in {dim}; project them with its option 'output_projection: true'"
            )
        self.memory_length = options.memory_length
        self.same_length = options.same_length
        self.clamp_length = options.clamp_length
        layer = PreNormLayer if options.norm == "pre" else PostNormLayer
        self.layers = nn.ModuleList(layer(options) for _ in range(options.num_layers))
        self.content_bias = nn.Parameter(torch.empty(options.num_heads, options.head_dim))
        self.position_bias = nn.Parameter(torch.empty(options.num_heads, options.head_dim))
        self.dropout = Dropout(options.dropout)

    def initial_state(self, batch_size: int) -> State:
        """An empty memory ``(0, B, D)`` for each layer."""
        empty = self.content_bias.new_empty(0, batch_size, self.embedding.embedding_dim)
        return (empty,) * len(self.layers)

    def forward(self, ids: Tensor, state: State) -> Output:
        """As in the base class."""
        dim = self.embedding.embedding_dim
        hidden = self.dropout(self.embedding(ids) * dim**0.5)
        reach = self.memory_length if self.same_length else None
        places = geometry(ids.size(1), state[0].size(0), dim, ids.device, reach, self.clamp_length)
        places = places._replace(encodings=self.dropout(places.encodings.to(hidden.dtype)))
        memories = []
        for layer, memory in zip(self.layers, state, strict=True):
            memories.append(self._remember(memory, hidden))
            hidden = layer(hidden, memory.transpose(0, 1), places, self.content_bias, self.position_bias)
        return Output(self.dropout(hidden), tuple(memories), hidden.new_zeros(()))

    def reset_parameters(self) -> None:
        """Weights and the biases u and v normal with std 0.02, other biases zero, as published."""
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

    def _remember(self, memory: Tensor, hidden: Tensor) -> Tensor:
        """The last M of a layer's remembered inputs ``(m, B, D)`` and its new ones ``(B, T, D)``."""
        new = hidden.detach().transpose(0, 1)
        new = new[max(0, new.size(0) - self.memory_length) :]
        kept = min(memory.size(0), self.memory_length - new.size(0))
        # A copy, so that no more than the memory itself stays alive or goes into a checkpoint.
        return torch.cat([memory[memory.size(0) - kept :], new])
