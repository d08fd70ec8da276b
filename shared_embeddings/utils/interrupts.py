"""What SIGINT and SIGTERM do to a command: end it with a message, after the step or the write under way."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Seconds in which signals are one request: a terminal, a launcher and a parent may each send theirs.
ONE_REQUEST = 2.0
# What every training says when it was stopped.
RESUME = "run the same command again to resume"
# Seconds until a signal is sent again that came while the process was forking.
_LATER = 0.01
Handler = Callable[[int, FrameType | None], None]


class Interrupted(KeyboardInterrupt):
    """The process was asked to stop.

    Attributes:
        signal: the number of the signal that asked.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number

    @property
    def status(self) -> int:
        """The exit status that a shell expects."""
        return 128 + self.signal


# The process that reports signals. Those that it forks inherit the handler, and end silently.
_reporting = os.getpid()
# Whether it is forking: Python drops what is raised meanwhile, so that signals wait until that is done.
_forking = False
_waiting: list[int] = []


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise `Interrupted`; a signal handler."""
    if os.getpid() != _reporting:
        os._exit(128 + number)
    if _forking:
        _waiting.append(number)
        return
    raise Interrupted(number)


def _begin_fork() -> None:
    """Let signals wait."""
    global _forking
    _forking = True


def _end_fork() -> None:
    """Send a signal that waited again, a little later."""
    global _forking
    _forking = False
    if _waiting:
        again = threading.Timer(_LATER, os.kill, (os.getpid(), _waiting.pop()))
        again.daemon = True
        again.start()


def _be_forked() -> None:
    """Begin anew in the child."""
    global _forking
    _forking = False
    _waiting.clear()


os.register_at_fork(before=_begin_fork, after_in_parent=_end_fork, after_in_child=_be_forked)


@contextmanager
def signals_raised() -> Iterator[None]:
    """Raise `Interrupted` at SIGINT and SIGTERM, so that ``finally`` clauses run. Main thread only; elsewhere
    nothing changes.
    """
    global _reporting
    _reporting = os.getpid()
    with handled_by(interrupt):
        yield


@contextmanager
def signals_delayed() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the end of the block, so that what it writes is complete.

    Works whatever handles the signals outside. Main thread only; elsewhere nothing changes.
    """
    waiting: list[int] = []
    try:
        with handled_by(lambda number, frame: waiting.append(number)):
            yield
    finally:
        if waiting:
            signal.raise_signal(waiting[0])


class Interrupts:
    """A context in which SIGINT and SIGTERM are noted; a later request acts at once.

    Signals within `ONE_REQUEST` seconds of the first one are the same request.

    Attributes:
        received: the number of the first signal, or None.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._since = 0.0
        self._previous: Mapping[int, Any] = {}

    def __enter__(self) -> Interrupts:
        """Note signals from now on."""
        self._previous = _install(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let them act again."""
        _restore(self._previous)

    @contextmanager
    def raised_now(self) -> Iterator[None]:
        """Raise `Interrupted` at a signal, noted before or new: for waits that leave nothing unfinished."""
        with handled_by(self._raise):
            if self.received is not None:
                raise Interrupted(self.received)
            yield

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Remember the first signal; hand over a later request to what handled it before."""
        if self.received is None:
            self.received, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > ONE_REQUEST:
            _restore(self._previous)
            signal.raise_signal(number)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        """Remember the first signal and act on it."""
        self._note(number, frame)
        assert self.received is not None
        raise Interrupted(self.received)


@contextmanager
def handled_by(handler: Handler) -> Iterator[None]:
    """Let `handler` handle SIGINT and SIGTERM. Main thread only; elsewhere nothing changes."""
    previous = _install(handler)
    try:
        yield
    finally:
        _restore(previous)


def _install(handler: Handler) -> dict[int, Any]:
    """Set a handler for both signals and return the previous ones.

    Python allows that in the main thread only. A signal that is ignored, as by ``nohup``, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heeded}


def _restore(previous: Mapping[int, Any]) -> None:
    """Set the handlers that `_install` returned; None stands for one that was not set from Python."""
    for number, handler in previous.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def leave_to_parent() -> None:
    """Let the parent alone report signals, in a process that it has started.

    SIGTERM ends this process silently; SIGINT, which a terminal sends to both, is the parent's to pass on.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
