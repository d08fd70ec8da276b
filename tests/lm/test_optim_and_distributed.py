"""Optimizers, averages and schedules by hand; two processes train like one with the batch of both."""

from __future__ import annotations

import random
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
from lm.train.loop import joined
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
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import OptionError, parse_options
from tests.lm.runs import log_lines, run, settings, small_corpus, without_dropout, words_of
from tests.processes import Running


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values))


@pytest.mark.parametrize("name", ["sgd", "asgd", "ntasgd"])
def test_descent_with_weight_decay_by_hand(name: str) -> None:
    weight = parameter(2.0)
    optimizer = build_optimizer(OPTIMIZERS[name](learning_rate=0.5, weight_decay=0.1), [weight])
    weight.grad = torch.tensor([3.0])
    optimizer.step()
    assert weight.item() == pytest.approx(2.0 - 0.5 * (3.0 + 0.1 * 2.0))


def test_momentum_by_hand() -> None:
    weight = parameter(0.0)
    optimizer = build_optimizer(SGDOptions(learning_rate=1.0, momentum=0.5), [weight])
    for _ in range(2):
        weight.grad = torch.tensor([1.0])
        optimizer.step()
    assert weight.item() == pytest.approx(-1.0 - 1.5)


def test_first_step_of_adam_is_the_learning_rate() -> None:
    weight = parameter(1.0, 1.0)
    optimizer = build_optimizer(AdamOptions(learning_rate=0.01, betas=(0.5, 0.9), eps=1e-12), [weight])
    weight.grad = torch.tensor([4.0, -0.2])
    optimizer.step()
    assert weight.tolist() == pytest.approx([0.99, 1.01])
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.9)


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        (SGDOptions, {"learning_rate": 0.0}, "learning_rate"),
        (SGDOptions, {"learning_rate": 1.0, "weight_decay": -1.0}, "weight_decay"),
        (SGDOptions, {"learning_rate": 1.0, "momentum": 1.0}, "momentum"),
        (NTASGDOptions, {"learning_rate": 1.0, "nonmono": -1}, "nonmono"),
        (AdamOptions, {"learning_rate": 1.0, "betas": (0.9,)}, "betas"),
        (AdamOptions, {"learning_rate": 1.0, "betas": (0.9, 1.0)}, "betas"),
        (AdamOptions, {"learning_rate": 1.0, "eps": -1e-8}, "eps"),
        (CosineOptions, {"min_lr_ratio": 1.5}, "min_lr_ratio"),
        (StepOptions, {"decay_epochs": (1.0,), "decay_factor": 0.5}, "decay_factor"),
        (PlateauOptions, {"decay_factor": 0.5}, "decay_factor"),
        (PlateauOptions, {"decay_patience": 0}, "decay_patience"),
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


def command(values: dict[str, Any], program: Sequence[str] = TRAIN) -> list[str]:
    """The command that trains with two processes of this machine."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [sys.executable, *launcher, *program, *words_of(values)]


def torchrun(values: dict[str, Any], program: Sequence[str] = TRAIN) -> subprocess.CompletedProcess[str]:
    """Train with two processes of this machine."""
    return subprocess.run(command(values, program), capture_output=True, text=True)


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
    one = settings(data, tmp_path / "one", batch_size=4, grad_accum_steps=2, steps=16, **changes)
    two = {**one, "output_dir": str(tmp_path / "two"), "batch_size": 2}
    for steps in (9, 16):
        result = torchrun({**two, "steps": steps})
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("Parameters:") == 1 and "processes: 2, on cpu" in result.stdout
    run(one)
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
        run({**two, "steps": 18})


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
    with Running(command(values), tmp_path / "log") as running:
        assert running.wait_for("^Training starts")
        (running.send_to_all if everybody else running.send)(signal.SIGTERM)
        assert running.end() == 1  # torchrun's own
    assert running.output().count("lm_train: terminated; run the same command again to resume") == 1
    training = load_model(tmp_path / "run/last.pt").training
    assert training is not None and len(training["processes"]) == 2
    steps = training["step"] + 2
    assert torchrun({**values, "steps": steps}).returncode == 0
    assert torchrun({**values, "steps": steps, "output_dir": str(tmp_path / "whole")}).returncode == 0
    found, wanted = (load_model(tmp_path / name / "last.pt").model for name in ("run", "whole"))
    for mine, other in zip(found.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_single_process_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined("cpu") as group:
        assert group.is_first and group.world_size == 1
        assert group.gather("x") == ["x"]
        assert group.mean(torch.tensor([2.0])).tolist() == [2.0]
        assert group.largest(15)() == 15


def test_more_processes_than_devices_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(max(1, torch.cuda.device_count())))
    with pytest.raises(UserError, match="device is cuda"), joined("cuda"):
        pass
