"""Measurements for GPUs: slices that resume, failures that do not spread, and everything once on the CPU."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu

Run = Callable[[], dict[str, Any]]


def slice_of(monkeypatch: pytest.MonkeyPatch, **cases: Run) -> None:
    """Replace all slices by one named "one"."""
    columns = {"ms": ("ms", 1), "ms/": ("ratio", 2)}
    part = gpu.Slice("Title", lambda *_: iter(cases.items()), columns)
    monkeypatch.setattr(gpu, "SLICES", {"one": part})


def run(folder: Path, minutes: float = 8.0) -> dict[str, dict[str, Any]]:
    """Run the slice in this process; gives the records by case."""
    options = argparse.Namespace(tiny=True, folder=folder, minutes=minutes)
    gpu.run_slice("one", options)
    return {case: record for (_, case), record in gpu.read_results(folder).items()}


def raising(error: BaseException) -> Run:
    """A case that fails."""

    def fail() -> dict[str, Any]:
        raise error

    return fail


def test_failures_are_recorded_and_other_cases_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {
        "large": raising(torch.OutOfMemoryError("CUDA out of memory")),
        "wrong": raising(ValueError("no such\nthing")),
        "good": lambda: {"ms": 2.0},
    }
    slice_of(monkeypatch, **cases)
    found = run(tmp_path)
    assert {name: record.get("failed") for name, record in found.items()} == {
        "large": "out of memory",
        "wrong": "ValueError: no such",
        "good": None,
    }
    assert found["good"]["measured"] == {"ms": 2.0}
    assert {"date", "git", "versions", "device"} <= found["good"].keys()
    assert [name for name, record in found.items() if record["done"]] == ["good", "large"]


def test_a_new_run_continues_with_failures_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def noting(name: str, result: dict[str, Any] | None) -> Run:
        def note() -> dict[str, Any]:
            order.append(name)
            if result is None:
                raise KeyboardInterrupt
            return result

        return note

    slice_of(monkeypatch, a=noting("a", {"ms": 1.0}), b=noting("b", None), c=noting("c", {"ms": 1.0}))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    slice_of(
        monkeypatch,
        a=noting("a", {"ms": 1.0}),
        b=noting("b", {"ms": 3.0}),
        c=noting("c", {"ms": 1.0}),
    )
    assert run(tmp_path)["b"]["measured"] == {"ms": 3.0}
    assert order == ["a", "b", "c", "b"]
    run(tmp_path)
    assert len(order) == 4


def test_no_case_starts_with_little_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    def note() -> dict[str, Any]:
        given.append("run")
        return {"ms": 1.0}

    slice_of(monkeypatch, a=note, b=note)
    run(tmp_path, minutes=1.0)
    assert len(given) == 2
    slice_of(monkeypatch, d=note)
    run(tmp_path, minutes=0.1)
    assert len(given) == 2


def test_tables_show_ratios_to_the_first_case_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    slice_of(
        monkeypatch, **{name: raising(AssertionError()) for name in ("plain", "small", "large", "other")}
    )
    origin = {"device": "cuda: 1 x H100", "versions": {"torch": "2.13.0"}}
    measured = {"plain": {"measured": {"ms": 4.0}}, "small": {"measured": {"ms": 1.0}}}
    measured["large"] = {"failed": "out of memory"}  # type: ignore[dict-item]
    records = {("one", case): {**origin, **numbers} for case, numbers in measured.items()}
    text = gpu.as_text(records)
    assert text.startswith("Measured on cuda: 1 x H100; torch 2.13.0.\n\nTitle\n\n|  | ms | ratio |")
    assert text.splitlines()[-5:] == [
        "| plain | 4.0 | 1.00 |",
        "| small | 1.0 | 0.25 |",
        "| large | out of memory | – |",
        "",
        "Not run: other.",
    ]
    assert gpu.as_text({}) == "- Title: not run"


@pytest.mark.slow
def test_everything_runs_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--folder", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {record["slice"] for record in records} == set(gpu.SLICES)
    assert [record for record in records if "failed" in record or not record["done"]] == []
    (two,) = (record["measured"] for record in records if record["slice"] == "processes")
    assert two["difference"] < 1e-4
    assert "processes: 1 of 1 done" in ended.stdout


@pytest.mark.parametrize(
    ("asked", "message"),
    [(["--slices", "input"], "no CUDA device"), (["--tiny", "--publish"], "remove --tiny")],
)
def test_cases_that_need_a_gpu_report_it(
    asked: list[str], message: str, monkeypatch, capsys, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status = gpu.run_main("gpu", gpu.main, [*asked, "--folder", str(tmp_path)])
    assert status == 2 and message in capsys.readouterr().err
