"""What signals do to a command while its libraries are imported, before `command_line.run`.

That takes seconds. Importing this module is enough.
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
# How the scripts of this project are called, and the packages that have modules to be run with ``python -m``.
SCRIPTS = ("lm_", "onmt_", "shared-embeddings")
PACKAGES = ("benchmarks", "lm", "nmt", "recipes", "shared_embeddings")
# Options of Python with a value that follows.
_WITH_VALUE = ("-X", "-W")


def report_signals() -> None:
    """Let SIGINT and SIGTERM end a command of this project with one line and status 130 or 143.

    Nothing changes in programs that only import the library.
    """
    if command_of(sys.orig_argv) is None or threading.current_thread() is not threading.main_thread():
        return
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)
    atexit.register(_ignore)


def command_of(line: Sequence[str]) -> str | None:
    """The command of this project that a command line of Python runs; None for any other program."""
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


def _ignore() -> None:
    """Let signals do nothing any more once all is done, while the interpreter is taken down."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _leave(number: int, frame: FrameType | None) -> None:
    """End the process at once: an import under way would turn an exception into a traceback."""
    word = "interrupted" if number == signal.SIGINT else "terminated"
    os.write(2, f"{command_of(sys.orig_argv)}: {word} before it began; nothing was changed\n".encode())
    os._exit(128 + number)


report_signals()
