"""Handle signals during the seconds in which a command imports its libraries, before `command_line.run`.

Importing this module installs the handlers.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Name prefixes of this project's scripts, and packages with modules for ``python -m``.
SCRIPTS = ("lm_", "onmt_", "shared-embeddings")
PACKAGES = ("benchmarks", "lm", "nmt", "recipes", "shared_embeddings")
# Options of Python that take a value.
_WITH_VALUE = ("-X", "-W")


def report_signals() -> None:
    """Make SIGINT and SIGTERM end a command of this project with one line and status 130 or 143.

    Does nothing in programs that only import the library.
    """
    if command_of(sys.orig_argv) is None or threading.current_thread() is not threading.main_thread():
        return
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)
    # While the interpreter shuts down, signals are ignored.
    atexit.register(lambda: [signal.signal(number, signal.SIG_IGN) for number in SIGNALS])


def command_of(line: Sequence[str]) -> str | None:
    """The command of this project that a Python command line runs; None for other programs."""
    words = iter(line[1:])
    for word in words:
        if word == "-m":
            module = next(words, "")
            return module if module.split(".")[0] in PACKAGES else None
        if word == "-c":
            return None
        if word in _WITH_VALUE:
            next(words, None)
        elif not word.startswith("-"):
            name = Path(word).name
            return name if name.startswith(SCRIPTS) else None
    return None


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit immediately: an exception during an import would print a traceback."""
    word = "interrupted" if number == signal.SIGINT else "terminated"
    os.write(2, f"{command_of(sys.orig_argv)}: {word} during startup; nothing was changed\n".encode())
    os._exit(128 + number)


report_signals()
