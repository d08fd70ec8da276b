"""What command lines of every program here have in common."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from typing import Any, NoReturn

from shared_embeddings.files import refusal

USER_ERROR = 2
# A number that PyYAML takes for text, because it has no point.
EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
UNREAD = 128 + signal.SIGPIPE  # what a shell says of a program whose reader has gone


def complaint(error: BaseException) -> str:
    """What an error says, in one line; where the operating system refused something, with the file."""
    text = refusal(error) if isinstance(error, OSError) else str(error)
    return " ".join(text.split()) or type(error).__name__


def drop_output() -> None:
    """Let what is left to be printed go nowhere, once its reader has gone, or Python complains at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, and that takes options by their full names only.

    Args:
        prog: the program's name, which a complaint begins with.
        settings: those of `argparse.ArgumentParser`.
    """

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, **{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        """Print the message and leave with the exit status for mistakes of the user."""
        print(f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help", file=sys.stderr)
        sys.exit(USER_ERROR)


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
