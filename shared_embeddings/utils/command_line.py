"""Argument parsing, error messages, signals and exit statuses shared by all commands.

Ctrl-C and SIGTERM end commands with one line, after ``finally`` clauses; training loops after a step.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import metadata
from types import FrameType
from typing import Any, NoReturn

from shared_embeddings.utils import paths
from shared_embeddings.utils.errors import UserError, first_line, missing_module

USER_ERROR = 2
TRACEBACK_VARIABLE = "SHARED_EMBEDDINGS_TRACEBACK"
# torch's messages for failed allocations.
NO_MEMORY = re.compile("can't allocate memory|out of memory|size calculation overflowed")

RESUME = "run the same command again to resume"

Main = Callable[[Sequence[str]], "int | None"]
Explain = Callable[[BaseException], "str | None"]


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM."""


def error_line(error: BaseException) -> str:
    """Return the message of an error on one line; for an `OSError`, with the file and what to check."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        place = "" if error.filename is None else f"{error.filename}: "
        text = f"{place}{error.strerror}; check the path, its permissions and the free disk space"
    return " ".join(text.split()) or type(error).__name__


def explain(error: BaseException) -> str | None:
    """Return the one-line message for an error that the user can fix; None for a bug."""
    if isinstance(error, (UserError, OSError)):
        return error_line(error)
    if isinstance(error, ImportError):
        advice = missing_module(error.name or "")
        return advice or f"{error_line(error)}; install the package or drop the option that requires it"
    if isinstance(error, RecursionError):
        return "the input is nested too deeply; reduce its depth"
    # On CPUs, torch raises a plain RuntimeError.
    if isinstance(error, MemoryError) or NO_MEMORY.search(str(error)):
        return f"not enough memory ({first_line(error)}); make batches, segments or the model smaller"
    return None


def run(
    program: str,
    main: Main | str,
    arguments: Sequence[str] | None = None,
    explain: Explain = explain,
    advice: str = "no partial files were left",
) -> int:
    """Run a command and return its exit status; ``--version`` alone prints the version.

    User errors print one line to stderr and exit with 2 (``SHARED_EMBEDDINGS_TRACEBACK=1`` shows the
    traceback). Ctrl-C and SIGTERM print one line and exit with 130 and 143. A closed output pipe exits with
    141.

    Args:
        program: prefix of the printed lines.
        main: takes the arguments; returns an exit status or None for 0. As ``module:function``, it is
            imported here, so that a missing package is reported like any other error.
        arguments: ``sys.argv[1:]`` if not given.
        explain: returns the line for an error, or None to show its traceback.
        advice: the end of the line printed on interruption, if the exception has none.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) == ["--version"]:
        print(f"{program} {metadata.version('shared-embeddings')}")
        return 0
    is_main_thread = threading.current_thread() is threading.main_thread()
    process = os.getpid()

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        if os.getpid() != process:  # a worker, which multiprocessing ends so
            os._exit(128 + number)
        raise Terminated

    previous = signal.signal(signal.SIGTERM, terminate) if is_main_thread else None
    atexit.register(gc.freeze)  # no last collection: the process ends in a third of the time
    try:
        if isinstance(main, str):
            module, _, function = main.partition(":")
            main = getattr(importlib.import_module(module), function)
        status = main(arguments)  # type: ignore[operator]
        sys.stdout.flush()
        return status or 0
    except BrokenPipeError:
        # Python must not fail to flush the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt as error:
        is_terminated = isinstance(error, Terminated)
        word = "terminated" if is_terminated else "interrupted"
        print(f"{program}: {word}; {str(error) or advice}", file=sys.stderr)
        return 128 + (signal.SIGTERM if is_terminated else signal.SIGINT)
    except Exception as error:
        message = explain(error)
        if message is None or os.environ.get(TRACEBACK_VARIABLE):
            raise
        print(f"{program}: {message}", file=sys.stderr)
        return USER_ERROR
    finally:
        if is_main_thread:
            signal.signal(signal.SIGTERM, previous)


class StopFlag:
    """Record Ctrl-C and SIGTERM while this context is open, so that a loop can end between two steps.

    A second signal of the same kind takes effect at once. Threads other than the main one get no signals::

        with StopFlag() as stop:
            while not stop.requested:
                step()
        save()
        stop.raise_requested()

    Attributes:
        requested: the number of the first signal; 0 if there was none.
    """

    def __init__(self) -> None:
        self.requested = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopFlag:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.requested = self.requested or number
        signal.signal(number, self._previous[number])

    def raise_requested(self, advice: str = "") -> None:
        """Raise `KeyboardInterrupt` or `Terminated`, with an advice to the user, if a signal was recorded."""
        if self.requested:
            raise (Terminated if self.requested == signal.SIGTERM else KeyboardInterrupt)(advice)


class Parser(argparse.ArgumentParser):
    """A parser with one-line errors, for options by their full names.

    Options that name files have a type of `paths`. With the option ``--force``, or one of the type
    `shared_table`, outputs may exist.
    """

    def __init__(self, prog: str, example: str | None = None, **settings: Any) -> None:
        closing = {} if example is None else {"epilog": f"example: {prog} {example}"}
        super().__init__(prog, **{"allow_abbrev": False, **closing, **settings})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        known, rest = super().parse_known_args(args, namespace)
        by_type: dict[Any, list[Any]] = {}
        for action in self._actions:
            value = getattr(known, action.dest, None)
            if value is not None and value is not action.default:
                by_type.setdefault(action.type, []).extend(value if isinstance(value, list) else [value])
        read = (paths.existing_file, paths.existing_path, paths.model_path)
        inputs = [path for kind in read for path in by_type.get(kind, [])]
        new, replaced = by_type.get(paths.new_path, []), by_type.get(paths.output_path, [])
        try:
            may_exist = getattr(known, "force", False) or paths.shared_table in by_type
            paths.check_outputs(new, inputs, may_exist)
            paths.check_outputs(replaced, [*inputs, *new], force=True)
        except UserError as error:
            self.error(str(error))
        return known, rest

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help", file=sys.stderr)
        sys.exit(USER_ERROR)


def positive(text: str) -> int:
    """Parse a positive integer, for argparse."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def align(rows: Sequence[Sequence[str]], texts: int = 1) -> list[str]:
    """Return rows as lines of columns: the first `texts` cells to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
            cell.ljust(width) if at < texts else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
