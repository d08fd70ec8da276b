"""Training with several processes (ranks) over gloo."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nmt.checkpoints import read_checkpoint, read_weights
from tests.nmt.conftest import FUNNEL, Host, free_port
from tests.processes import Running, error_lines, run


def two_ranks() -> dict[str, Any]:
    """Options of two ranks on this machine's CPU."""
    return {"world_size": 2, "gpu_ranks": [0, 1], "gpu_backend": "gloo", "master_port": free_port()}


def train(config: Path) -> list[str]:
    """The command line of a training."""
    return [str(Path(sys.executable).with_name("onmt_train")), "-config", str(config)]


def endless(host: Host, **options: Any) -> Path:
    """The configuration of a training that ends only by a signal."""
    long = {"train_steps": 1_000_000, "save_checkpoint_steps": 1_000_000, "report_every": 2}
    return host.config("model", embedding=FUNNEL, **{**long, **two_ranks(), **options})


@pytest.mark.slow
@pytest.mark.parametrize("everybody", [False, True], ids=["parent", "group"])
def test_two_ranks_save_the_same_step_when_they_are_stopped(everybody: bool, host: Host) -> None:
    config = endless(host, num_workers=1 if everybody else 0)
    with Running(train(config), host.folder / "log") as running:
        assert running.wait_for(r"Step +2/")
        (running.send_to_all if everybody else running.send)(signal.SIGTERM)
        assert running.end() == 143
        assert running.wait_for_empty_group(), running.members()
    message = "onmt_train: terminated; run the same command again to resume"
    assert error_lines(running.output(), "onmt_train") == [message]
    assert "Traceback" not in running.output()
    (saved,) = host.folder.glob("model_step_*.pt")
    step = int(saved.stem.rsplit("_", 1)[1])
    assert len(read_checkpoint(saved)["resume"]) == 2
    log = host.folder / "log"
    run(train(endless(host, num_workers=1 if everybody else 0, train_steps=step + 2)), log)
    body = read_weights(str(host.folder / f"model_step_{step + 2}.pt"))[1]
    assert "the data over" not in log.read_text()  # both positions are restored
    assert any("emb_luts.0" in name and tensor.shape == (88, 4) for name, tensor in body.items())


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
def test_a_killed_rank_is_named_in_one_line(place: int, host: Host) -> None:
    with Running(train(endless(host)), host.folder / "log") as running:
        assert running.wait_for(r"Step +2/")
        victim = running.children()[place]
        os.kill(victim, signal.SIGKILL)
        assert running.end() == 2
        assert running.wait_for_empty_group(), running.members()
    (line,) = error_lines(running.output(), "onmt_train")
    assert f"rank {place} (process {victim})" in line and "SIGKILL" in line
    assert line.endswith("run the same command again to resume from the last checkpoint")
    assert "Traceback" not in running.output()


@pytest.mark.slow
def test_orphaned_ranks_save_before_they_exit(host: Host) -> None:
    with Running(train(endless(host)), host.folder / "log") as running:
        assert running.wait_for(r"Step +2/")
        running.send(signal.SIGKILL)
        assert running.end() == -signal.SIGKILL
        assert running.wait_for_empty_group(), running.members()
    assert len(list(host.folder.glob("model_step_*.pt"))) == 1


@pytest.mark.slow
def test_the_mistake_of_a_rank_is_reported_in_one_line(host: Host) -> None:
    """Both ranks diverge."""
    config = endless(host, optim="sgd", learning_rate=1e30)
    with Running(train(config), host.folder / "log") as running:
        assert running.end() == 2
        assert running.wait_for_empty_group(), running.members()
    (line,) = error_lines(running.output(), "onmt_train")
    assert "lower learning_rate" in line
    assert "Traceback" not in running.output()


# Equivalence


@pytest.mark.slow
def test_two_ranks_equal_one_process_with_accum_count_2(host: Host) -> None:
    """Fed equal batches (a bucket is one batch here), they reach the same parameters."""
    names = [f"w{number}" for number in range(40)]
    lines = [[names[place % 40], names[place // 40], names[place % 7]] for place in range(160)]
    host.write("train.src", [" ".join(line) for line in lines])
    host.write("train.tgt", [" ".join(word.replace("w", "v") for word in line) for line in lines])
    descent = {"optim": "sgd", "learning_rate": 0.02, "decay_method": "none", "max_grad_norm": 0}
    options = {**descent, "embedding": FUNNEL, "dropout": [0.0], "attention_dropout": [0.0]}
    batches = {"batch_type": "sents", "batch_size": 8, "bucket_size": 8, "train_steps": 10}
    alone = host.train("alone", **options, **batches, accum_count=[2])
    run(train(host.config("two", **options, **batches, **two_ranks())), host.folder / "log")
    one, two = (read_weights(str(path))[1] for path in (alone, host.folder / "two_step_10.pt"))
    start = read_weights(str(host.train("start", **{**options, **batches, "learning_rate": 1e-30})))[1]
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-6, msg=name)
    assert max(float((one[name] - start[name]).abs().max()) for name in one) > 0.01


@pytest.mark.slow
def test_two_processes_stop_early_together(host: Host) -> None:
    """With a learning rate of zero, the second validation stops training."""
    options = {"learning_rate": 1e-30, "early_stopping": 1, "valid_steps": 2}
    run(train(endless(host, **options)), host.folder / "log")
    assert [path.name for path in host.folder.glob("model_step_*.pt")] == ["model_step_4.pt"]
    assert len(read_checkpoint(host.folder / "model_step_4.pt")["resume"]) == 2
