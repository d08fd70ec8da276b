"""Checkpoints of language models, and resuming from them."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lm import checkpoint, models
from lm.checkpoint import load_model, load_state, save_model
from lm.train.loop import Trainer
from shared_embeddings.accounting import distinct_state
from shared_embeddings.utils.errors import UserError
from shared_embeddings.words.classes import WordClasses
from tests.helpers import Bomb, alter
from tests.lm.runs import StopTraining, log_lines, run, settings, small_corpus

WORDS = ["<eos>", "<unk>", *"abcdefghij"]
OPTIONS = {"embedding_dim": 8, "hidden_dim": 6, "num_layers": 2}
CODES = {"map": "compositional_code", "map_options": {"num_codebooks": 2, "codebook_size": 4}}
EMBEDDINGS: list[dict[str, Any]] = [
    {"method": "standard", "output_bias": True},
    {"method": "adaptive", "cutoffs": [4, 8], "factor": 2},
    {"method": "adaptive", "cutoffs": [4, 8], "factor": 1, "width": 3, "output_bias": True},
    {"method": "adaptive", "cutoffs": [4, 8], "factor": 1, **CODES},
    {"method": "define", "map_dim": 4, "expand_dim": 8, "depth": 2, "output": "map"},
    {"method": "define", "unit": "delight", "map_dim": 4, "expand_dim": 8, "depth": 2, "output": "map"},
    {"method": "alone", "base_dim": 6, "hidden_dim": 6, "codebooks": 2, "codebook_size": 4},
    {"method": "uncle", "unique_dim": 4, "num_classes": 3, "random_classes": True},
]


def built(embedding: dict[str, Any], seed: int = 0) -> models.LanguageModel:
    torch.manual_seed(seed)
    return models.build("awd_lstm", WORDS, embedding, OPTIONS).eval()


def config(embedding: dict[str, Any]) -> dict[str, Any]:
    return {"model": "awd_lstm", "embedding": embedding, "output_dir": "somewhere", **OPTIONS}


def log_probs(model: models.LanguageModel) -> torch.Tensor:
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        return model.embedding.log_prob(model(ids, model.initial_state(2)).hidden)


@pytest.mark.parametrize("embedding", EMBEDDINGS, ids=lambda embedding: embedding["method"])
def test_a_loaded_model_computes_the_same(tmp_path: Path, embedding: dict[str, Any]) -> None:
    model = built(embedding)
    path = tmp_path / "model.pt"
    save_model(path, model, WORDS, config(embedding), {"step": 3})
    torch.manual_seed(99)
    trained = load_model(path)
    assert torch.equal(log_probs(trained.model), log_probs(model))
    assert not trained.model.training
    assert trained.words == WORDS
    assert trained.config == config(embedding)
    assert trained.training == {"step": 3}


def test_a_checkpoint_is_self_contained(tmp_path: Path) -> None:
    classes = np.arange(len(WORDS)) % 3
    vectors = np.zeros((len(WORDS), 2), dtype=np.float32)
    file = tmp_path / "classes.npz"
    WordClasses(tuple(WORDS), classes, np.zeros((3, 2), dtype=np.float32), vectors).save(file)
    embedding = {"method": "uncle", "unique_dim": 4, "classes": str(file)}
    model = built(embedding)
    save_model(tmp_path / "model.pt", model, WORDS, config(embedding), None)
    file.unlink()
    trained = load_model(tmp_path / "model.pt")
    assert torch.equal(log_probs(trained.model), log_probs(model))
    save_model(tmp_path / "again.pt", trained.model, WORDS, trained.config, None)
    assert torch.equal(log_probs(load_model(tmp_path / "again.pt").model), log_probs(model))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of a model with an output bias."""
    save_model(tmp_path / "model.pt", built(EMBEDDINGS[0]), WORDS, config(EMBEDDINGS[0]), None)
    return tmp_path / "model.pt"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight


def test_tied_tensors_are_stored_once_and_loaded_into_both(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    state = distinct_state(model)
    assert sorted(state) == ["first.bias", "first.weight", "second.bias"]
    load_state(other, state, tmp_path)
    assert other.second.weight is other.first.weight
    assert torch.equal(other.second.weight, model.first.weight)


FORMAT = {"format": checkpoint.FORMAT}


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (Path.unlink, "no such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:1000]), "truncated"),
        (lambda path: torch.save({"opt": 1}, path), "not written by lm_train"),
        (lambda path: torch.save({**FORMAT, "version": 9}, path), "not written by lm_train"),
        (lambda path: torch.save({"opt": Bomb(path / "mark")}, path), "could run code"),
    ],
)
def test_invalid_checkpoints_are_named(
    path: Path, damage: Callable[[Path], object], word: str, recwarn: pytest.WarningsRecorder
) -> None:
    damage(path)
    recwarn.clear()
    with pytest.raises(UserError, match=word) as error_line:
        load_model(path)
    assert str(path) in str(error_line.value) and "\n" not in str(error_line.value)
    assert not recwarn.list, "a warning is another line on stderr"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model": "gone"}, "gone"),
        ({"num_layers": 3}, r"expected \(24,\)"),
        ({"embedding": {"method": "standard", "rank": 3}}, "rank"),
    ],
)
def test_an_inconsistent_checkpoint_fails(path: Path, change: dict[str, Any], word: str) -> None:
    alter(path, lambda content: content["config"].update(change))
    with pytest.raises(UserError, match=word):
        load_model(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_corpus(tmp_path_factory.mktemp("corpus"))


def assert_same_run(first: Path, second: Path) -> None:
    """Assert that two runs have bitwise identical results."""
    first_run, second_run = load_model(first / "last.pt"), load_model(second / "last.pt")
    assert first_run.training is not None and second_run.training is not None
    for key in ("step", "epoch", "position", "scores", "lengths"):
        assert first_run.training[key] == second_run.training[key], key
    pairs = zip(first_run.model.state_dict().items(), second_run.model.state_dict().values(), strict=True)
    for (name, tensor), other in pairs:
        assert torch.equal(tensor, other), name
    mine, others = first_run.training["averages"], second_run.training["averages"]
    assert (mine is None) == (others is None)
    if mine is not None:
        assert mine["steps"] == others["steps"]
        for parameter, other in zip(mine["parameters"], others["parameters"], strict=True):
            assert torch.equal(parameter, other)


@pytest.mark.slow_except("8-bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("first_end", [3, 8, 13])
def test_a_resumed_run_is_the_same_run(data: Path, tmp_path: Path, first_end: int, precision: str) -> None:
    """Dropout, lengths, averages, memory and the log continue exactly; in bf16, states have another type."""
    common = {"nonmono": 0, "evaluate_every": 2, "save_every": 1, "grad_accum_steps": 2}
    common["precision"] = precision
    run(settings(data, tmp_path / "whole", **common))
    stopped = settings(data, tmp_path / "parts", **common)

    def stop_after_saving(self: Trainer) -> bool:
        if self.step == first_end:
            raise StopTraining
        return False

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StopTraining):
        patch.setattr(Trainer, "_asked_to_stop", stop_after_saving)
        run(stopped)
    torch.manual_seed(12345)
    random.seed(99)
    run(stopped)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert log_lines(tmp_path / "parts") == log_lines(tmp_path / "whole")
    averages = load_model(tmp_path / "whole/last.pt").training["averages"]  # type: ignore[index]
    assert averages is not None, "this test wants averages in it"


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


def test_a_finished_run_does_nothing_and_can_be_extended(data: Path, tmp_path: Path) -> None:
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
        ({"optimizer": "sgd", "nonmono": None}, ["nonmono was 1 and is now None", "optimizer"]),
    ],
)
def test_changed_settings_fail_by_name(
    data: Path, tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    run(settings(data, tmp_path / "run", steps=2))
    before = (tmp_path / "run/last.pt").read_bytes()
    with pytest.raises(UserError, match="other settings") as error_line:
        run(settings(data, tmp_path / "run", **{"steps": 2, **changes}))
    for word in words:
        assert word in str(error_line.value)
    assert (tmp_path / "run/last.pt").read_bytes() == before
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="corpus in 'data'"):
        run(settings(small_corpus(tmp_path / "other", seed=8), tmp_path / "run", steps=2))


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


def test_initialization_with_another_model_fails(data: Path, tmp_path: Path) -> None:
    run(settings(data, tmp_path / "first", steps=1))
    first = tmp_path / "first/best.pt"
    with pytest.raises(UserError, match="belongs to another model"):
        run(settings(data, tmp_path / "second", steps=1, init_from=str(first), hidden_dim=9))
    alter(first, lambda content: content["words"].reverse())
    with pytest.raises(UserError, match="init_from: the vocabulary of .* is not that of the data"):
        run(settings(data, tmp_path / "second", steps=1, init_from=str(first)))


def test_an_output_folder_that_is_a_file_fails(data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("notes")
    with pytest.raises(UserError, match="run: is a file; choose another path"):
        run(settings(data, tmp_path / "run"))
    assert (tmp_path / "run").read_text() == "notes"


def test_full_disk_is_reported_and_saved_files_are_kept(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = settings(data, tmp_path / "run", steps=5)
    run(values)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left on device"):
        patch.setattr("lm.checkpoint.torch.save", fail)
        run({**values, "steps": 10})
    assert load_model(tmp_path / "run/last.pt").training["step"] == 5  # type: ignore[index]
    run({**values, "steps": 10})
    assert load_model(tmp_path / "run/last.pt").training["step"] == 10  # type: ignore[index]
