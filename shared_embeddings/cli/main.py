"""Compress, trim, export and analyze the word embeddings of trained models."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shared_embeddings.cli import catalog, compress, export, trim, words
from shared_embeddings.utils.command_line import Parser, error_line, explain, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status; see `shared_embeddings.utils.command_line.run`."""
    return run("shared-embeddings", _main, arguments, explain=_explain)


def _main(arguments: Sequence[str]) -> None:
    """Run one command and print its result."""
    known, rest = _parser().parse_known_args(arguments)
    if not known.takes_options:
        _reject(rest)
    print(known.run(known, rest), flush=True)


def _explain(error: BaseException) -> str | None:
    """The one-line message of an error; the library raises ValueError for invalid values."""
    return error_line(error) if isinstance(error, ValueError) else explain(error)


def _parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(prog="shared-embeddings", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (catalog, compress, export, trim, words):
        module.register(commands)
    return parser


def _reject(rest: list[str]) -> None:
    """Raise ValueError for arguments that the command does not take."""
    if rest:
        raise ValueError(f"'{rest[0]}' is not an argument of this command; remove it")


if __name__ == "__main__":
    sys.exit(main())
