"""Preparing published text resumes after ``kill -9`` as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from recipes.common.results import REPOSITORY
from recipes.translation.preprocess import write_smoke_texts
from recipes.translation.sources import read_settings

RECIPE = "wmt14_ende"
SECONDS = 500
# Runs a module that kills itself, or whose workers kill it, once a line is printed: who reads its output
# could be late.
KILLED = """
import os, runpy, signal, sys
from recipes.common import tools
module, last = sys.argv.pop(1), sys.argv.pop(1)
process, print_line = os.getpid(), tools.print_line
def print_and_die(line):
    print_line(line)
    if line == last:
        os.kill(process, signal.SIGKILL)
tools.print_line = print_and_die
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
MODULE = "recipes.__main__"
PIECES = {"bpe": {"kind": "bpe", "size": 150}, "plain": {"kind": "sentencepiece", "size": 240}}


class Preparation:
    """preprocess.sh on a generated text of five shards.

    Args:
        folder: gets the texts, the settings and the runs.
    """

    def __init__(self, folder: Path) -> None:
        original = REPOSITORY / "recipes" / RECIPE / "data.yaml"
        write_smoke_texts(folder / "raw" / RECIPE, read_settings(original))
        content = yaml.safe_load(original.read_text(encoding="utf-8"))
        content.update(shard=50, sentences=500, pieces=PIECES)
        (folder / "data.yaml").write_text(yaml.safe_dump(content))
        self.folder = folder

    def start(
        self, name: str, processes: int, program: Sequence[str] = ("-m", MODULE)
    ) -> subprocess.Popen[str]:
        """Prepare the data below the folder `name`."""
        command = [sys.executable, *program, RECIPE, "preprocess"]
        command += ["--settings", str(self.folder / "data.yaml"), "--processes", str(processes)]
        own = {"RUNS": str(self.folder / name), "DATA_DIR": str(self.folder / "raw")}
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1", **own}
        with (self.folder / "errors").open("w") as errors:
            return subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def data(self, name: str) -> Path:
        """Where the data are."""
        return self.folder / name / RECIPE / "data"

    def killed(self, name: str, processes: int, step: str) -> list[str]:
        """Prepare, and be killed when `step` begins; gives the names of the steps before."""
        process = self.start(name, processes, ("-c", KILLED, MODULE, f"{step}: running"))
        printed = process.communicate(timeout=SECONDS)[0]
        assert process.returncode == -signal.SIGKILL
        assert not (self.data(name) / "plain" / "data.json").exists()
        states = [line.partition(": ") for line in printed.splitlines()]
        before = states[: states.index((step, ": ", "running"))]
        # The step "text" is over when those of its shards are.
        return [begun for begun, _, state in before if state and begun != "text"]

    def finished(self, name: str, processes: int) -> list[str]:
        """Prepare to the end; gives what is printed."""
        process = self.start(name, processes)
        printed = process.communicate(timeout=SECONDS)[0]
        assert process.returncode == 0, (self.folder / "errors").read_text()
        return printed.splitlines()

    def files(self, name: str) -> dict[str, bytes]:
        """The content of all files, stamps included."""
        home = self.data(name)
        return {str(path.relative_to(home)): path.read_bytes() for path in home.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def preparation(tmp_path_factory: pytest.TempPathFactory) -> Preparation:
    """A preparation that has come to its end without a break in the folder ``whole``."""
    made = Preparation(tmp_path_factory.mktemp("killed"))
    made.finished("whole", processes=1)
    assert len(made.files("whole")) > 60
    return made


@pytest.mark.slow
@pytest.mark.parametrize("steps", [("text-00002",), ("bpe-learn", "plain-train-00003.de")])
def test_a_killed_preparation_goes_on_from_its_last_step(
    preparation: Preparation, steps: Sequence[str]
) -> None:
    name = steps[-1]
    for step in steps:
        done = preparation.killed(name, 1, step)
        assert len(done) > 3
    # As a run leaves them that is killed while it writes a file.
    remains = [preparation.data(name) / folder / ".train.en.1.tmp" for folder in ("bpe", "text")]
    for path in remains:
        path.parent.mkdir(exist_ok=True)
        path.write_text("half of ")
    printed = preparation.finished(name, processes=1)
    assert {f"{step}: up to date" for step in done} <= set(printed)
    assert f"{steps[-1]}: running" in printed or f"{steps[-1]}: up to date" in printed
    assert preparation.files(name) == preparation.files("whole")


@pytest.mark.slow
def test_workers_end_with_the_process_that_is_killed(preparation: Preparation) -> None:
    preparation.killed("workers", 2, "tokens-train-00001.en")
    # They hold the lock as long as they live.
    for _ in range(50):
        process = preparation.start("workers", processes=2)
        process.communicate(timeout=SECONDS)
        if "another process is running" not in (preparation.folder / "errors").read_text():
            break
        time.sleep(1)
    assert process.returncode == 0
    assert preparation.files("workers") == preparation.files("whole")
