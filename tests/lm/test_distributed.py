"""Two processes that train one model: the same as one process with the batch of both."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.checkpoint import load_model
from lm.train.distributed import joined
from shared_embeddings.errors import UserError
from tests.drills.runner import Running
from tests.lm.runs import log_lines, run, settings, small_corpus, without_dropout

TRAIN = ("-m", "lm.train.command")
TRAIN_AND_LIST_THREADS = """
import pathlib, sys
from lm.train.command import main
main(sys.argv[1:])
print("threads:", *(path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")))
"""


def torchrun(values: dict[str, Any], program: Sequence[str] = TRAIN) -> subprocess.CompletedProcess[str]:
    """Train with two processes of this machine."""
    arguments = [piece for key, value in values.items() for piece in (f"-{key}", str(value))]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run([*command, *program, *arguments], capture_output=True, text=True)


def losses(save: Path) -> list[tuple[str, str, float]]:
    """Kind of each line of the log, its step and its loss."""
    lines = [line.split() for line in log_lines(save)]
    return [(line[2], line[1], float(line[line.index("loss") + 1])) for line in lines]


@pytest.mark.slow
def test_two_processes_are_one_with_the_doubled_batch(tmp_path: Path) -> None:
    """Also where only one of them has words of a band in its segment, in parts, and after going on."""
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
    # Without dropout nothing is drawn, so what differs is where the two processes began.
    first, second = (process["random"]["torch"] for process in double.training["processes"])
    assert not torch.equal(first, second)
    with pytest.raises(UserError, match="it had 2 processes and now has 1"):
        run({**two, "steps": 18})


@pytest.mark.slow
def test_the_threads_of_the_process_group_end(tmp_path: Path) -> None:
    """At exit they would race with the interpreter, which aborted one training in five on a busy machine."""
    values = settings(small_corpus(tmp_path), tmp_path / "run", **without_dropout(steps=2))
    (tmp_path / "train.py").write_text(TRAIN_AND_LIST_THREADS)
    result = torchrun(values, [str(tmp_path / "train.py")])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("threads: ") == 2 and "gloo" not in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("everybody", [False, True], ids=["torchrun", "group"])
def test_two_processes_save_the_same_step_when_they_are_stopped(everybody: bool, tmp_path: Path) -> None:
    """Also where the signal reaches everybody, and torchrun passes it on."""
    changes = without_dropout(steps=100_000, evaluate_every=50_000, batch_size=2, log_every=50_000)
    values = settings(small_corpus(tmp_path), tmp_path / "run", **changes)
    arguments = [piece for key, value in values.items() for piece in (f"-{key}", str(value))]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with Running([*command, "-m", "lm.train.command", *arguments], tmp_path / "log") as running:
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


def test_one_process_alone_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined("cpu") as group:
        assert group.is_first and group.world_size == 1
        assert group.gather("x") == ["x"] and group.from_first(0.5) == 0.5
        assert group.mean(torch.tensor([2.0])).tolist() == [2.0]
        assert group.largest(15)() == 15


def test_more_processes_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(max(1, torch.cuda.device_count())))
    with pytest.raises(UserError, match="device is cuda"), joined("cuda"):
        pass
