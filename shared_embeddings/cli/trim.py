"""The command `trim`: removes the words that given texts do not use from a trained model."""

from __future__ import annotations

import argparse

from shared_embeddings.cli.arguments import add, add_flags, add_model, percentage
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.path_options import PathOption

# Options that take files.
_FILES = {
    "text": "texts whose words to keep, preprocessed like the training data",
    "source-text": "the same for the source of a translation model",
    "target-text": "the same for the target of a translation model",
    "held-out": "held-out texts: report how many of their lines round-trip",
    "keep": "more words to keep, one per line",
}


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    command = add(commands, "trim", "remove the words that given texts do not use", _trim)
    add_model(command)
    argument = command.add_argument
    for name, description in _FILES.items():
        argument(f"--{name}", nargs="+", default=[], type=PathOption.FILE, metavar="FILE", help=description)
    argument("--output", type=PathOption.NEW, help="output path, in the format of --model")
    argument(
        "--dry-run", action="store_true", help="only report the words to keep and the size; writes no model"
    )
    argument("--keep-first", type=int, default=0, metavar="N", help="also keep the first N words")
    argument(
        "--min-count",
        type=int,
        default=1,
        metavar="N",
        help="remove words that are less frequent in the texts (default: 1)",
    )
    argument("--top-k", type=int, metavar="N", help="keep the N most frequent words of the texts")
    argument(
        "--coverage",
        type=percentage,
        help="keep the most frequent words that cover this fraction of the texts, such as 99.9%%",
    )
    argument(
        "--drop-characters",
        action="store_true",
        help="also remove unused single characters; other texts may then contain unknown words",
    )
    add_flags(command, "force")


def _trim(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.compress.trim import Keep, Texts, read_words, trim

    if known.dry_run == bool(known.output):
        raise UserError("give either --output or --dry-run")
    if known.dry_run and known.force:
        raise UserError("--force has no effect with --dry-run; remove one of them")
    keep = Keep(
        min_count=known.min_count,
        words=[word for path in known.keep for word in read_words(path)],
        first=known.keep_first,
        top=known.top_k,
        coverage=known.coverage,
        characters=not known.drop_characters,
    )
    texts = Texts(known.text, known.source_text, known.target_text, known.held_out)
    return trim(known.model, texts, known.output, keep, known.force).described()
