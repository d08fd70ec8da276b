"""Shared tools of the drills: processes to disturb, outcomes to count, and the table of results."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
README = Path(__file__).with_name("README.md")
STILL_RUNNING = "still running"
_POLL_SECONDS = 0.005


class Try(NamedTuple):
    """Input of one try of a drill."""

    folder: Path  # empty
    random: random.Random  # draws the moments; seeded, and different in each try


class Drill(NamedTuple):
    """A disturbance of a program, tried many times."""

    name: str
    wanted: str  # the outcome that every try should have, in a few words
    attempt: Callable[[Try], str]  # runs one try and returns its outcome, `wanted` or other words
    tries: int  # unless others are asked for
    # Makes what all tries share, in the main thread: only there can commands handle signals.
    prepare: Callable[[], object] = lambda: None


class Result(NamedTuple):
    """A drill and how often it had each outcome."""

    drill: Drill
    outcomes: Counter[str]

    @property
    def others(self) -> dict[str, int]:
        """The unwanted outcomes."""
        return {name: count for name, count in self.outcomes.items() if name != self.drill.wanted}


class Running:
    """A command in its own process group, which is killed at the end of the context.

    Args:
        command: the program and its arguments.
        log: file for its output; replaced if it exists.
        largest_file: file size in bytes at which writes fail, as on a full disk; None for no limit.
    """

    def __init__(self, command: Sequence[str | Path], log: Path, largest_file: int | None = None) -> None:
        self.log = log

        def limit() -> None:
            # Shells make their background processes ignore these.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            if largest_file is not None:
                # The write fails instead of killing the process.
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if largest_file is not None else file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
                start_new_session=True,
                preexec_fn=limit,
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
        return self.wait_until(lambda: re.search(pattern, self.output(), re.MULTILINE) is not None, seconds)

    def wait_until(self, holds: Callable[[], bool], seconds: float = 120) -> bool:
        """Wait until `holds()`; False if it ends or `seconds` pass first."""
        deadline = time.monotonic() + seconds
        while not holds():
            if self.process.poll() is not None or time.monotonic() > deadline:
                return holds()
            time.sleep(_POLL_SECONDS)
        return True

    def run_for(self, seconds: float) -> bool:
        """Let it run; returns whether it is still running."""
        self.wait_until(lambda: False, seconds)
        return self.process.poll() is None

    def send(self, number: int) -> None:
        """Send a signal to the command's own process, if it has not ended."""
        self.process.send_signal(number)

    def send_to_all(self, number: int) -> None:
        """Send a signal to its whole process group, as a terminal does."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def children(self) -> list[int]:
        """Its child processes in start order, without the resource tracker of multiprocessing."""
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        numbers = [int(number) for number in found.read_text().split()] if found.exists() else []
        return [number for number in numbers if "resource_tracker" not in read_process(number, "cmdline")]

    def members(self) -> list[int]:
        """The live processes of its group."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            state, _, group, *_ = read_process(int(entry.name), "stat").rpartition(")")[2].split() or "Z00"
            if state != "Z" and int(group) == self.process.pid:
                found.append(int(entry.name))
        return found

    def wait_for_empty_group(self, seconds: float = 60) -> bool:
        """Wait until its group has no live process; helpers briefly outlive their parent."""
        deadline = time.monotonic() + seconds
        while self.members() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return not self.members()

    def end(self, seconds: float = 60) -> int | str:
        """Wait for its end; returns the exit status (negative for a signal) or `STILL_RUNNING`."""
        try:
            rest, _ = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return STILL_RUNNING
        if rest:
            self.log.write_bytes(rest)
        return self.process.returncode


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


def remains(folder: Path) -> list[str]:
    """The temporary files and folders left below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob(".*.tmp"))


def error_lines(output: str, program: str) -> list[str]:
    """The error lines of a program."""
    return [line for line in output.splitlines() if line.startswith(f"{program}: ")]


def perform(
    drills: Iterable[Drill], folder: Path, seed: int, tries: int | None = None, jobs: int = 1
) -> list[Result]:
    """Run every drill many times, some in parallel, in a folder for each try, and print the outcomes."""
    results = []
    with ThreadPoolExecutor(jobs) as pool:
        for drill in drills:
            drill.prepare()
            given = []
            for number in range(drill.tries if tries is None else tries):
                place = folder / re.sub(r"\W+", "_", drill.name) / str(number)
                place.mkdir(parents=True)
                given.append(Try(place, random.Random(f"{drill.name} {seed} {number}")))
            outcomes = Counter(pool.map(drill.attempt, given))
            results.append(Result(drill, outcomes))
            print(f"{drill.name}: {tell(outcomes)}", flush=True)
    return results


def tell(outcomes: Counter[str] | dict[str, int]) -> str:
    """Outcomes with their counts, on one line."""
    return ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items())) or "none"


HEAD = ["| drill | tries | wanted | as wanted | otherwise |", "| --- | ---: | --- | ---: | --- |"]


def rows(results: Sequence[Result]) -> dict[str, str]:
    """The rows of drills in a Markdown table, by name."""
    found = {}
    for result in results:
        drill, outcomes = result
        cells = (drill.name, outcomes.total(), drill.wanted, outcomes[drill.wanted], tell(result.others))
        found[drill.name] = f"| {' | '.join(map(str, cells))} |"
    return found


def write_results(title: str, about: str, results: Sequence[Result], path: Path = README) -> None:
    """Replace the section ``## TITLE`` of a Markdown file, or append it; rows of other drills stay."""
    content = path.read_text(encoding="utf-8") if path.exists() else "# Drills"
    sections = re.split(r"^(?=## )", content.rstrip() + "\n\n", flags=re.MULTILINE)
    old = next((text for text in sections if text.startswith(f"## {title}\n")), "")
    kept = [line for line in old.splitlines() if line.startswith("| ") and line not in HEAD]
    known = {line.split(" | ")[0].removeprefix("| "): line for line in kept} | rows(results)
    new = "\n".join([f"## {title}", "", about, "", *HEAD, *known.values()]) + "\n\n"
    sections = [new if text == old else text for text in sections] if old else [*sections, new]
    path.write_text("".join(sections).rstrip() + "\n", encoding="utf-8")
