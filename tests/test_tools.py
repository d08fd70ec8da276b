"""The runner of drills."""

from __future__ import annotations

import signal
import sys
import threading
from collections import Counter
from pathlib import Path

from tests.drills.runner import (
    STILL_RUNNING,
    Drill,
    Result,
    Running,
    Try,
    perform,
    table,
    write_results,
    write_section,
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
    drawn = []

    def attempt(given: Try) -> str:
        drawn.append(given.random.random())
        return "good" if given.folder.name != "1" else "bad"

    drill = Drill("do it", "good", attempt, 3)
    results = perform([drill], tmp_path / "first", seed=4)
    assert results == [Result(drill, Counter(good=2, bad=1))] and results[0].others == {"bad": 1}
    assert "| do it | 3 | good | 2 | 1 bad |" in table(results)
    first = drawn[:]
    perform([drill], tmp_path / "again", seed=4)
    assert drawn == [*first, *first] and len(set(first)) == 3


def test_only_one_section_is_replaced(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    for title, text in (("One", "a"), ("Two", "b"), ("One", "c")):
        write_section(title, text, readme)
    assert readme.read_text() == "# Drills\n\n## One\n\nc\n\n## Two\n\nb\n"


def test_rows_of_skipped_drills_are_kept(tmp_path: Path) -> None:
    def result(name: str, tries: int) -> Result:
        return Result(Drill(name, "good", lambda given: "good", 1), Counter(good=tries))

    readme = tmp_path / "README.md"
    write_results("One", "About.", [result("a", 1), result("b", 2)], readme)
    write_results("One", "About it.", [result("b", 3)], readme)
    text = readme.read_text()
    assert "About it." in text and "| a | 1 | good | 1 | none |\n| b | 3 | good | 3 | none |" in text
    assert text.count("| b |") == 1 and text.count("drill |") == 1


def test_shared_setup_runs_in_the_main_thread(tmp_path: Path) -> None:
    """Commands that run inside of this process handle signals, which Python allows there alone."""
    places: list[bool] = []

    def note(*given: object) -> str:
        places.append(threading.current_thread() is threading.main_thread())
        return "done"

    (result,) = perform([Drill("a drill", "done", note, 2, note)], tmp_path, seed=1)
    assert places == [True, False, False] and result.outcomes == {"done": 2}
