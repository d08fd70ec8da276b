"""Training runs of both hosts are killed, asked to stop, or run out of disk, and resumed by the same command.

They are stopped at a random moment, including startup; each try of "kill -9" kills one run twice. The final
model must be identical to that of an undisturbed run, bit for bit, and no temporary file may be left. A
process that is asked to stop has 10 s (the limit of ``docker stop``) and prints one line.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lm.checkpoint import load_model
from nmt.checkpoints import read_weights
from tests.drills.runner import Drill, Running, Try, error_lines, remains, run
from tests.lm.runs import settings, small_corpus, words_of
from tests.nmt.conftest import Host as NmtFolder

STEPS = 60
GRACE_SECONDS = 10
SAME = "the same bits"
CLEAN = "reported, and the same bits"
_ONCE = threading.Lock()
_KEPT: list[tempfile.TemporaryDirectory[str]] = []


class Training(NamedTuple):
    """A training run that drills disturb."""

    program: str  # prefix of its error lines
    command: Callable[[Path], list[str]]  # its command line, for a folder that `prepare` made
    prepare: Callable[[Path], object]  # writes corpus and settings
    model: Callable[[Path], dict[str, torch.Tensor]]  # the tensors of the final model
    largest: Callable[[Path], int]  # the size of the largest file that it writes at a step
    status: Callable[[int], int] = lambda number: 128 + number  # exit status after a signal


def script(name: str) -> str:
    """The path of a command of this project."""
    return str(Path(sys.executable).with_name(name))


def free_port() -> int:
    """An unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def onmt_train(ranks: int = 1, **options: Any) -> Training:
    """A translation model."""

    def prepare(folder: Path) -> None:
        embedding = {"method": "funnel", "rank": 4}
        lengths = {"train_steps": STEPS, "save_checkpoint_steps": 7, "report_every": 1}
        NmtFolder(folder).config("model", embedding=embedding, **lengths, **options)

    def command(folder: Path) -> list[str]:
        given = ["-config", str(folder / "model.yaml")]
        if ranks > 1:
            given += ["-world_size", str(ranks), "-gpu_ranks", *map(str, range(ranks))]
            given += ["-gpu_backend", "gloo", "-master_port", str(free_port())]
        return [script("onmt_train"), *given]

    def model(folder: Path) -> dict[str, torch.Tensor]:
        return read_weights(str(folder / f"model_step_{STEPS}.pt"))[1]

    def largest(folder: Path) -> int:
        return max(path.stat().st_size for path in folder.glob("model_step_*"))

    return Training("onmt_train", command, prepare, model, largest)


def lm_train(ranks: int = 1) -> Training:
    """A language model."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]

    def command(folder: Path) -> list[str]:
        changes = {"steps": STEPS, "evaluate_every": 20, "save_every": 7, "log_every": 1}
        values = settings(folder / "data", folder / "run", **changes)
        given = words_of(values)
        if ranks > 1:
            return [sys.executable, *torchrun, "-m", "lm.train.command", *given]
        return [script("lm_train"), *given]

    def model(folder: Path) -> dict[str, torch.Tensor]:
        loaded = load_model(folder / "run/last.pt")
        assert loaded.training is not None and loaded.training["step"] == STEPS
        return loaded.model.state_dict()

    def largest(folder: Path) -> int:
        return (folder / "run/last.pt").stat().st_size

    # torchrun has its own exit status
    status = (lambda number: 128 + number) if ranks == 1 else (lambda number: 1)
    return Training("lm_train", command, small_corpus, model, largest, status)


@cache
def _undisturbed(training: Training) -> tuple[Path, float]:
    _KEPT.append(tempfile.TemporaryDirectory(prefix="drill-whole-"))
    folder = Path(_KEPT[-1].name)
    training.prepare(folder)
    started = time.monotonic()
    run(training.command(folder), folder / "log")
    return folder, time.monotonic() - started


def undisturbed(training: Training) -> tuple[Path, float]:
    """The folder of an undisturbed run, and its seconds; run once."""
    with _ONCE:
        return _undisturbed(training)


def resumed(training: Training, folder: Path, wanted: str) -> str:
    """Run the same command to its end; returns `wanted`, or what is wrong with the result."""
    with Running(training.command(folder), folder / "resumed.log") as running:
        status = running.end(300)
        if status != 0:
            return f"ended with {status} when run again: {running.output()[-300:]!r}"
    if left := remains(folder):
        return f"left {left[0]}"
    whole, found = training.model(undisturbed(training)[0]), training.model(folder)
    same = whole.keys() == found.keys() and all(torch.equal(whole[name], found[name]) for name in whole)
    return wanted if same else "other bits"


def kill(training: Training, given: Try) -> str:
    """Kill all its processes, twice, and resume."""
    training.prepare(given.folder)
    seconds = undisturbed(training)[1]
    for number in range(2):
        with Running(training.command(given.folder), given.folder / f"log{number}") as running:
            running.run_for(given.random.random() * seconds)
            running.send_to_all(signal.SIGKILL)
    return resumed(training, given.folder, SAME)


def kill_rank(training: Training, given: Try) -> str:
    """Kill one of its ranks, and resume."""
    training.prepare(given.folder)
    with Running(training.command(given.folder), given.folder / "log") as running:
        if not running.wait_for(r"(Step|step) +\d+"):
            return "did not start"
        running.run_for(given.random.random())
        ranks = running.children()
        if len(ranks) == 2:
            os.kill(given.random.choice(ranks), signal.SIGKILL)
        status = running.end(GRACE_SECONDS)
        if status not in (0, 1, 2):
            return f"ended with {status}"
        if not running.wait_for_empty_group(GRACE_SECONDS):
            return "left a rank running"
        if status == 2 and len(error_lines(running.output(), training.program)) != 1:
            return "was not reported in one line"
    return resumed(training, given.folder, CLEAN)


def ask(training: Training, number: int, to_all: bool, times: int, given: Try) -> str:
    """Ask it to stop, once or several times, and resume."""
    training.prepare(given.folder)
    with Running(training.command(given.folder), given.folder / "log") as running:
        running.run_for(given.random.random() * undisturbed(training)[1])
        for _ in range(times):
            (running.send_to_all if to_all else running.send)(number)
            running.run_for(given.random.random() * 0.02)
        status = running.end(GRACE_SECONDS)
        if status not in (0, training.status(number)):
            return f"ended with {status}"
        lines = error_lines(running.output(), training.program)
        if status and len(lines) != 1 and training.status(number) > 128:
            return f"printed {len(lines)} lines"
    return resumed(training, given.folder, CLEAN)


def fill_disk(training: Training, given: Try) -> str:
    """Stop it, run it with a file size limit below that of a checkpoint, and resume."""
    training.prepare(given.folder)
    largest = training.largest(undisturbed(training)[0])
    with Running(training.command(given.folder), given.folder / "log") as running:
        running.wait_for(r"(Step|step) +1\d\b")
        running.send(signal.SIGTERM)
        running.end(GRACE_SECONDS)
    limit = given.random.randrange(largest // 10, largest)
    with Running(training.command(given.folder), given.folder / "full.log", largest_file=limit) as running:
        status = running.end(120)
        lines = error_lines(running.output(), training.program)
        if status != 2 or len(lines) != 1 or "cannot be written" not in lines[0]:
            return f"ended with {status} and {lines}"
    if left := remains(given.folder):
        return f"left {left[0]}"
    return resumed(training, given.folder, CLEAN)


_LM, _ONMT, _ONMT_TWO, _LM_TWO = lm_train(), onmt_train(), onmt_train(ranks=2), lm_train(ranks=2)
_SAFE, _WORKERS = onmt_train(save_format="safetensors"), onmt_train(num_workers=2)
_INT, _TERM = signal.SIGINT, signal.SIGTERM

DRILLS = [
    Drill("lm_train: kill -9", SAME, partial(kill, _LM), 4),
    Drill("onmt_train: kill -9", SAME, partial(kill, _ONMT), 4),
    Drill("onmt_train, safetensors: kill -9", SAME, partial(kill, _SAFE), 4),
    Drill("onmt_train, two loader workers: kill -9", SAME, partial(kill, _WORKERS), 2),
    Drill("lm_train: SIGTERM", CLEAN, partial(ask, _LM, _TERM, False, 1), 3),
    Drill("onmt_train: SIGTERM", CLEAN, partial(ask, _ONMT, _TERM, False, 1), 3),
    Drill("onmt_train, two workers: Ctrl-C (SIGINT to all)", CLEAN, partial(ask, _WORKERS, _INT, True, 1), 3),
    Drill("lm_train: SIGINT, three times", CLEAN, partial(ask, _LM, _INT, False, 3), 2),
    Drill("onmt_train, safetensors: SIGTERM, three times", CLEAN, partial(ask, _SAFE, _TERM, False, 3), 2),
    Drill("onmt_train, two ranks: SIGTERM to the parent", CLEAN, partial(ask, _ONMT_TWO, _TERM, False, 1), 2),
    Drill("onmt_train, two ranks: kill -9 of one", CLEAN, partial(kill_rank, _ONMT_TWO), 3),
    Drill("onmt_train, two ranks: kill -9 of all", SAME, partial(kill, _ONMT_TWO), 1),
    Drill("lm_train, two processes: SIGTERM to torchrun", CLEAN, partial(ask, _LM_TWO, _TERM, False, 1), 2),
    Drill("lm_train, two processes: kill -9 of one", CLEAN, partial(kill_rank, _LM_TWO), 2),
    Drill("lm_train: full disk", CLEAN, partial(fill_disk, _LM), 2),
    Drill("onmt_train: full disk", CLEAN, partial(fill_disk, _ONMT), 2),
    Drill("onmt_train, safetensors: full disk", CLEAN, partial(fill_disk, _SAFE), 2),
]
