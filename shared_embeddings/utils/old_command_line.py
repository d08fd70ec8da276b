"""Argument parsing, error messages and exit statuses shared by all commands."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from shared_embeddings.utils import interrupts
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.extras import missing_module
from shared_embeddings.utils.interrupts import RESUME
from shared_embeddings.utils.old_files import first_line, os_error_line
from shared_embeddings.utils.path_options import check_path_options

USER_ERROR = 2
HELP = ["--help"]
TRACEBACK_VARIABLE = "SHARED_EMBEDDINGS_TRACEBACK"
# A number without a decimal point, which PyYAML parses as text.
EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
_DECIMAL = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
BROKEN_PIPE = 128 + signal.SIGPIPE  # the exit status in shells when the reader has closed the pipe
NO_PARTIAL_FILES = "no partial files were left"  # printed by interrupted commands that cannot resume
# torch's messages for failed allocations.
NO_MEMORY = re.compile("can't allocate memory|out of memory|size calculation overflowed")
LARGEST_NUMBER = 2**63 - 1
LONGEST_MESSAGE = 1000  # characters

Main = Callable[[Sequence[str]], "int | None"]
Explain = Callable[[BaseException], "str | None"]


def error_line(error: BaseException) -> str:
    """The message of an error on one line; for an `OSError`, with the file name."""
    text = os_error_line(error) if isinstance(error, OSError) else str(error)
    line = " ".join(text.split()) or type(error).__name__
    return line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE]} ..."


def explain(error: BaseException) -> str | None:
    """The one-line message for an error that the user can fix; None for a bug."""
    if isinstance(error, (UserError, OSError)):
        return error_line(error)
    if isinstance(error, ImportError):
        advice = missing_module(error.name or "")
        return advice or f"{error_line(error)}; install the package or drop the option that requires it"
    if isinstance(error, RecursionError):
        return "the input is nested too deeply; reduce its depth"
    if isinstance(error, UnicodeEncodeError):
        odd = error.object[error.start : error.end]
        return f"the output encoding {error.encoding} cannot encode {odd!r}; set PYTHONIOENCODING=utf-8"
    # On CPUs, torch raises a plain RuntimeError.
    if isinstance(error, MemoryError) or NO_MEMORY.search(str(error)):
        return f"not enough memory ({first_line(error)}); make batches, segments or the model smaller"
    return None


def run(
    program: str,
    main: Main,
    arguments: Sequence[str] | None = None,
    explain: Explain = explain,
    advice: str = NO_PARTIAL_FILES,
    helps: Path | None = None,
) -> int:
    """Run a command and return its exit status; ``--version`` alone prints the version.

    User errors print one line to stderr and exit with 2 (``SHARED_EMBEDDINGS_TRACEBACK=1`` shows the
    traceback). SIGINT and SIGTERM print one line and exit with 130 and 143. A closed output pipe exits with
    141.

    Args:
        program: prefix of the printed lines.
        main: takes the arguments; returns an exit status or None for 0.
        arguments: ``sys.argv[1:]`` if not given.
        explain: returns the line for an error, or None to show its traceback.
        advice: the end of the line printed on interruption.
        helps: a folder with the help of programs that take seconds to import, printed for ``--help`` alone.
    """
    try:
        with interrupts.signals_raised():
            given = sys.argv[1:] if arguments is None else arguments
            if list(given) == ["--version"]:
                print(f"{program} {metadata.version('shared-embeddings')}")
                return 0
            if helps and list(given) in (HELP, ["-h"]) and (stored := helps / f"{program}.txt").is_file():
                print(stored.read_text(encoding="utf-8"), end="")
                return 0
            status = main(given)
            sys.stdout.flush()
        return status or 0
    except BrokenPipeError:
        drop_output()
        return BROKEN_PIPE
    except KeyboardInterrupt as error:
        number = error.signal if isinstance(error, interrupts.Interrupted) else signal.SIGINT
        word = "interrupted" if number == signal.SIGINT else "terminated"
        print(f"{program}: {word}; {getattr(error, 'advice', None) or advice}", file=sys.stderr)
        return 128 + number
    except Exception as error:
        message = explain(error)
        if message is None or os.environ.get(TRACEBACK_VARIABLE):
            raise
        try:
            sys.stdout.flush()
        except OSError:
            drop_output()
        print(f"{program}: {message}", file=sys.stderr)
        return USER_ERROR


def run_module(
    program: str, function: str, helps: Path, explain: Explain = explain, advice: str = NO_PARTIAL_FILES
) -> None:
    """Run ``MODULE:FUNCTION(arguments)`` as a command, see `run`, and exit with its status.

    Without arguments, the help is printed. The module is imported inside `run`, so that a missing package is
    reported like any other error.
    """
    module, _, name = function.partition(":")

    def main(arguments: Sequence[str]) -> int | None:
        return getattr(importlib.import_module(module), name)(arguments)  # type: ignore[no-any-return]

    exit_with(run(program, main, sys.argv[1:] or HELP, explain, advice, helps))


def exit_with(status: int) -> None:
    """Exit with a nonzero status; return on 0, as console scripts and in-process callers expect."""
    if status:
        sys.exit(status)


def drop_output() -> None:
    """Redirect stdout to the null device, so that Python does not fail to flush a broken pipe at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def check_repeats(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> None:
    """Raise `UserError` if an option is repeated, since argparse silently uses the last one.

    Args:
        parser: defines the options; those with ``action="append"`` may repeat.
        arguments: ``sys.argv[1:]`` if not given.
    """
    found: set[str] = set()
    known = parser._option_string_actions
    for text in sys.argv[1:] if arguments is None else arguments:
        if text == "--":
            return
        name = text.partition("=")[0]
        meant = {known[name].dest: known[name]} if name in known else {}
        if not meant and text.startswith("-") and parser.allow_abbrev:
            meant = {action.dest: action for option, action in known.items() if option.startswith(name)}
        if len(meant) != 1:
            continue
        ((dest, action),) = meant.items()
        if isinstance(action, (argparse._AppendAction, argparse._SubParsersAction)):
            continue
        if dest in found:
            raise UserError(f"option {name} is given twice; remove one")
        found.add(dest)


class Parser(argparse.ArgumentParser):
    """A parser with one-line errors that accepts each option once, by its full name.

    Options that name files have a `PathOption` as their type, which checks them after parsing. An `example`
    has the arguments of a use, see `last_line`.
    """

    def __init__(self, prog: str, example: str | None = None, **settings: Any) -> None:
        closing = {} if example is None else {"epilog": last_line(prog, example)}
        super().__init__(prog, **{"allow_abbrev": False, **closing, **settings})
        self.register("type", int, whole_number)
        self.register("type", float, finite_number)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        check_repeats(self, args)
        given, rest = super().parse_known_args(args, namespace)
        check_path_options(self._actions, given)
        return given, rest

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help", file=sys.stderr)
        sys.exit(USER_ERROR)


def last_line(program: str, example: str) -> str:
    """The end of the help of a program."""
    return f"--version prints the version; example: {program} {example}"


def whole_number(text: str) -> int:
    """Parse a 64-bit integer, for argparse."""
    if re.fullmatch(r"[-+]?[0-9]{1,19}", text) is None or abs(int(text)) > LARGEST_NUMBER:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is not a whole number below 2**63")
    return int(text)


def environment_number(name: str, default: int) -> int:
    """The whole number in an environment variable, such as torchrun's ``RANK``.

    Raises:
        UserError: it is something else.
    """
    text = os.environ.get(name, str(default))
    if re.fullmatch(r"[0-9]{1,9}", text) is None:
        raise UserError(f"${name} is {shortened(text)}; expected a whole number, or unset it")
    return int(text)


def decimal_number(text: str) -> float | None:
    """The finite number in a text; None for others, such as ``1_0``, which Python's `float` takes for 10."""
    number = float(text) if _DECIMAL.fullmatch(text) else math.inf
    return number if math.isfinite(number) else None


def finite_number(text: str) -> float:
    """Parse a finite number, for argparse."""
    number = decimal_number(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is not a finite number")
    return number


def positive(text: str) -> int:
    """Parse a positive integer, for argparse."""
    number = whole_number(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def shortened(text: str) -> str:
    """A text quoted for a message, truncated to 40 characters."""
    return repr(text if len(text) <= 40 else f"{text[:40]} ...")


def align(rows: Sequence[Sequence[str]], texts: int = 1) -> list[str]:
    """The rows as lines of columns: the first `texts` cells are aligned to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
            cell.ljust(width) if at < texts else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


# Errors of gloo and NCCL in a process that waits for an exited one.
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote process exited|socket ?(timeout|error)|"
    r"gloo/transport|timed out waiting|wait timeout|NCCL error|recvValue failed|sendBytes failed",
    re.IGNORECASE,
)


def lost_group(error: BaseException) -> str | None:
    """The message for an error caused by another process of the group exiting; None for other errors.

    Args:
        error: raised by a collective operation of ``torch.distributed``.
    """
    if not isinstance(error, RuntimeError) or _LOST.search(str(error)) is None:
        return None
    reason = first_line(error).split("] ")[-1]
    return (
        f"another process of this training exited ({reason}); see its output, perhaps on another machine; "
        f"{RESUME} from the last checkpoint"
    )
