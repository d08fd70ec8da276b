"""Concurrent commands, each with a log file and a progress bar; they end with this process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from shared_embeddings.utils.errors import UserError

# A line of onmt_train's log: the step, and the speed on the target side.
_STEP = re.compile(r"Step\s+(\d+)/\s*\d+;.*?/\s*(\d+) tok/s")
_POLL_SECONDS = 0.2
# Interval between reports without a terminal.
_REPORT_SECONDS = 10.0
_LAST_LINES = 12
_BAR = "{desc} {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} {rate_fmt}, {remaining} left{postfix}"
_GRACE_SECONDS = 5.0


@dataclass
class Job:
    """A command to run.

    Attributes:
        name: label of the progress bar.
        command: the program and its arguments.
        log: file for stdout and stderr.
        steps: number of steps for the progress bar, which follows "Step n/N" in the log; 0 if unknown.
        seconds: duration, after the end.
        peak_memory_mib: largest resident memory, after the end.
        speeds: tokens per second in the log.
    """

    name: str
    command: Sequence[str]
    log: Path
    steps: int = 0
    seconds: float = 0.0
    peak_memory_mib: float = 0.0
    speeds: list[int] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """The average speed so far; 0 if unknown."""
        return sum(self.speeds) / len(self.speeds) if self.speeds else 0.0


def run_jobs(
    jobs: Sequence[Job],
    at_once: int,
    environment: dict[str, str],
    keep_open: Sequence[int] = (),
    finished: Callable[[Job], None] = lambda job: None,
) -> None:
    """Run jobs, at most `at_once` concurrently; after a failure or interruption, the others are stopped.

    Args:
        jobs: jobs to run in order.
        at_once: maximum number of concurrent jobs.
        environment: environment variables of the commands.
        keep_open: file descriptors to inherit.
        finished: called with each successful job.

    Raises:
        UserError: a job failed; the last lines of its log are printed.
    """
    waiting, running = list(jobs), list[_Process]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                taken = {process.position for process in running}
                position = min(set(range(at_once)) - taken)
                running.append(_Process(waiting.pop(0), position, environment, keep_open))
            time.sleep(_POLL_SECONDS)
            for process in list(running):
                if process.poll():
                    running.remove(process)
                    finished(process.job)
    finally:
        for process in running:
            process.end()


class _Process:
    """A running job and its progress bar at a line `position`."""

    def __init__(
        self, job: Job, position: int, environment: dict[str, str], keep_open: Sequence[int]
    ) -> None:
        self.job, self.position = job, position
        self._started = self._reported = time.monotonic()
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    job.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    pass_fds=keep_open,
                )
            except OSError as error:
                raise UserError(f"{job.command[0]}: {error.strerror}; run 'make setup'") from error
        self._reader = job.log.open(encoding="utf-8", errors="replace")
        self._partial = ""
        self._terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=job.steps or None,
            desc=f"{job.name:<24}",
            unit="step",
            position=position,
            leave=False,
            disable=not self._terminal,
            dynamic_ncols=True,
            bar_format=_BAR if job.steps else "{desc} {elapsed}",
        )

    def poll(self) -> bool:
        """Update the progress; return whether the job has succeeded; raise if it failed."""
        ended, status, usage = os.wait4(self._process.pid, os.WNOHANG)
        self._read_log()
        if not ended:
            return False
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self.job.seconds = time.monotonic() - self._started
        self.job.peak_memory_mib = round(usage.ru_maxrss / 1024, 1)
        self._close()
        if self._process.returncode:
            self._fail()
        return True

    def end(self) -> None:
        """Terminate the job; kill it after a grace period."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                self._process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._close()

    def _close(self) -> None:
        self._bar.close()
        self._reader.close()

    def _read_log(self) -> None:
        """Parse steps and speeds in new lines of the log."""
        lines = (self._partial + self._reader.read()).split("\n")
        self._partial = lines.pop()
        step = None
        for line in lines:
            if found := _STEP.search(line):
                step = int(found[1])
                self.job.speeds.append(int(found[2]))
        if step is not None:
            self._bar.set_postfix_str(f"{self.job.speeds[-1]:,} tok/s", refresh=False)
            self._bar.update(step - self._bar.n)
            self._report(step)
        elif not self.job.steps:
            self._bar.refresh()

    def _report(self, step: int) -> None:
        """Print a line at intervals if there is no terminal."""
        now = time.monotonic()
        if self._terminal or now - self._reported < _REPORT_SECONDS and step < self.job.steps:
            return
        self._reported = now
        job, left = self.job, (now - self._started) * (self.job.steps - step) / step
        text = f"{job.name}: step {step}/{job.steps}, {job.speeds[-1]:,} tok/s, {left:.0f} s left"
        print(text, file=sys.stderr, flush=True)

    def _fail(self) -> None:
        lines = self.job.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        print("\n".join(f"  | {line}" for line in lines), file=sys.stderr)
        name = Path(self.job.command[0]).name
        raise UserError(
            f"{self.job.name}: {name} failed with status {self._process.returncode}; "
            f"the last lines of {self.job.log} are above"
        )
