"""Compressing a language model says how much of its predictions it kept: its last line, and the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.checkpoint import load_model
from lm.evaluate.quality import probe
from tests.lm.command_line import write_corpus, write_model
from tests.lm.test_compression import compress

pytestmark = pytest.mark.usefixtures("installed_host")

WORDS = " ".join(f"w{number}" for number in range(60))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of random weights, which are large enough to make it choose different words."""
    return write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus", WORDS))


def kept(model: Path, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, dict[str, Any]]:
    """The last line, and what the report has about it."""
    report = model.parent / "report.json"
    capsys.readouterr()
    method, *options = arguments
    asked = [*options, "--report", report, "--force"]
    assert compress(model, str(method), model.parent / "small.pt", *asked) == 0
    return capsys.readouterr().out.splitlines()[-1], json.loads(report.read_text())["kept"]


def test_ruin_is_told_from_health(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = model.parent / "corpus" / "test.txt"
    for source in ([], ["--text", text]):
        line, found = kept(model, capsys, "projective", "--rank", 8, *source)
        assert (
            line.startswith("kept 100% of the predictions of the original (") and not found["needs_training"]
        )
        line, found = kept(model, capsys, "projective", "--rank", 1, *source)
        assert line.endswith("): train this model before using it")
        assert found["share"] < 0.5 and found["needs_training"]
        assert line.startswith(f"warning: kept {int(100 * found['share'])}% of the predictions")
        assert ("60 tokens of test.txt" if source else "1,000 tokens sampled from the model") in line


@torch.no_grad()
def test_share_is_that_of_the_words_after_the_same_words(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, whose 40 tokens are read two at a time: 20 beginnings, and 20 words after them."""
    drawn = [f"w{number * 7 % 60}" for number in range(39)]
    (tmp_path / "line").write_text(" ".join(drawn) + "\n")
    _, found = kept(model, capsys, "projective", "--rank", 4, "--text", tmp_path / "line")
    agreed = asked = 0.0
    before, after = (load_model(path).model.eval() for path in (model, tmp_path / "small.pt"))
    words = load_model(model).words
    ids = [words.index(word) for word in [*drawn, "<eos>"]]
    for place in range(40):
        read = torch.tensor([ids[place - place % 2 : place + 1]])
        scores = [
            known.embedding.log_prob(known(read, known.initial_state(1)).hidden[0, -1]).exp()
            for known in (before, after)
        ]
        weight = float(scores[0].max())
        asked += weight
        agreed += weight * float(scores[0].argmax() == scores[1].argmax())
    assert 0.05 < found["share"] < 0.95
    assert found["share"] == pytest.approx(agreed / asked, abs=1e-4)


def test_validation_is_measured_instead(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = model.parent / "corpus" / "test.txt"
    report = model.parent / "report.json"
    line, found = kept(model, capsys, "projective", "--rank", 1, "--validation", text)
    quality = json.loads(report.read_text())["quality"]
    assert found["share"] == pytest.approx(quality["before"] / quality["after"])
    assert f"{found['share']:.0%}" != "100%" and "% of the probability of a word of the original" in line


@pytest.mark.slow_except("awd_lstm")
@pytest.mark.parametrize("kind", ["awd_lstm", "transformer_xl"])
def test_what_it_writes_is_drawn_from_a_seed(tmp_path: Path, kind: str) -> None:
    path = write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus", WORDS), kind)
    model, words, *_ = load_model(path)
    first, again, other = (probe(model, words, None, seed).predict() for seed in (1, 1, 2))
    assert torch.equal(first.words, again.words) and not torch.equal(first.words, other.words)
    assert len(first.words) == 1000 and len(first.words.unique()) > 5
    assert model.training == load_model(path).model.training


def test_a_model_that_diverged_was_not_shown_to_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_corpus(tmp_path / "corpus", WORDS)
    model, words, *_ = load_model(write_model(tmp_path / "model.pt", data))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    for texts in (None, [tmp_path / "corpus" / "test.txt"]):
        with pytest.raises(ValueError, match="not finite|no numbers|are NaN"):
            probe(model, words, texts, 1).predict()
