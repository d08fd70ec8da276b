"""Mistakes of the person at the keyboard, told in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from shared_embeddings.download import DownloadError


class UserError(Exception):
    """Something that the user can put right; its text is one line that says what and how."""


def run_main(
    program: str, main: Callable[[Sequence[str]], None], arguments: Sequence[str] | None = None
) -> int:
    """Run `main` on the command line and return the exit status.

    A `UserError`, a `DownloadError`, or a file that cannot be read or written becomes one line on stderr and
    status 2; an interruption becomes one line and status 130.

    Args:
        program: what the line starts with.
        main: takes the arguments.
        arguments: ``sys.argv[1:]`` if not given.
    """
    try:
        main(sys.argv[1:] if arguments is None else arguments)
    except (UserError, DownloadError) as error:
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"{program}: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    return 0
