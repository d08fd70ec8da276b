"""Mistakes of the person at the keyboard, told in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from shared_embeddings.command_line import UNREAD, USER_ERROR, complaint, drop_output
from shared_embeddings.download import DownloadError
from shared_embeddings.options import OptionError


class UserError(Exception):
    """Something that the user can put right; its text is one line that says what and how."""


def run_main(
    program: str, main: Callable[[Sequence[str]], None], arguments: Sequence[str] | None = None
) -> int:
    """Run `main` on the command line and return the exit status.

    A `UserError`, a `DownloadError`, impossible options of an embedding and what the operating system refuses
    become one line on stderr and status 2; an interruption becomes one line and status 130. When
    nobody reads the output the status is 141.

    Args:
        program: what the line starts with.
        main: takes the arguments.
        arguments: ``sys.argv[1:]`` if not given.
    """
    try:
        main(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()
        return UNREAD
    except (UserError, DownloadError, OptionError, OSError) as error:
        print(f"{program}: {complaint(error)}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(f"{program}: interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    return 0
