"""``python -m recipes run``: rows beside each other, teachers first."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes import run_rows
from recipes.__main__ import main
from recipes.common.recipe import find_recipe
from recipes.common.results import write_result
from recipes.common.tools import run_main


class Processes:
    """Replaces the steps: they end at the second look; an evaluation writes a result."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: str = "") -> None:
        self.started: list[tuple[str, str]] = []
        self.failing = failing
        self.now = self.most = 0
        # Not `subprocess.Popen`: results ask git for the commit.
        monkeypatch.setattr(run_rows, "subprocess", SimpleNamespace(Popen=self, STDOUT=None))

    def __call__(self, command: list[str], **_: Any) -> Processes.One:
        *_, recipe, step, row = command
        self.started.append((step, row))
        self.now += 1
        self.most = max(self.most, self.now)
        if step == "eval":
            metrics = {"bleu": 30.0}
            home = find_recipe(recipe).home
            write_result(home, row, config={}, counts={}, metrics=metrics, data_checksum="c")
        return self.One(self, int(row == self.failing))

    class One:
        """A process."""

        def __init__(self, owner: Processes, status: int) -> None:
            self.owner, self.returncode, self.looks, self.pid = owner, status, 0, -1

        def poll(self) -> int | None:
            self.looks += 1
            if self.looks == 2:
                self.owner.now -= 1
            return self.returncode if self.looks > 1 else None


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("RUNS", str(tmp_path))
    monkeypatch.setattr(run_rows.time, "sleep", lambda _: None)
    return lambda *arguments: run_main("run", main, ["run", "multi30k_ende", *arguments])


def test_teachers_are_trained_first_and_results_are_kept(command: Any, monkeypatch, capsys) -> None:
    processes = Processes(monkeypatch)
    assert command("funnel_4x_distilled", "projective_*_fitted", "--jobs", "2") == 0
    order = processes.started
    assert order[0] == ("train", "standard") and processes.most == 2
    assert order.count(("train", "standard")) == 1 and len(order) == 8
    assert order.index(("eval", "standard")) < order.index(("train", "funnel_4x_distilled"))
    printed = capsys.readouterr().out
    assert "standard: bleu 30.0" in printed and "4 of 4 rows done" in printed
    assert command("funnel_4x_distilled", "funnel_4x") == 0
    assert order[8:] == [("train", "funnel_4x"), ("eval", "funnel_4x")]


def test_rows_of_a_failed_teacher_do_not_start(command: Any, monkeypatch, capsys) -> None:
    processes = Processes(monkeypatch, failing="standard")
    assert command("funnel_4x", "funnel_4x_distilled") == 2
    assert [row for _, row in processes.started] == ["funnel_4x", "funnel_4x", "standard"]
    printed = capsys.readouterr()
    assert "standard: train failed" in printed.out
    assert "no result of standard, funnel_4x_distilled" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["nothing_*"], "has no row 'nothing_*'"), (["funnel_4x", "table*"], "has no row 'table*'")],
)
def test_unknown_rows_are_refused(command: Any, arguments: list[str], message: str, capsys) -> None:
    assert command(*arguments) == 2
    assert message in capsys.readouterr().err


def test_nothing_starts_without_time(command: Any, monkeypatch, capsys) -> None:
    processes = Processes(monkeypatch)
    assert command("funnel_4x", "--minutes", "0") == 2
    assert processes.started == [] and "run the same command again to resume" in capsys.readouterr().err


@pytest.mark.parametrize("moment", ["while a row starts", "while rows run"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_stop_rows(command: Any, moment: str, number: int, status: int, monkeypatch) -> None:
    started = []

    def send(_: float = 0.0) -> None:
        os.kill(os.getpid(), number)

    def start(_: list[str], **__: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        if moment == "while a row starts":
            send()
        return started[-1]

    replaced = SimpleNamespace(Popen=start, STDOUT=None, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(run_rows, "subprocess", replaced)
    monkeypatch.setattr(run_rows, "time", SimpleNamespace(monotonic=time.monotonic, sleep=send))
    try:
        assert command("funnel_4x", "projective_4x", "--jobs", "2") == status
        assert [process.wait(10) for process in started] == [-signal.SIGTERM] * len(started)
    finally:
        for process in started:
            process.kill()
