"""Compressing language models: what is written goes through the commands, and computes what it should."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from lm.checkpoint import load_model
from shared_embeddings import compression_hosts
from shared_embeddings.cli import main
from tests.lm.command_line import run, write_corpus, write_model
from tests.lm.runs import run as train
from tests.lm.runs import settings, small_corpus


@pytest.fixture(autouse=True)
def installed_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of this source tree, whichever one is installed."""
    point = EntryPoint("lm", "lm.compression:Host", "shared_embeddings.hosts")
    monkeypatch.setattr(compression_hosts, "entry_points", lambda group: [point])


def compress(model: Path, method: str, output: Path, *arguments: object) -> int:
    """The exit status of the command."""
    asked = ["compress", "--model", model, "--method", method, "--output", output, *arguments]
    return main([str(argument) for argument in asked])


def scores(path: Path) -> torch.Tensor:
    """The log-probabilities of a made-up text."""
    model = load_model(path).model
    ids = torch.randint(model.embedding.num_embeddings, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.embedding.log_prob(model(ids, model.initial_state(2)).hidden)


@pytest.mark.parametrize("kind", ["awd_lstm", "transformer_xl"])
@pytest.mark.parametrize(("method", "arguments"), [("standard", []), ("projective", ["--rank", 8])])
def test_full_size_keeps_the_scores(tmp_path: Path, kind: str, method: str, arguments: list[object]) -> None:
    model = write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus"), kind)
    assert compress(model, method, tmp_path / "same.pt", *arguments) == 0
    torch.testing.assert_close(scores(tmp_path / "same.pt"), scores(model), atol=1e-4, rtol=0)


def test_trained_model_is_evaluated_and_trains_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = small_corpus(tmp_path)
    plain = {"method": "standard", "output_bias": True}
    train(settings(data, tmp_path / "run", embedding=plain, steps=5))
    model, small = tmp_path / "run" / "last.pt", tmp_path / "small.pt"
    assert compress(model, "standard", tmp_path / "same.pt") == 0
    torch.testing.assert_close(scores(tmp_path / "same.pt"), scores(model), atol=1e-4, rtol=0)
    assert load_model(tmp_path / "same.pt").model.embedding.output_bias() is not None
    text = ["--text", tmp_path / "train.txt", "--report", tmp_path / "report.json"]
    assert compress(model, "funnel", small, "--rank", 4, "--fit-steps", 50, *text) == 0
    assert load_model(small).training is None
    report = json.loads((tmp_path / "report.json").read_text())
    assert not any("bias" in note for note in report["notes"])
    kept, bias = (load_model(path).model.embedding.output_bias() for path in (small, model))
    assert bias is not None and bias.abs().max() > 0
    assert torch.equal(kept, bias)
    without = ["--output-bias", "false", "--report", tmp_path / "report.json", "--force"]
    assert compress(model, "funnel", tmp_path / "without.pt", "--rank", 4, "--fit-steps", 1, *without) == 0
    notes = json.loads((tmp_path / "report.json").read_text())["notes"]
    assert any("bias of the output is left out" in note for note in notes)
    assert report["tables"][0]["fit"]["weighted_error"] > 0
    assert run("lm_eval", "-model", small, "-data", data) == 0
    own = load_model(small).config["embedding"]
    train(settings(data, tmp_path / "further", start_from=str(small), embedding=own, steps=2))
    assert load_model(tmp_path / "further" / "last.pt").config["embedding"]["rank"] == 4
    capsys.readouterr()
    assert compress(tmp_path / "train.txt", "funnel", small, "--rank", 4, "--force") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_methods_that_the_model_cannot_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_corpus(tmp_path / "corpus")
    model = write_model(tmp_path / "model.pt", data)
    options = ["--map-dim", 4, "--expand-dim", 8, "--depth", 2, "--max-groups", 2]
    assert compress(model, "define", tmp_path / "small.pt", *options) == 2
    assert "takes 4 dimensions, but the model ends in 8" in capsys.readouterr().err
    assert not (tmp_path / "small.pt").exists()
