"""Perplexity of a text, and the command ``lm_evaluate``: every token but the first is scored exactly once,
with a defined context.

The n - 1 targets of a text of n tokens are split into chunks. The model reads each chunk in segments,
starting from its initial state and carrying the state over between segments. The context of a target depends
on its chunk only, not on the batch size.

The continuous cache pointer (Grave et al., 2017) makes recent words more likely. For the last `window`
positions i of the text, the cache holds the hidden state h_i and the next word w_{i+1}. With the current
hidden state h_t,

    p_cache(w) = sum_i exp(theta h_t . h_i) [w_{i+1} = w] / sum_i exp(theta h_t . h_i)     (eq. 2)
    p(w) = (1 - lambda) p_model(w) + lambda p_cache(w)                                    (eq. 3)

Only the probability of the actual next word is computed, not the distribution over the vocabulary. The fourth
setting of AWD-LSTM's pointer, the number of tokens per segment, is `Reading.target_length`.

Axes: ``B`` chunks in a batch, ``T`` tokens of a segment, ``S`` score_dim.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lm.checkpoint import Trained, load_model
from lm.cli import chosen_device
from lm.data.corpus import SPLITS, Vocabulary, load_corpus, word_blocks
from lm.models import LanguageModel, count_model
from shared_embeddings.nn.layers import evaluating
from shared_embeddings.utils.command_line import Parser, positive
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import sha256, write_text
from shared_embeddings.utils.options import option, parse_options, require
from shared_embeddings.utils.paths import existing_file, existing_path, new_path
from shared_embeddings.utils.reading import parse_yaml
from shared_embeddings.utils.results import describe_device, encoded, provenance

# Maximum number of dot products, and of query positions, that the pointer computes at a time.
_SCORES = 2**22
_QUERIES = 256


class Score(NamedTuple):
    """The total negative log-likelihood of a number of targets, in nats."""

    nats: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """``exp(nats / tokens)``."""
        return perplexity(self.nats / self.tokens)


def perplexity(loss: float) -> float:
    """``exp(loss)``, or infinity on overflow."""
    return math.exp(loss) if loss < 700 else math.inf


class Reading(NamedTuple):
    """How a text is split."""

    target_length: int = 70  # tokens per segment
    context_length: int = 0  # unscored tokens before each chunk; fewer at the beginning of the text
    chunk_length: int | None = None  # targets per chunk; None for a single chunk
    batch_size: int = 1  # chunks per batch; does not affect the result


class Segment(NamedTuple):
    """A segment that the model has read."""

    hidden: Tensor  # (B, T, S)
    targets: Tensor  # (B, T), the next tokens
    is_scored: Tensor  # (B, T), False for context and padding
    losses: Tensor  # (n,), float64, negative log-likelihoods of the scored targets
    is_first: bool  # of its chunks


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    tokens: np.ndarray,
    reading: Reading = Reading(),  # noqa: B008 (a tuple of numbers)
    progress: bool = True,
) -> Score:
    """Score all tokens of a text but the first.

    Args:
        model: is in evaluation mode during the call.
        tokens: ``(n,)`` word ids, at least two; may be a memory map.
        reading: how the text is split.
        progress: whether to show a progress bar.
    """
    with evaluating(model):
        parts = read(model, tokens, reading, progress)
        nats = sum(float(segment.losses.sum()) for segment in parts)
    return Score(nats, len(tokens) - 1)


def read(
    model: LanguageModel, tokens: np.ndarray, reading: Reading, progress: bool = True
) -> Iterator[Segment]:
    """Yield the segments of a text as a model scores them. Shorter chunks are padded with id 0."""
    device = next(model.parameters()).device
    with tqdm(total=len(tokens) - 1, unit="tok", desc="evaluating", disable=not progress) as bar:
        for batch, offset in segments(len(tokens), reading):
            width = min(reading.target_length, max(span.length for span in batch) - offset)
            ids = torch.zeros(len(batch), width, dtype=torch.int64)
            targets, is_scored = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
            for row, span in enumerate(batch):
                count = min(width, span.length - offset)
                if count > 0:
                    begin = span.start + offset
                    piece = torch.from_numpy(np.asarray(tokens[begin : begin + count + 1]).astype(np.int64))
                    ids[row, :count], targets[row, :count] = piece[:-1], piece[1:]
                    is_scored[row, max(0, span.context - offset) : count] = True
            if offset == 0:
                state = model.initial_state(len(batch))
            output = model(ids.to(device), state)
            state = output.state
            bar.update(int(is_scored.sum()))
            hidden, targets, is_scored = output.hidden, targets.to(device), is_scored.to(device)
            losses = model.embedding.cross_entropy(hidden[is_scored], targets[is_scored], reduction="none")
            yield Segment(hidden, targets, is_scored, losses.double(), offset == 0)


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


@dataclasses.dataclass(frozen=True)
class PointerOptions:
    """Settings of the pointer; see `parse`."""

    window: int = option("number of positions in the cache.", minimum=1)
    theta: float = option(
        "inverse temperature of the similarities; 0 weighs all positions equally.", minimum=0
    )
    weight: float = option("lambda, the weight of the cache in the mixture.")

    def __post_init__(self) -> None:
        require(0.0 < self.weight < 1.0, f"lambda is {self.weight}; it must be above 0 and below 1")

    @classmethod
    def parse(cls, settings: Any) -> PointerOptions:
        """Parse a mapping with the keys window, theta and lambda (a keyword of Python, here `weight`)."""
        if isinstance(settings, Mapping):
            settings = {{"lambda": "weight"}.get(key, key): value for key, value in settings.items()}
        return parse_options("pointer", cls, settings)


class CachePointer:
    """The cache of B parallel texts, which are read segment by segment."""

    def __init__(self, options: PointerOptions) -> None:
        self.options = options
        self._hidden: Tensor | None = None
        self._words: Tensor | None = None

    def log_probabilities(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the next words of a segment under the cache; adds the segment to the cache.

        Args:
            hidden: ``(B, T, S)``.
            targets: ``(B, T)`` next words.

        Returns:
            ``(B, T)`` float64 log-probabilities, minus infinity for words that are not in the cache; and
            ``(T,)``, False where the cache is empty.
        """
        keys = hidden if self._hidden is None else torch.cat([self._hidden, hidden], dim=1)
        words = targets if self._words is None else torch.cat([self._words, targets], dim=1)
        size, window = keys.size(1), self.options.window
        known = size - hidden.size(1)
        step = max(1, min(_QUERIES, _SCORES // (len(hidden) * (window + _QUERIES))))
        places = torch.arange(size, device=keys.device)
        blocks = []
        for queries in places[known:].split(step):
            begin, end = int(queries[0]), int(queries[-1]) + 1
            cached = places[max(0, begin - window) : end]
            similarities = keys[:, begin:end] @ keys[:, cached[0] : end].transpose(1, 2)
            scores = self.options.theta * similarities.double()
            outside = (cached >= queries[:, None]) | (cached < queries[:, None] - window)
            scores = scores.masked_fill(outside, -math.inf)
            is_same = words[:, cached[0] : end].unsqueeze(1) == words[:, begin:end].unsqueeze(2)
            of_word = scores.masked_fill(~is_same, -math.inf).logsumexp(dim=-1)
            # With an empty cache, both sums are empty.
            total = scores.logsumexp(dim=-1)
            blocks.append(torch.where(total > -math.inf, of_word - total, -math.inf))
        # Copies release the memory outside the window.
        self._hidden, self._words = keys[:, -window:].clone(), words[:, -window:].clone()
        return torch.cat(blocks, dim=1), places[known:] > 0


@torch.no_grad()
def evaluate_with_pointer(
    model: LanguageModel,
    tokens: np.ndarray,
    options: PointerOptions,
    reading: Reading = Reading(),  # noqa: B008
    progress: bool = True,
) -> tuple[Score, Score]:
    """Like `evaluate`, without and with the pointer; each chunk starts with an empty cache."""
    plain = mixed = 0.0
    with evaluating(model):
        for segment in read(model, tokens, reading, progress):
            if segment.is_first:
                pointer = CachePointer(options)
            log_cache, has_cache = pointer.log_probabilities(segment.hidden, segment.targets)
            losses, counting = segment.losses, segment.is_scored
            has_cache = has_cache.expand_as(counting)[counting]
            plain += float(losses.sum())
            by_model, by_cache = math.log1p(-options.weight) - losses, math.log(options.weight)
            mixture = torch.logaddexp(by_model, by_cache + log_cache[counting])
            # Where the cache is empty, the model alone predicts.
            mixed += float(torch.where(has_cache, -mixture, losses).sum())
    return Score(plain, len(tokens) - 1), Score(mixed, len(tokens) - 1)


class Text(NamedTuple):
    """A text to evaluate on."""

    tokens: np.ndarray  # (n,) word ids
    name: str  # for reports
    split: str | None  # None for a file
    unknown: int  # number of <unk>
    checksum: str  # SHA-256 of the data


def read_data(path: Path, split: str | None, known: Sequence[str]) -> Text:
    """Read one split of a corpus (default: test), or a tokenized text, as ids of a model's `known` words.

    Raises:
        UserError: the text is missing, too short, or has another vocabulary.
    """
    if path.is_dir():
        corpus = load_corpus(path)
        words = corpus.vocabulary.words
        if words != list(known):
            raise UserError(
                f"data {path}: its vocabulary ({len(words):,} words) is not the model's ({len(known):,} "
                "words); use the corpus that the model was trained on, or a text file"
            )
        split = split or "test"
        tokens: np.ndarray = getattr(corpus, split)
        unknown = corpus.description["unknown"][split]
        return Text(tokens, f"{split} text of {path}", split, unknown, corpus.description["checksum"])
    if split is not None:
        raise UserError(f"split is {split}, but {path} is not a folder written by lm_prepare; remove -split")
    vocabulary = Vocabulary(known)
    blocks = [np.empty(0, np.int32)]
    for block in word_blocks(path):
        blocks.append(np.array([vocabulary.index.get(word, vocabulary.unk) for word in block], np.int32))
    tokens = np.concatenate(blocks)
    if len(tokens) < 2:
        raise UserError(f"{path}: {len(tokens)} tokens, but at least 2 are needed; use a longer text")
    unknown = int(np.count_nonzero(tokens == vocabulary.unk))
    return Text(tokens, str(path), None, unknown, sha256(path))


def main(arguments: Sequence[str]) -> None:
    """Compute the perplexity of a trained model on all tokens of a text but the first."""
    options = _parser().parse_args(list(arguments))
    reading, pointer = _parse_reading(options), None
    if options.pointer is not None:
        pointer = PointerOptions.parse(parse_yaml(options.pointer, "-pointer"))
    words = options.words if options.reference is None else _count_words(options.reference)
    device = chosen_device(options.device)
    trained = load_model(options.model, device)
    text = read_data(options.data, options.split, trained.words)
    memory = set_memory(trained.model, options)

    begin, progress = time.monotonic(), sys.stderr.isatty()
    if pointer is None:
        plain, mixed = evaluate(trained.model, text.tokens, reading, progress), None
    else:
        plain, mixed = evaluate_with_pointer(trained.model, text.tokens, pointer, reading, progress)
    seconds = max(time.monotonic() - begin, 1e-9)
    if not math.isfinite(plain.perplexity):
        raise UserError(
            f"the loss is {plain.nats / plain.tokens} nats per token: training diverged; use another model"
        )

    metrics: dict[str, Any] = {"perplexity": plain.perplexity, "nats": plain.nats, "tokens": plain.tokens}
    if pointer is not None and mixed is not None:
        pointed = {"window": pointer.window, "theta": pointer.theta, "lambda": pointer.weight}
        metrics |= {"pointer_perplexity": mixed.perplexity, "pointer": pointed}
    if words is not None:
        metrics |= {"words": words, "word_perplexity": perplexity((mixed or plain).nats / words)}
    metrics |= {
        "tokens_per_second": plain.tokens / seconds,
        "inference_ms": 1000 * seconds / sum(1 for _ in segments(len(text.tokens), reading)),
    }
    settings = {**reading._asdict(), **memory}
    print("\n".join(_report(text, metrics, settings)))
    if options.output is not None:
        record = _record(options, trained, text, {**metrics, "unknown": text.unknown, **settings}, device)
        write_text(options.output, encoded(options.output, record, indent=2) + "\n")


def _parse_reading(options: argparse.Namespace) -> Reading:
    reading = Reading(options.target_length, options.context_length, options.chunk_length, options.batch_size)
    for name in ("context_length", "memory_length"):
        if (getattr(options, name) or 0) < 0:
            raise UserError(f"{name} is {getattr(options, name)}, but it must be at least 0; raise it")
    if reading.context_length and reading.chunk_length is None:
        raise UserError(
            f"context_length is {reading.context_length}, which has no effect on a single "
            "chunk; set chunk_length"
        )
    return reading


def _count_words(reference: Path) -> int:
    words = sum(map(len, word_blocks(reference)))
    if words < 1:
        raise UserError(f"{reference} has no words; use another text")
    return words


def _report(text: Text, metrics: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that the command prints."""
    context = ", ".join(
        f"{name} {value}" for name, value in settings.items() if value is not None and name != "batch_size"
    )
    yield f"{text.name}: {metrics['tokens']:,} targets, {context}"
    yield f"<unk>: {text.unknown:,} tokens ({text.unknown / len(text.tokens):.2%})"
    yield f"perplexity {metrics['perplexity']:.2f}"
    if "pointer" in metrics:
        yield f"with the pointer {metrics['pointer']}: perplexity {metrics['pointer_perplexity']:.2f}"
    if "words" in metrics:
        yield f"per word ({metrics['words']:,} words): perplexity {metrics['word_perplexity']:.2f}"
    yield f"{metrics['tokens_per_second']:,.0f} tokens per second, {metrics['inference_ms']:.1f} ms per batch"


def _record(
    options: argparse.Namespace,
    trained: Trained,
    text: Text,
    metrics: Mapping[str, Any],
    device: torch.device,
) -> dict[str, Any]:
    """Return what ``-output`` writes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
    return {
        "model": str(options.model),
        "data": str(options.data),
        "split": text.split,
        "metrics": dict(metrics),
        "counts": count_model(trained.model),
        "data_checksum": text.checksum,
        "peak_memory_mib": round(peak, 1),
        **provenance(),
        "device": describe_device(device.type),
        "config": trained.config,
    }


def _parser() -> Parser:
    example = "-model runs/ptb/funnel/best.pt -data runs/ptb/data"
    parser = Parser("lm_evaluate", example, description=main.__doc__)
    add = parser.add_argument
    add("-model", type=existing_file, required=True, metavar="FILE", help="checkpoint written by lm_train")
    source = "folder written by lm_prepare, or a UTF-8 text"
    add("-data", type=existing_path, required=True, metavar="PATH", help=source)
    add("-split", choices=SPLITS, help="split of the folder (default: test)")
    add("-target_length", type=positive, default=70, metavar="N", help="tokens per segment (default: 70)")
    context = "unscored context tokens before each chunk (default: 0)"
    add("-context_length", type=int, default=0, metavar="N", help=context)
    add("-chunk_length", type=positive, metavar="N", help="targets per chunk (default: all in one chunk)")
    add("-batch_size", type=positive, default=1, metavar="N", help="chunks per batch (default: 1)")
    memory = "memory length (Transformer-XL; default: as in training)"
    add("-memory_length", type=int, metavar="N", help=memory)
    distance = "maximum distance (Transformer-XL; default: as in training)"
    add("-clamp_length", type=positive, metavar="N", help=distance)
    same = "same context for all words (Transformer-XL)"
    add("-same_length", action="store_const", const=True, help=same)
    pointer = "also evaluate with a cache pointer, such as '{window: 500, theta: 1.0, lambda: 0.1}'"
    add("-pointer", metavar="YAML", help=pointer)
    number_of_words = parser.add_mutually_exclusive_group().add_argument
    per_word = "also report the perplexity per word of a text with N words"
    number_of_words("-words", type=positive, metavar="N", help=per_word)
    reference = "the same with the number of words and line ends of this text"
    number_of_words("-reference", type=existing_file, metavar="FILE", help=reference)
    add("-output", type=new_path, metavar="FILE", help="write the results to this JSON file")
    add("-force", "--force", action="store_true", help="overwrite -output")
    add("-device", choices=("auto", "cpu", "cuda"), default="auto", help="device (default: auto)")
    return parser


def set_memory(model: LanguageModel, options: argparse.Namespace) -> dict[str, int]:
    """Change the memory settings of a model where requested; return the settings in effect."""
    names = ("memory_length", "clamp_length", "same_length")
    for name in names:
        if (value := getattr(options, name)) is not None:
            if not hasattr(model, name):
                raise UserError(f"{name} is {value}, but {type(model).__name__} has no {name}; remove it")
            setattr(model, name, value)
    return {name: getattr(model, name) for name in names if hasattr(model, name)}


if __name__ == "__main__":
    from lm.cli import evaluate as command

    sys.exit(command())
