"""The command `shared-embeddings`: methods, what embeddings hold, classes of words, smaller models."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shared_embeddings.command_line import UNREAD, USER_ERROR, Parser, complaint, drop_output
from shared_embeddings.commands import catalogue, classes, compress, correlation, similarity, trim


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status.

    0 when it worked, 2 with one line on stderr for a mistake of the user, 130 when interrupted, 141 when
    nobody reads the output.
    """
    parser = _parser()
    known, rest = parser.parse_known_args(arguments)
    try:
        if not known.takes_options:
            _refuse(rest)
        print(known.run(known, rest), flush=True)
    except BrokenPipeError:
        drop_output()
        return UNREAD
    except (ValueError, ImportError, OSError, MemoryError) as error:
        print(f"{parser.prog}: {complaint(error)}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted; nothing was left half-written", file=sys.stderr)
        return 130
    return 0


def _parser() -> Parser:
    """The arguments of all commands; options of methods are read from what is left."""
    parser = Parser(prog="shared-embeddings", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (catalogue, classes, compress, correlation, similarity, trim):
        module.register(commands)
    return parser


def _refuse(rest: list[str]) -> None:
    """Raise ValueError for arguments that the command does not take."""
    if rest:
        raise ValueError(f"'{rest[0]}' is not an argument of this command; leave it out")


if __name__ == "__main__":
    sys.exit(main())
