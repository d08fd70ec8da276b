"""Handle SIGINT and SIGTERM: end a command with a message, after the current step or write.

Importing this module handles signals during the seconds in which a command imports its libraries, before
`command_line.run`.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Name prefixes of this project's scripts, and packages with modules for ``python -m``.
SCRIPTS = ("lm_", "onmt_", "shared-embeddings")
PACKAGES = ("benchmarks", "lm", "nmt", "recipes", "shared_embeddings")
# Signals within this many seconds are one request: a terminal, a launcher and a parent may each send one.
# On a busy machine torchrun passes signals on late; it kills after 30 seconds.
ONE_REQUEST = 30.0 if "TORCHELASTIC_RUN_ID" in os.environ else 2.0
# The advice of interrupted commands that train.
RESUME = "run the same command again to resume"
# Seconds after which a signal whose exception was dropped is sent again.
_LATER = 0.01
Handler = Callable[[int, FrameType | None], None]


class Interrupted(KeyboardInterrupt):
    """The process received SIGINT or SIGTERM.

    Args:
        number: of the signal.
        advice: the end of the printed line, if it differs from that of the command.
    """

    def __init__(self, number: int, advice: str | None = None) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number
        self.advice = advice
        self.status = 128 + number  # the exit status that a shell expects


# The process that reports signals. Its forks inherit the handler but exit silently.
_reporting = os.getpid()
# Whether Python would drop an exception, as during a fork, so that signals wait.
_must_wait = False
# Signals that wait, or whose exception was dropped, until one is raised.
_waiting: list[int] = []
# Held while a waiting signal is sent, so that none arrives after its handler has gone.
_sending = threading.Lock()


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise `Interrupted`; a signal handler."""
    if os.getpid() != _reporting:
        os._exit(128 + number)
    if _must_wait:
        _waiting.append(number)
        return
    _waiting.clear()
    raise Interrupted(number)


def _begin_waiting() -> None:
    global _must_wait
    _must_wait = True


def _end_waiting() -> None:
    global _must_wait
    if _waiting:
        threading.Thread(target=_send_again, daemon=True).start()
    _must_wait = False


def _send_again() -> None:
    """Send a waiting signal until it is raised, or once if another handler receives it."""
    while True:
        time.sleep(_LATER)
        with _sending:
            waiting = _waiting[:1]
            if not waiting:
                return
            if signal.getsignal(waiting[0]) is not interrupt:
                _waiting.clear()
            os.kill(os.getpid(), waiting[0])


def _forget_waiting() -> None:
    global _must_wait, _sending
    _must_wait, _sending = False, threading.Lock()
    _waiting.clear()


os.register_at_fork(before=_begin_waiting, after_in_parent=_end_waiting, after_in_child=_forget_waiting)


@contextmanager
def signals_raised() -> Iterator[None]:
    """Raise `Interrupted` on SIGINT and SIGTERM, so that ``finally`` clauses run; no effect outside the main
    thread.

    Python drops exceptions in callbacks of C code, such as those of compilers, and in destructors: a signal
    that arrives there is sent again.
    """
    global _reporting
    _reporting = os.getpid()
    report = sys.unraisablehook

    def dropped(unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, Interrupted):
            _begin_waiting()
            _waiting.append(unraisable.exc_value.signal)
            _end_waiting()
        else:
            report(unraisable)

    sys.unraisablehook = dropped
    try:
        with handled_by(interrupt):
            try:
                yield
                while _waiting:
                    time.sleep(_LATER)
            finally:
                with _sending:
                    _waiting.clear()
    finally:
        sys.unraisablehook = report


@contextmanager
def signals_delayed() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the end of the block, so that it completes its writes.

    The outer handlers then get the signal. No effect outside the main thread.
    """
    waiting: list[int] = []
    try:
        with handled_by(lambda number, frame: waiting.append(number)):
            yield
    finally:
        if waiting:
            signal.raise_signal(waiting[0])


class Interrupts:
    """A context that records SIGINT and SIGTERM; a second request takes effect immediately.

    Signals within `ONE_REQUEST` seconds of the first one belong to the same request.

    Attributes:
        received: the number of the first signal, or None.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._since = 0.0
        self._previous: Mapping[int, Any] = {}

    def __enter__(self) -> Interrupts:
        self._previous = _install(self._record)
        return self

    def __exit__(self, *error: object) -> None:
        _restore(self._previous)

    @contextmanager
    def raised_now(self) -> Iterator[None]:
        """Raise `Interrupted` for a recorded or new signal: for waits that are safe to interrupt."""

        def record_and_raise(number: int, frame: FrameType | None) -> None:
            self._record(number, frame)
            assert self.received is not None
            raise Interrupted(self.received)

        with handled_by(record_and_raise):
            if self.received is not None:
                raise Interrupted(self.received)
            yield

    def _record(self, number: int, frame: FrameType | None) -> None:
        """Record the first signal; pass a later request to the previous handler."""
        if self.received is None:
            self.received, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > ONE_REQUEST:
            _restore(self._previous)
            signal.raise_signal(number)


@contextmanager
def handled_by(handler: Handler) -> Iterator[None]:
    """Handle SIGINT and SIGTERM with `handler`; no effect outside the main thread."""
    previous = _install(handler)
    try:
        yield
    finally:
        _restore(previous)


def _install(handler: Handler) -> dict[int, Any]:
    """Set a handler for both signals and return the previous ones.

    Python allows this in the main thread only. Signals that are ignored, as under ``nohup``, stay ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in handled}


def _restore(previous: Mapping[int, Any]) -> None:
    """Restore the handlers that `_install` returned; None means one that was not set from Python."""
    for number, handler in previous.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def report_signals() -> None:
    """Make SIGINT and SIGTERM end a command of this project with one line and status 130 or 143.

    Does nothing in programs that only import the library.
    """
    command = command_of(sys.orig_argv)
    if command is None or threading.current_thread() is not threading.main_thread():
        return

    def leave(number: int, frame: FrameType | None) -> None:
        # Immediately: an exception during an import would print a traceback.
        word = "interrupted" if number == signal.SIGINT else "terminated"
        os.write(2, f"{command}: {word} during startup; nothing was changed\n".encode())
        os._exit(128 + number)

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)
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
        if word in ("-X", "-W"):  # options of Python that take a value
            next(words, None)
        elif not word.startswith("-"):
            name = Path(word).name
            return name if name.startswith(SCRIPTS) else None
    return None


def leave_to_parent() -> None:
    """Let the parent process report signals.

    SIGTERM ends this process silently. SIGINT, which a terminal sends to both, is ignored: the parent passes
    it on. The thread of multiprocessing that sends tensors passes its errors to `sys.excepthook`: those of a
    receiver that has ended are not printed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, (EOFError, ConnectionError)):
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = report


report_signals()
