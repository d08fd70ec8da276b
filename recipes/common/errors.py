"""Mistakes of the user, reported in one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared_embeddings.errors import UserError
from shared_embeddings.utils.command_line import run

__all__ = ["UserError", "run_main"]


def run_main(
    program: str, main: Callable[[Sequence[str]], None], arguments: Sequence[str] | None = None
) -> int:
    """Run `main` on the command line, return the exit status; see `shared_embeddings.utils.command_line.run`.

    Args:
        program: what the line starts with.
        main: takes the arguments.
        arguments: ``sys.argv[1:]`` if not given.
    """
    return run(program, main, arguments, advice="run the same command again to resume")
