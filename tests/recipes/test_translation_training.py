"""Checkpoints, logs and resumption of training with ``onmt_train``, also on two machines."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from nmt.checkpoints import read_checkpoint, read_weights
from recipes.common.recipe import Row, find_recipe
from recipes.common.tools import option_value
from recipes.translation import train
from recipes.translation.train import Data, Machines, complete_checkpoints
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import locked
from tests.nmt.conftest import Host, run


def save(folder: Path, step: int, when: float | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"model_step_{step}.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", "x" * 1000)
    if when is not None:
        os.utime(path, (when, when))
    return path


def test_checkpoints_sort_by_step_without_partial_ones(tmp_path: Path) -> None:
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
    assert train.kept_segments(segments, 300.0) == [{"from_step": 0, "started": 100.0, "ended": 300.0}]
    assert [part["ended"] for part in train.kept_segments(segments, 900.0)] == [900.0, 900.0]


class Tools:
    """Replaces the commands: "trains" by writing checkpoints, "averages" by writing a file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
        self.calls: list[list[str]] = []
        self.fails = False
        self.run = run
        monkeypatch.setattr(train, "run_tool", self)

    def __call__(self, name: str, arguments: list[Any], keep_open: list[int] | None = None) -> None:
        self.calls.append([name, *map(str, arguments)])
        if name == "onmt_average_models":
            Path(arguments[-1]).write_text("averaged")
            return
        for step in (4, 6, 8):
            save(self.run / "checkpoints", step)
        if self.fails:
            raise UserError("failed")


DATA = train.Data({"data": {}}, "checksum")
ROW = Row(name="row", embedding={"method": "standard"}, train={"train_steps": 8}, average=2)


def test_training_averages_and_finishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = Tools(monkeypatch, tmp_path)
    train.train_row(ROW, tmp_path, DATA, [], 2)
    assert "-train_from" not in tools.calls[0]
    assert tools.calls[1][2:4] == [str(tmp_path / f"checkpoints/model_step_{n}.pt") for n in (6, 8)]
    assert json.loads((tmp_path / "training.json").read_text())["seconds"] >= 0
    train.train_row(ROW, tmp_path, DATA, [], 2)
    assert [call[0] for call in tools.calls].count("onmt_train") == 1
    train.train_row(ROW, tmp_path, DATA, ["-train_steps", "12"], 2)
    assert tools.calls[-2][-4:-2] == ["-train_steps", "12"]
    assert tools.calls[-2][-1].endswith("model_step_8.pt")


def test_failed_training_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = Tools(monkeypatch, tmp_path)
    tools.fails = True
    with pytest.raises(UserError):
        train.train_row(ROW, tmp_path, DATA, [], 2)
    assert json.loads((tmp_path / "training.json").read_text())["finished"] is None
    assert not (tmp_path / train.AVERAGED).exists()
    tools.fails = False
    train.train_row(ROW, tmp_path, DATA, [], 2)
    assert tools.calls[1][-1].endswith("model_step_8.pt")
    assert (tmp_path / train.AVERAGED).read_text() == "averaged"
    with (
        locked(tmp_path / "lock"),
        pytest.raises(BlockingIOError, match="another process is running here"),
    ):
        train.train_row(ROW, tmp_path, DATA, [], 2)
    with pytest.raises(UserError, match="train_steps is 'many'"):
        train.train_row(ROW, tmp_path, DATA, ["-train_steps", "many"], 2)


def test_changed_settings_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Tools(monkeypatch, tmp_path)
    train.train_row(ROW, tmp_path, DATA, [], 2)
    other = Row(name="row", embedding={"method": "funnel"}, train={"train_steps": 9}, average=2)
    with pytest.raises(UserError, match="started with a different embedding;"):
        train.train_row(other, tmp_path, DATA, [], 2)
    with pytest.raises(UserError, match="started with a different data;"):
        train.train_row(ROW, tmp_path, DATA._replace(checksum="other"), [], 2)
    elsewhere = DATA._replace(options={"data": {"train": {}}})
    train.train_row(ROW, tmp_path, elsewhere, [], 2)


def test_option_value_parses_every_spelling() -> None:
    options = ["-a", "1", "--train_steps=5", "-b"]
    assert option_value(options, "train_steps") == "5"
    assert option_value(["--train_steps", "5", "-train_steps", "6"], "train_steps") == "6"
    assert option_value(options, "b") is None


BATCH = {"tokens": 8, "per_gpu": 4}
STEPS = 3
# Without randomness, and with a bucket as a batch, both see the same sentences in every step.
SETTINGS: dict[str, Any] = {
    "embedding": {"method": "funnel", "rank": 4},
    "dropout": [0.0],
    "bucket_size": 4,
    "optim": "sgd",
    "learning_rate": 0.02,
    "max_grad_norm": 0,
    "train_steps": STEPS,
    "save_checkpoint_steps": STEPS,
    "report_every": 1,
}
SECONDS = 300


def run_together(commands: Sequence[Sequence[str]], logs: Path) -> list[int]:
    """Run commands at the same time; they and their children end in any case."""
    processes = []
    for number, command in enumerate(commands):
        with (logs / f"{number}.log").open("w") as log:
            streams: Any = {"stdout": log, "stderr": subprocess.STDOUT}
            processes.append(subprocess.Popen(command, **streams, start_new_session=True))
    try:
        return [process.wait(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, 9)
            process.wait()


def reports(log: str) -> list[tuple[str, ...]]:
    """Step, perplexity and number of sentences of each line that ``onmt_train`` has logged."""
    return re.findall(r"Step +(\d+)/ *\d+;.* ppl: +([\d.]+);.* sents: +(\d+);", log)


@pytest.mark.slow
def test_two_machines_equal_one_process_with_all_batches(tmp_path: Path) -> None:
    """Neither reads the other's part, and both have the same parameters at every step."""
    host = Host(tmp_path)
    configs = [host.config(f"machine{number}", **SETTINGS, gpu_backend="gloo") for number in range(2)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    onmt_train = str(Path(sys.executable).with_name("onmt_train"))
    commands = [
        [onmt_train, "-config", str(config), *Machines(1, 2, number, "127.0.0.1", port).options(BATCH)]
        for number, config in enumerate(configs)
    ]
    states = run_together(commands, tmp_path)
    logs = [(tmp_path / f"{number}.log").read_text() for number in range(2)]
    assert states == [0, 0], logs
    assert not list(tmp_path.glob("machine1_step_*"))

    alone = host.config("alone", **SETTINGS, log_file=str(tmp_path / "alone.log"))
    run("onmt_train", "-config", str(alone), *Machines(0).options(BATCH))
    wanted, found = reports((tmp_path / "alone.log").read_text()), reports(logs[0])
    assert [(*mine[::2],) for mine in wanted] == [
        (str(1 + step), str(BATCH["tokens"])) for step in range(STEPS)
    ]
    for mine, other in zip(wanted, found, strict=True):
        assert mine[::2] == other[::2] and float(other[1]) == pytest.approx(float(mine[1]), rel=1e-3)
    assert reports(logs[1]) == []

    _, single, _ = read_weights(str(tmp_path / f"alone_step_{STEPS}.pt"))
    saved = tmp_path / f"machine0_step_{STEPS}.pt"
    _, double, _ = read_weights(str(saved))
    assert single.keys() == double.keys()
    for name, tensor in single.items():
        torch.testing.assert_close(double[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
    # Before the last bucket, of four.
    drawn = [state["data"]["workers"][0]["drawn"] for state in read_checkpoint(saved)["resume"]]
    assert drawn == [{"corpus": 4 * (STEPS - 1)}] * 2


@pytest.mark.parametrize("finished", [None, 2, 4])
def test_another_machine_joins_an_unfinished_run(
    finished: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []
    monkeypatch.setenv("RUNS", str(tmp_path))
    monkeypatch.setattr(train, "run_tool", lambda name, arguments: called.append([name, *arguments]))
    recipe = find_recipe("iwslt_pten")
    row = replace(recipe.row("distilled_table3_standard"), train={"train_steps": 4})
    run = recipe.home / row.name
    (run / "checkpoints").mkdir(parents=True)
    newest = run / "checkpoints" / "model_step_2.pt"
    zipfile.ZipFile(newest, "w").close()
    (run / "training.json").write_text(json.dumps({"finished": finished}))
    train.join_training(run, row, Data({"src_vocab": "v"}, "sum"), 1, ["-world_size", "2"])
    if finished == 4:
        assert called == []
        return
    config = run / "machine_1.yaml"
    assert called == [["onmt_train", "-config", str(config), "-world_size", "2", "-train_from", str(newest)]]
    assert yaml.safe_load(config.read_text())["save_model"] == str(run / "checkpoints" / "model")
    assert json.loads((run / "training.json").read_text()) == {"finished": finished}
