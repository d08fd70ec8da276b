"""Drills: every command that writes is killed, stopped and starved, and given files that it cannot use.

Its outputs are then the old ones or the new ones as a whole, it prints one line, and it exits with 2, 130 or
143. Temporary files are left only by kill -9.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers import content
from tests.lm.runs import settings, small_corpus, words_of, write_corpus, write_model
from tests.nmt.conftest import Host
from tests.test_setup import COMMANDS

SENTENCES = "a b c d\nc d a b\nb b e f\n"


class Writer(NamedTuple):
    """A command that writes."""

    arguments: str  # after the command's name; inputs start with <, the output with >
    force: str | None = "--force"  # the option that lets it replace outputs; None if it always does
    # Whether files are OpenNMT-py's, whose errors it reports itself.
    is_upstream: bool = False

    @property
    def program(self) -> str:
        return self.arguments.split()[0]

    def words(self, inputs: Path, folder: Path) -> list[str]:
        """Its arguments, for inputs and outputs in two folders."""
        words = self.arguments.replace("<", f"{inputs}/").replace(">", f"{folder}/")
        return words.split()[1:]

    def inputs(self) -> list[str]:
        """The names of the files and folders that it reads."""
        return re.findall(r"<([\w.]+)", self.arguments)

    def outputs(self) -> list[str]:
        """The names of the files and folders that it writes."""
        return re.findall(r">([\w.]+)", self.arguments)


_COMPRESS = "shared-embeddings compress --method projective --rank 2 --output"
WRITERS = {
    "characters": Writer("onmt_characters split -input <text -output >out", None),
    "rerank": Writer("onmt_rerank -source <text -hypotheses <more -n_best 1 -output >out", None),
    "character_vocab": Writer("onmt_character_vocab -source <text -target <more -output >out", None),
    "average": Writer("onmt_average_models -models <nmt.pt -output >out.pt"),
    "release": Writer("onmt_release_model --model <nmt.pt --output >out.pt"),
    "translate": Writer("onmt_translate -model <nmt.pt -src <test.src -output >out -beam_size 1", None, True),
    "lm_prepare": Writer("lm_prepare -train <train.txt -valid <text -test <more -output >data", "-force"),
    "lm_evaluate": Writer("lm_evaluate -model <lm.pt -data <text -output >out.json"),
    "classes": Writer(
        "shared-embeddings classes --text <text --vocab <words --num-classes 2 --dim 3 --epochs 1 "
        "--output >out.npz"
    ),
    "compress lm": Writer(f"{_COMPRESS} >small --model <lm.pt"),
    "compress nmt": Writer(f"{_COMPRESS} >small --model <nmt.pt"),
    "compress folder": Writer(f"{_COMPRESS} >small --model <gpt2"),
    "compress words": Writer(f"{_COMPRESS} >small --model <words.vec"),
    "export words": Writer("shared-embeddings export --format vec --output >small --model <words.vec"),
    "trim": Writer("shared-embeddings trim --model <lm.pt --text <text --output >small"),
}
NAMES = sorted(WRITERS)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs of all `WRITERS`; the models are tiny."""
    pytest.importorskip("transformers")
    from tests.shared_embeddings.hf.models import write as write_folder

    folder = tmp_path_factory.mktemp("inputs")
    for name in ("text", "more"):
        (folder / name).write_text(SENTENCES * 20)
    (folder / "train.txt").write_text(SENTENCES * 200)
    (folder / "words").write_text("a\nb\nc\nd\ne\nf\n")
    rows = (f"{word} {number} 1 {number * number} 2" for number, word in enumerate("abcdef"))
    (folder / "words.vec").write_text("\n".join(rows) + "\n")
    write_model(folder / "lm.pt", write_corpus(folder / "corpus", "a b c d e f"))
    write_folder("gpt2", folder / "gpt2")
    host = Host(folder)
    shutil.copyfile(host.train("model", train_steps=1, save_checkpoint_steps=1), folder / "nmt.pt")
    return folder


class DrillEnded(NamedTuple):
    """The exit status and the error output of a command."""

    status: int
    error: str

    def assert_one_line(self, status: int, *words: str) -> None:
        """Check that it failed with a status and one line with these words."""
        assert self.status == status, self
        lines = [
            line
            for line in self.error.splitlines()
            if "Traceback" in line or re.match(r"[\w-]+( \w+)?: ", line)
        ]
        assert len(lines) == 1 and "Traceback" not in self.error, self.error
        assert all(word in lines[0] for word in words), self.error


def run(name: str, words: list[str], folder: Path) -> DrillEnded:
    """Run a command in this process; no temporary file may be left in a folder."""
    program = WRITERS[name].program
    module, function = COMMANDS[program].split(":")
    error, status = io.StringIO(), 0
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stderr(error),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        patch.setattr("sys.argv", [program, *words])
        try:
            status = getattr(importlib.import_module(module), function)() or 0
        except SystemExit as end:
            status = int(end.code or 0)
    assert not list(folder.rglob(".*.tmp"))
    return DrillEnded(status, error.getvalue())


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A folder for outputs."""
    folder = tmp_path / "outputs"
    folder.mkdir()
    return folder


def fill(name: str, folder: Path, inputs: Path) -> dict[str, object]:
    """Put old outputs into a folder; returns its content."""
    for output in WRITERS[name].outputs():
        if name == "compress folder":  # which replaces models only
            shutil.copytree(inputs / "gpt2", folder / output)
        elif name == "lm_prepare":
            (folder / output).mkdir()
            (folder / output / "old").write_text("old")
        else:
            (folder / output).write_text("old")
    return content(folder)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_replaced_as_a_whole(name: str, inputs: Path, old: Path, tmp_path: Path) -> None:
    """Only with --force, and they are then those of a run into an empty folder."""
    writer, fresh = WRITERS[name], tmp_path / "fresh"
    fresh.mkdir()
    assert run(name, writer.words(inputs, fresh), fresh).status == 0
    before = fill(name, old, inputs)
    words = writer.words(inputs, old)
    if writer.force:
        if name != "lm_prepare":  # which only keeps other corpora
            run(name, words, old).assert_one_line(2, "exists", "force")
            assert content(old) == before
        words.append(writer.force)
    assert run(name, words, old).status == 0
    assert {*content(old)} - {"data/old"} == {*content(fresh)}


@pytest.mark.parametrize("name", NAMES)
def test_an_output_is_no_input(name: str, inputs: Path, tmp_path: Path) -> None:
    writer = WRITERS[name]
    if name == "lm_prepare":
        return  # its output is a folder with names of its own
    copy = tmp_path / "copy"
    shutil.copytree(inputs, copy)
    before = content(copy)
    for same in writer.inputs():
        words = [
            str(copy / same) if word.startswith(f"{tmp_path}/out/") else word
            for word in writer.words(copy, tmp_path / "out")
        ]
        run(name, [*words, *([writer.force] if writer.force else [])], copy).assert_one_line(2, same)
        assert content(copy) == before, same


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "garbage"])
@pytest.mark.parametrize("name", NAMES)
def test_unusable_inputs_leave_the_old_outputs(
    name: str, damage: str, inputs: Path, old: Path, tmp_path: Path
) -> None:
    """Texts may be short; everything else is reported in one line."""
    writer = WRITERS[name]
    copy = tmp_path / "copy"
    shutil.copytree(inputs, copy)
    before = fill(name, old, inputs)
    words = writer.words(copy, old) + ([writer.force] if writer.force else [])
    for damaged in writer.inputs():
        path = copy / damaged
        if path.is_dir():
            path = path / "model.safetensors"
        data = path.read_bytes()
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(
                {"empty": b"", "truncated": data[: len(data) // 2], "garbage": b"\xff\xfe\x00" * 99}[damage]
            )
        ended = run(name, words, old)
        if ended.status:
            if not writer.is_upstream:
                ended.assert_one_line(2)
            assert content(old) == before, damaged
        else:
            is_text = damaged in ("text", "more", "train.txt", "words", "test.src")
            assert is_text and damage in ("empty", "truncated"), (damaged, ended)
            shutil.rmtree(old)
            old.mkdir()
            before = fill(name, old, inputs)
        path.write_bytes(data)


@pytest.mark.parametrize("name", NAMES)
def test_a_full_disk_leaves_the_old_outputs(name: str, inputs: Path, old: Path) -> None:
    """Writes beyond the first bytes of a file fail."""
    writer = WRITERS[name]
    before = fill(name, old, inputs)
    words = writer.words(inputs, old) + ([writer.force] if writer.force else [])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        ended = run(name, words, old)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    ended.assert_one_line(2, os.strerror(27), "" if writer.is_upstream else str(old))
    assert content(old) == before


# Sends a signal to its own process before or after an output gets its place.
STOP = """
import os, pathlib, sys
number, when, program, module, function = int(sys.argv[1]), *sys.argv[2:6]
original = pathlib.Path.replace
def replace(self, target):
    # Not a file in the temporary folder of an output.
    is_output = ".tmp/" not in str(target)
    if when == "before" and is_output:
        os.kill(os.getpid(), number)
    result = original(self, target)
    if when == "after" and is_output:
        os.kill(os.getpid(), number)
    return result
pathlib.Path.replace = replace
sys.argv = [program, *sys.argv[6:]]
sys.exit(getattr(__import__(module, fromlist=[function]), function)())
"""


def start_stopped(program: str, words: list[str], number: int, when: str, cwd: Path) -> DrillEnded:
    """Run a command in a process that gets a signal when it replaces its output."""
    command = [
        sys.executable,
        "-c",
        STOP,
        str(int(number)),
        when,
        program,
        *COMMANDS[program].split(":"),
        *words,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    # Shells make their background processes ignore Ctrl-C.
    ended = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    return DrillEnded(ended.returncode, ended.stderr)


# One of each kind of output, a file and a folder, and of each signal is quick.
@pytest.mark.slow_except("lm_evaluate-SIGINT-before", "lm_prepare-SIGTERM-before")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name
)
@pytest.mark.parametrize("name", NAMES)
def test_stopped_commands(
    name: str, number: signal.Signals, when: str, inputs: Path, old: Path, tmp_path: Path
) -> None:
    writer = WRITERS[name]
    before = fill(name, old, inputs)
    words = writer.words(inputs, old) + ([writer.force] if writer.force else [])
    ended = start_stopped(writer.program, words, number, when, tmp_path)
    if number == signal.SIGKILL:
        assert ended.status == -number
        after = {key: value for key, value in content(old).items() if not key.startswith(".")}
    else:
        ended.assert_one_line(128 + number, writer.program)
        after = content(old)
        assert not list(old.rglob(".*.tmp"))
    # Files of a corpus follow each other, so that kill -9 may leave one without its description.
    if when == "before" and (name != "lm_prepare" or number != signal.SIGKILL):
        # An old folder has just been moved aside; kill -9 leaves it in the temporary one.
        assert after == before or (name == "compress folder" and not after)
    else:
        assert after != before


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name
)
def test_a_stopped_training_resumes(number: signal.Signals, tmp_path: Path) -> None:
    """With the same command, to the same model; also if it is stopped while it writes a checkpoint."""
    data = small_corpus(tmp_path)
    words = words_of(settings(data, tmp_path / "run", steps=20, save_every=5))
    ended = start_stopped("lm_train", words, number, "before", tmp_path)
    assert ended.status == (-number if number == signal.SIGKILL else 128 + number)
    if number != signal.SIGKILL:
        ended.assert_one_line(128 + number, "run the same command again to resume")
    whole = words_of(settings(data, tmp_path / "whole", steps=20, save_every=5))
    for arguments in (words, whole):
        assert start_stopped("lm_train", arguments, 0, "never", tmp_path).status == 0
    import torch

    from lm.checkpoint import load_model

    for name in ("best.pt", "last.pt"):
        models = [load_model(tmp_path / folder / name).model for folder in ("run", "whole")]
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(ours, theirs), name
