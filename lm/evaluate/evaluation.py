"""Perplexity of a text, every token but the first scored exactly once, with a stated context.

A text of n tokens has n - 1 targets. They are cut into chunks, and the model reads each chunk from its
initial state on, in segments, with the state carried over from one segment to the next. What a target is
predicted from therefore depends on its chunk alone and never on how many chunks go side by side.

Axes: ``B`` chunks side by side, ``T`` tokens of a segment, ``S`` width of the hidden states that are scored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from shared_embeddings.errors import UserError

if TYPE_CHECKING:
    from lm.models.interface import LanguageModel


class Score(NamedTuple):
    """How well a text was predicted.

    Attributes:
        nats: the sum of the negative natural log-probabilities of all targets.
        tokens: the number of targets.
    """

    nats: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """``exp(nats / tokens)``."""
        return self.perplexity_per(self.tokens)

    def perplexity_per(self, units: int) -> float:
        """``exp(nats / units)``: per word of a text of `units` words whose tokens are smaller pieces."""
        try:
            return math.exp(self.nats / units)
        except OverflowError:
            return math.inf


class Reading(NamedTuple):
    """How a text is read.

    Attributes:
        target_length: tokens of a segment; beyond it the model knows what its state holds.
        context_length: how many tokens a chunk is given, unscored, before the one that its first target is
            predicted from; fewer at the beginning of the text.
        chunk_length: targets of a chunk; None for one chunk of all.
        batch_size: chunks side by side; of no influence on the result.
    """

    target_length: int = 70
    context_length: int = 0
    chunk_length: int | None = None
    batch_size: int = 1

    def check(self) -> None:
        """Raise `UserError` for a length that no text can be read with."""
        least = {"target_length": 1, "context_length": 0, "chunk_length": 1, "batch_size": 1}
        for name, value in self._asdict().items():
            if value is not None and value < least[name]:
                raise UserError(f"{name} is {value}, but it must be at least {least[name]}; raise it")


class Segment(NamedTuple):
    """What the model has read at a time.

    Attributes:
        hidden: ``(B, T, S)`` hidden states to be scored.
        targets: ``(B, T)`` the tokens that follow.
        is_scored: ``(B, T)`` which of them count: neither context nor padding.
        is_first: whether the chunks begin here.
    """

    hidden: Tensor
    targets: Tensor
    is_scored: Tensor
    is_first: bool


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    tokens: np.ndarray,
    target_length: int = 70,
    context_length: int = 0,
    chunk_length: int | None = None,
    batch_size: int = 1,
    progress: bool = True,
) -> Score:
    """Score every token of a text but the first.

    Args:
        model: is in ``eval()`` meanwhile.
        tokens: ``(n,)`` word ids; may be a memory map.
        target_length, context_length, chunk_length, batch_size: see `Reading`.
        progress: whether to show how far it is.

    Raises:
        UserError: a text of fewer than two tokens, or an impossible length.
    """
    reading = Reading(target_length, context_length, chunk_length, batch_size)
    nats = 0.0
    with evaluating(model):
        for segment in read(model, tokens, reading, progress):
            nats += float(target_losses(model, segment).sum())
    return Score(nats, len(tokens) - 1)


def read(
    model: LanguageModel, tokens: np.ndarray, reading: Reading, progress: bool = True
) -> Iterator[Segment]:
    """Let the model read a text; gives one segment after the other.

    Raises:
        UserError: a text of fewer than two tokens, or an impossible length.
    """
    reading.check()
    if len(tokens) < 2:
        raise UserError(
            f"the text has {len(tokens)} tokens, but at least 2 are needed: one to begin with and one to "
            "predict; give a longer text"
        )
    device = next(model.parameters()).device
    spans = chunk_spans(len(tokens), reading)
    with tqdm(total=len(tokens) - 1, unit="tok", desc="evaluating", disable=not progress) as bar:
        for first in range(0, len(spans), reading.batch_size):
            batch = spans[first : first + reading.batch_size]
            state = model.initial_state(len(batch))
            for offset in range(0, max(span.length for span in batch), reading.target_length):
                ids, targets, is_scored = _cut(tokens, batch, offset, reading.target_length)
                output = model(ids.to(device), state)
                state = output.state
                yield Segment(output.hidden, targets.to(device), is_scored.to(device), offset == 0)
                bar.update(int(is_scored.sum()))


def target_losses(model: LanguageModel, segment: Segment) -> Tensor:
    """The negative log-probabilities ``(n,)``, in float64, of the targets of a segment that count."""
    hidden, targets = segment.hidden[segment.is_scored], segment.targets[segment.is_scored]
    return model.embedding.cross_entropy(hidden, targets, reduction="none").double()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into ``eval()``, and back into the mode that it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class Span(NamedTuple):
    """What is read of a text for one chunk: the tokens from `start` on predict those from ``start + 1`` on.

    Attributes:
        start: index of the first token that is read.
        length: how many are read, context and all.
        context: how many of them are context.
    """

    start: int
    length: int
    context: int


def chunk_spans(size: int, reading: Reading) -> list[Span]:
    """The chunks of a text of `size` tokens, in order."""
    length = reading.chunk_length or size - 1
    spans = []
    for begin in range(0, size - 1, length):
        context = min(reading.context_length, begin)
        spans.append(Span(begin - context, context + min(length, size - 1 - begin), context))
    return spans


def _cut(tokens: np.ndarray, batch: list[Span], offset: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, targets, and which of them count, all ``(B, T)``, of the chunks' tokens from `offset` on.

    Chunks that have ended are filled up with word 0, which comes after all that counts.
    """
    width = min(length, max(span.length for span in batch) - offset)
    ids = torch.zeros(len(batch), width, dtype=torch.int64)
    targets, is_scored = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for row, span in enumerate(batch):
        count = min(width, span.length - offset)
        if count > 0:
            begin = span.start + offset
            piece = torch.from_numpy(np.asarray(tokens[begin : begin + count + 1]).astype(np.int64))
            ids[row, :count], targets[row, :count] = piece[:-1], piece[1:]
            is_scored[row, max(0, span.context - offset) : count] = True
    return ids, targets, is_scored
