"""The command `compress`: replaces the embeddings of a trained model with smaller ones."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shared_embeddings.cli.arguments import add, add_flags, add_model, percentage, read_options
from shared_embeddings.compress.measure import SUBWORDS, Validation
from shared_embeddings.quant.storage import STORES
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import require_seed
from shared_embeddings.utils.path_options import PathOption

if TYPE_CHECKING:
    from shared_embeddings.compress.report import CompressionReport
    from shared_embeddings.compress.session import Choice, Settings


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    title = "replace the embeddings of a trained model"
    command = add(commands, "compress", title, _compress, takes_options=True)
    add_model(command)
    argument = command.add_argument
    argument("--method", help="see 'shared-embeddings methods' (default: try several and keep the best)")
    argument("--output", action="append", type=PathOption.NEW, help="output path, in the format of --model")
    argument(
        "--trim-to",
        nargs="+",
        type=PathOption.FILE,
        metavar="TEXT",
        help="first trim the vocabulary to these texts, like trim; ratios are relative to the result",
    )
    argument("--compare", action="store_true", help="only compare the candidates; writes no model")
    argument("--embedding-output", help="the option 'output' of a method, such as table")
    argument("--token-counts", type=PathOption.FILE, help="file with a word, a tab and its count per line")
    argument(
        "--text",
        nargs="+",
        type=PathOption.FILE,
        help="tokenized text (all languages of the vocabulary), to count words and compare predictions",
    )
    argument("--validation", type=PathOption.SOURCE, help="text for the perplexity of a language model")
    argument(
        "--validation-source",
        type=PathOption.FILE,
        help="tokenized source text for the BLEU of a translation model",
    )
    argument("--validation-target", type=PathOption.FILE, help="its reference translation")
    argument(
        "--validation-subwords",
        choices=SUBWORDS,
        default="none",
        help="subwords to join before computing BLEU (default: none, BLEU of tokens)",
    )
    argument("--target-ratio", type=float, help="reduce the bytes of the embeddings by this factor")
    argument("--target-bytes", type=int, help="maximum bytes of the embeddings")
    argument(
        "--max-loss",
        type=percentage,
        help="choose the smallest size with at most this loss of quality, such as 1%%",
    )
    argument(
        "--store", choices=STORES, help="storage dtype; int4 loses quality (default: depends on the method)"
    )
    argument(
        "--no-check",
        action="store_true",
        help="with --method: do not run the model, which saves memory; the quality is not measured",
    )
    argument("--fit-steps", type=int, help="steps of gradient descent, for methods that use it")
    argument("--seed", type=int, default=0, help="(default: 0)")
    argument("--report", type=PathOption.NEW_FILE, help="also write the report to this JSON file")
    add_flags(command, "force")


def _compress(known: argparse.Namespace, rest: list[str]) -> str:
    from shared_embeddings.compress.session import Settings
    from shared_embeddings.words.token_counts import read_counts

    if known.token_counts is not None and known.text is not None:
        raise UserError("--token-counts and --text both provide word counts; remove one of them")
    if len(known.output or ()) > 1:
        raise UserError("--output is repeated; the option 'output' of a method is --embedding-output")
    if known.compare == bool(known.output):
        raise UserError("give either --output or --compare")
    for name in ("force", "report"):
        if known.compare and getattr(known, name):
            raise UserError(
                f"--{name} has no effect with --compare, which writes no files; remove one of them"
            )
    require_seed(known.seed)
    validation = None
    sides = (known.validation_source, known.validation_target)
    if known.validation is not None or sides != (None, None) or known.validation_subwords != "none":
        validation = Validation(known.validation, *sides, known.validation_subwords)
    settings = Settings(
        counts=read_counts(known.token_counts) if known.token_counts is not None else None,
        texts=known.text,
        validation=validation,
        seed=known.seed,
        force=known.force,
        report_file=known.report,
    )
    output = None if known.compare else Path(known.output[0])
    run = _choose if known.method is None else _compress_with
    if known.trim_to is None:
        return run(known, rest, known.model, output, settings).described()
    from shared_embeddings.compress.trim import trimmed_copy

    with trimmed_copy(known.model, output, known.trim_to, settings) as (small, inner):
        return run(known, rest, small, output, inner).described()


def _compress_with(
    known: argparse.Namespace, rest: list[str], model: Path, output: Path | None, settings: Settings
) -> CompressionReport:
    """Compress with the given method."""
    from shared_embeddings.compress.session import compress
    from shared_embeddings.compress.sizing import Target

    for name in ("compare", "max_loss"):
        if getattr(known, name):
            raise UserError(f"--{name.replace('_', '-')} compares methods; remove --method")
    if known.no_check and settings.validation is not None:
        raise UserError("--no-check does not run the model; remove the --validation options")
    assert output is not None
    options = read_options(rest)
    if known.embedding_output is not None:
        options["output"] = known.embedding_output
    has_target = known.target_ratio is not None or known.target_bytes is not None
    return compress(
        model,
        known.method,
        output,
        options=options,
        target=Target(known.target_ratio, known.target_bytes) if has_target else None,
        store=known.store,
        steps=known.fit_steps,
        check=not known.no_check,
        settings=settings,
    )


def _choose(
    known: argparse.Namespace, rest: list[str], model: Path, output: Path | None, settings: Settings
) -> Choice:
    """Compress with the best of the candidates."""
    from shared_embeddings.compress.session import choose
    from shared_embeddings.compress.sizing import Target

    for name in ("store", "fit_steps", "embedding_output"):
        if getattr(known, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} needs --method")
    if known.no_check:
        raise UserError("--no-check needs --method: methods are compared by running the model")
    options = read_options(rest)
    bits = options.pop("bits", None)
    if options:
        raise UserError(f"--{next(iter(options))} is an option of a method; also give --method")
    ratio = known.target_ratio
    sizes = [ratio, known.target_bytes, bits, known.max_loss]
    if sum(size is not None for size in sizes) != 1:
        raise UserError(
            "give exactly one of --target-ratio, --target-bytes, --bits and --max-loss, or a --method"
        )
    if bits is not None:
        if isinstance(bits, bool) or not isinstance(bits, int | float) or not 0 < bits < 32:
            raise UserError(f"--bits is {bits}, but it must be a number above 0 and below 32")
        ratio = 32 / bits
    target = Target(ratio, known.target_bytes) if known.max_loss is None else None
    return choose(model, output, target, known.max_loss, settings)
