"""Compress, trim, export and analyze the word embeddings of trained models."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shared_embeddings.cli import catalog, models, words
from shared_embeddings.utils.command_line import Parser, run
from shared_embeddings.utils.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status; see `shared_embeddings.utils.command_line.run`."""
    return run("shared-embeddings", _print_result, arguments)


def _print_result(arguments: Sequence[str]) -> None:
    parser = Parser(prog="shared-embeddings", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (catalog, models, words):
        module.register(commands)
    known, rest = parser.parse_known_args(arguments)
    if rest and not known.takes_options:
        raise UserError(f"'{rest[0]}' is not an argument of this command; remove it")
    print(known.run(known, rest), flush=True)


if __name__ == "__main__":
    sys.exit(main())
