"""Finishing what is being done before an interrupt takes effect."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """While this context is entered, the first Ctrl-C or SIGTERM is only noted; the second one acts at once.

    Attributes:
        noted: whether there was one.
    """

    def __init__(self) -> None:
        self.noted = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> None:
        """Note interrupts from now on."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let them act again."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Remember an interrupt."""
        self.noted = True
        signal.signal(number, self._previous[number])
