"""Configurations, checkpoints and the books of a training run."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
from recipes.common.checkpoints import complete_checkpoints
from recipes.common.config import Row, read_row

from recipes.common import training
from recipes.common.errors import UserError
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


COMMON = "average: 2\ntrain: {train_steps: 10}\ntranslate: {}\n"


@pytest.mark.parametrize(
    ("common", "row", "said"),
    [
        (COMMON, "embeding: {}\n", "unknown key 'embeding'"),
        (COMMON, "embedding: {method: funnel}\naverages: 3\n", "unknown key 'averages'"),
        (COMMON, "embedding: {}\ntrain: 3\n", "train is 3; it must be of type dict"),
        (COMMON, "embedding: {}\ndistill: full\n", "distill is 'full'"),
        (COMMON, "embedding: {}\ndistill: {alpha: 0}\n", "teacher is None; it must be one of full"),
        (COMMON, "embedding: {}\ndistill: {teacher: row}\n", "teacher is 'row'; it must be one of full"),
        (COMMON, "", "must hold embedding"),
        (COMMON, "embedding: funnel\n", "must be of type dict"),
        (COMMON, "embedding: {\n", "cannot be read as YAML"),
        (COMMON.replace("2", "0"), "embedding: {}\n", "average is 0"),
        (COMMON.replace("2", "true"), "embedding: {}\n", "average is True"),
    ],
)
def test_wrong_configuration_is_refused(tmp_path: Path, common: str, row: str, said: str) -> None:
    (tmp_path / "common.yaml").write_text(common)
    (tmp_path / "row.yaml").write_text(row)
    (tmp_path / "full.yaml").write_text("embedding: {method: standard}\n")
    with pytest.raises(UserError, match=said):
        read_row(tmp_path, "row")


def test_row_is_merged_and_common_is_no_row(tmp_path: Path) -> None:
    (tmp_path / "common.yaml").write_text(COMMON)
    (tmp_path / "row.yaml").write_text("embedding: {method: funnel, rank: 3}\n")
    assert read_row(tmp_path, "row") == Row(
        "row", {"method": "funnel", "rank": 3}, 2, {"train_steps": 10}, {}
    )
    with pytest.raises(UserError, match="no config 'common'; there are: row"):
        read_row(tmp_path, "common")


def test_distilled_row_names_its_teacher_and_its_own_options(tmp_path: Path) -> None:
    (tmp_path / "common.yaml").write_text("average: 2\ntrain: {train_steps: 10, seed: 1}\ntranslate: {}\n")
    (tmp_path / "full.yaml").write_text("embedding: {method: standard}\n")
    (tmp_path / "row.yaml").write_text(
        "embedding: {method: funnel, rank: 3}\ndistill: {teacher: full}\ntrain: {train_steps: 4}\n"
    )
    row = read_row(tmp_path, "row")
    assert row.distill == {"teacher": "full"}
    assert row.train == {"train_steps": 4, "seed": 1}
    full = read_row(tmp_path, "full")
    assert full.distill is None and full.train == {"train_steps": 10, "seed": 1}


def test_option_value_takes_every_spelling() -> None:
    options = ["-a", "1", "--train_steps=5", "-b"]
    assert training.option_value(options, "train_steps") == "5"
    assert training.option_value(["--train_steps", "5", "-train_steps", "6"], "train_steps") == "6"
    assert training.option_value(options, "b") is None


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
ROW = Row("row", {"method": "standard"}, 2, {"train_steps": 8}, {})


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
    other = Row("row", {"method": "funnel"}, 2, {"train_steps": 9}, {})
    with pytest.raises(UserError, match="started with another embedding;"):
        training.train_row(other, tmp_path, DATA, [], 2)
    with pytest.raises(UserError, match="started with another data;"):
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
