"""Losses against a teacher, computed by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from nmt.train.embeddings import DistillationLoss, SoftTargets, TeacherLosses
from shared_embeddings.fitting.distillation import Reconstruction


class FixedLoss:
    """OpenNMT's loss with a known outcome: 12 over 3 target words."""

    padding_idx = 1

    def __call__(self, *batch: Any, **options: Any) -> tuple[torch.Tensor, Any]:
        return torch.tensor(12.0), SimpleNamespace(n_words=3)


class FixedTable(torch.nn.Module):
    """A student of three words, the second of which is padding."""

    padding_idx = 1

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.tensor([[3.0, 4.0], [9.0, 9.0], [1.0, 1.0]]))

    def table(self) -> torch.Tensor:
        return self.rows


def test_the_loss_by_hand() -> None:
    """Distances 5 and 1 over two words, mean 3; 0.25 * 3 beside 0.75 * 12 / 3, for three words."""
    student = FixedTable()
    teacher = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 2.0]])
    loss = DistillationLoss(FixedLoss(), TeacherLosses(Reconstruction([(student, teacher)], 0.25)))
    total, statistics = loss({}, None, None)
    assert total.item() == pytest.approx(3 * (0.25 * 3 + 0.75 * 4))
    assert statistics.n_words == 3 and loss.padding_idx == 1
    total.backward()
    expected = 0.25 * 3 / 2 * torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.0, -1.0]])
    torch.testing.assert_close(student.rows.grad, expected)
    assert loss.take_mean() == pytest.approx(3.0)
    assert loss.take_mean() == 0.0


def test_soft_targets_by_hand() -> None:
    """Two words of a sentence and one of another, which is padded; a quarter of the loss is the teacher's."""
    torch.manual_seed(0)
    states, output = torch.randn(2, 2, 4), torch.randn(2, 2, 4)
    layers = [torch.nn.Linear(4, 5) for _ in range(2)]
    teacher = Mock(return_value=(states, {}), generator=layers[0])
    batch = {"src": None, "tgt": torch.tensor([[2, 3, 4], [2, 4, 1]]).unsqueeze(-1), "srclen": None}
    loss = DistillationLoss(FixedLoss(), TeacherLosses(soft_targets=SoftTargets(teacher, layers[1], 0.25)))
    total, _ = loss(batch, output, None, trunc_start=0)
    each = -(layers[0](states).softmax(-1) * layers[1](output).log_softmax(-1)).sum(-1)
    assert total.item() == pytest.approx(0.75 * 12 + 0.25 * (each[0].sum() + each[1, 0]).item(), rel=1e-5)


def test_an_exact_student_has_a_gradient() -> None:
    """The norm has none at zero, where it must not become NaN."""
    student = FixedTable()
    loss = DistillationLoss(
        FixedLoss(), TeacherLosses(Reconstruction([(student, student.rows.detach().clone())], 0.5))
    )
    loss({}, None, None)[0].backward()
    assert torch.equal(student.rows.grad, torch.zeros(3, 2))
