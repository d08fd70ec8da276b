"""Commands that write files are killed, terminated, or run out of disk, and are then run again.

They are stopped at a random moment, or shortly after their first temporary file appears. Running the same
command line again must succeed, leave no temporary file, and produce the files of an undisturbed run. A full
disk is simulated by a limit on file size; the command must fail with one line and leave nothing behind.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import sys
import tempfile
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.commands.harness import WRITERS, Writer, make_inputs
from tests.drills.runner import Drill, Running, Try, error_lines, read_process, remains, run

# The number of kills per command; the other drills run half as often.
TRIES = {
    "compress a language model": 6,
    "compress a translation model": 4,
    "compress a folder": 6,
    "trim": 4,
    "trim a translation model": 4,
    "classes": 4,
    "lm_prepare": 6,
    "lm_prepare with a split": 4,
    "onmt_build_vocab": 4,
    "onmt_release_model": 4,
    "onmt_release_model to CTranslate2": 4,
    "onmt_translate": 4,
}
_LONGEST_PAUSE = 0.05
_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@cache
def inputs() -> Path:
    """A folder with the inputs of all commands; removed at the end of the process."""
    _KEPT.append(tempfile.TemporaryDirectory(prefix="drill-inputs-"))
    folder = Path(_KEPT[-1].name)
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        make_inputs(folder)
    return folder


def command_line(writer: Writer, folder: Path) -> list[str]:
    """The command line of a writer."""
    return [str(Path(sys.executable).with_name(writer.command)), *writer.given(inputs(), folder)]


@cache
def undisturbed(name: str) -> tuple[dict[str, object], float]:
    """The files of an undisturbed run, and its seconds."""
    with tempfile.TemporaryDirectory(prefix="drill-whole-") as whole:
        begin = time.monotonic()
        run(command_line(WRITERS[name], Path(whole)), inputs() / "whole.log")
        return written(Path(whole)), time.monotonic() - begin


def written(folder: Path) -> dict[str, object]:
    """The content of a folder by file name; reports without times and paths."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): _content(path, folder) for path in files}


def _content(path: Path, folder: Path) -> object:
    """The content of a file."""
    if path.suffix == ".safetensors":  # the library writes metadata in random order
        size = int.from_bytes(path.read_bytes()[:8], "little")
        return json.loads(path.read_bytes()[8 : 8 + size]), path.read_bytes()[8 + size :]
    if path.name != "report.json":
        return path.read_bytes()

    def without_times(part: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in part.items() if name not in ("seconds", "fit_seconds")}

    return json.loads(path.read_text().replace(str(folder), ""), object_hook=without_times)


def _disturb(running: Running, folder: Path, given: Try, seconds: float) -> bool:
    """Wait for a random moment to stop a command; returns whether it is still running."""
    if given.random.random() < 0.5:
        return running.run_for(given.random.uniform(0, seconds))
    began = running.wait_until(lambda: any(folder.glob(".*.tmp")) or any(folder.glob("*/.*.tmp")))
    return began and running.run_for(given.random.uniform(0, _LONGEST_PAUSE))


def _again(name: str, folder: Path, given: Try) -> str:
    """Run a command again; returns how the result compares with an undisturbed run."""
    writer, (wanted, _) = WRITERS[name], undisturbed(name)
    log = given.folder / "again.log"
    with Running(command_line(writer, folder), log) as running:
        status = running.end()
        lines = error_lines(running.output(), writer.command)
    is_intact = status == 2 and "already exists" in " ".join(lines)
    if status != 0 and not is_intact:
        return f"second run ended with {status} ({' '.join(lines)[:80]})"
    if remains(folder):
        return f"{remains(folder)[0]} is left"
    return "complete again" if written(folder) == wanted else "other files than wanted"


def stopped(number: int, name: str, given: Try) -> str:
    """Kill a command and its processes, or end it by SIGTERM, which it reports; then run it again."""
    writer, (wanted, seconds) = WRITERS[name], undisturbed(name)
    folder = given.folder / "outputs"
    folder.mkdir()
    with Running(command_line(writer, folder), given.folder / "log") as running:
        if number == signal.SIGTERM:
            running.wait_until(lambda: is_ours(running.process.pid))
        if _disturb(running, folder, given, seconds):
            (running.send_to_all if number == signal.SIGKILL else running.send)(number)
        status = running.end()
        output = running.output()
    if number == signal.SIGTERM:
        lines = error_lines(output, writer.command)
        if "Traceback" in output or remains(folder):
            return "traceback" if "Traceback" in output else f"{remains(folder)[0]} is left"
        if status == 143 and (len(lines) != 1 or "terminated" not in lines[0]):
            return f"no line, but {lines}"
        if status not in (0, 143) or (status == 0 and written(folder) != wanted):
            return f"ended with {status}"
    return _again(name, folder, given)


def is_ours(process: int) -> bool:
    """Whether a process has ended or handles SIGTERM; before that, Python is still starting."""
    caught = re.search(r"SigCgt:\s+(\w+)", read_process(process, "status"))
    return caught is None or bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def full(name: str, given: Try) -> str:
    """Run a command on a disk that is full before its largest file is complete."""
    writer, (wanted, _) = WRITERS[name], undisturbed(name)
    sizes = [len(content) if isinstance(content, bytes) else 1000 for content in wanted.values()]
    folder = given.folder / "outputs"
    folder.mkdir()
    limit = given.random.randrange(max(sizes) // 4, max(sizes))
    with Running(command_line(writer, folder), given.folder / "log", largest_file=limit) as running:
        status = running.end()
        lines = error_lines(running.output(), writer.command)
        traceback = "Traceback" in running.output()
    if status != 2 or traceback or len(lines) != 1 or "File too large" not in lines[0]:
        return f"ended with {status}, {'a traceback' if traceback else lines}"
    left = [path for path in folder.rglob("*") if path.is_file()]
    return f"{left[0].name} is left" if left else _again(name, folder, given)


DRILLS = [
    Drill(f"{name}: {what}", "complete again", partial(attempt, name), -(-tries // share), inputs)
    for what, attempt, share in (
        ("kill -9", partial(stopped, signal.SIGKILL), 1),
        ("SIGTERM", partial(stopped, signal.SIGTERM), 2),
        ("full disk", full, 2),
    )
    for name, tries in TRIES.items()
]
