"""The command ``lm_evaluate``: computes the perplexity of a trained model on a text."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Sequence

import torch

from lm.checkpoint import load_model
from lm.cli import chosen_device
from lm.data.corpus import SPLITS
from lm.data.vocabulary import word_blocks
from lm.evaluate.evaluation import (
    PointerOptions,
    Reading,
    evaluate,
    evaluate_with_pointer,
    perplexity,
    read_data,
    segments,
)
from lm.models import LanguageModel, count_model
from shared_embeddings.utils.command_line import Parser, positive
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import write_text
from shared_embeddings.utils.paths import existing_file, existing_path, new_path
from shared_embeddings.utils.reading import parse_yaml
from shared_embeddings.utils.results import describe_device, encoded, provenance

# Model options that evaluation may change.
MEMORY_OPTIONS = ("memory_length", "clamp_length", "same_length")


def main(arguments: Sequence[str]) -> None:
    """Compute the perplexity of a trained model on all tokens of a text but the first."""
    options = _parser().parse_args(list(arguments))
    reading = Reading(options.target_length, options.context_length, options.chunk_length, options.batch_size)
    for name in ("context_length", "memory_length"):
        if (getattr(options, name) or 0) < 0:
            raise UserError(f"{name} is {getattr(options, name)}, but it must be at least 0; raise it")
    if reading.context_length and reading.chunk_length is None:
        raise UserError(
            f"context_length is {reading.context_length}, which has no effect on a single "
            "chunk; set chunk_length"
        )
    pointer = None
    if options.pointer is not None:
        pointer = PointerOptions.parse(parse_yaml(options.pointer, "-pointer"))
    words = options.words
    if options.reference is not None:
        if words is not None:
            raise UserError("words and reference both set the number of words; remove one of them")
        words = sum(map(len, word_blocks(options.reference)))
        if words < 1:
            raise UserError(f"{options.reference} has no words; use another text")
    device = chosen_device(options.device)
    trained = load_model(options.model, device)
    text = read_data(options.data, options.split, trained.words)
    memory = set_memory(trained.model, {name: getattr(options, name) for name in MEMORY_OPTIONS})

    begin = time.monotonic()
    progress = sys.stderr.isatty()
    pointed = {}
    if pointer is None:
        plain, mixed = evaluate(trained.model, text.tokens, reading, progress), None
    else:
        plain, mixed = evaluate_with_pointer(trained.model, text.tokens, pointer, reading, progress)
        pointed = {"window": pointer.window, "theta": pointer.theta, "lambda": pointer.weight}
    seconds = max(time.monotonic() - begin, 1e-9)
    if not math.isfinite(plain.perplexity):
        raise UserError(
            f"the loss is {plain.nats / plain.tokens} nats per token: training diverged; use another model"
        )

    metrics = {"perplexity": plain.perplexity, "nats": plain.nats, "tokens": plain.tokens}
    context = ", ".join(
        f"{name} {value}"
        for name, value in {**reading._asdict(), **memory}.items()
        if value is not None and name != "batch_size"
    )
    lines = [
        f"{text.name}: {plain.tokens:,} targets, {context}",
        f"<unk>: {text.unknown:,} tokens ({text.unknown / len(text.tokens):.2%})",
        f"perplexity {plain.perplexity:.2f}",
    ]
    if mixed is not None:
        metrics["pointer_perplexity"] = mixed.perplexity
        lines.append(f"with the pointer {pointed}: perplexity {mixed.perplexity:.2f}")
    if words is not None:
        metrics |= {"words": words, "word_perplexity": perplexity((mixed or plain).nats / words)}
        lines.append(f"per word ({words:,} words): perplexity {metrics['word_perplexity']:.2f}")
    speed = plain.tokens / seconds
    batch_ms = 1000 * seconds / sum(1 for _ in segments(len(text.tokens), reading))
    lines.append(f"{speed:,.0f} tokens per second, {batch_ms:.1f} ms per batch")
    print("\n".join(lines))
    if options.output is None:
        return
    metrics |= {"tokens_per_second": speed, "inference_ms": batch_ms}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
    record = {
        "model": str(options.model),
        "data": str(options.data),
        "split": text.split,
        "metrics": {
            **metrics,
            **({"pointer": pointed} if pointed else {}),
            "unknown": text.unknown,
            **reading._asdict(),
            **memory,
        },
        "counts": count_model(trained.model),
        "data_checksum": text.checksum,
        "peak_memory_mib": round(peak, 1),
        **provenance(),
        "device": describe_device(device.type),
        "config": trained.config,
    }
    write_text(options.output, encoded(options.output, record, indent=2) + "\n")


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
    add(
        "-words",
        type=positive,
        metavar="N",
        help="also report the perplexity per word of a text with N words",
    )
    reference = "the same with the number of words and line ends of this text"
    add("-reference", type=existing_file, metavar="FILE", help=reference)
    add("-output", type=new_path, metavar="FILE", help="write the results to this JSON file")
    add("-force", "--force", action="store_true", help="overwrite -output")
    add("-device", choices=("auto", "cpu", "cuda"), default="auto", help="device (default: auto)")
    return parser


def set_memory(model: LanguageModel, wanted: dict[str, int | None]) -> dict[str, int]:
    """Change the memory settings of a model where requested; returns the settings in effect.

    Raises:
        UserError: the model has no such setting.
    """
    for name, value in wanted.items():
        if value is None:
            continue
        if not hasattr(model, name):
            raise UserError(f"{name} is {value}, but {type(model).__name__} has no {name}; remove it")
        setattr(model, name, value)
    return {name: getattr(model, name) for name in wanted if hasattr(model, name)}


if __name__ == "__main__":
    from lm.cli import evaluate as command

    sys.exit(command())
