"""What the benchmarks measure: one or two embeddings per registered method, and a plain table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shared_embeddings as se

DENSE = "plain table"
PADDING = 1


class Row(NamedTuple):
    """One embedding to measure."""

    name: str
    method: str
    options: dict[str, Any]


class Setting(NamedTuple):
    """V, D, N, the bands of adaptive embeddings and the shape of a tensor train."""

    name: str
    vocab_size: int
    dim: int
    tokens: int
    cutoffs: list[int]
    vocab_shape: list[int]


SETTINGS = {
    "translation": Setting("translation", 37000, 512, 4096, [2000, 6000], [25, 37, 40]),
    "language model": Setting("language model", 267735, 512, 1024, [20000, 40000, 200000], [64, 64, 66]),
    "tiny": Setting("tiny", 3000, 512, 64, [300, 1000], [15, 15, 14]),
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
    """The rows of `methods`, with sizes like those in the papers."""
    dim = setting.dim
    narrow, wide = dim // 8, 8 * dim
    known: dict[str, list[tuple[str, dict[str, Any]]]] = {
        "projective": [("", {"rank": narrow})],
        "funnel": [("", {"rank": narrow})],
        "adaptive": [("", {"cutoffs": setting.cutoffs})],
        "define": [
            (", tied to its map", _define(dim, "map", output_projection=True)),
            (", tied to its table", _define(dim, "table")),
        ],
        "alone": [(f", {kind}", {"hidden_dim": wide, "filter": kind}) for kind in ("real", "binary")],
        "uncle": [("", {"unique_dim": narrow, "num_classes": 1000, "random_classes": True})],
        "group_reduce": [("", {"num_groups": 10, "min_rank": 23})],
        "tensor_train": [("", {"vocab_shape": setting.vocab_shape, "dim_shape": [8, 8, 8], "rank": 90})],
        "structured": [("", {"num_groups": 32, "num_clusters": 2376})],
    }
    return [
        Row(method + suffix, method, options)
        for method in methods
        for suffix, options in known.get(method, [("", {})])
    ]


def _define(dim: int, output: str, **options: object) -> dict[str, Any]:
    """DeFINE with n = D / 4, k = 2 D and three layers."""
    return {"map_dim": dim // 4, "expand_dim": 2 * dim, "depth": 3, "output": output, **options}


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
