"""Perplexity of a text: every token but the first is scored exactly once, with a defined context.

The n - 1 targets of a text of n tokens are split into chunks. The model reads each chunk in segments,
starting from its initial state and carrying the state over between segments. The context of a target depends
on its chunk only, not on the batch size.

Axes: ``B`` chunks in a batch, ``T`` tokens of a segment, ``S`` score_dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from lm.data.corpus import load_corpus
from lm.data.vocabulary import Vocabulary, word_blocks
from lm.models import LanguageModel
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import sha256


class Score(NamedTuple):
    """The total negative log-likelihood of a number of targets, in nats."""

    nats: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """``exp(nats / tokens)``."""
        return self.perplexity_per(self.tokens)

    def perplexity_per(self, units: int) -> float:
        """``exp(nats / units)``, for example per word of a text in subwords."""
        try:
            return math.exp(self.nats / units)
        except OverflowError:
            return math.inf


class Reading(NamedTuple):
    """How a text is split."""

    target_length: int = 70  # tokens per segment
    context_length: int = 0  # unscored tokens before each chunk; fewer at the beginning of the text
    chunk_length: int | None = None  # targets per chunk; None for a single chunk
    batch_size: int = 1  # chunks per batch; does not affect the result

    def check(self) -> None:
        """Raise `UserError` for values out of range."""
        for name, value in self._asdict().items():
            least = 0 if name == "context_length" else 1
            if value is not None and value < least:
                raise UserError(f"{name} is {value}, but it must be at least {least}; raise it")


class Segment(NamedTuple):
    """A segment that the model has read."""

    hidden: Tensor  # (B, T, S)
    targets: Tensor  # (B, T), the next tokens
    is_scored: Tensor  # (B, T), False for context and padding
    is_first: bool  # of its chunks


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
    """Score all tokens of a text but the first.

    Args:
        model: is in evaluation mode during the call.
        tokens: ``(n,)`` word ids, at least two; may be a memory map.
        target_length, context_length, chunk_length, batch_size: see `Reading`.
        progress: whether to show a progress bar.
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
    """Yield the segments of a text with the hidden states of a model."""
    device = next(model.parameters()).device
    with tqdm(total=len(tokens) - 1, unit="tok", desc="evaluating", disable=not progress) as bar:
        for batch, offset in segments(len(tokens), reading):
            if offset == 0:
                state = model.initial_state(len(batch))
            ids, targets, is_scored = _cut(tokens, batch, offset, reading.target_length)
            output = model(ids.to(device), state)
            state = output.state
            yield Segment(output.hidden, targets.to(device), is_scored.to(device), offset == 0)
            bar.update(int(is_scored.sum()))


def target_losses(model: LanguageModel, segment: Segment) -> Tensor:
    """Negative log-likelihoods ``(n,)``, float64, of the scored targets of a segment."""
    hidden, targets = segment.hidden[segment.is_scored], segment.targets[segment.is_scored]
    return model.embedding.cross_entropy(hidden, targets, reduction="none").double()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation mode temporarily."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class Span(NamedTuple):
    """The input tokens of one chunk."""

    start: int  # index of the first token
    length: int  # including the context
    context: int


def segments(size: int, reading: Reading) -> Iterator[tuple[list[Span], int]]:
    """The chunks that are read together, and the offset in them, of each segment of `size` tokens."""
    length = reading.chunk_length or size - 1
    spans = []
    for begin in range(0, size - 1, length):
        context = min(reading.context_length, begin)
        spans.append(Span(begin - context, context + min(length, size - 1 - begin), context))
    for first in range(0, len(spans), reading.batch_size):
        batch = spans[first : first + reading.batch_size]
        for offset in range(0, max(span.length for span in batch), reading.target_length):
            yield batch, offset


def _cut(tokens: np.ndarray, batch: list[Span], offset: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, targets and `Segment.is_scored`, all ``(B, T)``, of the chunks' tokens starting at `offset`.

    Shorter chunks are padded with word 0.
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


class Text(NamedTuple):
    """A text to evaluate on."""

    tokens: np.ndarray  # (n,) word ids
    name: str  # for reports
    split: str | None  # None for a file
    unknown: int  # number of <unk>
    checksum: str  # SHA-256 of the data


def read_data(path: Path, split: str | None, known: Sequence[str]) -> Text:
    """Read one split of a corpus, or a tokenized text, as word ids of a model.

    Args:
        path: folder of the corpus, or the file.
        split: split of the corpus (default: test); None for a file.
        known: words of the model in the order of their ids.

    Raises:
        UserError: the text is missing, too short, or has another vocabulary.
    """
    if path.is_dir():
        corpus = load_corpus(path)
        words = corpus.vocabulary.words
        if words != list(known):
            place = next((i for i, pair in enumerate(zip(words, known)) if pair[0] != pair[1]), None)
            place = min(len(words), len(known)) if place is None else place
            raise UserError(
                f"data {path}: its vocabulary ({len(words):,} words) differs from the model's "
                f"({len(known):,} words) at word {place}; use the corpus that the model was trained on, or a "
                "text file"
            )
        split = split or "test"
        tokens = {"train": corpus.train, "valid": corpus.valid, "test": corpus.test}[split]
        unknown = corpus.description["unknown"][split]
        return Text(tokens, f"{split} text of {path}", split, unknown, corpus.description["checksum"])
    if split is not None:
        raise UserError(f"split is {split}, but {path} is not a folder written by lm_prepare; remove -split")
    vocabulary = Vocabulary(known, [0] * len(known))
    blocks = [np.empty(0, np.int32)]
    for block in word_blocks(path):
        blocks.append(np.array([vocabulary.index.get(word, vocabulary.unk) for word in block], np.int32))
    tokens = np.concatenate(blocks)
    if len(tokens) < 2:
        raise UserError(f"{path}: {len(tokens)} tokens, but at least 2 are needed; use a longer text")
    unknown = int(np.count_nonzero(tokens == vocabulary.unk))
    return Text(tokens, str(path), None, unknown, sha256(path))
