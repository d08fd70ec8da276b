"""Checkpoints, and what is logged of a training run with ``onmt_train``."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from recipes.common.rows import Row
from recipes.common.tools import option_value
from recipes.translation import training
from recipes.translation.training import complete_checkpoints
from shared_embeddings.errors import UserError
from shared_embeddings.utils.files import locked


def save(folder: Path, step: int, when: float | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"model_step_{step}.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", "x" * 1000)
    if when is not None:
        os.utime(path, (when, when))
    return path


def test_checkpoints_sort_by_step_and_half_written_ones_do_not_count(tmp_path: Path) -> None:
    for step in (1000, 250, 9):
        save(tmp_path, step)
    newest = save(tmp_path, 1250)
    newest.write_bytes(newest.read_bytes()[:500])
    (tmp_path / "model_step_best.pt").touch()
    assert [checkpoint.step for checkpoint in complete_checkpoints(tmp_path)] == [9, 250, 1000]
    assert complete_checkpoints(tmp_path / "absent") == []


def test_time_after_the_last_checkpoint_is_not_counted() -> None:
    segments: list[dict[str, Any]] = [
        {"from_step": 0, "started": 100.0, "ended": None},
        {"from_step": 0, "started": 500.0, "ended": None},
    ]
    assert training.kept_segments(segments, 300.0) == [{"from_step": 0, "started": 100.0, "ended": 300.0}]
    assert [part["ended"] for part in training.kept_segments(segments, 900.0)] == [900.0, 900.0]


class Tools:
    """Stands in for the commands: "trains" by leaving checkpoints, "averages" by leaving a file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
        self.calls: list[list[str]] = []
        self.fails = False
        self.run = run
        monkeypatch.setattr(training, "run_tool", self)

    def __call__(self, name: str, arguments: list[Any], keep_open: list[int] | None = None) -> None:
        self.calls.append([name, *map(str, arguments)])
        if name == "onmt_average_models":
            Path(arguments[-1]).write_text("averaged")
            return
        for step in (4, 6, 8):
            save(self.run / "checkpoints", step)
        if self.fails:
            raise UserError("failed")


DATA = training.Data({"data": {}}, "checksum")
ROW = Row("row", {"method": "standard"}, {"train_steps": 8}, 2)


def test_training_starts_averages_and_then_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = Tools(monkeypatch, tmp_path)
    training.train_row(ROW, tmp_path, DATA, [], 2)
    assert "-train_from" not in tools.calls[0]
    assert tools.calls[1][2:4] == [str(tmp_path / f"checkpoints/model_step_{n}.pt") for n in (6, 8)]
    assert json.loads((tmp_path / "training.json").read_text())["seconds"] >= 0
    training.train_row(ROW, tmp_path, DATA, [], 2)
    assert [call[0] for call in tools.calls].count("onmt_train") == 1
    training.train_row(ROW, tmp_path, DATA, ["-train_steps", "12"], 2)
    assert tools.calls[-2][-4:-2] == ["-train_steps", "12"]
    assert tools.calls[-2][-1].endswith("model_step_8.pt")


def test_failed_training_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = Tools(monkeypatch, tmp_path)
    tools.fails = True
    with pytest.raises(UserError):
        training.train_row(ROW, tmp_path, DATA, [], 2)
    assert json.loads((tmp_path / "training.json").read_text())["finished"] is None
    assert not (tmp_path / training.AVERAGED).exists()
    tools.fails = False
    training.train_row(ROW, tmp_path, DATA, [], 2)
    assert tools.calls[1][-1].endswith("model_step_8.pt")
    assert (tmp_path / training.AVERAGED).read_text() == "averaged"


def test_changed_settings_are_not_mixed_into_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Tools(monkeypatch, tmp_path)
    training.train_row(ROW, tmp_path, DATA, [], 2)
    other = Row("row", {"method": "funnel"}, {"train_steps": 9}, 2)
    with pytest.raises(UserError, match="started with a different embedding;"):
        training.train_row(other, tmp_path, DATA, [], 2)
    with pytest.raises(UserError, match="started with a different data;"):
        training.train_row(ROW, tmp_path, DATA._replace(checksum="other"), [], 2)
    elsewhere = DATA._replace(options={"data": {"train": {}}})
    training.train_row(ROW, tmp_path, elsewhere, [], 2)


def test_only_one_process_trains_a_row(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "lock"),
        pytest.raises(BlockingIOError, match="another process is running here"),
    ):
        training.train_row(ROW, tmp_path, DATA, [], 2)


def test_nonsense_steps_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Tools(monkeypatch, tmp_path)
    with pytest.raises(UserError, match="train_steps is 'many'"):
        training.train_row(ROW, tmp_path, DATA, ["-train_steps", "many"], 2)


def test_option_value_takes_every_spelling() -> None:
    options = ["-a", "1", "--train_steps=5", "-b"]
    assert option_value(options, "train_steps") == "5"
    assert option_value(["--train_steps", "5", "-train_steps", "6"], "train_steps") == "6"
    assert option_value(options, "b") is None
