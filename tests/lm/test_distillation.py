"""Training language models with embedding distillation."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shared_embeddings as se
from lm.checkpoint import Trained, load_model
from lm.train.config import parse
from lm.train.loop import SegmentLoss
from shared_embeddings.compress.distillation import OPTION, Reconstruction, SoftTargets
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import OptionError
from tests.lm.runs import TinyLSTM, log_lines, run, settings, small_corpus, without_dropout
from tests.lm.test_training import torchrun

STANDARD = {"method": "standard", "output_bias": True}
PROJECTIVE = {"method": "projective", "rank": 4}
GROUPS = {"method": "group_reduce", "num_groups": 3, "min_rank": 1}
# A tiny step, so that the saved parameters are the initial ones.
STILL: dict[str, Any] = {"steps": 1, "evaluate_every": 1, "learning_rate": 1e-12, "log_every": 1}
Student = Callable[..., Trained]


@pytest.fixture(autouse=True)
def short_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps of gradient descent for fits that use it and set no number."""
    fit = se.fit

    def short(*arguments: Any, steps: int | None = None, **options: Any) -> Any:
        return fit(*arguments, steps=steps or 60, **options)

    monkeypatch.setattr(se, "fit", short)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, and a trained model with a full table in ``teacher`` next to it."""
    folder = tmp_path_factory.mktemp("distillation")
    corpus = small_corpus(folder)
    run(settings(corpus, folder / "teacher", embedding=STANDARD, steps=10))
    return corpus


@pytest.fixture
def teacher(data: Path) -> Path:
    return data.parent / "teacher/best.pt"


def changes(teacher: Path, embedding: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Changes of settings for a student; keys of the option may be given as ``d_KEY``."""
    keys = {name[2:]: others.pop(name) for name in list(others) if name.startswith("d_")}
    return {"embedding": embedding, OPTION: {"teacher": str(teacher), **keys}, **others}


@pytest.fixture
def student(data: Path, teacher: Path, tmp_path: Path) -> Student:
    """Train a student in the folder ``student``."""

    def train(embedding: dict[str, Any], **others: Any) -> Trained:
        run(settings(data, tmp_path / "student", **changes(teacher, embedding, **others)))
        return load_model(tmp_path / "student/last.pt")

    return train


@torch.no_grad()
def table(trained: Trained) -> Tensor:
    return trained.model.embedding.table().clone()


def network(trained: Trained) -> dict[str, Tensor]:
    """The tensors outside the embedding."""
    state = trained.model.state_dict()
    return {name: tensor for name, tensor in state.items() if not name.startswith("embedding.")}


def svd(full: Tensor, rank: int) -> Tensor:
    left, values, right = torch.linalg.svd(full.double(), full_matrices=False)
    return ((left[:, :rank] * values[:rank]) @ right[:rank]).float()


def near(tensors: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    assert tensors.keys() == wanted.keys()
    return all(torch.allclose(tensor, wanted[name], atol=1e-6) for name, tensor in tensors.items())


def test_student_starts_from_the_teacher(student: Student, teacher: Path, tmp_path: Path) -> None:
    begun, full = student(PROJECTIVE, **STILL), load_model(teacher)
    torch.testing.assert_close(table(begun), svd(table(full), 4), rtol=1e-4, atol=1e-5)
    assert near(network(begun), network(full))
    log = (tmp_path / "student/train.log").read_text()
    message = re.search(r"Fitted the embedding.*reconstruction loss ([\d.]+), relative error ([\d.]+)", log)
    assert message is not None and "bias" not in log.replace("output_bias", "")
    bias = full.model.embedding.output_bias()
    assert bias is not None and bias.abs().max() > 0
    torch.testing.assert_close(begun.model.embedding.output_bias(), bias, rtol=0, atol=1e-6)
    (tmp_path / "student/last.pt").unlink()
    without = student(PROJECTIVE | {"output_bias": False}, **STILL)
    assert without.model.embedding.output_bias() is None
    assert "output bias is dropped" in (tmp_path / "student/train.log").read_text()
    missed = svd(table(full), 4) - table(full)
    assert float(message.group(1)) == pytest.approx(float(missed.norm(dim=1).mean()), abs=1e-4)
    assert float(message.group(2)) == pytest.approx(float(missed.norm() / table(full).norm()), abs=1e-3)
    step = next(line for line in log.splitlines() if line.startswith("step 1 epoch"))
    assert f" reconstruction {message.group(1)} |" in step


def test_fitted_sizes_are_stored_without_the_teacher(
    student: Student, teacher: Path, data: Path, tmp_path: Path
) -> None:
    begun, full = student(GROUPS, **STILL), load_model(teacher)
    lines = (data / "vocabulary.tsv").read_text().splitlines()
    counts = torch.tensor([max(1, int(line.split("\t")[1])) for line in lines])
    options = {key: value for key, value in GROUPS.items() if key != "method"}
    options["output_bias"] = True
    wanted, _ = se.fit("group_reduce", table(full), token_counts=counts, seed=1, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(table(begun), wanted.table().detach(), rtol=1e-4, atol=1e-5)
    assert not [
        name for name in torch.load(teacher.parent / "best.pt", weights_only=True) if "teacher" in name
    ]
    assert begun.config["embedding"] == {"method": "group_reduce", **wanted.stored_options()}


def test_fit_steps_are_passed_on(student: Student, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    fit = se.fit

    def noted(*arguments: Any, **options: Any) -> Any:
        asked.append(options["steps"])
        return fit(*arguments, **options)

    monkeypatch.setattr(se, "fit", noted)
    student(PROJECTIVE, d_fit_steps=7, **STILL)
    assert asked == [7]


def test_random_starts(student: Student, teacher: Path, data: Path, tmp_path: Path) -> None:
    run(settings(data, tmp_path / "scratch", embedding=PROJECTIVE, **STILL))
    scratch, full = load_model(tmp_path / "scratch/last.pt"), load_model(teacher)
    own_table = student(PROJECTIVE, d_embedding_start="random", **STILL)
    assert torch.allclose(table(own_table), table(scratch), atol=1e-6)
    assert near(network(own_table), network(full))
    (tmp_path / "student/last.pt").unlink()
    own_network = student(PROJECTIVE, d_network_start="random", **STILL)
    torch.testing.assert_close(table(own_network), svd(table(full), 4), rtol=1e-4, atol=1e-5)
    assert near(network(own_network), network(scratch))


@pytest.mark.parametrize("what", ["embedding", "network"])
def test_frozen_parameters_stay_frozen_after_resume(what: str, student: Student, teacher: Path) -> None:
    student(PROJECTIVE, d_freeze=what, steps=5)
    final, full = student(PROJECTIVE, d_freeze=what, steps=10), load_model(teacher)
    still = torch.allclose(table(final), svd(table(full), 4), rtol=1e-4, atol=1e-5)
    assert still == (what == "embedding")
    assert near(network(final), network(full)) == (what == "network")


@pytest.mark.slow_except("projective")
@pytest.mark.parametrize("embedding", [PROJECTIVE, GROUPS], ids=["projective", "group_reduce"])
def test_resume_is_exact(embedding: dict[str, Any], data: Path, teacher: Path, tmp_path: Path) -> None:
    values = changes(teacher, embedding, d_alpha=0.3, d_soft_targets=0.5)
    run(settings(data, tmp_path / "whole", **values))
    moved = tmp_path / "moved.pt"
    run(settings(data, tmp_path / "parts", **{**values, "steps": 10}))
    moved.write_bytes(teacher.read_bytes())
    run(settings(data, tmp_path / "parts", **changes(moved, embedding, d_alpha=0.3, d_soft_targets=0.5)))
    whole, parts = (load_model(tmp_path / name / "last.pt") for name in ("whole", "parts"))
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(parts.model.state_dict()[name], tensor), name
    assert set(log_lines(tmp_path / "whole")) <= set(log_lines(tmp_path / "parts"))
    with pytest.raises(UserError, match=f"{OPTION} was .*'alpha': 0.3.* and is .*'alpha': 0.2"):
        run(settings(data, tmp_path / "parts", **changes(moved, embedding, d_alpha=0.2)))


class FixedTable(torch.nn.Module):
    """A student of three words, the second of which is padding."""

    padding_idx = 1

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.tensor([[3.0, 4.0], [9.0, 9.0], [1.0, 1.0]]))

    def table(self) -> Tensor:
        return self.rows


def test_the_loss_by_hand() -> None:
    """Distances 5 and 1 over two words, mean 3; 0.25 of that plus 0.75 of the cross entropy."""
    fixed: Any = FixedTable()
    reconstruction = Reconstruction([(fixed, torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 2.0]]))], 0.25)
    assert reconstruction.current() == pytest.approx(3.0) and fixed.training
    model: Any = TinyLSTM()
    ids = torch.tensor([[1, 2, 3]])
    loss, cross_entropy, _ = SegmentLoss(model, reconstruction)(ids, ids + 1, *model.initial_state(1))
    plain, same, _ = SegmentLoss(model)(ids, ids + 1, *model.initial_state(1))
    assert loss.item() == pytest.approx(0.25 * 3 + 0.75 * plain.item())
    assert cross_entropy.item() == same.item() == plain.item()
    loss.backward()
    expected = 0.25 / 2 * torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.0, -1.0]])
    torch.testing.assert_close(fixed.rows.grad, expected)


def test_soft_targets_by_hand() -> None:
    """A third of the probability is the teacher's; the states of both models are carried over."""
    torch.manual_seed(0)
    model: Any = TinyLSTM()
    teacher: Any = TinyLSTM().requires_grad_(False).eval()
    learned = SegmentLoss(model, None, SoftTargets(teacher, 1 / 3))
    ids = torch.tensor([[1, 2, 3], [3, 2, 1]])
    state = learned.initial_state(2)
    _, _, state = learned(ids, ids + 1, *state)
    loss, cross_entropy, _ = learned(ids, ids + 1, *state)
    log_probs = {}
    for name, network in {"own": model, "teacher": teacher}.items():
        output = network(ids, network(ids, network.initial_state(2)).state)
        log_probs[name] = network.embedding.logits(output.hidden).log_softmax(-1)
    hard = -log_probs["own"].gather(-1, (ids + 1).unsqueeze(-1)).mean()
    soft = -(log_probs["teacher"].exp() * log_probs["own"]).sum(-1).mean()
    torch.testing.assert_close(loss, hard * 2 / 3 + soft / 3)
    torch.testing.assert_close(cross_entropy, hard.detach())
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.slow
def test_two_processes_equal_one_with_twice_the_batch(data: Path, teacher: Path, tmp_path: Path) -> None:
    values = without_dropout(**changes(teacher, GROUPS, d_alpha=0.3), nonmono=0, steps=6, evaluate_every=3)
    run(settings(data, tmp_path / "one", batch_size=4, **values))
    result = torchrun(settings(data, tmp_path / "two", batch_size=2, **values))
    assert result.returncode == 0, result.stderr
    alone, parallel = (load_model(tmp_path / name / "last.pt") for name in ("one", "two"))
    for name, tensor in alone.model.state_dict().items():
        torch.testing.assert_close(parallel.model.state_dict()[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


def test_options_without_effect_fail() -> None:
    with pytest.raises(OptionError, match="'init_from' has no effect together with 'embedding_distillation'"):
        parse(settings(Path("d"), Path("s"), init_from="b.pt", **{OPTION: {"teacher": "x"}}))
    seeded = {"method": "alone", "hidden_dim": 8, "seed": 3}
    with pytest.raises(OptionError, match="cannot have its own `seed`"):
        parse(settings(Path("d"), Path("s"), **changes(Path("x"), seeded)))


@pytest.mark.parametrize(
    ("others", "printed"),
    [
        ({"teacher": "none.pt"}, "teacher: checkpoint .*no such file"),
        ({"embedding_dim": 16}, "set embedding_dim: 8"),
        ({"num_layers": 3}, r"is \(40, 10\) in this model, \(32, 10\) in the teacher"),
        ({"model": "lstm", "weight_decay": None}, "is a awd_lstm, this model a lstm"),
        (
            {"embedding": {"method": "define", "map_dim": 4, "expand_dim": 8, "depth": 2, "max_groups": 1}},
            "score_dim 8, this define embedding 4, so the last layers differ",
        ),
        ({"data": "other"}, "vocabulary of the teacher"),
    ],
)
def test_unsuitable_teachers_are_rejected(
    data: Path, teacher: Path, tmp_path: Path, others: dict[str, Any], printed: str
) -> None:
    case: dict[str, Any] = {"data": data, "teacher": teacher, "embedding": PROJECTIVE, **others}
    if case["data"] == "other":
        case["data"] = small_corpus(tmp_path, seed=3)
    path = tmp_path / case.pop("teacher")
    values = settings(case.pop("data"), tmp_path / "run", **changes(path, case.pop("embedding"), **case))
    with pytest.raises((UserError, OptionError), match=f"^{OPTION}: .*{printed}"):
        run(values)
