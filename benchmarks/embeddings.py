"""What the benchmarks measure: one or two embeddings per registered method, and a plain table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shared_embeddings as se
from shared_embeddings.registry import method_class

DENSE = "plain table"
PADDING = 1


class Row(NamedTuple):
    """One embedding to measure."""

    name: str
    method: str
    options: dict[str, Any]


class Setting(NamedTuple):
    """The sizes V, D and N."""

    name: str
    vocab_size: int
    dim: int
    tokens: int


SETTINGS = {
    "translation": Setting("translation", 37000, 512, 4096),
    "language model": Setting("language model", 267735, 512, 1024),
    "tiny": Setting("tiny", 3000, 512, 64),
}
PUBLISHED = ("translation", "language model")


class Dense(nn.Module):
    """``nn.Embedding`` with a tied softmax that builds all scores."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.score_dim = dim
        self.weight = nn.Parameter(torch.randn(vocab_size, dim) * dim**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """The vectors ``(N, D)`` of ids ``(N,)``."""
        return F.embedding(ids, self.weight, PADDING)

    def cross_entropy(self, hidden: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        """The mean loss of hidden ``(N, D)`` and targets ``(N,)``."""
        return F.cross_entropy(hidden @ self.weight.T, targets, ignore_index=ignore_index)


def rows(setting: Setting, methods: Sequence[str]) -> list[Row]:
    """The examples of each of `methods`."""
    return [
        Row(f"{method}, {label}" if label else method, method, options)
        for method in methods
        for label, options in method_class(method).examples(setting.vocab_size, setting.dim).items()
    ]


def build(row: Row, setting: Setting) -> Any:
    """Build the module of a row with weights from a fixed seed."""
    torch.manual_seed(0)
    if row.method == DENSE:
        return Dense(setting.vocab_size, setting.dim)
    return se.build(
        row.method,
        num_embeddings=setting.vocab_size,
        embedding_dim=setting.dim,
        padding_idx=PADDING,
        **row.options,
    )


def words(setting: Setting) -> Tensor:
    """Draw ``(N,)`` word ids from Zipf's law: the frequency of id i is proportional to 1 / (i + 1)."""
    generator = torch.Generator().manual_seed(0)
    frequencies = 1.0 / torch.arange(1, setting.vocab_size + 1, dtype=torch.float64)
    return torch.multinomial(frequencies, setting.tokens, replacement=True, generator=generator)
