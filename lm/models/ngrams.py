"""An input table of hashed n-grams of tokens, whose vectors are added to the word vectors.

As in over-tokenized transformers (Huang et al., 2025, arXiv 2501.16975, "over-encoding"), the input vector of
a position is that of its token, plus those of the n-grams that end with it: with the token ids x_t,

    h_t = E[x_t] + P sum_n T[f_n(x_t, ..., x_{t-n+1}) mod R].

One table T of R rows serves all orders n, and P maps its rows to the width of the word vectors. Engram (Cheng
et al., 2026, arXiv 2601.07372) reads such tables, too, by hashes that mix the ids with fixed multipliers; its
gates, convolution and several hashes of each n-gram are not here. The hash is a polynomial modulo a prime
(Carter and Wegman, 1979), the same in every process and version:

    f_n = sum_{i < n} (x_{t-i} + 1) A^(i + 1) mod (2^31 - 1),   A = 48271.

A token before the beginning of a text counts as x = -1, which adds nothing: n-grams become shorter there.

Axes: ``B`` batch, ``T`` time, ``R`` rows, ``W`` width of the rows, ``D`` width of the word vectors, ``N`` the
longest n-gram.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import shared_embeddings as se
from shared_embeddings.nn.layers import keep_mask
from shared_embeddings.registry import parse_embedding
from shared_embeddings.utils.options import option

_PRIME, _BASE = 2**31 - 1, 48271


@dataclasses.dataclass(frozen=True)
class NGramOptions:
    """Options of the table of n-grams."""

    ngram_rows: int = option(
        "R, rows of the table of hashed n-grams whose vectors are added to the word vectors; 0 for none.",
        0,
        minimum=0,
    )
    ngram_dim: int = option("W, width of its rows, which are projected to that of words.", 64, minimum=1)
    ngram_orders: tuple[int, ...] = option("lengths of the n-grams.", (2, 3), minimum=1)
    ngram_dropout: float = option(
        "probability of dropping the vector of an n-gram at a position.", 0.0, minimum=0, below=1
    )
    ngram_learning_rate: float = option(
        "of the rows, by SGD with sparse gradients for any optimizer; scheduled like 'learning_rate'.",
        40.0,
        minimum=0,
    )
    ngram_embedding: Mapping[str, Any] = option(
        "method of the table and its options.", factory=lambda: {"method": "standard"}
    )


class NGramTable(nn.Module):
    """Vectors of hashed n-grams: rows of an embedding without an output side, and their projection."""

    def __init__(self, options: NGramOptions, embedding_dim: int) -> None:
        super().__init__()
        self.options = options
        method, settings = parse_embedding("ngram_embedding", options.ngram_embedding)
        self.embedding = se.build(
            method, num_embeddings=options.ngram_rows, embedding_dim=options.ngram_dim, **settings
        )
        self.embedding.has_sparse_gradients = True
        self.projection = nn.Linear(options.ngram_dim, embedding_dim, bias=False)

    def reset_parameters(self) -> None:
        """Draw the projection; a standard table is zero, so that n-grams that were never read add nothing."""
        self.projection.reset_parameters()
        self.embedding.reset_parameters()
        if self.embedding.method == "standard":
            for parameter in self.embedding.parameters():
                nn.init.zeros_(parameter)

    def sparse_parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients have only the rows that were read."""
        return list(self.embedding.parameters()) if self.embedding.method == "standard" else []

    def initial_context(self, batch_size: int) -> Tensor:
        """The tokens ``(1, B, N - 1)`` before the beginning of texts."""
        device, length = self.projection.weight.device, max(self.options.ngram_orders) - 1
        return torch.full((1, batch_size, length), -1, device=device)

    def ids(self, tokens: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """The rows ``(B, T, orders)`` of the n-grams that end with `tokens` ``(B, T)``, and the next context.

        Args:
            context: ``(1, B, N - 1)`` the tokens before them.
        """
        length, before = tokens.size(1), context.size(-1)
        read = torch.cat([context[0], tokens], dim=1)
        terms = read + 1
        sums, factor = torch.zeros_like(tokens), 1
        by_order = []
        for back in range(before + 1):
            factor = factor * _BASE % _PRIME
            sums = (sums + terms[:, before - back : before - back + length] * factor) % _PRIME
            if back + 1 in self.options.ngram_orders:
                by_order.append(sums % self.options.ngram_rows)
        return torch.stack(by_order, dim=-1), read[None, :, length:]

    def forward(self, tokens: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """What is added to the vectors ``(B, T, D)`` of tokens ``(B, T)``, and the context of those after."""
        ids, context = self.ids(tokens, context)
        vectors = self.embedding(ids)  # (B, T, orders, W)
        if self.training and self.options.ngram_dropout > 0.0:
            vectors = vectors * keep_mask(vectors, (*vectors.shape[:-1], 1), self.options.ngram_dropout)
        return self.projection(vectors.sum(dim=2)), context
