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
        monkeypatch.setattr(run_rows, "subprocess", SimpleNamespace(Popen=self.start, STDOUT=None))

    def start(self, command: list[str], **_: Any) -> Any:
        *_, recipe, step, row = command
        self.started.append((step, row))
        self.now += 1
        self.most = max(self.most, self.now)
        if step == "eval":
            metrics = {"bleu": 30.0}
            home = find_recipe(recipe).home
            write_result(home, row, config={}, counts={}, metrics=metrics, data_checksum="c")
        looks: list[int] = []

        def poll() -> int | None:
            looks.append(1)
            self.now -= len(looks) == 2
            return int(row == self.failing) if len(looks) > 1 else None

        return SimpleNamespace(poll=poll, returncode=int(row == self.failing), pid=-1)


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
    assert "standard, funnel_4x_distilled" in printed.err


@pytest.mark.parametrize(
    "arguments", [["nothing_*"], ["funnel_4x", "nothing_*"], ["funnel_4x", "--minutes", "0"]]
)
def test_unknown_rows_and_no_time_start_nothing(
    command: Any, arguments: list[str], monkeypatch, capsys
) -> None:
    processes = Processes(monkeypatch)
    assert command(*arguments) == 2 and processes.started == []
    message = capsys.readouterr().err
    assert "nothing_*" in message or "run the same command again" in message


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_stop_rows(command: Any, number: int, status: int, monkeypatch) -> None:
    started = []

    def start(_: list[str], **__: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        return started[-1]

    replaced = SimpleNamespace(Popen=start, STDOUT=None, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(run_rows, "subprocess", replaced)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: os.kill(os.getpid(), number))
    monkeypatch.setattr(run_rows, "time", clock)
    try:
        assert command("funnel_4x", "projective_4x", "--jobs", "2") == status
        assert [process.wait(10) for process in started] == [-signal.SIGTERM] * 2
    finally:
        for process in started:
            process.kill()
