"""Commands in processes of their own, which tests stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
_POLL_SECONDS = 0.05


class Running:
    """A command in its own process group, which is killed at the end of the context.

    Args:
        command: the program and its arguments.
        log: file for its output; replaced if it exists.
    """

    def __init__(self, command: Sequence[str | Path], log: Path) -> None:
        self.log = log

        def listen() -> None:
            # Shells make their background processes ignore these.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)

        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
                start_new_session=True,
                preexec_fn=listen,
            )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.send_to_all(signal.SIGKILL)
        self.end(10)
        self.wait_for_empty_group(10)  # its children exit a moment later

    def output(self) -> str:
        """The output so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, pattern: str, seconds: float = 120) -> bool:
        """Wait until a line of its output matches; False if it ends or `seconds` pass first."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            if re.search(pattern, self.output(), re.MULTILINE):
                return True
            time.sleep(_POLL_SECONDS)
        return re.search(pattern, self.output(), re.MULTILINE) is not None

    def send(self, number: int) -> None:
        """Send a signal to the command's own process, if it has not ended."""
        self.process.send_signal(number)

    def send_to_all(self, number: int) -> None:
        """Send a signal to its whole process group, as a terminal does."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def children(self) -> list[int]:
        """Its child processes in start order, without the resource tracker of multiprocessing."""
        listing = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        numbers = [int(number) for number in listing.read_text().split()] if listing.exists() else []
        return [number for number in numbers if "resource_tracker" not in read_process(number, "cmdline")]

    def members(self) -> list[int]:
        """The live processes of its group."""
        pids = []
        for entry in Path("/proc").glob("[0-9]*"):
            state, _, group, *_ = read_process(int(entry.name), "stat").rpartition(")")[2].split() or "Z00"
            if state != "Z" and int(group) == self.process.pid:
                pids.append(int(entry.name))
        return pids

    def wait_for_empty_group(self, seconds: float = 60) -> bool:
        """Wait until its group has no live process; helpers briefly outlive their parent."""
        deadline = time.monotonic() + seconds
        while self.members() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return not self.members()

    def end(self, seconds: float = 60) -> int:
        """Wait for its end; returns the exit status, negative for a signal."""
        return self.process.wait(seconds)


def read_process(process: int, name: str) -> str:
    """A file about a process in /proc; empty when it has ended."""
    try:
        return Path(f"/proc/{process}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def run(arguments: Sequence[str | Path], log: Path, seconds: float = 300) -> str:
    """Run a command to its end, which has to be good, and return what it has printed.

    Raises:
        AssertionError: it failed, or took too long.
    """
    with Running(arguments, log) as running:
        status = running.end(seconds)
        assert status == 0, f"{arguments} ended with {status}: {running.output()[-2000:]}"
        return running.output()


def error_lines(output: str, program: str) -> list[str]:
    """The error lines of a program."""
    return [line for line in output.splitlines() if line.startswith(f"{program}: ")]
