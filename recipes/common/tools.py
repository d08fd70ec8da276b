"""Running the project's commands from a recipe."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.common.errors import UserError


def run_tool(name: str, arguments: Sequence[str | Path], keep_open: Sequence[int] = ()) -> None:
    """Run the command `name` of the environment that this Python belongs to; its output goes where ours goes.

    Args:
        name: for instance ``onmt_train``.
        arguments: its arguments.
        keep_open: file descriptors that it inherits.

    Raises:
        UserError: the command is not installed, or it failed.
        SystemExit: with status 2 when the command has found a mistake of the user's and said so itself.
    """
    command = Path(sys.executable).with_name(name)
    if not command.exists():
        raise UserError(f"{command}: not installed; run 'make setup'")
    _run(name, [command, *arguments], keep_open)


def run_module(name: str, arguments: Sequence[str | Path], keep_open: Sequence[int] = ()) -> None:
    """As `run_tool`, for a module of this project that is a program, such as ``lm.train.command``."""
    _run(name, [sys.executable, "-m", name, *arguments], keep_open)


def with_overrides(own: Sequence[str | Path], given: Sequence[str]) -> list[str]:
    """The options of a command: ours, but for those that the user gives another value; it takes each once.

    Args:
        own: options with their values.
        given: those of the user, likewise.
    """
    names = {_option_name(text) for text in given}
    kept, is_kept = [], True
    for text in map(str, own):
        if name := _option_name(text):
            is_kept = name not in names
        if is_kept:
            kept.append(text)
    return [*kept, *given]


def _option_name(text: str) -> str:
    """The name of the option that an argument is; nothing for a value."""
    found = re.match(r"--?([a-zA-Z]\w*)", text)
    return found[1] if found else ""


def _run(name: str, command: Sequence[str | Path], keep_open: Sequence[int]) -> None:
    """Run a command to its end; when interrupted, to where it has saved what it has."""
    with subprocess.Popen(command, pass_fds=keep_open) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:
            # It may have had the same Ctrl-C, of which the first SIGTERM is told apart.
            process.terminate()
            process.wait()
            raise
    if status == 2:
        raise SystemExit(2)
    if status:
        raise UserError(f"{name} ended with status {status}; see what it printed above")
