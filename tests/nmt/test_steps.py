"""The steps of a training, in one process and in several."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from nmt.checkpoints import read_checkpoint, read_weights, step_files, write_model
from nmt.train.embeddings import DistillationLoss
from shared_embeddings.compress.distillation import Reconstruction, SoftTargets, TeacherLosses
from shared_embeddings.utils.errors import UserError
from tests.nmt.conftest import FUNNEL, ErrorLine, Host, Trained, free_port
from tests.processes import Running, error_lines, run

STANDARD = {"method": "standard"}
APART = {"embedding": STANDARD, "save_format": "safetensors"}


def copied(model: Path, folder: Path, name: str = "model") -> Path:
    """A checkpoint and the weights next to it, if any, under another name."""
    folder.mkdir(exist_ok=True)
    for suffix in (".pt", ".safetensors"):
        if model.with_suffix(suffix).exists():
            shutil.copy(model.with_suffix(suffix), folder / f"{name}{suffix}")
    return folder / f"{name}.pt"


def commands(host: Host, model: Path, folder: Path) -> dict[str, list[object]]:
    """Arguments of every command that reads a checkpoint."""
    source = host.folder / "test.src"
    return {
        "onmt_train": ["-config", host.config("again", embedding=None), "-train_from", model],
        "onmt_translate": ["-model", model, "-src", source, "-output", folder / "out"],
        "onmt_average_models": ["-models", model, model, "-output", folder / "mean.pt"],
        "onmt_release_model": ["-model", model, "-output", folder / "small.pt"],
    }


def test_weights_of_another_run_are_detected(trained: Trained, tmp_path: Path, error_line: ErrorLine) -> None:
    """The files after a kill between the two files of a step, over those of an earlier run."""
    host, path = trained(**APART)
    _, other = trained(**APART, learning_rate=0.02)
    mixed = copied(path, tmp_path)
    shutil.copy(other.with_suffix(".safetensors"), mixed.with_suffix(".safetensors"))
    for command, arguments in commands(host, mixed, tmp_path).items():
        line = error_line(command, *arguments)
        assert str(mixed) in line and str(mixed.with_suffix(".safetensors")) in line, line


def test_files_of_steps(trained: Trained, tmp_path: Path) -> None:
    _, model = trained(**APART)
    for name in ("run_step_2000", "run_step_300", "run_step_best", "run_step_7.small", "other_step_9"):
        copied(model, tmp_path, name)
    (tmp_path / "run_step_300.safetensors").rename(tmp_path / "run_step_300.00.safetensors")
    steps = step_files(str(tmp_path / "run"))
    assert list(steps.values()) == [300, 300, 2000, 2000]
    assert {path.name for path in steps} == {
        *("run_step_300.pt", "run_step_300.00.safetensors", "run_step_2000.pt", "run_step_2000.safetensors")
    }


@pytest.mark.parametrize("kill_at", [1, 2, 3])
def test_a_kill_between_two_files_of_a_step(tmp_path: Path, kill_at: int) -> None:
    """The process exits before its first, second, ... rename; weights of another step are detected."""
    base = str(tmp_path / "run_step_3")
    parts = {"opt": Namespace(), "vocab": {"src": ["a"], "tgt": ["a"], "data_task": "seq2seq"}}
    write_model({"a": torch.full((4,), 1.0)}, {**parts, "optim": None}, f"{base}.pt", "safetensors")
    child = os.fork()
    if child == 0:
        replace, moves = os.replace, []

        def counted(source: Path, target: Path) -> None:
            moves.append(target)
            os._exit(9) if len(moves) == kill_at else replace(source, target)

        os.replace = counted  # type: ignore[assignment]
        write_model({"a": torch.full((4,), 2.0)}, {**parts, "generator": None}, f"{base}.pt", "safetensors")
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == (9 if kill_at < 3 else 0)
    numbers = load_file(f"{base}.safetensors")["a"].tolist()
    assert numbers == [1.0 if kill_at == 1 else 2.0] * 4
    if kill_at == 2:
        with pytest.raises(UserError, match="use an earlier step"):
            read_checkpoint(f"{base}.pt")
    else:
        assert ("generator" in read_checkpoint(f"{base}.pt")) == (kill_at == 3)


def test_upstream_checkpoints_without_checksum_load(trained: Trained, tmp_path: Path) -> None:
    _, model = trained(embedding=STANDARD)
    content = torch.load(model, weights_only=True)
    assert len(content.pop("checksum")) == 64
    torch.save(content, tmp_path / "upstream.pt")
    assert read_checkpoint(tmp_path / "upstream.pt").keys() == content.keys()


class FixedLoss:
    """OpenNMT's loss with a known outcome: 12 over 3 target words."""

    padding_idx = 1

    def __call__(self, *batch: Any, **options: Any) -> tuple[torch.Tensor, Any]:
        return torch.tensor(12.0), SimpleNamespace(n_words=3)


class FixedRows(torch.nn.Module):
    """A student of three words, the second of which is padding."""

    padding_idx = 1

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.tensor([[3.0, 4.0], [9.0, 9.0], [1.0, 1.0]]))

    def table(self) -> torch.Tensor:
        return self.rows


def test_the_loss_by_hand() -> None:
    """Distances 5 and 1 over two words, mean 3; 0.25 * 3 plus 0.75 * 12 / 3, for three words."""
    student = FixedRows()
    teacher = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 2.0]])
    loss = DistillationLoss(FixedLoss(), TeacherLosses(Reconstruction([(student, teacher)], 0.25)), Mock())
    total, statistics = loss({}, None, None)
    assert total.item() == pytest.approx(3 * (0.25 * 3 + 0.75 * 4))
    assert statistics.n_words == 3 and loss.padding_idx == 1
    total.backward()
    expected = 0.25 * 3 / 2 * torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.0, -1.0]])
    torch.testing.assert_close(student.rows.grad, expected)
    assert loss.take_mean() == pytest.approx(3.0)
    assert loss.take_mean() == 0.0


def test_soft_targets_by_hand() -> None:
    """Two words of one sentence and one of another, padded; a quarter of the loss is the teacher's."""
    torch.manual_seed(0)
    states, output = torch.randn(2, 2, 4), torch.randn(2, 2, 4)
    layers = [torch.nn.Linear(4, 5) for _ in range(2)]
    teacher = Mock(return_value=(states, {}), generator=layers[0])
    batch = {"src": None, "tgt": torch.tensor([[2, 3, 4], [2, 4, 1]]).unsqueeze(-1), "srclen": None}
    losses = TeacherLosses(soft_targets=SoftTargets(teacher, 0.25))
    loss = DistillationLoss(FixedLoss(), losses, layers[1])
    total, _ = loss(batch, output, None, trunc_start=0)
    soft = -(layers[0](states).softmax(-1) * layers[1](output).log_softmax(-1)).sum(-1)
    assert total.item() == pytest.approx(0.75 * 12 + 0.25 * (soft[0].sum() + soft[1, 0]).item(), rel=1e-5)


def test_an_exact_student_has_a_gradient() -> None:
    """The norm has no gradient at zero, but it must not become NaN."""
    student = FixedRows()
    losses = TeacherLosses(Reconstruction([(student, student.rows.detach().clone())], 0.5))
    loss = DistillationLoss(FixedLoss(), losses, Mock())
    loss({}, None, None)[0].backward()
    assert torch.equal(student.rows.grad, torch.zeros(3, 2))


def two_ranks() -> dict[str, Any]:
    """Options of two ranks on this machine's CPU."""
    return {"world_size": 2, "gpu_ranks": [0, 1], "gpu_backend": "gloo", "master_port": free_port()}


def train(config: Path) -> list[str]:
    """The command line of a training."""
    return [str(Path(sys.executable).with_name("onmt_train")), "-config", str(config)]


def endless(host: Host, **options: Any) -> Path:
    """The configuration of a training that ends only by a signal."""
    long = {"train_steps": 1_000_000, "save_checkpoint_steps": 1_000_000, "report_every": 2}
    return host.config("model", embedding=FUNNEL, **{**long, **two_ranks(), **options})


@pytest.mark.slow
@pytest.mark.parametrize("everybody", [False, True], ids=["parent", "group"])
def test_two_ranks_save_the_same_step_when_they_are_stopped(everybody: bool, host: Host) -> None:
    config = endless(host, num_workers=1 if everybody else 0)
    with Running(train(config), host.folder / "log") as running:
        assert running.wait_for(r"Step +2/")
        (running.send_to_all if everybody else running.send)(signal.SIGTERM)
        assert running.end() == 143
        assert running.wait_for_empty_group(), running.members()
    message = "onmt_train: terminated; run the same command again to resume"
    assert error_lines(running.output(), "onmt_train") == [message]
    assert "Traceback" not in running.output()
    (saved,) = host.folder.glob("model_step_*.pt")
    step = int(saved.stem.rsplit("_", 1)[1])
    assert len(read_checkpoint(saved)["resume"]) == 2
    log = host.folder / "log"
    run(train(endless(host, num_workers=1 if everybody else 0, train_steps=step + 2)), log)
    body = read_weights(str(host.folder / f"model_step_{step + 2}.pt"))[1]
    assert "the data over" not in log.read_text()  # both positions are restored
    assert any("emb_luts.0" in name and tensor.shape == (88, 4) for name, tensor in body.items())


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
def test_a_killed_rank_is_named_in_one_line(place: int, host: Host) -> None:
    with Running(train(endless(host)), host.folder / "log") as running:
        assert running.wait_for(r"Step +2/")
        victim = running.children()[place]
        os.kill(victim, signal.SIGKILL)
        assert running.end() == 2
        assert running.wait_for_empty_group(), running.members()
    (line,) = error_lines(running.output(), "onmt_train")
    assert f"rank {place} (process {victim})" in line and "SIGKILL" in line
    assert line.endswith("run the same command again to resume from the last checkpoint")
    assert "Traceback" not in running.output()


@pytest.mark.slow
def test_orphaned_ranks_save_before_they_exit(host: Host) -> None:
    with Running(train(endless(host)), host.folder / "log") as running:
        assert running.wait_for(r"Step +2/")
        running.send(signal.SIGKILL)
        assert running.end() == -signal.SIGKILL
        assert running.wait_for_empty_group(), running.members()
    assert len(list(host.folder.glob("model_step_*.pt"))) == 1


@pytest.mark.slow
def test_the_mistake_of_a_rank_is_reported_in_one_line(host: Host) -> None:
    """Both ranks diverge."""
    config = endless(host, optim="sgd", learning_rate=1e30)
    with Running(train(config), host.folder / "log") as running:
        assert running.end() == 2
        assert running.wait_for_empty_group(), running.members()
    (line,) = error_lines(running.output(), "onmt_train")
    assert "lower learning_rate" in line
    assert "Traceback" not in running.output()


# Equivalence


@pytest.mark.slow
def test_two_ranks_equal_one_process_with_accum_count_2(host: Host) -> None:
    """Fed equal batches (a bucket is one batch here), they reach the same parameters."""
    names = [f"w{number}" for number in range(40)]
    lines = [[names[place % 40], names[place // 40], names[place % 7]] for place in range(160)]
    host.write("train.src", [" ".join(line) for line in lines])
    host.write("train.tgt", [" ".join(word.replace("w", "v") for word in line) for line in lines])
    descent = {"optim": "sgd", "learning_rate": 0.02, "decay_method": "none", "max_grad_norm": 0}
    options = {**descent, "embedding": FUNNEL, "dropout": [0.0], "attention_dropout": [0.0]}
    batches = {"batch_type": "sents", "batch_size": 8, "bucket_size": 8, "train_steps": 10}
    alone = host.train("alone", **options, **batches, accum_count=[2])
    run(train(host.config("two", **options, **batches, **two_ranks())), host.folder / "log")
    single, double = (read_weights(str(path))[1] for path in (alone, host.folder / "two_step_10.pt"))
    start = read_weights(str(host.train("start", **{**options, **batches, "learning_rate": 1e-30})))[1]
    for name, tensor in single.items():
        torch.testing.assert_close(double[name], tensor, rtol=0, atol=1e-6, msg=name)
    assert max(float((single[name] - start[name]).abs().max()) for name in single) > 0.01


@pytest.mark.slow
def test_two_processes_stop_early_together(host: Host) -> None:
    """With a learning rate of zero, the second validation stops training."""
    options = {"learning_rate": 1e-30, "early_stopping": 1, "valid_steps": 2}
    run(train(endless(host, **options)), host.folder / "log")
    assert [path.name for path in host.folder.glob("model_step_*.pt")] == ["model_step_4.pt"]
    assert len(read_checkpoint(host.folder / "model_step_4.pt")["resume"]) == 2
