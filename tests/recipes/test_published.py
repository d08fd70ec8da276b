"""The published translation rows, and preprocessing that resumes after ``kill -9``."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.common.recipe import find_recipe
from recipes.common.results import REPOSITORY
from recipes.translation.preprocess import (
    Texts,
    clean,
    locate,
    read_pairs,
    read_settings,
    shards,
    write_smoke_texts,
)
from recipes.translation.subwords import count_words, learn_bpe
from recipes.translation.train import Machines, batch_size, read_machines
from shared_embeddings.utils.errors import UserError

RECIPES = ("iwslt_pten", "wmt14_ende", "wmt14_enfr")
IWSLT = find_recipe("iwslt_pten")


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_row_can_be_read_and_has_its_data(recipe: str) -> None:
    settings = read_settings(find_recipe(recipe))
    names = [texts.name for texts in settings.tests]
    for row in find_recipe(recipe).rows.values():
        assert row.data and row.batch is not None
        pieces = settings.pieces[row.data["pieces"]]
        assert {row.data["valid"], *row.data["tests"]} <= set(names)
        if "classes" in row.embedding:
            assert row.embedding["num_classes"] in pieces.classes


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_train_as_their_papers_print(recipe: str) -> None:
    """DeFINE takes OpenNMT-py's recommended settings, ALONE those of its authors' README, the others those of
    Vaswani et al. (2017).

    There, the learning rate is D**-0.5 * min(step**-0.5, step * 4000**-1.5) without a factor, and dropout is
    on sub-layers and on the sums with the positions, not on the attention.
    """
    names = ("learning_rate", "warmup_steps", "adam_beta2", "attention_dropout", "dropout", "label_smoothing")
    for name, row in find_recipe(recipe).rows.items():
        train = row.train
        wanted = [1.0, 4000, 0.98, [0.0], [0.1], 0.1]
        if name.startswith("define_"):
            wanted = [2.0, 8000, 0.998, [0.1], [0.1], 0.1]
            assert (row.translate["beam_size"], row.translate["length_penalty"]) == (5, "none")
        elif name.startswith("uncle_table12_"):
            wanted[-1] = 0.0  # fairseq's loss of adaptive softmaxes does not smooth labels
        elif name.startswith("alone_") and name != "alone_table2_standard":
            wanted = [2.1466, 4000, 0.98, [0.0], [0.2], 0.1]
        assert [train[option] for option in names] == wanted, name
        assert train["decay_method"] == "noam"


def test_rows_of_alone_train_as_in_the_readme_of_its_authors() -> None:
    """3,584 tokens, 32 batches on each of 4 GPUs, at most 1.5e-3; ReLU dropout ends after 4,500 updates."""
    dropped = set()
    for name, row in find_recipe("wmt14_ende").rows.items():
        if not name.startswith("alone_table2_") or name.endswith("standard"):
            continue
        assert row.batch is not None and batch_size(row.batch, 4) == (3584, 32)
        assert row.train["learning_rate"] * (512 * 4000) ** -0.5 == pytest.approx(1.5e-3, rel=1e-4)
        assert row.train["max_grad_norm"] == 1.0 and row.train["train_steps"] == 100_000
        assert row.average == 10 and row.train["keep_checkpoint"] >= 10
        if row.embedding["method"] == "alone":
            assert row.embedding["relu_dropout_steps"] == 4500
            dropped.add((row.embedding["filter"], row.embedding["relu_dropout"]))
    assert dropped == {("binary", 0.15), ("real", 0.2)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"corpora": None}, "corpora is None; expected a nonempty list"),
        ({"pieces": {}}, r"pieces is \{\}; expected a nonempty dict"),
        ({"max_ratio": 0.5}, "max_ratio is 0.5; expected a number of at least 1"),
        ({"pieces": {"a": {"kind": "bpe", "size": "x"}}}, "a: option 'size' is 'x'"),
        (
            {"pieces": {"a": {"kind": "bpe", "size": 9, "classes": [0]}}},
            "classes is 0; it must be at least 1",
        ),
    ],
)
def test_invalid_settings_fail(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, content = IWSLT.data_settings()
    path = tmp_path / "data.yaml"
    path.write_text(yaml.safe_dump({**content, **changed}))
    with pytest.raises(UserError, match=message):
        read_settings(IWSLT, path)


def test_a_step_has_as_many_tokens_on_any_number_of_gpus_and_machines() -> None:
    for processes in (1, 2, 3, 8, 16):
        size, accumulated = batch_size({"tokens": 48000, "per_gpu": 6000}, processes)
        assert size <= 6000
        assert abs(size * accumulated * processes - 48000) <= accumulated * processes / 2
    options = Machines(2, 2, 1, "first", 12345).options({"tokens": 4096, "per_gpu": 1024})
    assert options[options.index("-gpu_ranks") + 1 :][:2] == ["2", "3"]
    assert options[options.index("-world_size") + 1] == "4"
    assert int(options[options.index("-timeout") + 1]) > 60
    assert "-timeout" not in Machines(2).options({"tokens": 4096, "per_gpu": 1024})
    with pytest.raises(UserError, match="--machine is 2 of 2"):
        read_machines(["--machines", "2", "--machine", "2"], gpus=1)


def test_archive_formats_are_read(tmp_path: Path) -> None:
    members = {
        "a/x.pt": "<url>u</url>\num\ndois\n",
        "a/x.en": "<url>u</url>\none\ntwo\n",
        "a/t.en.sgm": '<doc>\n<seg id="1">A &amp; B</seg>\n</doc>\n',
        "a/t.pt.sgm": '<doc>\n<seg id="1"> C </seg>\n</doc>\n',
    }
    with tarfile.open(tmp_path / "x.tgz", "w:gz") as archive:
        for name, text in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    tags = Texts("x", "x.tgz", "", "a/x.pt", "a/x.en", "tags")
    segments = Texts("t", "x.tgz", "", "a/t.pt.sgm", "a/t.en.sgm", "segments")
    found = locate(tags, ("pt", "en"), [tmp_path])
    assert list(read_pairs(found)) == [("um", "one"), ("dois", "two")]
    assert list(read_pairs(locate(segments, ("pt", "en"), [tmp_path]))) == [("C", "A & B")]
    (tmp_path / "x.pt").write_text("um\n")
    (tmp_path / "x.en").write_text("one\ntwo\n")
    with pytest.raises(UserError, match="the source side ends before line 2"):
        list(read_pairs(locate(tags, ("pt", "en"), [tmp_path])))


def test_pairs_are_cleaned_and_sharded() -> None:
    settings = read_settings(IWSLT)
    pairs = [("a", "b"), ("", "b"), ("a", "b " * 9 + "b"), ("a " * 250 + "a", "b " * 200 + "b"), ("c", "d e")]
    kept = list(clean(pairs, settings))
    assert kept == [("a", "b"), ("c", "d e")]
    assert list(shards(kept * 2, 3)) == [[*kept, kept[0]], [kept[1]]]


def test_counting_drops_the_rarest_words(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("a a a\nb b\nc\nd\n")
    assert count_words([text], 3) == {"a": 3}
    assert len(count_words([text], 3)) <= 3
    assert count_words([text], 9) == {"a": 3, "b": 2, "c": 1, "d": 1}
    text.write_text("a b c\n")
    with pytest.raises(UserError, match="no word has two characters; give more text"):
        learn_bpe([text], tmp_path / "codes", 10)


RECIPE = "wmt14_ende"
SECONDS = 500
# Runs a module that kills itself, or is killed by its workers, once a line is printed: a reader of its output
# could be too late.
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
    """preprocess.sh on a generated text of five shards, with settings and runs in a folder."""

    def __init__(self, folder: Path) -> None:
        recipe = find_recipe(RECIPE)
        write_smoke_texts(folder / "raw" / RECIPE, read_settings(recipe))
        _, content = recipe.data_settings()
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
        """Prepare, and be killed when `step` begins; returns the names of the earlier steps."""
        process = self.start(name, processes, ("-c", KILLED, MODULE, f"{step}: running"))
        printed = process.communicate(timeout=SECONDS)[0]
        assert process.returncode == -signal.SIGKILL
        assert not (self.data(name) / "plain" / "data.json").exists()
        states = [line.partition(": ") for line in printed.splitlines()]
        before = states[: states.index((step, ": ", "running"))]
        # The step "text" ends with those of its shards.
        return [begun for begun, _, state in before if state and begun != "text"]

    def finished(self, name: str, processes: int) -> list[str]:
        """Prepare to the end; returns the output."""
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
    """An uninterrupted preparation in the folder ``whole``."""
    made = Preparation(tmp_path_factory.mktemp("killed"))
    made.finished("whole", processes=1)
    assert len(made.files("whole")) > 60
    return made


@pytest.mark.slow
@pytest.mark.parametrize("steps", [("text-00002",), ("bpe-learn", "plain-train-00003.de")])
def test_killed_preprocessing_resumes_from_its_last_step(
    preparation: Preparation, steps: Sequence[str]
) -> None:
    name = steps[-1]
    for step in steps:
        done = preparation.killed(name, 1, step)
        assert len(done) > 3
    # As left by a run that is killed while it writes a file.
    remains = [preparation.data(name) / folder / ".train.en.1.tmp" for folder in ("bpe", "text")]
    for path in remains:
        path.parent.mkdir(exist_ok=True)
        path.write_text("half of ")
    remains[0].with_name(".train.de.1.tmp").mkdir()
    printed = preparation.finished(name, processes=1)
    assert {f"{step}: up to date" for step in done} <= set(printed)
    assert f"{steps[-1]}: running" in printed or f"{steps[-1]}: up to date" in printed
    assert preparation.files(name) == preparation.files("whole")


@pytest.mark.slow
def test_workers_exit_if_their_parent_is_killed(preparation: Preparation) -> None:
    preparation.killed("workers", 2, "tokens-train-00001.en")
    # They hold the lock until they exit.
    for _ in range(50):
        process = preparation.start("workers", processes=2)
        process.communicate(timeout=SECONDS)
        if "another process is running" not in (preparation.folder / "errors").read_text():
            break
        time.sleep(1)
    assert process.returncode == 0, (preparation.folder / "errors").read_text()
    assert preparation.files("workers") == preparation.files("whole")
