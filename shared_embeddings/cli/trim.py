"""The command `trim`: a trained model without the words that some texts do not use."""

from __future__ import annotations

import argparse

from shared_embeddings.cli.arguments import add
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
    command.add_argument("--output", required=True, type=PathOption.NEW, help="the model to write, as it was")
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


def _trim(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.checkpoints.trim import Keep, Texts, read_words, trim

    words = [word for path in known.keep for word in read_words(path)]
    return trim(
        known.model,
        Texts(known.text, known.source_text, known.target_text),
        known.output,
        Keep(known.min_count, words, known.keep_first),
    ).described()
