"""The runner of drills."""

from __future__ import annotations

import signal
import sys
import threading
from collections import Counter
from pathlib import Path

from tests.drills.runner import (
    HEAD,
    STILL_RUNNING,
    Drill,
    Result,
    Running,
    Try,
    perform,
    rows,
    write_results,
)

SLEEPER = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)"]


def test_signal_reaches_a_process_after_its_first_line(tmp_path: Path) -> None:
    with Running(SLEEPER, tmp_path / "log") as running:
        assert running.wait_for("^ready$")
        assert running.end(0.01) == STILL_RUNNING
        running.send(signal.SIGTERM)
        assert running.end() == -signal.SIGTERM


def test_contexts_clean_up(tmp_path: Path) -> None:
    parent = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"
    with Running([sys.executable, "-c", parent, *SLEEPER], tmp_path / "log") as running:
        assert running.wait_for("^ready$")
        assert len(running.children()) == 1 and len(running.members()) == 2
    assert running.members() == []


def test_a_full_disk_is_a_failed_write(tmp_path: Path) -> None:
    writer = [sys.executable, "-c", f"with open({str(tmp_path / 'file')!r}, 'wb') as f: f.write(bytes(100))"]
    with Running(writer, tmp_path / "log", largest_file=10) as running:
        assert running.end() == 1
    assert "File too large" in running.output()
    assert (tmp_path / "file").stat().st_size == 10


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


def test_only_rows_of_these_drills_are_replaced(tmp_path: Path) -> None:
    def result(name: str, tries: int) -> Result:
        return Result(Drill(name, "good", lambda given: "good", 1), Counter(good=tries))

    readme = tmp_path / "README.md"
    write_results("One", "About.", [result("a", 1), result("b", 2)], readme)
    write_results("Two", "Others.", [result("b", 9)], readme)
    two = "\n".join(["## Two", "", "Others.", "", *HEAD, "| b | 9 | good | 9 | none |"]) + "\n"
    write_results("One", "About it.", [result("b", 3)], readme)
    mine = ["| a | 1 | good | 1 | none |", "| b | 3 | good | 3 | none |"]
    one = "\n".join(["## One", "", "About it.", "", *HEAD, *mine]) + "\n"
    assert readme.read_text() == f"# Drills\n\n{one}\n{two}"
