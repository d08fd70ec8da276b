"""The command ``lm_eval``: computes the perplexity of a trained model on a text."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lm.checkpoint import load_model
from lm.cli import add_device, chosen_device
from lm.data.texts import SPLITS
from lm.evaluate.evaluation import Reading, Score, Text, evaluate, number_of_words, read_data, segments
from lm.evaluate.pointer import PointerOptions, evaluate_with_pointer
from lm.models.interface import LanguageModel, count_model
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.path_options import PathOption
from shared_embeddings.utils.reading import parse_yaml
from shared_embeddings.utils.results import describe_device, provenance, write_record

# Model options that evaluation may change.
MEMORY_OPTIONS = ("memory_length", "clamp_length", "same_length")


class Measured(NamedTuple):
    """The result of an evaluation.

    Attributes:
        plain: score of the model.
        mixed: score with the cache pointer, or None.
        seconds: duration.
        segments: number of forward passes of the model.
    """

    plain: Score
    mixed: Score | None
    seconds: float
    segments: int

    @property
    def last(self) -> Score:
        """The score with the pointer, if it is used, or of the model."""
        return self.mixed or self.plain


def main(arguments: Sequence[str]) -> None:
    """Compute the perplexity of a trained model on all tokens of a text but the first."""
    options = _parser().parse_args(list(arguments))
    reading = Reading(options.target_length, options.context_length, options.chunk_length, options.batch_size)
    reading.check()
    pointer = None
    if options.pointer is not None:
        pointer = PointerOptions.parse(parse_yaml(options.pointer, "-pointer"))
    words = number_of_words(options.words, options.reference)
    device = chosen_device(options.device)
    trained = load_model(options.model, device)
    text = read_data(options.data, options.split, trained.words)
    memory = set_memory(trained.model, {name: getattr(options, name) for name in MEMORY_OPTIONS})
    measured = measure(trained.model, text.tokens, reading, pointer)
    metrics = {
        **metrics_of(measured, words),
        **({} if pointer is None else {"pointer": pointer.plain()}),
        "unknown": text.unknown,
        **reading._asdict(),
        **memory,
    }
    print(_report(text, metrics))
    if options.output is not None:
        record = {
            "model": str(options.model),
            "data": str(options.data),
            "split": text.split,
            "metrics": metrics,
            "counts": count_model(trained.model),
            "data_checksum": text.checksum,
            "peak_memory_mib": peak_memory(device.type),
            **provenance(),
            "device": describe_device(device.type),
            "config": trained.config,
        }
        write_record(options.output, record)


def _parser() -> Parser:
    """The command line."""
    parser = Parser("lm_eval", description=main.__doc__)
    add = parser.add_argument
    add("-model", type=PathOption.FILE, required=True, metavar="FILE", help="checkpoint written by lm_train")
    add(
        "-data",
        type=PathOption.SOURCE,
        required=True,
        metavar="PATH",
        help="folder written by lm_prepare, or a UTF-8 text",
    )
    add("-split", choices=SPLITS, help="split of the folder (default: test)")
    add("-target_length", type=int, default=70, metavar="N", help="tokens per segment (default: 70)")
    add(
        "-context_length",
        type=int,
        default=0,
        metavar="N",
        help="unscored context tokens before each chunk (default: 0)",
    )
    add("-chunk_length", type=int, metavar="N", help="targets per chunk (default: all in one chunk)")
    add("-batch_size", type=int, default=1, metavar="N", help="chunks per batch (default: 1)")
    add(
        "-memory_length",
        type=int,
        metavar="N",
        help="memory length (Transformer-XL; default: as in training)",
    )
    add(
        "-clamp_length",
        type=int,
        metavar="N",
        help="maximum distance (Transformer-XL; default: as in training)",
    )
    add(
        "-same_length",
        action="store_const",
        const=True,
        help="same context for all words (Transformer-XL)",
    )
    add(
        "-pointer",
        metavar="YAML",
        help="also evaluate with a cache pointer, such as '{window: 500, theta: 1.0, lambda: 0.1}'",
    )
    add("-words", type=int, metavar="N", help="also report the perplexity per word of a text with N words")
    add(
        "-reference",
        type=PathOption.FILE,
        metavar="FILE",
        help="the same with the number of words and line ends of this text",
    )
    add("-output", type=PathOption.NEW_FILE, metavar="FILE", help="write the results to this JSON file")
    add("-force", "--force", action="store_true", help="overwrite -output")
    add_device(parser)
    return parser


def set_memory(model: LanguageModel, wanted: dict[str, int | None]) -> dict[str, int]:
    """Change the memory settings of a model where requested; returns the settings in effect.

    Raises:
        UserError: the model has no such setting, or the value is out of range.
    """
    for name, value in wanted.items():
        if value is None:
            continue
        if not hasattr(model, name):
            raise UserError(f"{name} is {value}, but {type(model).__name__} has no {name}; remove it")
        least = 0 if name == "memory_length" else 1
        if value < least:
            raise UserError(f"{name} is {value}, but it must be at least {least}; raise it")
        setattr(model, name, value)
    return {name: getattr(model, name) for name in wanted if hasattr(model, name)}


def measure(
    model: LanguageModel, tokens: np.ndarray, reading: Reading, pointer: PointerOptions | None
) -> Measured:
    """Score a text and measure the time.

    Raises:
        UserError: the loss is not finite.
    """
    begin = time.monotonic()
    progress = sys.stderr.isatty()
    if pointer is None:
        plain, mixed = evaluate(model, tokens, *reading, progress=progress), None
    else:
        plain, mixed = evaluate_with_pointer(model, tokens, pointer, reading, progress)
    seconds = max(time.monotonic() - begin, 1e-9)
    measured = Measured(plain, mixed, seconds, sum(1 for _ in segments(len(tokens), reading)))
    if not math.isfinite(plain.perplexity):
        raise UserError(
            f"the loss is {plain.nats / plain.tokens} nats per token: training diverged; use another model"
        )
    return measured


def metrics_of(measured: Measured, words: int | None) -> dict[str, Any]:
    """The metrics for ``results.json``."""
    numbers: dict[str, Any] = {
        "perplexity": measured.plain.perplexity,
        "nats": measured.plain.nats,
        "tokens": measured.plain.tokens,
    }
    if measured.mixed is not None:
        numbers["pointer_perplexity"] = measured.mixed.perplexity
    if words is not None:
        numbers |= {"words": words, "word_perplexity": measured.last.perplexity_per(words)}
    numbers["tokens_per_second"] = measured.plain.tokens / measured.seconds
    numbers["inference_ms"] = 1000 * measured.seconds / measured.segments
    return numbers


def peak_memory(device: str) -> float:
    """Peak memory of this process on `device` in MiB."""
    if device == "cuda":
        return round(torch.cuda.max_memory_allocated() / 2**20, 1)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def _report(text: Text, metrics: dict[str, Any]) -> str:
    """The printed report."""
    settings = ("target_length", "context_length", "chunk_length", *MEMORY_OPTIONS)
    context = ", ".join(f"{name} {metrics[name]}" for name in settings if metrics.get(name) is not None)
    lines = [f"{text.name}: {metrics['tokens']:,} targets, {context}"]
    lines.append(f"<unk>: {text.unknown:,} tokens ({text.unknown / len(text.tokens):.2%})")
    lines.append(f"perplexity {metrics['perplexity']:.2f}")
    if "pointer" in metrics:
        lines.append(f"with the pointer {metrics['pointer']}: perplexity {metrics['pointer_perplexity']:.2f}")
    if "words" in metrics:
        lines.append(f"per word ({metrics['words']:,} words): perplexity {metrics['word_perplexity']:.2f}")
    lines.append(
        f"{metrics['tokens_per_second']:,.0f} tokens per second, {metrics['inference_ms']:.1f} ms per batch"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    from lm.cli import evaluate as command

    command()
