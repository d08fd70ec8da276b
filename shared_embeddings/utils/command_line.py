"""What the command lines of all programs have in common."""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from shared_embeddings.errors import UserError
from shared_embeddings.utils import interrupts
from shared_embeddings.utils.files import first_line, os_error_line
from shared_embeddings.utils.path_options import check_path_options

USER_ERROR = 2
TRACEBACK_VARIABLE = "SHARED_EMBEDDINGS_TRACEBACK"
# A number that PyYAML takes for text, because it has no point.
EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
BROKEN_PIPE = 128 + signal.SIGPIPE  # the status that shells give to a program whose reader has gone
NO_PARTIAL_FILES = "nothing was left half-written"  # what an interrupted command says unless it can resume
# What torch says when there is not enough of it, or can never be.
NO_MEMORY = re.compile("can't allocate memory|out of memory|size calculation overflowed")
LARGEST_NUMBER = 2**63 - 1
LONGEST_MESSAGE = 1000  # characters of an error's line

Main = Callable[[Sequence[str]], "int | None"]
Explain = Callable[[BaseException], "str | None"]


def error_line(error: BaseException) -> str:
    """What an error says, in one line; where the operating system refused something, with the file."""
    text = os_error_line(error) if isinstance(error, OSError) else str(error)
    line = " ".join(text.split()) or type(error).__name__
    return line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE]} ..."


def explain(error: BaseException) -> str | None:
    """The line that a user reads about an error; None for an error that is ours."""
    if isinstance(error, (UserError, OSError)):
        return error_line(error)
    if isinstance(error, ImportError):
        return f"{error_line(error)}; install what an option needs, or leave that option out"
    if isinstance(error, RecursionError):
        return "the input is nested too deeply; make it flatter"
    if isinstance(error, UnicodeEncodeError):
        odd = error.object[error.start : error.end]
        return f"the output's encoding {error.encoding} has no {odd!r}; set PYTHONIOENCODING=utf-8"
    # On a CPU torch has no class of its own for it.
    if isinstance(error, MemoryError) or NO_MEMORY.search(str(error)):
        return f"not enough memory ({first_line(error)}); make batches, segments or the model smaller"
    return None


def run(
    program: str,
    main: Main,
    arguments: Sequence[str] | None = None,
    explain: Explain = explain,
    advice: str = NO_PARTIAL_FILES,
) -> int:
    """Run a command and return its exit status.

    2 with one line on stderr for a mistake of the user (``SHARED_EMBEDDINGS_TRACEBACK=1`` shows the
    traceback), 130 after SIGINT and 143 after SIGTERM with one line, 141 when nobody reads the output.

    Args:
        program: what the line begins with.
        main: takes the arguments; returns an exit status other than 0, if any.
        arguments: ``sys.argv[1:]`` if not given.
        explain: gives the line about an error, or None for one whose traceback is to be shown.
        advice: what an interruption's line says at its end.
    """
    try:
        with interrupts.signals_raised():
            status = main(sys.argv[1:] if arguments is None else arguments)
            sys.stdout.flush()
        return status or 0
    except BrokenPipeError:
        drop_output()
        return BROKEN_PIPE
    except interrupts.Interrupted as error:
        print(
            f"{program}: {'interrupted' if error.signal == signal.SIGINT else 'terminated'}; {advice}",
            file=sys.stderr,
        )
        return error.status
    except KeyboardInterrupt:
        print(f"{program}: interrupted; {advice}", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        message = explain(error)
        if message is None or os.environ.get(TRACEBACK_VARIABLE):
            raise
        _settle_output()
        print(f"{program}: {message}", file=sys.stderr)
        return USER_ERROR


def exit_with(status: int) -> None:
    """Leave with an exit status; return at 0, as console scripts and callers in the same process expect."""
    if status:
        sys.exit(status)


def drop_output() -> None:
    """Let what is left to be printed go nowhere, once its reader has gone, or Python complains at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _settle_output() -> None:
    """Drop what cannot be printed, as on a full disk: Python would try again at its end, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        drop_output()


def check_repeats(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> None:
    """Check that no option is given twice, of which argparse takes the last silently.

    Args:
        parser: knows the options; those that gather the values of all their uses may repeat.
        arguments: ``sys.argv[1:]`` if not given.

    Raises:
        UserError: names the option.
    """
    found: set[str] = set()
    for text in sys.argv[1:] if arguments is None else arguments:
        if text == "--":
            return
        action = _action_of(parser, text)
        if action is None or isinstance(action, (argparse._AppendAction, argparse._SubParsersAction)):
            continue
        if action.dest in found:
            raise UserError(f"option {text.partition('=')[0]} is given twice; give it once")
        found.add(action.dest)


def _action_of(parser: argparse.ArgumentParser, text: str) -> argparse.Action | None:
    """The option that an argument is, perhaps by the beginning of its name, or None."""
    name, known = text.partition("=")[0], parser._option_string_actions
    if not text.startswith("-") or name in known or not parser.allow_abbrev:
        return known.get(name)
    meant = {action.dest: action for option, action in known.items() if option.startswith(name)}
    return next(iter(meant.values())) if len(meant) == 1 else None


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, and that takes options by their full names only, once each.

    Options that name files have a `PathOption` as their type, and are checked by it before any work.

    Args:
        prog: the program's name, which a complaint begins with.
        settings: those of `argparse.ArgumentParser`.
    """

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, **{"allow_abbrev": False, **settings})
        self.register("type", int, whole_number)
        self.register("type", float, finite_number)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse arguments and check the paths among them.

        Raises:
            UserError: see `check_repeats` and `check_path_options`.
        """
        check_repeats(self, args)
        given, rest = super().parse_known_args(args, namespace)
        check_path_options(self._actions, given)
        return given, rest

    def error(self, message: str) -> NoReturn:
        """Print the message and leave with the exit status for mistakes of the user."""
        print(f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help", file=sys.stderr)
        sys.exit(USER_ERROR)


def whole_number(text: str) -> int:
    """A whole number of 64 bits, for argparse."""
    if re.fullmatch(r"[-+]?[0-9]{1,19}", text) is None or abs(int(text)) > LARGEST_NUMBER:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is not a whole number below 2**63")
    return int(text)


def finite_number(text: str) -> float:
    """A number that is neither infinite nor NaN, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{shortened(text)} is not a finite number")
    return number


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    number = whole_number(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def shortened(text: str) -> str:
    """A text as it is shown in a message."""
    return repr(text if len(text) <= 40 else f"{text[:40]} ...")
