"""Language models small enough to be followed by hand, behind the interface of the real ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

import shared_embeddings as se


class Output(NamedTuple):
    hidden: Tensor
    state: tuple[Tensor, ...]
    penalty: Tensor


class TinyLSTM(nn.Module):
    """One LSTM layer: what it knows of the past does not depend on how the past was cut into segments."""

    def __init__(self, words: int = 11, dim: int = 6, method: str = "standard", **options: object) -> None:
        super().__init__()
        self.embedding = se.build(method, num_embeddings=words, embedding_dim=dim, **options)
        self.lstm = nn.LSTM(dim, self.embedding.score_dim, batch_first=True)
        self.embedding.reset_parameters()
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.8)

    def initial_state(self, batch_size: int) -> tuple[Tensor, ...]:
        zeros = torch.zeros(1, batch_size, self.embedding.score_dim)
        return zeros, zeros.clone()

    def forward(self, ids: Tensor, state: tuple[Tensor, ...]) -> Output:
        hidden, state = self.lstm(self.embedding(ids), state)
        return Output(hidden, tuple(part.detach() for part in state), hidden.new_zeros(()))


class TinyMemory(nn.Module):
    """Sees the mean of its segment so far and of the last `memory` vectors of the segments before."""

    def __init__(self, words: int = 11, dim: int = 6, memory: int = 4) -> None:
        super().__init__()
        self.embedding = se.build("standard", num_embeddings=words, embedding_dim=dim)
        nn.init.normal_(next(self.embedding.parameters()))
        self.memory = memory

    def initial_state(self, batch_size: int) -> tuple[Tensor, ...]:
        return (torch.zeros(1, batch_size, 0, self.embedding.embedding_dim),)

    def forward(self, ids: Tensor, state: tuple[Tensor, ...]) -> Output:
        vectors = self.embedding(ids)
        known = torch.cat([state[0][0], vectors], dim=1)
        counts = torch.arange(1, known.size(1) + 1).unsqueeze(1)
        hidden = (known.cumsum(dim=1) / counts)[:, -ids.size(1) :]
        memory = known[:, max(0, known.size(1) - self.memory) :].unsqueeze(0)
        return Output(hidden, (memory.detach(),), hidden.new_zeros(()))


def text(length: int, words: int = 11, seed: int = 0) -> Tensor:
    """Random word ids ``(length,)``."""
    return torch.randint(words, (length,), generator=torch.Generator().manual_seed(seed))
