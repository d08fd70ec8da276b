"""Training steps are saved completely or not at all; losses against a teacher, computed by hand."""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from nmt.checkpoints import read_checkpoint, step_files, write_with_safetensors
from nmt.train.embeddings import DistillationLoss
from shared_embeddings.compress.distillation import Reconstruction, SoftTargets, TeacherLosses
from shared_embeddings.utils.errors import UserError
from tests.nmt.conftest import ErrorLine, Host, Trained

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
    host, one = trained(**APART)
    _, other = trained(**APART, learning_rate=0.02)
    mixed = copied(one, tmp_path)
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
    write_with_safetensors({"a": torch.full((4,), 1.0)}, {**parts, "optim": None}, base)
    child = os.fork()
    if child == 0:
        replace, moves = os.replace, []

        def counted(source: Path, target: Path) -> None:
            moves.append(target)
            os._exit(9) if len(moves) == kill_at else replace(source, target)

        os.replace = counted  # type: ignore[assignment]
        write_with_safetensors({"a": torch.full((4,), 2.0)}, {**parts, "generator": None}, base)
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
    each = -(layers[0](states).softmax(-1) * layers[1](output).log_softmax(-1)).sum(-1)
    assert total.item() == pytest.approx(0.75 * 12 + 0.25 * (each[0].sum() + each[1, 0]).item(), rel=1e-5)


def test_an_exact_student_has_a_gradient() -> None:
    """The norm has no gradient at zero, but it must not become NaN."""
    student = FixedRows()
    losses = TeacherLosses(Reconstruction([(student, student.rows.detach().clone())], 0.5))
    loss = DistillationLoss(FixedLoss(), losses, Mock())
    loss({}, None, None)[0].backward()
    assert torch.equal(student.rows.grad, torch.zeros(3, 2))
