"""Signals that arrive while a command is still importing its libraries, and the runner of drills."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from scripts.update_help import live_help, stored_help
from shared_embeddings.utils import command_line, interrupts
from shared_embeddings.utils.interrupts import command_of
from tests.drills.runner import Drill, Result, Try, perform, rows

ROOT = Path(__file__).parents[2]
# Replaces torch, so that the moment is certain.
STOPPED_HERE = "import os, signal, time\nos.kill(os.getpid(), signal.{name})\ntime.sleep(60)\n"
MODULES = [
    "lm.data.prepare",
    "lm.evaluate.command",
    "nmt.headlines",
    "recipes",
    "benchmarks.preprocessing",
]


def stopped(folder: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a torch that sends the process a signal."""
    (folder / "torch.py").write_text(STOPPED_HERE.format(name=name))
    places = os.pathsep.join([str(folder), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": places, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=50, cwd=ROOT
    )


@pytest.mark.parametrize(
    ("module", "name", "word"),
    [*((module, "SIGTERM", "terminated") for module in MODULES), (MODULES[0], "SIGINT", "interrupted")],
)
def test_signals_during_imports_are_reported(module: str, name: str, word: str, tmp_path: Path) -> None:
    ended = stopped(tmp_path, name, "-m", module)
    assert ended.stderr == f"{module}: {word} during startup; nothing was changed\n"
    assert ended.returncode == 128 + signal.Signals[name]


def test_commands_that_are_imported_quickly_are_stopped_while_they_run(tmp_path: Path) -> None:
    ended = stopped(tmp_path, "SIGTERM", "-m", "shared_embeddings.cli.main", "methods")
    assert ended.stderr == "shared-embeddings: terminated; no partial files were left\n"
    assert ended.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("words", ["--version", "--help", "compress --help", "suggest --help", ""])
def test_help_does_not_wait_for_torch(words: str, tmp_path: Path) -> None:
    ended = stopped(tmp_path, "SIGTERM", "-m", "shared_embeddings.cli.main", *words.split())
    assert (ended.returncode, ended.stderr) == (0, "") and ended.stdout


@pytest.mark.parametrize(
    ("command", "word"),
    [
        *(("nmt.cli:train", "--version"), ("nmt.cli:translate", "--version"), ("nmt.cli:server", "-h")),
        *(("lm.cli:train", word) for word in ("--version", "--help", "-h", "")),
        *(("nmt.cli:rouge", ""), ("nmt.cli:rerank", "--help")),
    ],
)
def test_versions_and_stored_help_do_not_wait_for_torch(command: str, word: str, tmp_path: Path) -> None:
    module, name = command.split(":")
    ended = stopped(tmp_path, "SIGTERM", "-c", f"import {module}; {module}.{name}()", *word.split())
    assert (ended.returncode, ended.stderr) == (0, "") and ended.stdout


@pytest.mark.parametrize(
    ("file", "command"), list(stored_help()), ids=lambda value: getattr(value, "stem", "")
)
def test_stored_help_is_that_of_the_parser(file: Path, command: metadata.EntryPoint) -> None:
    # Lines and punctuation differ between versions of Python.
    shown, stored = (set(re.findall(r"\w+", text)) for text in (live_help(command), file.read_text()))
    assert shown == stored, "run: make readme"
    assert f"--version prints the version; example: {command.name} " in file.read_text()


def test_programs_that_import_the_library_keep_their_signal_handlers(tmp_path: Path) -> None:
    ended = stopped(tmp_path, "SIGTERM", "-c", "import shared_embeddings; shared_embeddings.build")
    assert ended.returncode == -signal.SIGTERM and ended.stderr == ""


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("python /usr/bin/onmt_translate -src x", "onmt_translate"),
        ("python -u bin/lm_evaluate", "lm_evaluate"),
        ("python -X dev -m lm.train.command -config y", "lm.train.command"),
        ("python -W error -m recipes smoke", "recipes"),
        ("python -m pytest -m lm.train.command", None),
        ("python bin/pytest -m lm", None),
        ("python train.py -m nmt.cli", None),
        ("python -c pass lm_evaluate", None),
        ("python", None),
    ],
)
def test_commands_are_recognized(line: str, command: str | None) -> None:
    assert command_of(line.split()) == command


def test_nothing_is_reported_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the interpreter shuts down, which takes long after so many imports."""
    at_the_end: list[Callable[[], None]] = []
    monkeypatch.setattr(interrupts.atexit, "register", at_the_end.append)
    monkeypatch.setattr(sys, "orig_argv", ["python", "lm_prepare"])
    before = {number: signal.getsignal(number) for number in interrupts.SIGNALS}
    try:
        interrupts.report_signals()
        at_the_end[0]()
        assert all(signal.getsignal(number) is signal.SIG_IGN for number in before)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_processes_that_count_words_leave_signals_to_their_parent() -> None:
    import onmt.bin.build_vocab

    from nmt.hooks import apply_patches

    apply_patches()
    before = {number: signal.getsignal(number) for number in interrupts.SIGNALS}
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        onmt.bin.build_vocab.init_pool([])
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", interrupts.SIGNALS)
def test_forked_processes_end_silently(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    """Even before they could set their own handlers."""
    with interrupts.signals_raised():
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(number)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 128 + number
        with pytest.raises(interrupts.Interrupted):
            signal.raise_signal(number)
    assert capfd.readouterr().err == ""


def test_signals_during_a_fork_are_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    """Python only prints exceptions raised in functions that modules register for a fork."""
    stop = threading.Event()
    with interrupts.signals_raised():
        interrupts._begin_waiting()
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            with pytest.raises(interrupts.Interrupted):
                interrupts._end_waiting()
                stop.wait(20)
    assert capfd.readouterr().err == ""


class Destroyed:
    """Receives a signal when it is deleted."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def in_a_callback() -> None:
    """Of C code, as those of numba's compiler."""
    ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGTERM))()


def in_a_destructor() -> None:
    Destroyed()


def while_numba_compiles() -> None:
    """In the function that gets the machine code, which LLVM calls."""
    numba, engine = pytest.importorskip("numba"), importlib.import_module("llvmlite.binding.executionengine")

    def receive(*arguments: Any) -> bytes:
        signal.raise_signal(signal.SIGTERM)
        return b""

    with mock.patch.object(engine, "string_at", receive):
        numba.njit(lambda number: number + 1)(1)


@pytest.mark.parametrize("seconds", [0, 20])
@pytest.mark.parametrize("receive", [in_a_callback, in_a_destructor, while_numba_compiles])
def test_signals_whose_exception_python_drops_end_a_command(
    receive: Callable[[], None], seconds: float, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whether the command goes on for long or would end immediately."""
    went_on = []

    def main(arguments: Sequence[str]) -> None:
        receive()
        went_on.append(threading.Event().wait(seconds))

    assert command_line.run("program", main, []) == 128 + signal.SIGTERM
    assert capfd.readouterr().err == f"program: terminated; {command_line.NO_PARTIAL_FILES}\n"
    assert not (seconds and went_on)


def test_other_exceptions_that_python_drops_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    with interrupts.signals_raised():
        ctypes.CFUNCTYPE(None)(lambda: 1 / 0)()
    assert [one.exc_type for one in found] == [ZeroDivisionError] and sys.unraisablehook == found.append


def test_outcomes_are_counted(tmp_path: Path) -> None:
    """What tries share is made in the main thread: only there can commands handle signals."""
    drawn, prepared = [], []

    def attempt(given: Try) -> str:
        drawn.append(given.random.random())
        return "good" if given.folder.name != "1" else "bad"

    def prepare() -> None:
        prepared.append(threading.current_thread() is threading.main_thread())

    drill = Drill("do it", "good", attempt, 3, prepare)
    results = perform([drill], tmp_path / "first", seed=4)
    assert results == [Result(drill, Counter(good=2, bad=1))] and results[0].others == {"bad": 1}
    assert rows(results) == {"do it": "| do it | 3 | good | 2 | 1 bad |"}
    first = drawn[:]
    perform([drill], tmp_path / "again", seed=4)
    assert drawn == [*first, *first] and len(set(first)) == 3 and prepared == [True, True]
