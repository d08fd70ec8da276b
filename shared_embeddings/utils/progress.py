"""Progress bars: one over all phases of a command, or one for each long step of a library call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from tqdm import tqdm

# Seconds before the bar of a step appears.
BAR_DELAY = 2.0
_SHAPE = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


class _Phases:
    """The bar of a command, on stderr if that is a terminal."""

    def __init__(self) -> None:
        self.bar = tqdm(total=1.0, bar_format=_SHAPE, disable=None, leave=False)
        self.weights: dict[str, float] = {}
        self._first = self._size = 0.0

    def begin(self, name: str, detail: str) -> None:
        names, total = list(self.weights), sum(self.weights.values())
        if name in names:
            self._first = sum(self.weights[other] for other in names[: names.index(name)]) / total
            self._size = self.weights[name] / total
        self.bar.set_description_str(f"{name}{detail}")
        self.advance(0.0)

    def advance(self, share: float) -> None:
        self.bar.update(max(0.0, min(1.0, self._first + share * self._size) - self.bar.n))


class _Step:
    """What `progress_bar` returns within a phase of a command: the part of the bar that is the phase."""

    def __init__(self, phases: _Phases, total: float) -> None:
        self._phases, self._total, self.n = phases, total, 0.0

    def update(self, number: float = 1) -> None:
        self.n += number
        self._phases.advance(self.n / max(self._total, 1e-9))

    def set_postfix_str(self, text: str, refresh: bool = False) -> None:
        self._phases.bar.set_postfix_str(text, refresh)

    def close(self) -> None:
        self._phases.bar.set_postfix_str("")


_phases: _Phases | None = None


@contextlib.contextmanager
def command_progress() -> Iterator[None]:
    """Within this context, there is one bar over all phases."""
    global _phases
    _phases = _Phases()
    try:
        yield
    finally:
        _phases.bar.close()
        _phases = None


def plan_phases(weights: Mapping[str, float]) -> None:
    """Say about how long each phase takes, in their order."""
    if _phases is not None:
        _phases.weights = dict(weights)


def begin_phase(name: str, detail: str = "") -> None:
    """Begin a phase of the command; those before it are done."""
    if _phases is not None:
        _phases.begin(name, detail)


def progress_bar(total: float, desc: str, unit: str = "it", disable: bool = False) -> Any:
    """Return a bar for steps: of the current phase, or of its own if there is no command."""
    if _phases is None or disable:
        return tqdm(total=total, desc=desc, unit=unit, delay=BAR_DELAY, disable=disable or None)
    return _Step(_phases, total)
