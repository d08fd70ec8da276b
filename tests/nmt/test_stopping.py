"""Training that is stopped, and the same command that resumes it."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch
from onmt.trainer import Trainer
from onmt.utils import Statistics

from nmt.checkpoints import read_checkpoint, read_weights
from nmt.fixes.training import MetricScorer
from nmt.hooks import apply_patches
from nmt.train.batches import TrackedBatches
from nmt.train.runs import differences
from nmt.train.training import ProgressReport
from shared_embeddings.utils.files import locked
from tests.nmt.conftest import FUNNEL, Capture, ErrorLine, Host, Patch, run

apply_patches()  # before a test patches a function


def steps(host: Host, name: str = "model") -> list[int]:
    """The steps that are saved."""
    return sorted(int(path.stem.rsplit("_", 1)[1]) for path in host.folder.glob(f"{name}_step_?.pt"))


def assert_same_model(host: Host, first: str, second: str, step: int) -> None:
    """Weights and the position in the data are bitwise equal."""
    paths = [host.folder / f"{name}_step_{step}.pt" for name in (first, second)]
    bodies = [read_weights(str(path))[1] for path in paths]
    assert bodies[0].keys() == bodies[1].keys()
    for name, tensor in bodies[0].items():
        assert torch.equal(tensor, bodies[1][name]), name
    places = [read_checkpoint(path)["resume"][0]["data"] for path in paths]
    assert places[0] == places[1]


def stopped_by(number: int, config: Path, capsys: Capture, owner: Any, name: str, function: Any) -> None:
    """Run a training with another method, which a signal ends with one line."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(owner, name, function)
        run("onmt_train -config", config)
    assert stop.value.code == 128 + number
    verb = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}[signal.Signals(number)]
    message = [line for line in capsys.readouterr().err.splitlines() if line.startswith("onmt_train")]
    assert message == [f"onmt_train: {verb}; run the same command again to resume"]


def after(calls: int, action: Callable[[], None], original: Any) -> Any:
    """A function that acts once, in the middle of its call of that number."""
    done = []

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        done.append(None)
        if len(done) == calls:
            action()
        return original(*args, **kwargs)

    return wrapped


@pytest.mark.slow_except("safetensors-15")
@pytest.mark.parametrize(
    ("save_format", "number"), [("pytorch", signal.SIGINT), ("safetensors", signal.SIGTERM)]
)
def test_a_signal_during_a_step_saves_that_step(
    save_format: str, number: int, host: Host, capsys: Capture
) -> None:
    options = {"embedding": FUNNEL, "save_format": save_format, "save_checkpoint_steps": 6}
    host.train("whole", **options)
    config = host.config("model", **options)
    kill = after(2, lambda: os.kill(os.getpid(), number), Trainer._gradient_accumulation)
    stopped_by(number, config, capsys, Trainer, "_gradient_accumulation", kill)
    assert steps(host) == [2]
    run("onmt_train -config", config)
    assert steps(host) == [2, 6]
    assert_same_model(host, "whole", "model", 6)


def test_a_signal_while_waiting_for_batches_discards_the_next_step(host: Host, capsys: Capture) -> None:
    """Of the two batches of step 3, one is there already."""
    options = {"embedding": FUNNEL, "accum_count": [2], "batch_size": 8, "save_checkpoint_steps": 6}
    host.train("whole", **options)
    config = host.config("model", **options)
    iterate = TrackedBatches.__iter__

    def interrupted(self: TrackedBatches) -> Any:
        for place, item in enumerate(iterate(self)):
            if place == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            yield item

    stopped_by(signal.SIGTERM, config, capsys, TrackedBatches, "__iter__", interrupted)
    assert steps(host) == [2]
    run("onmt_train -config", config)
    assert_same_model(host, "whole", "model", 6)


def test_a_signal_before_the_first_step_saves_nothing(host: Host, capsys: Capture) -> None:
    config = host.config("model", embedding=FUNNEL)
    interrupted = after(1, lambda: os.kill(os.getpid(), signal.SIGINT), TrackedBatches.__iter__)
    stopped_by(signal.SIGINT, config, capsys, TrackedBatches, "__iter__", interrupted)
    assert steps(host) == []


@pytest.mark.slow
def test_a_signal_during_validation_saves_its_step(host: Host, capsys: Capture) -> None:
    """The validation for early stopping is completed."""
    options = {"embedding": FUNNEL, "valid_steps": 2, "early_stopping": 5}
    config = host.config("model", **options)
    host.train("whole", **options)
    kill = after(1, lambda: os.kill(os.getpid(), signal.SIGTERM), Trainer.validate)
    stopped_by(signal.SIGTERM, config, capsys, Trainer, "validate", kill)
    assert steps(host) == [2]
    saved = read_checkpoint(host.folder / "model_step_2.pt")["resume"][0]["early_stopping"]
    assert saved["best_step"] == 2
    run("onmt_train -config", config)
    assert_same_model(host, "whole", "model", 6)


# The same command again


def test_the_same_command_resumes_and_finishes(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    """From the last complete step; a longer run is the same run, and a finished one reports it."""
    options = {"embedding": FUNNEL, "save_checkpoint_steps": 2}
    host.train("whole", **options)
    host.train("model", **options, train_steps=4)
    (host.folder / "model_step_5.pt").write_bytes(b"half of a checkpoint")
    free = {"report_every": 1, "valid_steps": 1, "keep_checkpoint": 9, "num_workers": 0}
    host.train("model", **options, **free)
    assert steps(host) == [2, 4, 5, 6]
    assert_same_model(host, "whole", "model", 6)
    before = (host.folder / "model_step_6.pt").stat().st_mtime_ns
    host.train("model", **options)
    assert "nothing to do" in caplog.text
    assert (host.folder / "model_step_6.pt").stat().st_mtime_ns == before


def test_changed_settings_of_a_run_fail_by_name(host: Host, error_line: ErrorLine) -> None:
    host.train("model", embedding=FUNNEL, train_steps=2, save_checkpoint_steps=2)
    other = {"embedding": {"method": "funnel", "rank": 5}, "learning_rate": 0.02}
    line = error_line("onmt_train -config", host.config("model", **other))
    assert "model_step_2.pt belongs to a run with other settings" in line
    assert "embedding.rank was 4 and is 5" in line and "learning_rate was 0.01 and is 0.02" in line
    host.write("train.src", ["w1 w2 w3"] * 90)
    line = error_line("onmt_train -config", host.config("model", embedding=FUNNEL))
    assert "(the content of data.corpus.path_src has changed)" in line
    assert steps(host) == [2]


def test_never_and_overwrite(host: Host, error_line: ErrorLine) -> None:
    host.train("model", embedding=FUNNEL, train_steps=4, save_checkpoint_steps=2)
    config, other = host.config("model", embedding=FUNNEL), host.folder / "model_step_4.small.pt"
    assert "model_step_4.pt exists" in error_line("onmt_train -resume never -config", config)
    other.write_bytes(b"of the user")
    host.train("model", "-resume", "overwrite", embedding=FUNNEL, learning_rate=0.5, train_steps=3)
    assert steps(host) == [3] and other.exists()
    host.train("fresh", "-resume", "never", embedding=FUNNEL, train_steps=1, save_checkpoint_steps=1)
    assert steps(host, "fresh") == [1]


def test_checkpoints_that_cannot_be_resumed_are_named(host: Host, error_line: ErrorLine) -> None:
    path = host.train("model", embedding=FUNNEL, train_steps=2)
    without_run = {name: part for name, part in read_checkpoint(path).items() if name != "run"}
    torch.save(without_run, host.folder / "new")
    os.replace(host.folder / "new", path)  # its tensors are mapped into memory
    config = host.config("model", embedding=FUNNEL)
    assert "model_step_2.pt" in error_line("onmt_train -config", config)
    path.write_bytes(b"damaged")
    assert "set resume: overwrite" in error_line("onmt_train -config", config)


@pytest.mark.slow
def test_train_from_and_the_same_command_resumes(host: Host, error_line: ErrorLine) -> None:
    options = {"embedding": FUNNEL, "save_checkpoint_steps": 2}
    first = host.train("first", **options, train_steps=2)
    begin = ("-train_from", str(first), "-reset_optim", "all")
    host.train("whole", *begin, **options)
    host.train("model", *begin, **options, train_steps=4)
    host.train("model", *begin, **options)
    assert_same_model(host, "whole", "model", 6)
    other = host.train("other", **options, train_steps=2)
    line = error_line("onmt_train", "-config", host.config("model", **options), "-train_from", other)
    assert f"train_from was '{first}' and is '{other}'" in line
    # A checkpoint of the run itself is resumed even if later ones exist.
    host.train("model", "-train_from", host.folder / "model_step_4.pt", **options, train_steps=5)
    assert steps(host) == [2, 4, 5, 6]


def test_only_settings_that_matter_are_compared() -> None:
    before = {"seed": 1, "train_steps": 5, "data": {"a": {"weight": 1}}, "train_from": "", "older": 3}
    now = {"seed": 1, "train_steps": 9, "data": {"a": {"weight": 2}, "b": {}}, "train_from": "", "newer": 4}
    assert differences(before, now) == ["data.a.weight was 1 and is 2", "data.b was None and is {}"]
    assert differences(before, {**now, "data": before["data"], "train_from": "x"}) == [
        "train_from was '' and is 'x'"
    ]
    assert differences({**before, "train_from": "x"}, {**before, "train_from": ""}) == []


def test_the_remaining_time_does_not_count_the_wait_for_the_first_batch(
    caplog: pytest.LogCaptureFixture, monkeypatch: Patch
) -> None:
    """The first step ends after 80 s, the others take 2 s."""
    now = [0.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    opt = Namespace(wandb=None, report_every=5, single_pass=False, train_steps=100)
    trainer = Namespace(
        report_manager=Namespace(tensorboard_writer=None),
        gpu_rank=-1,
        optim=Namespace(amp=False),
        train_loss=None,
    )
    report = ProgressReport(opt, trainer, first_step=50)
    report.start()
    with caplog.at_level("INFO"):
        for step in range(51, 56):
            now[0] += 80 if step == 51 else 2
            report.report_training(step, 100, 0.1, None, Statistics(1.0, 1, 1, 1, 1))
    assert "55% done, about 01:30 left" in caplog.text


def test_an_early_stopped_run_is_finished(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    unchanged = {"learning_rate": 1e-30, "early_stopping": 1, "valid_steps": 2, "train_steps": 50}
    options = {"embedding": FUNNEL, **unchanged, "save_checkpoint_steps": 50}
    host.train("model", **options)
    assert steps(host) == [4]
    caplog.clear()
    host.train("model", **options)
    assert steps(host) == [4] and "nothing to do" in caplog.text


def test_bleu_stops_training(host: Host, caplog: pytest.LogCaptureFixture, error_line: ErrorLine) -> None:
    """It is that of the pairs with text on both sides, and needs the metric of validation."""
    lines = (host.folder / "train.src").read_text().splitlines()
    wanted = (host.folder / "train.tgt").read_text().splitlines()
    host.write("valid.src", ["", *lines[:20], "w1"])
    host.write("valid.tgt", ["v1", *wanted[:20], ""])
    first = host.train("first", train_steps=100, save_checkpoint_steps=100, dropout=[0.0])
    unchanged = {"learning_rate": 1e-30, "early_stopping": 1, "valid_steps": 2, "train_from": str(first)}
    options = {**unchanged, "early_stopping_criteria": ["bleu"], "train_steps": 150, "reset_optim": "all"}
    filters = {"transforms": ["filtertoolong"]}  # need targets
    host.train("model", **options, **filters, valid_metrics=["BLEU"], save_checkpoint_steps=150)
    assert steps(host) == [4]
    host.write("filled", lines[:20])
    greedy = ("-beam_size", 1, "-max_length", 250, "-max_length_ratio", 1.25)
    translated = host.translate(first, *greedy, source="filled")
    bleu = sacrebleu.corpus_bleu(translated, [wanted[:20]]).score
    (shown,) = re.findall(r"improving bleu: -inf --> (\d+\.\d+)", caplog.text)
    assert float(shown) == pytest.approx(bleu, rel=1e-4) and bleu > 1
    line = error_line("onmt_train -config", host.config("other", **options))
    assert "early_stopping_criteria: bleu" in line and "valid_metrics: [BLEU]" in line
    without = host.config("without", early_stopping=1, data={"corpus": host.corpus("train")})
    assert "early_stopping: needs validation" in error_line("onmt_train -config", without)
    long = host.config("long", decoder_positions=["lrpe"], valid_metrics=["BLEU"])
    assert "valid_metrics: ['BLEU']" in error_line("onmt_train -config", long)


@pytest.mark.parametrize(("metric", "better"), [("BLEU", 21.0), ("TER", 19.0)])
def test_metrics_that_improve(metric: str, better: float) -> None:
    scorer = MetricScorer(metric)
    for value in (20.0, better, 40.0 - better, better):
        stats = Statistics(computed_metrics={metric: value})
        is_first_or_better = value == better or scorer.best_score not in (20.0, better)
        assert scorer.is_improving(stats) == (is_first_or_better and value != scorer.best_score)
        assert scorer.is_decreasing(stats) == (value == 40.0 - better)
        if scorer.is_improving(stats):
            scorer.update(stats)
    assert scorer.best_score == better


def test_an_earlier_step_replaces_the_later_ones(host: Host) -> None:
    """Old files of later steps do not count as checkpoints to remove."""
    host.train("model", embedding=FUNNEL, save_checkpoint_steps=2)
    first = host.folder / "model_step_2.pt"
    config = host.config("model", embedding=FUNNEL, save_checkpoint_steps=2)
    run("onmt_train -keep_checkpoint 2 -config", config, "-train_from", first)
    assert steps(host) == [4, 6]


@pytest.mark.slow_except("safetensors")
@pytest.mark.parametrize("save_format", ["pytorch", "safetensors"])
def test_resumed_run_keeps_the_same_checkpoints(save_format: str, host: Host) -> None:
    options = {"save_format": save_format, "keep_checkpoint": 2, "save_checkpoint_steps": 1}
    for steps_of_run in (3, 6):
        host.train("model", embedding=FUNNEL, **options, train_steps=steps_of_run)
    assert steps(host) == [5, 6]
    assert len(list(host.folder.glob("model_step_*"))) == (2 if save_format == "pytorch" else 4)


def test_one_training_at_a_time(host: Host, error_line: ErrorLine) -> None:
    config = str(host.config("model", embedding=FUNNEL))
    with locked(host.folder / ".model.lock"):
        assert "another process" in error_line("onmt_train -config", config)
        host.train("beside", embedding=FUNNEL, train_steps=1, save_checkpoint_steps=1)
    assert steps(host) == [] and steps(host, "beside") == [1]


def test_weights_of_a_killed_save_do_not_make_a_run(host: Host) -> None:
    """They are renamed before their .pt; the same command starts over."""
    (host.folder / "model_step_2.safetensors").write_bytes(b"of a killed process")
    options = {"embedding": FUNNEL, "save_format": "safetensors", "save_checkpoint_steps": 2}
    host.train("model", **options, train_steps=2)
    assert steps(host) == [2] and read_checkpoint(host.folder / "model_step_2.pt")


# Failed saves


def test_diverging_training_keeps_the_last_good_checkpoint(
    host: Host, error_line: ErrorLine, monkeypatch: Patch
) -> None:
    config = host.config("model", embedding=FUNNEL, save_checkpoint_steps=2)
    original = Trainer._gradient_accumulation

    def poison(self: Trainer, *args: Any) -> None:
        original(self, *args)
        if self.optim.training_step == 4:  # after step 3
            with torch.no_grad():
                next(self.model.parameters()).fill_(math.nan)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_gradient_accumulation", poison)
        line = error_line("onmt_train -config", config)
    assert "at step 4" in line and "lower learning_rate" in line
    assert steps(host) == [2]
    saved = read_weights(str(host.folder / "model_step_2.pt"))[1]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in saved.values())
    run("onmt_train -config", config)
    assert steps(host) == [2, 4, 6]


def test_a_full_disk_keeps_the_saved_files(host: Host, error_line: ErrorLine, monkeypatch: Patch) -> None:
    host.train("model", embedding=FUNNEL, train_steps=3)

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        line = error_line("onmt_train -config", host.config("model", embedding=FUNNEL))
    assert "No space left on device" in line
    assert steps(host) == [3]
    host.train("model", embedding=FUNNEL)
    assert steps(host) == [3, 6]
