"""The command `compress`: smaller embeddings for a trained model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared_embeddings.checkpoints.quality import SUBWORDS, Validation
from shared_embeddings.checkpoints.storage import STORES
from shared_embeddings.cli.arguments import OPTIONS_FOLLOW, add, percentage, read_options
from shared_embeddings.options import require_seed
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.path_options import PathOption

if TYPE_CHECKING:
    from shared_embeddings.checkpoints.choosing import Choice
    from shared_embeddings.checkpoints.report import CompressionReport
    from shared_embeddings.sizing.targets import Target


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    command = add(
        commands, "compress", "replace the embeddings of a trained model", _compress, takes_options=True
    )
    command.epilog = OPTIONS_FOLLOW
    command.add_argument("--model", required=True, type=PathOption.SOURCE, help="a trained model of any host")
    command.add_argument(
        "--method",
        help="see 'shared-embeddings methods'; by default, candidates are tried and the best is kept",
    )
    command.add_argument(
        "--output", action="append", type=PathOption.NEW, help="the model to write, in the format of --model"
    )
    command.add_argument(
        "--trim-to",
        nargs="+",
        type=PathOption.FILE,
        metavar="TEXT",
        help="first trim the vocabulary to these texts, as the command trim does; ratios count from there",
    )
    command.add_argument("--compare", action="store_true", help="compare the candidates, and write no model")
    command.add_argument("--embedding-output", help="the option 'output' of a method, such as table")
    command.add_argument(
        "--token-counts", type=PathOption.FILE, help="a word, a tab and its count on every line"
    )
    command.add_argument(
        "--text",
        nargs="+",
        type=PathOption.FILE,
        help="tokenized text: words are counted in it instead, and predictions compared",
    )
    command.add_argument(
        "--validation", type=PathOption.SOURCE, help="a text: shows the perplexity of a language model"
    )
    command.add_argument(
        "--validation-source",
        type=PathOption.FILE,
        help="a text in the model's tokens: shows the BLEU of a translation model",
    )
    command.add_argument("--validation-target", type=PathOption.FILE, help="what its translation should read")
    command.add_argument(
        "--validation-subwords",
        choices=SUBWORDS,
        default="none",
        help="pieces of words to join in translations; none: BLEU compares the model's tokens (default)",
    )
    command.add_argument("--target-ratio", type=float, help="times fewer bytes for the embeddings")
    command.add_argument("--target-bytes", type=int, help="bytes for the embeddings")
    command.add_argument(
        "--max-loss", type=percentage, help="the smallest size that loses no more than this, such as 1%%"
    )
    command.add_argument(
        "--store", choices=STORES, help="of the numbers; int4 costs quality (default: that of the method)"
    )
    command.add_argument("--fit-steps", type=int, help="steps of methods fitted by gradient descent")
    command.add_argument("--seed", type=int, default=0, help="(default: 0)")
    command.add_argument(
        "--report", type=PathOption.NEW_FILE, help="write the report into this JSON file, too"
    )
    command.add_argument("--force", action="store_true", help="replace files that are there already")


def _compress(known: argparse.Namespace, rest: list[str]) -> str:
    from shared_embeddings.checkpoints.token_counts import read_counts

    if known.token_counts is not None and known.text is not None:
        raise ValueError("--token-counts and --text both say how often words occur; leave one of them out")
    if len(known.output or ()) > 1:
        raise ValueError("--output is given twice; a method's option 'output' is --embedding-output here")
    if known.compare == bool(known.output):
        raise ValueError("give --output for a model, or --compare to compare the candidates only")
    for name in ("force", "report"):
        if known.compare and getattr(known, name):
            raise ValueError(f"--compare writes no files, so that --{name} has no effect; remove one of them")
    require_seed(known.seed)
    settings = {
        "counts": read_counts(known.token_counts) if known.token_counts is not None else None,
        "texts": known.text,
        "validation": _validation(known),
        "seed": known.seed,
    }
    writing = {"force": known.force, "report_file": known.report}
    output = None if known.compare else Path(known.output[0])
    run = _choose if known.method is None else _compress_with
    if known.trim_to is None:
        return run(known, rest, known.model, output, {**settings, **writing}).described()
    from shared_embeddings.checkpoints.trim_and_compress import trim_and_compress

    return trim_and_compress(
        known.model,
        output,
        known.trim_to,
        lambda model, place, trimmed: run(known, rest, model, place, {**settings, "trimmed": trimmed}),
        validation=settings["validation"],
        **writing,
    ).described()


def _compress_with(
    known: argparse.Namespace, rest: list[str], model: Path, output: Path | None, settings: dict[str, Any]
) -> CompressionReport:
    """Compress with the method that was named."""
    from shared_embeddings.checkpoints.compress import compress

    for name in ("compare", "max_loss"):
        if getattr(known, name):
            raise ValueError(f"--{name.replace('_', '-')} tries candidates; remove --method")
    assert output is not None
    options = read_options(rest)
    if known.embedding_output is not None:
        options["output"] = known.embedding_output
    return compress(
        model,
        known.method,
        output,
        options=options,
        target=_target(known.target_ratio, known.target_bytes),
        store=known.store,
        steps=known.fit_steps,
        **settings,
    )


def _choose(
    known: argparse.Namespace, rest: list[str], model: Path, output: Path | None, settings: dict[str, Any]
) -> Choice:
    """Compress with the best of the candidates."""
    from shared_embeddings.checkpoints.choosing import choose, smallest

    for name in ("store", "fit_steps", "embedding_output"):
        if getattr(known, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is for one method; name it with --method")
    options = read_options(rest)
    bits = options.pop("bits", None)
    if options:
        raise ValueError(f"--{next(iter(options))} is an option of a method; name the method with --method")
    ratio = None if bits is None else _ratio_of(bits)
    sizes = [known.target_ratio, known.target_bytes, ratio, known.max_loss]
    if sum(size is not None for size in sizes) != 1:
        raise ValueError(
            "without --method, give one of --target-ratio, --target-bytes, --bits and --max-loss; "
            "or name a --method"
        )
    target = _target(known.target_ratio if ratio is None else ratio, known.target_bytes)
    measuring = {name: value for name, value in settings.items() if name not in ("force", "report_file")}
    target = target or smallest(model, known.max_loss, **measuring)
    return choose(model, output, target, **settings)


def _ratio_of(bits: object) -> float:
    """How many times smaller than 32 bits a number of bits is."""
    if isinstance(bits, bool) or not isinstance(bits, int | float) or not 0 < bits < 32:
        raise ValueError(f"--bits is {bits}, but it must be a number above 0 and below 32")
    return 32 / bits


def _target(ratio: float | None, total_bytes: int | None) -> Target | None:
    """The target size, if there is one."""
    from shared_embeddings.sizing.targets import Target

    return None if ratio is None and total_bytes is None else Target(ratio, total_bytes)


def _validation(known: argparse.Namespace) -> Validation | None:
    """What the quality is measured on, or None where nothing was said about it."""
    sides = (known.validation_source, known.validation_target)
    if known.validation is None and sides == (None, None) and known.validation_subwords == "none":
        return None
    return Validation(known.validation, *sides, known.validation_subwords)
