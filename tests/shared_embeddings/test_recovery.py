"""Tests of the parts of recovery that need no model of a host."""

from __future__ import annotations

import gzip
import io
import resource
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shared_embeddings as se
from shared_embeddings.compress.distillation import divergence
from shared_embeddings.compress.host import scores_rows
from shared_embeddings.compress.measure import Batch, Samples, in_float32, split_lines
from shared_embeddings.compress.options import parse_duration
from shared_embeddings.compress.recovery import (
    SavedRecovery,
    Student,
    TeacherBatches,
    train,
)
from shared_embeddings.embedding import score_only
from shared_embeddings.utils.errors import UserError


@pytest.mark.parametrize("text", ["0min", "-1min", "nanmin", "20", "0steps", "1.5steps", "2 hours"])
def test_durations_that_cannot_be_kept(text: str) -> None:
    with pytest.raises(UserError, match=f"recover is '{text}'"):
        parse_duration(text)


def test_a_duration_is_of_the_clock_or_of_steps() -> None:
    assert parse_duration("2min").done(7, 30.0) == 0.25
    assert parse_duration("8steps").done(2, 1e9) == 0.25


def test_the_divergence_is_that_of_torch() -> None:
    """Words with a probability of zero count nothing and have no gradient."""
    scores = torch.randn(5, 7, requires_grad=True)
    wanted = torch.randn(5, 7).log_softmax(dim=-1)
    loss = divergence(wanted, scores)
    expected = nn.functional.kl_div(scores.log_softmax(-1), wanted, reduction="sum", log_target=True)
    torch.testing.assert_close(loss, expected)
    with torch.no_grad():
        scores[:, 3] = -torch.inf
    wanted = wanted.index_fill(1, torch.tensor(3), -torch.inf).log_softmax(dim=-1)
    loss = divergence(wanted, scores)
    (gradient,) = torch.autograd.grad(loss, scores)
    assert bool(loss.isfinite()) and bool(gradient.isfinite().all())


def test_lines_that_are_measured_are_not_read_otherwise(tmp_path: Path) -> None:
    texts = [tmp_path / "source", tmp_path / "target.gz"]
    lines = [f"line {number}" for number in range(40)] + ["line 2", ""]
    texts[0].write_text("\n\n".join(lines))
    texts[1].write_bytes(gzip.compress("\n\n".join(lines).upper().encode()))
    rest, measured = split_lines(texts, tmp_path / "copies") or ((), ())
    assert [text.name for text in (*rest, *measured)] == ["source", "target"] * 2
    other, held_out = ([text.read_text().split("\n") for text in copies] for copies in (rest, measured))
    assert [line.upper() for line in held_out[0]] == held_out[1] and "line 2" in held_out[0]
    assert sorted(filter(None, {*other[0], *held_out[0]})) == sorted({*lines} - {""})
    assert not {*other[0]} & ({*held_out[0]} - {""}) and 7 <= len([*filter(None, held_out[0])]) <= 9
    texts[0].write_text("one\ntwo\n")
    rest, measured = split_lines(texts[:1], tmp_path / "copies") or ((), ())
    assert rest[0].read_text() == "one\n" and measured[0].read_text() == "two\n"
    texts[0].write_text("one\n\none\n")
    assert split_lines(texts[:1], tmp_path / "copies") is None


def test_a_saved_state_is_of_the_same_training(tmp_path: Path) -> None:
    output = tmp_path / "small"
    saved = SavedRecovery(output, ["plan", torch.ones(2)])
    saved.write({"steps": 3, "tensors": torch.full((9,), 3.25)})
    assert saved.path == tmp_path / "small.recovery"
    assert SavedRecovery(output, ["plan", torch.ones(2)]).read()["steps"] == 3
    with pytest.raises(UserError, match="does not match this command"):
        SavedRecovery(output, ["plan", torch.zeros(2)])
    content = saved.path.read_bytes()
    place = content.index(torch.full((9,), 3.25).numpy().tobytes())
    bomb = zipfile.ZipFile(zipped := io.BytesIO(), "w", zipfile.ZIP_DEFLATED)
    with bomb, bomb.open("archive/data.pkl", "w") as file:
        file.write(b"\x80\x02B" + (2**20).to_bytes(4, "little") + bytes(2**20))
    for damaged, reason in (
        (content[:200], ""),
        (content[:place] + b"\1" + content[place + 1 :], "checksum"),
        (zipped.getvalue(), "in memory"),
    ):
        saved.path.write_bytes(damaged)
        with pytest.raises(UserError, match=f"is damaged .*{reason}.*; remove it"):
            SavedRecovery(output, ["plan", torch.ones(2)])


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path) -> None:
    saved, before = SavedRecovery(tmp_path / "small", 0), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(OSError, match="small.recovery"):
            saved.write({"tensors": torch.ones(3000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


class Original:
    """A model whose scores are a matrix, for each of eight words a row."""

    def __init__(self) -> None:
        self.scores = torch.randn(8, 8)

    def samples(self, texts: object, seed: int, tokens: int) -> Samples:
        parts = list(torch.randint(8, (3, 300), generator=torch.Generator().manual_seed(seed)))
        return Samples("drawn", parts, lambda ids: Batch(self.scores[ids]))


def student_of(original: Original) -> tuple[Student, nn.Parameter]:
    weight = nn.Parameter(original.scores.half().float().sign())

    def measure() -> float:
        wanted = original.scores.log_softmax(dim=-1)
        return float(divergence(wanted, weight.detach())) / 8

    return Student(
        {"weight": weight}, lambda ids: Batch(weight[ids]), measure, lambda _, value: value.half().float()
    ), weight


def test_a_training_keeps_the_best_values_as_they_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the rate is too large at first; where it stays so, those before."""
    original = Original()
    for rate, falls in ((2e-2, True), (1e2, True), (1e12, False)):
        monkeypatch.setattr("shared_embeddings.compress.recovery.RATE", rate)
        student, weight = student_of(original)
        before, saved = weight.detach().clone(), SavedRecovery(tmp_path / "small", 0)
        batches = TeacherBatches(original, None, 2, [], lambda *_: None)  # type: ignore[arg-type]
        report = train(student, batches, parse_duration("20steps"), saved)
        assert report.steps == 20 and report.tokens == 20 * 600 and batches.place == (13, 1)
        assert (report.kl_after < 0.9 * report.kl_before) == falls
        assert (student.factor < 1.0) == (rate > 1.0)
        assert torch.equal(weight, before) != falls and torch.equal(weight, weight.half().float())
        assert report.kl_after == pytest.approx(student._measure(), rel=1e-6)


def test_a_training_whose_divergence_is_never_finite_fails(tmp_path: Path) -> None:
    """Gradients that are not finite change nothing."""
    original = Original()
    original.scores[0, 0] = torch.nan
    student, weight = student_of(original)
    student.divergence, student._measure = float("inf"), lambda: float("inf")
    before = weight.detach().clone()
    batches = TeacherBatches(original, None, 2, [], lambda *_: None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="not finite in any check of 20 steps"):
        train(student, batches, parse_duration("20steps"), SavedRecovery(tmp_path / "small", 0))
    assert torch.equal(weight[1:], before[1:])


def test_tied_tensors_stay_tied_in_float32() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(torch.bfloat16)
    model[1].weight = model[0].weight
    old = model[0].weight
    with in_float32(model):
        assert model[0].weight is model[1].weight and model[0].weight.dtype == torch.float32
    assert model[0].weight is model[1].weight is old


def test_few_words_are_scored_within_another_selection() -> None:
    embedding = se.build("quantized", num_embeddings=30, embedding_dim=16, bits=4.0).eval()
    hidden, first, second = torch.randn(4, 16), torch.arange(9), torch.arange(3, 30)
    assert scores_rows(embedding, first)
    scores = embedding.logits(hidden)
    with score_only(embedding, first):
        torch.testing.assert_close(embedding.logits(hidden), scores[:, first])
        with score_only(embedding, second):
            torch.testing.assert_close(embedding.logits(hidden), scores[:, second])
        torch.testing.assert_close(embedding.logits(hidden), scores[:, first])
    torch.testing.assert_close(embedding.logits(hidden), scores)


def test_rows_are_looked_up_once_without_gradients() -> None:
    embedding = se.build("standard", num_embeddings=30, embedding_dim=16)
    words, hidden, calls = torch.arange(5), torch.randn(2, 16), []
    embedding.register_forward_hook(lambda *_: calls.append(1))
    with score_only(embedding, words):
        for _ in range(3):
            embedding.logits(hidden).sum().backward()
        assert len(calls) == 3 and embedding.weight.grad is not None
    embedding.requires_grad_(False)
    with score_only(embedding, words):
        scores: list[Tensor] = [embedding.logits(hidden) for _ in range(3)]
    assert len(calls) == 4 and torch.equal(scores[0], scores[2])
