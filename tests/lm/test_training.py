"""Training of language models."""

from __future__ import annotations

import math
import random
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lm.checkpoint import load_model
from lm.data.corpus import load_corpus
from lm.evaluation import Reading, evaluate
from lm.models import build
from lm.train.config import parse
from lm.train.loop import Group, Report, SegmentLoss, Trainer, joined
from lm.train.optim import (
    OPTIMIZERS,
    AdamOptions,
    ASGDOptions,
    Averages,
    CosineOptions,
    NTASGDOptions,
    PlateauOptions,
    SGDOptions,
    StepOptions,
    build_optimizer,
    draw_length,
    is_stalled,
    rate_factor,
    starts_averaging,
)
from shared_embeddings.modules.alone import AloneEmbedding
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import locked
from shared_embeddings.utils.options import OptionError, parse_options
from tests.lm.runs import (
    StopTraining,
    command,
    log_lines,
    run,
    settings,
    small_corpus,
    without_dropout,
    words_of,
)
from tests.processes import Running


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_corpus(tmp_path_factory.mktemp("corpus"))


def trainer(data: Path, **changes: Any) -> Trainer:
    """A trainer with parameters of seed 1 that saves nothing."""
    config = parse(settings(data, data / "unused", **changes))
    corpus = load_corpus(data)
    torch.manual_seed(1)
    model = build(
        config.training.model, corpus.vocabulary.words, config.training.embedding, vars(config.model)
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
        monkeypatch.setattr("lm.train.command.cpu_has_bf16", lambda answer=has_bf16: answer)
        run(settings(data, tmp_path / str(has_bf16), steps=1, precision="bf16"))
        assert ("set precision: fp32" in capsys.readouterr().out) is not has_bf16


@pytest.mark.slow
def test_gradient_accumulation_counts_batches_once_also_after_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    token_rows = AloneEmbedding.token_rows

    def noted(self: AloneEmbedding, *tensors: torch.Tensor) -> torch.Tensor:
        if self.training:
            seen.append(self.relu_dropout.p > 0)
        return token_rows(self, *tensors)

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


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values))


@pytest.mark.parametrize("name", ["sgd", "asgd", "ntasgd"])
def test_descent_with_weight_decay_by_hand(name: str) -> None:
    weight = parameter(2.0)
    optimizer = build_optimizer(OPTIMIZERS[name](learning_rate=0.5, weight_decay=0.1), [weight])
    weight.grad = torch.tensor([3.0])
    optimizer.step()
    assert weight.item() == pytest.approx(2.0 - 0.5 * (3.0 + 0.1 * 2.0))


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        (SGDOptions, {"learning_rate": 1.0, "momentum": 1.0}, "momentum"),
        (AdamOptions, {"learning_rate": 1.0, "betas": (0.9, 1.0)}, "betas"),
        (CosineOptions, {"min_lr_ratio": 1.5}, "min_lr_ratio"),
        (StepOptions, {"decay_epochs": (1.0,), "decay_factor": 0.5}, "decay_factor"),
    ],
)
def test_values_out_of_range_fail_by_name(kind: type, options: dict[str, object], name: str) -> None:
    with pytest.raises(OptionError, match=f"'{name}"):
        parse_options("test", kind, options)


@pytest.mark.parametrize(
    ("scores", "nonmono", "stalled"),
    [
        ([], 0, False),
        ([5.0], 0, False),
        ([5.0, 4.0], 0, False),
        ([4.0, 5.0], 0, True),
        ([4.0, 4.0], 0, False),
        ([4.0, 5.0], 1, False),  # the score before it is not considered
        ([4.0, 3.0, 5.0], 1, True),
        ([4.0, 3.0, 3.5], 1, False),  # worse than the last one, better than those before
        ([1.0, 2.0, 2.0, 2.0, 2.0, 2.0], 5, False),
        ([1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0], 5, True),
    ],
)
def test_validation_stall_criterion(scores: list[float], nonmono: int, stalled: bool) -> None:
    assert is_stalled(scores, nonmono) is stalled
    assert starts_averaging(NTASGDOptions(learning_rate=1.0, nonmono=nonmono), scores) is stalled


def test_only_asgd_averages_from_the_start() -> None:
    assert starts_averaging(ASGDOptions(learning_rate=1.0), [])
    assert not starts_averaging(SGDOptions(learning_rate=1.0), [1.0, 2.0, 3.0])
    assert not starts_averaging(AdamOptions(learning_rate=1.0), [1.0, 2.0, 3.0])


def test_averages_cover_the_steps_since_their_start() -> None:
    first, second = parameter(9.0, 9.0), parameter(1.0)
    averages = Averages([first, second])
    for value in (1.0, 2.0, 6.0):
        with torch.no_grad():
            first.fill_(value)
            second.fill_(-value)
        averages.update()
    with averages.in_place():
        assert first.tolist() == pytest.approx([3.0, 3.0])
        assert second.tolist() == pytest.approx([-3.0])
    assert first.tolist() == [6.0, 6.0] and second.tolist() == [-6.0]


def test_parameters_are_restored_after_an_error() -> None:
    weight = parameter(4.0)
    averages = Averages([weight])
    averages.update()
    with torch.no_grad():
        weight.fill_(8.0)
    with pytest.raises(ZeroDivisionError), averages.in_place():
        assert weight.item() == 4.0
        _ = 1 / 0
    assert weight.item() == 8.0


def test_segment_lengths_have_the_published_distribution() -> None:
    generator = random.Random(0)
    lengths = [draw_length(70, generator) for _ in range(20000)]
    long = [length for length in lengths if length > 52]
    short = [length for length in lengths if length <= 52]
    assert len(short) / len(lengths) == pytest.approx(0.05, abs=0.006)
    assert sum(long) / len(long) == pytest.approx(
        69.5, abs=0.3
    )  # truncated to whole numbers: half a token less
    assert sum(short) / len(short) == pytest.approx(34.5, abs=0.8)
    spread = (sum((length - 69.5) ** 2 for length in long) / len(long)) ** 0.5
    assert spread == pytest.approx(5.0, abs=0.2)
    assert min(draw_length(8, generator) for _ in range(500)) == 5
    assert min(draw_length(2, generator) for _ in range(500)) == 2


def at(
    done: float = 0.0, epochs: float = 0.0, scores: tuple[float, ...] = ()
) -> tuple[float, float, tuple[float, ...]]:
    return done, epochs, scores


@pytest.mark.parametrize(
    ("done", "factor"), [(0.0, 1.0), (1 / 3, 0.775), (0.5, 0.55), (1.0, 0.1), (1.2, 0.1)]
)
def test_cosine_falls_to_its_minimum(done: float, factor: float) -> None:
    assert rate_factor(CosineOptions(min_lr_ratio=0.1), *at(done)) == pytest.approx(factor)


def test_step_divides_after_each_of_its_epochs() -> None:
    schedule = StepOptions(decay_epochs=(2.0, 3.5), decay_factor=4.0)
    factors = [rate_factor(schedule, *at(epochs=epochs)) for epochs in (0, 1.9, 2.0, 3.4, 3.5, 9)]
    assert factors == pytest.approx([1, 1, 1 / 4, 1 / 4, 1 / 16, 1 / 16])


@pytest.mark.parametrize(
    ("factor", "patience", "scores", "wanted"),
    [
        (2.0, 1, (5.0, 4.0, 4.0, 4.5, 3.0, 3.1), [1, 1, 1, 0.5, 0.25, 0.25, 0.125]),
        (10.0, 2, (5.0, 6.0, 6.0, 6.0, 6.0, 4.0, 6.0), [1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.01]),
    ],
)
def test_plateau_divides_whenever_validation_does_not_improve(
    factor: float, patience: int, scores: tuple[float, ...], wanted: list[float]
) -> None:
    schedule = PlateauOptions(decay_factor=factor, decay_patience=patience)
    factors = [rate_factor(schedule, *at(scores=scores[:count])) for count in range(len(scores) + 1)]
    assert factors == pytest.approx(wanted)


TRAIN = ("-m", "lm.train.command")
TRAIN_AND_LIST_THREADS = """
import pathlib, sys
from lm.train.command import main
main(sys.argv[1:])
print("threads:", *(path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")))
"""


def on_two_processes(values: dict[str, Any], program: Sequence[str] = TRAIN) -> list[str]:
    """The command that trains with two processes of this machine."""
    launcher = ["-m", "lm.train.launch", "--standalone", "--nproc-per-node", "2"]
    return [sys.executable, *launcher, *program, *words_of(values)]


def torchrun(values: dict[str, Any], program: Sequence[str] = TRAIN) -> subprocess.CompletedProcess[str]:
    """Train with two processes of this machine."""
    return subprocess.run(on_two_processes(values, program), capture_output=True, text=True)


def losses(save: Path) -> list[tuple[str, str, float]]:
    """The kind, step and loss of each log line."""
    lines = [line.split() for line in log_lines(save)]
    return [(line[2], line[1], float(line[line.index("loss") + 1])) for line in lines]


@pytest.mark.slow
def test_two_processes_equal_one_with_twice_the_batch(tmp_path: Path) -> None:
    """Also if only one of them has words of a band in its segment, with accumulation, and after resuming."""
    data = small_corpus(tmp_path)
    embedding = {"method": "adaptive", "cutoffs": [5, 18], "factor": 2}
    changes = without_dropout(embedding=embedding, nonmono=0, evaluate_every=3, sequence_length=5)
    alone = settings(data, tmp_path / "one", batch_size=4, grad_accum_steps=2, steps=16, **changes)
    parallel = {**alone, "output_dir": str(tmp_path / "two"), "batch_size": 2}
    for steps in (9, 16):
        result = torchrun({**parallel, "steps": steps})
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("Parameters:") == 1 and "processes: 2, on cpu" in result.stdout
    run(alone)
    for mine, other in zip(losses(tmp_path / "one"), losses(tmp_path / "two"), strict=True):
        assert mine[:2] == other[:2] and mine[2] == pytest.approx(other[2], rel=1e-4)
    single, double = load_model(tmp_path / "one/last.pt"), load_model(tmp_path / "two/last.pt")
    pairs = zip(single.model.state_dict().items(), double.model.state_dict().values(), strict=True)
    for (name, tensor), other in pairs:
        torch.testing.assert_close(other, tensor, rtol=1e-3, atol=1e-5, msg=name)
    assert double.training is not None and single.training is not None
    # Without dropout there is no randomness, so only the initial parameters can differ.
    first, second = (process["random"]["torch"] for process in double.training["processes"])
    assert not torch.equal(first, second)
    with pytest.raises(UserError, match="it had 2 processes and now has 1"):
        run({**parallel, "steps": 18})


@pytest.mark.slow
def test_the_threads_of_the_process_group_end(tmp_path: Path) -> None:
    """At exit they would race with the interpreter, which aborted a fifth of trainings on a busy machine."""
    values = settings(small_corpus(tmp_path), tmp_path / "run", **without_dropout(steps=2))
    (tmp_path / "train.py").write_text(TRAIN_AND_LIST_THREADS)
    result = torchrun(values, [str(tmp_path / "train.py")])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("threads: ") == 2 and "gloo" not in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("everybody", [False, True], ids=["torchrun", "group"])
def test_two_processes_save_the_same_step_when_they_are_stopped(everybody: bool, tmp_path: Path) -> None:
    """Also if the signal reaches all processes, and torchrun passes it on."""
    changes = without_dropout(steps=100_000, evaluate_every=50_000, batch_size=2, log_every=50_000)
    values = settings(small_corpus(tmp_path), tmp_path / "run", **changes)
    with Running(on_two_processes(values), tmp_path / "log") as running:
        assert running.wait_for("^Training starts")
        (running.send_to_all if everybody else running.send)(signal.SIGTERM)
        assert running.end() == 143
    assert running.output().count("lm_train: terminated; run the same command again to resume") == 1
    assert running.output().count("torchrun: terminated; all processes were stopped") == 1
    assert "Traceback" not in running.output()
    training = load_model(tmp_path / "run/last.pt").training
    assert training is not None and len(training["processes"]) == 2
    steps = training["step"] + 2
    assert torchrun({**values, "steps": steps}).returncode == 0
    assert torchrun({**values, "steps": steps, "output_dir": str(tmp_path / "whole")}).returncode == 0
    stopped, wanted = (load_model(tmp_path / name / "last.pt").model for name in ("run", "whole"))
    for mine, other in zip(stopped.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_more_processes_than_devices_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(max(1, torch.cuda.device_count())))
    with pytest.raises(UserError, match="device is cuda"), joined("cuda"):
        pass


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
