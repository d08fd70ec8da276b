"""The command `compress`: smaller embeddings for a trained model."""

from __future__ import annotations

import argparse
from pathlib import Path

from shared_embeddings.checkpoints.quality import SUBWORDS, Validation
from shared_embeddings.checkpoints.storage import STORES
from shared_embeddings.cli.arguments import OPTIONS_FOLLOW, add, read_options
from shared_embeddings.options import require_seed
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.path_options import PathOption


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    command = add(
        commands, "compress", "replace the embeddings of a trained model", _compress, takes_options=True
    )
    command.epilog = OPTIONS_FOLLOW
    command.add_argument("--model", required=True, type=PathOption.SOURCE, help="a trained model of any host")
    command.add_argument("--method", required=True, help="a method, see 'shared-embeddings methods'")
    command.add_argument(
        "--output", required=True, action="append", type=PathOption.NEW, help="the model to write, as it was"
    )
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
    command.add_argument("--store", choices=STORES, help="of the numbers (default: that of the method)")
    command.add_argument("--fit-steps", type=int, help="steps of methods fitted by gradient descent")
    command.add_argument("--seed", type=int, default=0, help="(default: 0)")
    command.add_argument(
        "--report", type=PathOption.NEW_FILE, help="write the report into this JSON file, too"
    )
    command.add_argument("--force", action="store_true", help="replace files that are there already")


def _compress(known: argparse.Namespace, rest: list[str]) -> str:
    from shared_embeddings.checkpoints.compress import Target, compress
    from shared_embeddings.checkpoints.token_counts import read_counts

    if known.token_counts is not None and known.text is not None:
        raise ValueError("--token-counts and --text both say how often words occur; leave one of them out")
    if len(known.output) > 1:
        raise ValueError("--output is given twice; a method's option 'output' is --embedding-output here")
    require_seed(known.seed)
    options = read_options(rest)
    if known.embedding_output is not None:
        options["output"] = known.embedding_output
    counts = read_counts(known.token_counts) if known.token_counts is not None else None
    has_target = known.target_ratio is not None or known.target_bytes is not None
    return compress(
        known.model,
        known.method,
        Path(known.output[0]),
        options=options,
        target=Target(known.target_ratio, known.target_bytes) if has_target else None,
        store=known.store,
        counts=counts,
        texts=known.text,
        validation=_validation(known),
        seed=known.seed,
        steps=known.fit_steps,
        force=known.force,
        report_file=known.report,
    ).described()


def _validation(known: argparse.Namespace) -> Validation | None:
    """What the quality is measured on, or None where nothing was said about it."""
    sides = (known.validation_source, known.validation_target)
    if known.validation is None and sides == (None, None) and known.validation_subwords == "none":
        return None
    return Validation(known.validation, *sides, known.validation_subwords)
