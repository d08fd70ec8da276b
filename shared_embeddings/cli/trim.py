"""The command `trim`: a trained model without the words that some texts do not use."""

from __future__ import annotations

import argparse

from shared_embeddings.cli.arguments import add, percentage
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.path_options import PathOption


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    command = add(commands, "trim", "leave out the words that some texts do not use", _trim)
    command.add_argument(
        "--model", required=True, type=PathOption.SOURCE, help="a trained model, file or folder"
    )
    text = "texts whose words stay, as the model reads them (tokenized where it is trained so)"
    command.add_argument("--text", nargs="+", default=[], type=PathOption.FILE, metavar="FILE", help=text)
    for side in ("source", "target"):
        command.add_argument(
            f"--{side}-text",
            nargs="+",
            default=[],
            type=PathOption.FILE,
            metavar="FILE",
            help=f"the same for the {side} of a translation model",
        )
    command.add_argument(
        "--held-out",
        nargs="+",
        default=[],
        type=PathOption.FILE,
        metavar="FILE",
        help="other texts, which select no words: reports how many of their lines round-trip",
    )
    command.add_argument("--output", type=PathOption.NEW, help="the model to write, in the format of --model")
    command.add_argument(
        "--dry-run", action="store_true", help="report what would be kept and how large it is, write nothing"
    )
    command.add_argument(
        "--keep",
        nargs="+",
        default=[],
        type=PathOption.FILE,
        metavar="FILE",
        help="words that stay, one a line",
    )
    command.add_argument("--keep-first", type=int, default=0, metavar="N", help="the first N words stay, too")
    command.add_argument(
        "--min-count",
        type=int,
        default=1,
        metavar="N",
        help="words that the texts use less often go (default: 1)",
    )
    command.add_argument(
        "--top-k",
        type=int,
        metavar="N",
        help="of the words that the texts use, keep the N most frequent ones",
    )
    command.add_argument(
        "--coverage",
        type=percentage,
        help="keep the most frequent words that make up this share of the texts, such as 99.9%%",
    )
    command.add_argument(
        "--drop-characters",
        action="store_true",
        help="drop single characters that the texts do not use; without them, other texts become unknown",
    )


def _trim(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.checkpoints.selection import Keep, Texts, read_words
    from shared_embeddings.checkpoints.trim import trim

    if known.dry_run == bool(known.output):
        raise ValueError("give --output for a trimmed model, or --dry-run for a report only")
    words = [word for path in known.keep for word in read_words(path)]
    keep = Keep(
        min_count=known.min_count,
        words=words,
        first=known.keep_first,
        top=known.top_k,
        coverage=known.coverage,
        characters=not known.drop_characters,
    )
    texts = Texts(known.text, known.source_text, known.target_text, known.held_out)
    return trim(known.model, texts, known.output, keep).described()
