"""The command ``lm_eval``: the perplexity of a trained model on a text, in a stated context."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lm.arguments import add_device, chosen_device
from lm.checkpoint import load_model
from lm.data.corpus import SPLITS
from lm.evaluate.evaluation import Reading, Score, evaluate
from lm.evaluate.pointer import PointerOptions, evaluate_with_pointer
from lm.evaluate.scored_text import Text, number_of_words, read_data
from lm.models.interface import LanguageModel
from lm.models.parameters import count_model
from lm.yaml_input import parse_yaml
from shared_embeddings.errors import UserError
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.path_options import PathOption
from shared_embeddings.utils.results import describe_device, provenance, write_record

# What some models let be set anew for evaluation.
MEMORY_OPTIONS = ("memory_length", "clamp_length", "same_length")


class Measured(NamedTuple):
    """What came out.

    Attributes:
        plain: the model on its own.
        mixed: the model with the pointer, or None without one.
        seconds: how long it took.
    """

    plain: Score
    mixed: Score | None
    seconds: float

    @property
    def last(self) -> Score:
        """The score of all that was asked for."""
        return self.mixed or self.plain


def main(arguments: Sequence[str]) -> None:
    """Measure the perplexity of a trained model on every token of a text but the first."""
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
        **described(measured, words),
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
            "peak_memory_mib": peak_memory(device),
            **provenance(),
            "device": describe_device(device),
            "config": trained.config,
        }
        write_record(options.output, record)


def _parser() -> Parser:
    """The command line."""
    parser = Parser("lm_eval", description=main.__doc__)
    add = parser.add_argument
    add("-model", type=PathOption.FILE, required=True, metavar="FILE", help="checkpoint of lm_train")
    add(
        "-data",
        type=PathOption.SOURCE,
        required=True,
        metavar="PATH",
        help="folder of lm_prepare, or a UTF-8 text",
    )
    add("-split", choices=SPLITS, help="which text of the folder (default: test)")
    add("-target_length", type=int, default=70, metavar="N", help="tokens read at a time (default: 70)")
    add(
        "-context_length",
        type=int,
        default=0,
        metavar="N",
        help="unscored tokens before a chunk (default: 0)",
    )
    add("-chunk_length", type=int, metavar="N", help="targets of a chunk (default: one chunk of all)")
    add(
        "-batch_size", type=int, default=1, metavar="N", help="chunks side by side (default: 1); no influence"
    )
    add(
        "-memory_length",
        type=int,
        metavar="N",
        help="positions remembered (Transformer-XL; default: as trained)",
    )
    add(
        "-clamp_length",
        type=int,
        metavar="N",
        help="longest distance told apart (Transformer-XL; as trained)",
    )
    add("-same_length", action="store_const", const=True, help="all words see equally far (Transformer-XL)")
    add(
        "-pointer",
        metavar="YAML",
        help="cache pointer beside the model, such as '{window: 500, theta: 1.0, lambda: 0.1}'",
    )
    add("-words", type=int, metavar="N", help="also tell the perplexity per word, for a text of N words")
    add(
        "-reference",
        type=PathOption.FILE,
        metavar="FILE",
        help="the same for the words and line ends of this text",
    )
    add("-output", type=PathOption.NEW_FILE, metavar="FILE", help="write results.json here")
    add("-force", "--force", action="store_true", help="replace the file of -output")
    add_device(parser)
    return parser


def set_memory(model: LanguageModel, wanted: dict[str, int | None]) -> dict[str, int]:
    """Set how far a model remembers, where that was asked for; gives what holds now.

    Raises:
        UserError: the model has no such setting, or cannot have such a value.
    """
    for name, value in wanted.items():
        if value is None:
            continue
        if not hasattr(model, name):
            raise UserError(f"{name} is {value}, but {type(model).__name__} has no {name}; leave it out")
        least = 0 if name == "memory_length" else 1
        if value < least:
            raise UserError(f"{name} is {value}, but it must be at least {least}; raise it")
        setattr(model, name, value)
    return {name: getattr(model, name) for name in wanted if hasattr(model, name)}


def measure(
    model: LanguageModel, tokens: np.ndarray, reading: Reading, pointer: PointerOptions | None
) -> Measured:
    """Score a text, and take the time.

    Raises:
        UserError: the loss is no finite number.
    """
    begin = time.monotonic()
    progress = sys.stderr.isatty()
    if pointer is None:
        plain, mixed = evaluate(model, tokens, *reading, progress=progress), None
    else:
        plain, mixed = evaluate_with_pointer(model, tokens, pointer, reading, progress)
    measured = Measured(plain, mixed, time.monotonic() - begin)
    if not math.isfinite(plain.perplexity):
        raise UserError(
            f"the loss is {plain.nats / plain.tokens} nats per token: training diverged; take another model"
        )
    return measured


def described(measured: Measured, words: int | None) -> dict[str, Any]:
    """The numbers of ``results.json``."""
    numbers: dict[str, Any] = {
        "perplexity": measured.plain.perplexity,
        "nats": measured.plain.nats,
        "tokens": measured.plain.tokens,
    }
    if measured.mixed is not None:
        numbers["pointer_perplexity"] = measured.mixed.perplexity
    if words is not None:
        numbers |= {"words": words, "word_perplexity": measured.last.perplexity_per(words)}
    numbers["tokens_per_second"] = measured.plain.tokens / max(measured.seconds, 1e-9)
    return numbers


def peak_memory(device: str) -> float:
    """The most memory that this process has held on `device`, in MiB."""
    if device == "cuda":
        return round(torch.cuda.max_memory_allocated() / 2**20, 1)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def _report(text: Text, metrics: dict[str, Any]) -> str:
    """What people read."""
    settings = ("target_length", "context_length", "chunk_length", *MEMORY_OPTIONS)
    context = ", ".join(f"{name} {metrics[name]}" for name in settings if metrics.get(name) is not None)
    lines = [f"{text.name}: {metrics['tokens']:,} targets, {context}"]
    lines.append(f"of its tokens, {text.unknown / len(text.tokens):.2%} ({text.unknown:,}) are <unk>")
    lines.append(f"perplexity {metrics['perplexity']:.2f}")
    if "pointer" in metrics:
        lines.append(f"with the pointer {metrics['pointer']}: perplexity {metrics['pointer_perplexity']:.2f}")
    if "words" in metrics:
        lines.append(f"per word, of {metrics['words']:,} words: perplexity {metrics['word_perplexity']:.2f}")
    lines.append(f"{metrics['tokens_per_second']:,.0f} tokens per second")
    return "\n".join(lines)


if __name__ == "__main__":
    from lm.cli import evaluate as command

    command()
