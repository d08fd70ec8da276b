"""Resuming, restarting and changing runs of lm_train, and their folders."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.checkpoint import load_model
from lm.train.loop import Trainer
from shared_embeddings.errors import UserError
from tests.altered import alter
from tests.lm.runs import log_lines, run, settings, small_corpus


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_corpus(tmp_path_factory.mktemp("corpus"))


def assert_same_run(first: Path, second: Path) -> None:
    """Assert that two runs left the same, to the last bit."""
    one, two = load_model(first / "last.pt"), load_model(second / "last.pt")
    assert one.training is not None and two.training is not None
    for key in ("step", "epoch", "position", "scores", "lengths"):
        assert one.training[key] == two.training[key], key
    pairs = zip(one.model.state_dict().items(), two.model.state_dict().values(), strict=True)
    for (name, tensor), other in pairs:
        assert torch.equal(tensor, other), name
    mine, others = one.training["averages"], two.training["averages"]
    assert (mine is None) == (others is None)
    if mine is not None:
        assert mine["steps"] == others["steps"]
        for parameter, other in zip(mine["parameters"], others["parameters"], strict=True):
            assert torch.equal(parameter, other)


@pytest.mark.slow_except("8")
@pytest.mark.parametrize("first_end", [3, 8, 13])
def test_a_run_in_two_parts_is_the_same_run(data: Path, tmp_path: Path, first_end: int) -> None:
    """Dropout, lengths, averages, memory and what the log says go on where they stopped."""
    common = {"nonmono": 0, "evaluate_every": 2, "save_every": 1, "grad_accum_steps": 2}
    run(settings(data, tmp_path / "whole", **common))
    stopped = settings(data, tmp_path / "parts", **common)

    class Stop(Exception):
        pass

    def stop_after_saving(self: Trainer) -> bool:
        if self.step == first_end:
            raise Stop
        return False

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Trainer, "_asked_to_stop", stop_after_saving)
        run(stopped)
    torch.manual_seed(12345)
    random.seed(99)
    run(stopped)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert log_lines(tmp_path / "parts") == log_lines(tmp_path / "whole")
    averages = load_model(tmp_path / "whole/last.pt").training["averages"]  # type: ignore[index]
    assert averages is not None, "this test wants averages in it"


def start(values: dict[str, Any], folder: Path) -> subprocess.Popen[str]:
    """Start lm_train in a process of its own."""
    folder.mkdir(exist_ok=True)
    arguments = [piece for key, value in values.items() for piece in (f"-{key}", str(value))]
    return subprocess.Popen(
        [sys.executable, "-m", "lm.train.command", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_nothing_had_happened(data: Path, tmp_path: Path) -> None:
    common = {"nonmono": 0, "evaluate_every": 4, "save_every": 3, "steps": 600}
    save = tmp_path / "parts"
    process = start(settings(data, save, **common), tmp_path)
    while process.poll() is None and not (save / "last.pt").exists():
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    stopped_at = load_model(save / "last.pt").training["step"]  # type: ignore[index]
    common["steps"] = stopped_at + 20
    common["evaluate_every"] = 4
    run(settings(data, save, **common))
    run(settings(data, tmp_path / "whole", **common))
    assert_same_run(tmp_path / "whole", save)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_saved_after_its_step(
    data: Path, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = settings(data, tmp_path / "parts", evaluate_every=20)
    step = Trainer._train_step

    def interrupted_step(self: Trainer) -> Any:
        result = step(self)
        if self.step == 7:
            os.kill(os.getpid(), number)
        return result

    monkeypatch.setattr(Trainer, "_train_step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        run(values)
    monkeypatch.undo()
    training = load_model(tmp_path / "parts/last.pt").training
    assert training is not None and training["step"] == 7
    run(values)
    run({**values, "output_dir": str(tmp_path / "whole")})
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_finished_run_has_nothing_to_do_and_may_be_made_longer(data: Path, tmp_path: Path) -> None:
    values = settings(data, tmp_path / "run", steps=4, evaluate_every=2)
    run(values)
    before = log_lines(tmp_path / "run")
    run(values)
    assert log_lines(tmp_path / "run") == before
    run({**values, "steps": 6, "log_every": 1})
    assert load_model(tmp_path / "run/last.pt").training["step"] == 6  # type: ignore[index]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_rate": 4}, ["learning_rate was 3.0 and is now 4.0"]),
        ({"seed": 2, "hidden_dim": 9}, ["seed", "hidden_dim was 10 and is now 9"]),
        ({"optimizer": "sgd", "nonmono": None}, ["nonmono was 1 and is now None", "optimizer"]),
        ({"embedding": {"method": "funnel", "rank": 3}}, ["embedding"]),
    ],
)
def test_other_settings_are_refused_by_name(
    data: Path, tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    run(settings(data, tmp_path / "run", steps=2))
    before = (tmp_path / "run/last.pt").read_bytes()
    with pytest.raises(UserError, match="other settings") as refusal:
        run(settings(data, tmp_path / "run", **{"steps": 2, **changes}))
    for word in words:
        assert word in str(refusal.value)
    assert (tmp_path / "run/last.pt").read_bytes() == before


def test_other_text_is_refused(data: Path, tmp_path: Path) -> None:
    run(settings(data, tmp_path / "run", steps=2))
    (tmp_path / "other").mkdir()
    other = small_corpus(tmp_path / "other", seed=8)
    with pytest.raises(UserError, match="corpus in 'data'"):
        run(settings(other, tmp_path / "run", steps=2))


def test_a_run_may_move_with_its_data(data: Path, tmp_path: Path) -> None:
    run(settings(data, tmp_path / "run", steps=2))
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "data").symlink_to(data)
    run(settings(tmp_path / "data", tmp_path / "moved", steps=4))
    assert load_model(tmp_path / "moved/last.pt").training["step"] == 4  # type: ignore[index]


def test_training_starts_from_another_run(data: Path, tmp_path: Path) -> None:
    """The finetune stage: the parameters of a trained model, averages from the first step on."""
    run(settings(data, tmp_path / "first", steps=4, evaluate_every=4))
    first = load_model(tmp_path / "first/best.pt").model
    finetune = {"optimizer": "asgd", "nonmono": None, "init_from": str(tmp_path / "first/best.pt")}
    values = settings(data, tmp_path / "second", steps=1, learning_rate=1e-9, **finetune)
    run(values)
    second = load_model(tmp_path / "second/last.pt")
    for (name, tensor), other in zip(first.state_dict().items(), second.model.state_dict().values()):
        torch.testing.assert_close(other, tensor, msg=name)
    assert second.training is not None and second.training["averages"]["steps"] == 1
    (tmp_path / "first/best.pt").unlink()
    run({**values, "steps": 2})


def test_a_start_of_another_shape_is_refused(data: Path, tmp_path: Path) -> None:
    run(settings(data, tmp_path / "first", steps=1))
    changes = {"init_from": str(tmp_path / "first/best.pt"), "hidden_dim": 9}
    with pytest.raises(UserError, match="belongs to another model"):
        run(settings(data, tmp_path / "second", steps=1, **changes))


def test_a_start_with_other_words_is_refused(data: Path, tmp_path: Path) -> None:
    run(settings(data, tmp_path / "first", steps=1))
    first = tmp_path / "first/best.pt"
    alter(first, lambda content: content["words"].reverse())
    with pytest.raises(UserError, match="init_from: the vocabulary of .* is not that of the data"):
        run(settings(data, tmp_path / "second", steps=1, init_from=str(first)))


def test_what_killed_processes_have_left_is_cleared_away(data: Path, tmp_path: Path) -> None:
    values = settings(data, tmp_path / "run", steps=1)
    run(values)
    before = {path.name for path in (tmp_path / "run").iterdir()}
    for name in (".last.pt.7.tmp", ".best.pt.7.tmp", ".config.yaml.7.tmp", "notes.tmp"):
        (tmp_path / "run" / name).write_bytes(b"half")
    run({**values, "steps": 2})
    assert {path.name for path in (tmp_path / "run").iterdir()} == before | {"notes.tmp"}


def test_a_run_in_a_file_is_refused(data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("notes")
    with pytest.raises(UserError, match="run: is a file; choose another path"):
        run(settings(data, tmp_path / "run"))
    assert (tmp_path / "run").read_text() == "notes"


def test_a_full_disk_is_told_and_leaves_what_was_saved(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = settings(data, tmp_path / "run", steps=5)
    run(values)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(UserError) as refusal:
        patch.setattr("lm.checkpoint.save_tensors", fail)
        run({**values, "steps": 10})
    assert f"output_dir {tmp_path / 'run'}: cannot be written (No space left on device)" in str(refusal.value)
    assert load_model(tmp_path / "run/last.pt").training["step"] == 5  # type: ignore[index]
    run({**values, "steps": 10})
    assert load_model(tmp_path / "run/last.pt").training["step"] == 10  # type: ignore[index]
