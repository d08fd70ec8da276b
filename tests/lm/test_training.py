"""Training of language models."""

from __future__ import annotations

import math
import random
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.checkpoint import load_model
from lm.data.corpus import load_corpus
from lm.evaluation import Reading, evaluate
from lm.models import build
from lm.train.config import parse
from lm.train.loop import Group, Report, SegmentLoss, Trainer
from lm.train.optim import draw_length
from shared_embeddings.modules.alone import AloneEmbedding
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import locked
from tests.lm.runs import StopTraining, command, run, settings, small_corpus, without_dropout, words_of


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_corpus(tmp_path_factory.mktemp("corpus"))


def trainer(data: Path, **changes: Any) -> Trainer:
    """A trainer with parameters of seed 1 that saves nothing."""
    config = parse(settings(data, data / "unused", **changes))
    corpus = load_corpus(data)
    torch.manual_seed(1)
    model = build(
        config.training.model, corpus.vocabulary.words, config.training.embedding, config.model_options()
    )
    return Trainer(config, model.train(), corpus.train, corpus.valid, Group(torch.device("cpu")))


def train(subject: Trainer) -> Trainer:
    subject.run(Report(), lambda: None, lambda: None)
    return subject


def parameters(subject: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in subject.parameters]


# A step


def test_steps_equal_a_plain_loop(data: Path) -> None:
    """Clipped gradient descent over consecutive segments, with the state carried over within an epoch."""
    changes = without_dropout(optimizer="sgd", nonmono=None, steps=18, evaluate_every=18, max_grad_norm=0.5)
    subject = train(trainer(data, **changes))
    fresh = trainer(data, **changes)
    model, stream = fresh.model, fresh.text_columns
    position, state = 0, model.initial_state(4)
    for _ in range(18):
        ids, targets = stream.segment(position, 12, "cpu")
        output = model(ids, state)
        scores = model.embedding.logits(output.hidden)
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten()) + output.penalty
        gradients = torch.autograd.grad(loss, fresh.parameters)
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        with torch.no_grad():
            for parameter, gradient in zip(fresh.parameters, gradients):
                gradient = gradient * min(1.0, 0.5 / (norm + 1e-6)) + 1e-6 * parameter
                parameter -= 3 * gradient
        position, state = position + ids.size(1), output.state
        if position >= stream.length - 1:
            position, state = 0, model.initial_state(4)
    for actual, expected in zip(parameters(subject), parameters(fresh), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_accumulated_batches_equal_one_batch(data: Path) -> None:
    changes = without_dropout(optimizer="sgd", nonmono=None, steps=18)
    whole, parts = train(trainer(data, **changes)), train(trainer(data, **changes, grad_accum_steps=2))
    assert parts.scores == pytest.approx(whole.scores, rel=1e-5)
    for actual, expected in zip(parameters(parts), parameters(whole), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_varied_lengths_scale_the_learning_rate(data: Path) -> None:
    subject = trainer(data, sequence_length=40, learning_rate=2)
    expected_length = draw_length(40, random.Random(1))
    rate = subject._train_step()["rate"]
    assert subject.position == expected_length != 40
    assert rate == pytest.approx(2 * expected_length / 40)


def test_warmup_and_schedule_multiply(data: Path) -> None:
    subject = trainer(data, **without_dropout(warmup_steps=4, schedule="cosine", steps=8))
    rates = [subject._train_step()["rate"] for _ in range(8)]
    cosine = [(1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]
    rise = [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    assert rates == pytest.approx([3 * up * down for up, down in zip(rise, cosine)])


def test_words_without_tokens_in_a_segment_need_no_gradient(data: Path) -> None:
    embedding = {"method": "adaptive", "cutoffs": [5, 20], "factor": 2}
    subject = train(trainer(data, embedding=embedding, sequence_length=5, batch_size=1, steps=4))
    assert math.isfinite(subject.scores[-1])


def test_the_loss_is_the_cross_entropy_and_the_penalty(data: Path) -> None:
    subject = trainer(data, ar_weight=2.0)
    ids, targets = subject.text_columns.segment(0, 12, "cpu")
    torch.manual_seed(5)
    output = subject.model(ids, subject.states[0])
    torch.manual_seed(5)
    loss, cross_entropy, state = SegmentLoss(subject.model)(ids, targets, *subject.states[0])
    scores = torch.log_softmax(subject.model.embedding.logits(output.hidden), dim=-1)
    expected = -scores.gather(-1, targets.unsqueeze(-1)).mean()
    assert output.penalty.item() > 0
    torch.testing.assert_close(cross_entropy, expected)
    torch.testing.assert_close(loss, expected + output.penalty)
    assert not cross_entropy.requires_grad and not any(part.requires_grad for part in state)


# Validation and the end


def test_training_learns_a_learnable_text(data: Path) -> None:
    changes = without_dropout(
        optimizer="adam", nonmono=None, learning_rate=0.02, weight_decay=None, steps=None, epochs=12,
        embedding_dim=16, hidden_dim=24, embedding={"method": "standard"},
        ar_weight=0.0, tar_weight=0.0, evaluate_every=None,
    )  # fmt: skip
    subject = train(trainer(data, **changes))
    assert subject.epoch == 12 and len(subject.scores) == 12
    # The text itself has about 1.1 nats per token; 22 words at random have 3.1.
    assert subject.scores[-1] < 2.0 < 2.5 < subject.scores[0]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"steps": 12, "evaluate_every": 5}, [5, 10, 12]),
        ({"steps": None, "epochs": 2, "evaluate_every": None}, [13, 26]),
    ],
    ids=["interval", "epochs"],
)
def test_validation_runs_at_its_interval_and_at_the_end(
    data: Path, changes: dict[str, Any], wanted: list[int]
) -> None:
    subject = trainer(data, **without_dropout(**changes))
    seen: list[int] = []
    subject.run(Report(), lambda: seen.append(subject.step), lambda: None)
    assert seen == wanted and len(subject.scores) == len(wanted)


def test_averages_start_when_validation_stalls_and_are_scored(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = trainer(data, **without_dropout(steps=12, evaluate_every=3, nonmono=1))
    losses = iter([3.0, 2.0, 4.0, 1.0])
    scored: list[list[torch.Tensor]] = []
    after_steps: list[list[torch.Tensor]] = []

    def score(*_: Any) -> Any:
        scored.append(parameters(subject))
        return type("Score", (), {"nats": next(losses), "tokens": 1})

    monkeypatch.setattr("lm.train.loop.evaluate", score)
    step = subject._train_step

    def noted() -> Any:
        result = step()
        after_steps.append(parameters(subject))
        return result

    monkeypatch.setattr(subject, "_train_step", noted)
    train(subject)
    for validation in range(3):
        for actual, expected in zip(scored[validation], after_steps[3 * validation + 2]):
            assert torch.equal(actual, expected)
    # 4.0 is worse than 3.0, the best before the last one: averaging starts with the steps after it.
    assert subject.averages is not None and subject.averages.steps == 3
    for place, actual in enumerate(scored[3]):
        mean = torch.stack([after_steps[number][place] for number in (9, 10, 11)]).mean(0)
        torch.testing.assert_close(actual, mean)
    for actual, expected in zip(parameters(subject), after_steps[11]):
        assert torch.equal(actual, expected)


def test_best_checkpoint_has_the_best_score(data: Path, tmp_path: Path) -> None:
    run(settings(data, tmp_path / "run", nonmono=0, evaluate_every=2))
    last, best = load_model(tmp_path / "run/last.pt"), load_model(tmp_path / "run/best.pt")
    assert last.training is not None and best.training is None
    valid = load_corpus(data).valid
    reading = Reading(12, chunk_length=math.ceil((len(valid) - 1) / 2), batch_size=2)
    score = evaluate(best.model, valid, reading, progress=False)
    assert score.nats / score.tokens == pytest.approx(min(last.training["scores"]), rel=1e-6)


def test_patience_ends_training(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([3.0, 2.0, 2.5, 3.5, 1.0])
    monkeypatch.setattr(
        "lm.train.loop.evaluate", lambda *_: type("Score", (), {"nats": next(losses), "tokens": 1})
    )
    subject = train(trainer(data, optimizer="sgd", nonmono=None, patience=2, steps=100, evaluate_every=1))
    assert subject.scores == [3.0, 2.0, 2.5, 3.5] and subject.step == 4


# Divergence


def test_training_stops_when_the_loss_is_not_finite(data: Path, tmp_path: Path) -> None:
    values = settings(data, tmp_path / "run", evaluate_every=4, log_every=3)
    step = Trainer._train_step

    def poisoned(self: Trainer) -> Any:
        result = step(self)
        if self.step == 6:
            with torch.no_grad():
                self.parameters[0].fill_(math.nan)
        return result

    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="not finite at step 6"):
        patch.setattr(Trainer, "_train_step", poisoned)
        run(values)
    assert load_model(tmp_path / "run/last.pt").training["step"] == 4  # type: ignore[index]
    for tensor in load_model(tmp_path / "run/last.pt").model.state_dict().values():
        assert bool(torch.isfinite(tensor).all())
    run(values)
    assert load_model(tmp_path / "run/last.pt").training["step"] == 20  # type: ignore[index]


# The command


def test_command_trains_and_reports(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = command("lm_train", *words_of(settings(data, folder, steps=2)))
    assert done.status == 0 and done.err == ""
    assert "input = output: funnel" in done.out and "step 2 epoch" in done.out and "tokens/s" in done.out
    assert float(re.findall(r"([\d.]+) ms per step", done.out)[-1]) > 0
    names = {".lock", "last.pt", "best.pt", "config.yaml", "train.log", "tensorboard"}
    assert {path.name for path in folder.iterdir()} == names
    assert command("lm_train", "-config", folder / "config.yaml", "-steps", "3").status == 0
    assert load_model(folder / "last.pt").training["step"] == 3  # type: ignore[index]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"data": "nowhere"}, "nowhere"),
        ({"batch_size": 100000}, "batch_size"),
        ({"init_from": "nothing.pt"}, "init_from: checkpoint nothing.pt"),
        ({"device": "cuda"}, "cuda"),
        ({"hidden_dim": 10**8}, "not enough memory"),
    ],
)
def test_user_errors_are_one_line(data: Path, tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    if "device" in changes and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = command("lm_train", *words_of({**settings(data, tmp_path / "run"), **changes}))
    assert done.says("lm_train: ", word) and not (tmp_path / "run" / "last.pt").exists()


def test_one_training_per_folder(data: Path, tmp_path: Path) -> None:
    values = settings(data, tmp_path / "run", steps=1)
    with (
        locked(tmp_path / "run" / ".lock"),
        pytest.raises(BlockingIOError, match="run: another process is running here"),
    ):
        run(values)
    assert not (tmp_path / "run" / "config.yaml").exists()
    run(values)


def test_training_warns_if_bf16_is_slow(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for has_bf16 in (True, False):
        monkeypatch.setattr("lm.train.command.cpu_has_bf16", lambda found=has_bf16: found)
        run(settings(data, tmp_path / str(has_bf16), steps=1, precision="bf16"))
        assert ("set precision: fp32" in capsys.readouterr().out) is not has_bf16


@pytest.mark.slow
def test_gradient_accumulation_counts_batches_once_also_after_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    token_rows = AloneEmbedding.token_rows

    def noted(self: AloneEmbedding, *given: torch.Tensor) -> torch.Tensor:
        if self.training:
            seen.append(self.relu_dropout.p > 0)
        return token_rows(self, *given)

    monkeypatch.setattr(AloneEmbedding, "token_rows", noted)
    alone = {"method": "alone", "hidden_dim": 12, "relu_dropout": 0.5, "relu_dropout_steps": 4}
    common: dict[str, Any] = {"embedding": alone, "grad_accum_steps": 2, "steps": 6, "save_every": 1}
    data = small_corpus(tmp_path)
    run(settings(data, tmp_path / "whole", **common))
    expected = [True] * 4 * 2 + [False] * 2 * 2
    assert seen == expected
    weights = load_model(tmp_path / "whole/last.pt").model.state_dict()
    for end in (3, 5):
        seen.clear()

        def stops(self: Trainer, end: int = end) -> bool:
            if self.step == end:
                raise StopTraining
            return False

        parts = settings(data, tmp_path / f"parts{end}", **common)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(StopTraining):
            patch.setattr(Trainer, "_asked_to_stop", stops)
            run(parts)
        run(parts)
        assert seen == expected
        for name, tensor in load_model(tmp_path / f"parts{end}/last.pt").model.state_dict().items():
            assert torch.equal(tensor, weights[name]), (end, name)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("size", [40, 1000, 3000])
def test_a_full_disk_is_one_line(tmp_path: Path, size: int) -> None:
    """Where the settings, the log or the events of TensorBoard cannot be written."""
    data, limits = small_corpus(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    words = words_of(settings(data, tmp_path / "run", steps=60, log_every=1, save_every=60))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        ended = command("lm_train", *words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ended.status == 2 and ended.err.count("\n") == 1
    assert "File too large" in ended.err and str(tmp_path / "run") in ended.err
