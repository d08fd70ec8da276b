"""Checkpoints: what comes back, and what becomes of files that are none."""

from __future__ import annotations

import argparse
import os
import pickle
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from torch import nn

from lm import checkpoint, models
from lm.checkpoint import load_model, load_state, save_model
from shared_embeddings.classes import WordClasses
from shared_embeddings.errors import UserError
from shared_embeddings.sizing.accounting import distinct_state
from tests.altered import alter

WORDS = ["<eos>", "<unk>", *"abcdefghij"]
OPTIONS = {"embedding_dim": 8, "hidden_dim": 6, "num_layers": 2}
EMBEDDINGS: list[dict[str, Any]] = [
    {"method": "standard", "output_bias": True},
    {"method": "adaptive", "cutoffs": [4, 8], "factor": 2},
    {"method": "adaptive", "cutoffs": [4, 8], "factor": 1, "width": 3, "output_bias": True},
    {
        "method": "adaptive",
        "cutoffs": [4, 8],
        "factor": 1,
        "map": "compositional_code",
        "map_options": {"num_codebooks": 2, "codebook_size": 4},
    },
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


def test_a_checkpoint_needs_no_other_file(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda path: path.unlink(), "no such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:1000]), "truncated"),
        (lambda path: path.write_bytes(b""), "truncated"),
        (lambda path: path.write_text("hello"), "truncated"),
        (lambda path: torch.save({"opt": 1}, path), "not written by lm_train"),
        (lambda path: torch.save(torch.zeros(2), path), "not written by lm_train"),
        (lambda path: torch.save({"format": checkpoint.FORMAT, "version": 9}, path), "version 9"),
        (lambda path: torch.save({"format": checkpoint.FORMAT, "version": 1}, path), "has no config"),
        (lambda path: path.write_bytes(pickle.dumps({"a": 1}, protocol=4)), "truncated"),
        (lambda path: path.write_bytes(pickle.dumps({"a": 1.5}, protocol=2)[:-8]), "truncated"),
        (lambda path: torch.jit.script(nn.Linear(2, 2)).save(str(path)), "truncated"),
        (lambda path: torch.save({"opt": argparse.Namespace()}, path), "could run code"),
    ],
)
def test_files_that_are_no_checkpoint_are_named(
    tmp_path: Path, damage: Any, word: str, recwarn: pytest.WarningsRecorder
) -> None:
    path = tmp_path / "model.pt"
    save_model(path, built(EMBEDDINGS[0]), WORDS, config(EMBEDDINGS[0]), None)
    damage(path)
    recwarn.clear()
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()  # nmt, in other tests, lets Namespaces be read
    try:
        with pytest.raises(UserError, match=word) as refusal:
            load_model(path)
    finally:
        torch.serialization.add_safe_globals(allowed)
    assert str(path) in str(refusal.value) and "\n" not in str(refusal.value)
    assert not recwarn.list, "a warning is another line on stderr"


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch evil",)


def test_code_in_a_file_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(Evil(), tmp_path / "model.pt")
    with pytest.raises(UserError, match="cannot be read"):
        load_model(tmp_path / "model.pt")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model": "gone"}, "gone"),
        ({"embedding": {"method": "standard"}}, "embedding.bias is only in the checkpoint"),
        ({"hidden_dim": 7}, "expected"),
        ({"num_layers": 3}, "only in the model"),
        ({"embedding": {"method": "standard", "rank": 3}}, "rank"),
    ],
)
def test_a_checkpoint_that_does_not_fit_itself(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    path = tmp_path / "model.pt"
    save_model(path, built(EMBEDDINGS[0]), WORDS, config(EMBEDDINGS[0]), None)
    alter(path, lambda content: content["config"].update(change))
    with pytest.raises(UserError, match=word):
        load_model(path)


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pt"
    model = built(EMBEDDINGS[0])
    save_model(path, model, WORDS, config(EMBEDDINGS[0]), None)
    before = path.read_bytes()

    def fail(content: object, file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="no space"):
        save_model(path, model, WORDS, config(EMBEDDINGS[0]), None)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]
