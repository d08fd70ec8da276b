"""Training compressed language models until they predict as the original: ``compress --recover-steps``."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.checkpoint import load_model
from shared_embeddings.compress import recovery, session
from shared_embeddings.compress.recovery import Lessons, Student
from shared_embeddings.utils.interrupts import RESUME
from tests.helpers import CODES, every_word
from tests.lm.runs import Ended, compress, tool, write_corpus, write_model

pytestmark = pytest.mark.usefixtures("short_recovery")

WORDS = " ".join(f"w{number}" for number in range(60))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus", WORDS))


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: one.detach() for name, one in load_model(path).model.state_dict().items()}


def are_equal(first: Path, second: Path) -> bool:
    one, other = tensors(first), tensors(second)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def recovered(model: Path, small: Path, *arguments: object, method: tuple[Any, ...] = CODES) -> Ended:
    text = model.parent / "corpus" / "train.txt"
    name, *options = method
    return compress(model, name, small, *options, "--text", text, "--recover-steps", 12, *arguments)


@pytest.mark.slow_except("awd_lstm-codes", "transformer_xl-rank")
@pytest.mark.parametrize(
    "method",
    [CODES, ("projective", "--rank", 2), ("projective", "--rank", 2, "--store", "int8")],
    ids=["codes", "rank", "int8"],
)
@pytest.mark.parametrize("kind", ["awd_lstm", "transformer_xl"])
def test_the_divergence_falls_at_equal_bytes(tmp_path: Path, kind: str, method: tuple[Any, ...]) -> None:
    model = write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus", WORDS), kind)
    report, sizes, divergences = tmp_path / "report.json", [], []
    for number, more in enumerate((["--recover-steps", 12], [])):
        small = tmp_path / f"small{number}.pt"
        name, *options = method
        text = tmp_path / "corpus" / "train.txt"
        asked = [*options, "--text", text, "--report", report, "--force", *more]
        ended = compress(model, name, small, *asked)
        assert ended.status == 0
        found = json.loads(report.read_text())
        sizes.append(found["bytes_of_weights"])
        divergences.append(found["kept"]["kl"])
        if more:
            trained = found["recovery"]
            assert trained["steps"] == 12 and trained["tokens"] >= 1200
            assert trained["kl_after"] < 0.995 * trained["kl_before"]
            assert trained["kl_after"] == pytest.approx(found["kept"]["kl"], rel=1e-4)
            assert "recovery: 12 steps on" in ended.out and not small.with_name("small0.pt.recovery").exists()
    assert sizes[0] == sizes[1] and divergences[1] == pytest.approx(trained["kl_before"], rel=1e-4)


def test_without_a_text_it_reads_what_the_original_generates(model: Path, tmp_path: Path) -> None:
    name, *options = CODES
    ended = compress(model, name, tmp_path / "small.pt", *options, "--recover", 0.02)
    assert ended.status == 0 and "recovery read what the original generates" in ended.out


def test_steps_are_repeatable_also_after_an_interruption(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the second sample of the text, just before the divergence is measured."""
    small = [tmp_path / f"small{number}.pt" for number in range(3)]
    assert recovered(model, small[0]).status == recovered(model, small[1]).status == 0
    assert are_equal(small[0], small[1])
    step = Student.step

    def stopped(self: Student, lessons: Lessons, rate: float) -> float:
        if self.steps == 8:
            signal.raise_signal(signal.SIGINT)
        return step(self, lessons, rate)

    monkeypatch.setattr(Student, "step", stopped)
    ended = recovered(model, small[2])
    assert ended.status == 130 and RESUME in ended.err and not small[2].exists()
    monkeypatch.setattr(Student, "step", step)
    waiting = tmp_path / "small2.pt.recovery"
    assert torch.load(waiting, weights_only=True)["steps"] == 9
    assert recovered(model, small[2], "--seed", 1).says(str(waiting), "other options")
    assert recovered(model, small[2]).status == 0 and not waiting.exists()
    assert are_equal(small[0], small[2])


def test_a_model_never_ends_worse(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "RATE", 1e12)
    ended = recovered(model, tmp_path / "small.pt")
    assert ended.status == 0 and "the model is as before it" in ended.out
    name, *options = CODES
    text = tmp_path / "corpus" / "train.txt"
    assert compress(model, name, tmp_path / "plain.pt", *options, "--text", text).status == 0
    assert are_equal(tmp_path / "small.pt", tmp_path / "plain.pt")


def test_a_large_vocabulary_is_trained_alike_by_few_words(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the few words are all words."""
    assert recovered(model, tmp_path / "full.pt").status == 0
    monkeypatch.setattr(session.Session, "words_of", lambda self, *_: every_word(self))
    monkeypatch.setattr(session.Session, "sample", None)
    assert recovered(model, tmp_path / "few.pt").status == 0
    full, few = tensors(tmp_path / "full.pt"), tensors(tmp_path / "few.pt")
    for name, tensor in full.items():
        torch.testing.assert_close(few[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.slow
def test_the_best_candidate_is_trained(model: Path, tmp_path: Path) -> None:
    text, report = tmp_path / "corpus" / "train.txt", tmp_path / "report.json"
    asked = ["--model", model, "--output", tmp_path / "small.pt", "--bits", 8, "--text", text]
    assert (
        tool("compress", *asked, "--validation", text, "--recover-steps", 3, "--report", report).status == 0
    )
    found = json.loads(report.read_text())
    assert found["quality"]["measure"] == "perplexity" and found["recovery"]["steps"] == 3


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--recover", 1, "--recover-steps", 2], ["--recover and --recover-steps exclude each other"]),
        (["--recover", 1, "--no-check"], ["--recover runs the model; remove --no-check"]),
        (["--recover-steps", 1, "--no-check"], ["--recover-steps runs the model"]),
        (["--recover", 0], ["--recover is 0, but it must be a number of minutes above 0"]),
        (["--recover-steps", -1], ["--recover-steps is -1", "at least 1"]),
        (["--recover-steps", 1.5], ["--recover-steps"]),
    ],
)
def test_user_errors(model: Path, tmp_path: Path, arguments: list[object], messages: list[str]) -> None:
    name, *options = CODES
    assert compress(model, name, tmp_path / "small.pt", *options, *arguments).says(*messages)
    assert not (tmp_path / "small.pt").exists()


def test_nothing_is_trained_without_an_output(model: Path) -> None:
    ended = tool("compress", "--model", model, "--compare", "--bits", 2, "--recover", 1)
    assert ended.says("--recover trains the model that is written; give --output instead of --compare")
