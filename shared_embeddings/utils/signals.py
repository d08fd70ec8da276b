"""Ctrl-C and SIGTERM: commands end with one line, training loops at the end of a step.

`shared_embeddings.utils.command_line.run` turns both signals into exceptions: ``finally`` clauses run.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, NoReturn

RESUME = "run the same command again to resume"


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM."""


def raise_terminated(number: int, frame: FrameType | None) -> NoReturn:
    """Raise `Terminated`; a handler of SIGTERM."""
    raise Terminated


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
