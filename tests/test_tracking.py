"""Weights & Biases: a module in its place records what both hosts send."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shared_embeddings.utils.tracking import WandbWriter
from tests.lm.runs import run as train_lm
from tests.lm.runs import settings, small_corpus
from tests.nmt.conftest import Host
from tests.nmt.conftest import run as run_nmt


class FakeRun:
    """What `wandb.init` returns."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.logged: list[tuple[dict[str, float], int]] = []
        self.is_finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((values, step))

    def finish(self) -> None:
        self.is_finished = True

    def values(self, tag: str) -> dict[int, float]:
        return {step: values[tag] for values, step in self.logged if tag in values}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """All runs that the module in place of wandb starts."""
    started: list[FakeRun] = []

    def init(**options: Any) -> FakeRun:
        started.append(FakeRun(options))
        return started[-1]

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return started


def test_without_wandb_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'shared-embeddings\[wandb\]'"):
        WandbWriter("project", tmp_path, {})
    values = settings(small_corpus(tmp_path), tmp_path / "run", steps=2, wandb="project")
    with pytest.raises(ModuleNotFoundError, match="wandb"):
        train_lm(values)
    assert not (tmp_path / "run" / "train.log").exists()


def test_a_language_model_sends_training_and_validation(tmp_path: Path, runs: list[FakeRun]) -> None:
    train_lm(settings(small_corpus(tmp_path), tmp_path / "run", steps=10, wandb="project"))
    [run] = runs
    assert run.is_finished and run.values("train/loss").keys() == {2, 4, 6, 8, 10}
    assert run.values("valid/perplexity").keys() == {5, 10}
    assert (run.options["project"], run.options["group"]) == ("project", "run")
    assert run.options["config"]["steps"] == 10
    train_lm(settings(tmp_path / "data", tmp_path / "run", steps=12))
    assert len(runs) == 1  # a run may be resumed without


@pytest.mark.slow
def test_a_translator_sends_what_tensorboard_gets(tmp_path: Path, runs: list[FakeRun]) -> None:
    config = Host(tmp_path).config("model", valid_steps=6)
    run_nmt("onmt_train", "-config", str(config), "-wandb", "project")
    [run] = runs
    assert run.is_finished and run.values("progress/ppl").keys() == {2, 4, 6}
    assert run.values("valid/ppl").keys() == {6}
    assert run.options["config"]["train_steps"] == 6
