"""Outputs support pipes, devices and links, are written completely or not at all, and replace no input."""

from __future__ import annotations

import os
import resource
import signal
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared_embeddings.utils import command_line
from shared_embeddings.utils.path_options import PathOption
from tests.commands.harness import (
    CALLS,
    COMMANDS,
    OF_TRAINING,
    WRITERS,
    Ended,
    arguments,
    content,
    make_inputs,
    places,
    plant,
    run,
)
from tests.shared_embeddings.support import Killed, kill_at_move

# The other writers load larger libraries or models.
QUICK = ("onmt_characters", "onmt_rerank", "onmt_character_vocab", "lm_prepare", "lm_evaluate", "trim")
QUICK += ("lm_prepare with a split", "suggest")
TO_FILES = [name for name, writer in WRITERS.items() if not writer.is_folder]
FULL = os.makedev(1, 7)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all inputs."""
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return folder


def write(name: str, inputs: Path, folder: Path, force: bool = False) -> Ended:
    """Run a writer."""
    writer = WRITERS[name]
    folder.mkdir(exist_ok=True)
    further = [writer.force] if force and writer.force is not None else []
    return run(writer.command, [*writer.given(inputs, folder), *further])


def error_of(name: str, ended: Ended) -> str:
    """The one line with which a writer reports its error."""
    lines = [line for line in ended.error.splitlines() if line.startswith(f"{WRITERS[name].command}: ")]
    assert len(lines) == 1 and "Traceback" not in ended.error, ended.error
    return lines[0]


@contextmanager
def reading_pipe(path: Path) -> Iterator[list[bytes]]:
    """Make a pipe and read it to its end; yields a list that receives the content."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(path.read_bytes()), daemon=True)
    reader.start()
    yield found
    reader.join(10)


@pytest.mark.slow_except("onmt_character_vocab")
@pytest.mark.parametrize("name", TO_FILES)
def test_pipes_are_written_and_links_kept(name: str, inputs: Path, tmp_path: Path) -> None:
    plain, odd = tmp_path / "plain", tmp_path / "odd"
    assert write(name, inputs, plain).status == 0
    wanted = content(plain)
    odd.mkdir()
    (output, *others), (target, *_) = (WRITERS[name].outputs(folder) for folder in (odd, plain))
    with reading_pipe(output) as found:
        ended = write(name, inputs, odd, force=True)
    assert ended.status == 0, ended.error
    assert stat.S_ISFIFO(output.stat().st_mode)
    # Records and reports contain names and times.
    if target.suffix not in (".json", ".pt", "") or name.startswith("onmt_char"):
        assert found == [target.read_bytes()]
    assert found and len(found[0]) > 10
    output.unlink()
    for path in others:
        if path.is_file():
            path.unlink()
    output.symlink_to(tmp_path / "behind the link")
    (tmp_path / "behind the link").write_text("old")
    ended = write(name, inputs, odd, force=True)
    assert ended.status == 0, ended.error
    assert output.is_symlink()
    assert (tmp_path / "behind the link").read_bytes() != b"old"
    assert content(plain) == wanted


@pytest.mark.slow_except(*QUICK)
@pytest.mark.parametrize("name", TO_FILES)
def test_a_full_device_fails(name: str, inputs: Path, tmp_path: Path) -> None:
    """The device itself is not replaced."""
    (output, *_) = WRITERS[name].outputs(tmp_path)
    try:
        os.mknod(output, stat.S_IFCHR | 0o666, FULL)
    except PermissionError:
        pytest.skip("devices cannot be made here")
    ended = write(name, inputs, tmp_path, force=True)
    assert ended.status == 2 and "No space left on device" in error_of(name, ended)
    assert stat.S_ISCHR(output.stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == [output.name]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Make writes beyond so many bytes of a file fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow_except(*QUICK)
@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_keeps_existing_files(name: str, inputs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "outputs"
    folder.mkdir()
    for is_there in (False, True):
        if is_there:
            assert write(name, inputs, folder).status == 0
            if name.startswith("lm_prepare"):  # replaces nothing for the same texts
                return
        before = content(folder)
        with largest_file(20 if name == "onmt_character_vocab" else 100):
            ended = write(name, inputs, folder, force=True)
        assert ended.status == 2, ended.error
        line = error_of(name, ended)
        # These also write temporary files elsewhere.
        where = tempfile.gettempdir() if name.endswith(("translate", "CTranslate2")) else str(folder)
        assert "File too large" in line and where in line and ".tmp" not in line
        assert content(folder) == before


@pytest.mark.slow
def test_a_full_disk_while_writing_weights_is_one_line(inputs: Path, tmp_path: Path) -> None:
    """The safetensors library writes them, with its own errors."""
    with largest_file(5000):
        ended = write("compress a folder", inputs, tmp_path / "outputs")
    assert ended.status == 2, ended.error
    assert "File too large" in error_of("compress a folder", ended)
    assert not list((tmp_path / "outputs").iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow_except(*(f"{name}-*" for name in QUICK))
@pytest.mark.parametrize("name", WRITERS)
def test_a_signal_ends_a_command_with_one_line(
    name: str, inputs: Path, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes during writing; nothing is left behind."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: signal.raise_signal(number))
    ended = write(name, inputs, tmp_path)
    assert ended.status == 128 + number, ended.error
    assert error_of(name, ended)
    assert not list(tmp_path.iterdir())


def is_killed_at(name: str, inputs: Path, folder: Path, moment: int) -> bool:
    """Kill a writer at its `moment`-th rename; returns whether it got there."""
    with pytest.MonkeyPatch.context() as patch:
        kill_at_move(patch, moment)
        try:
            write(name, inputs, folder)
        except Killed:
            return True
    return False


@pytest.mark.slow_except(*QUICK)
@pytest.mark.parametrize("name", WRITERS)
def test_next_run_completes_a_killed_run(name: str, inputs: Path, tmp_path: Path) -> None:
    """It may be killed at any rename; between two of a set, the first ones are there."""
    assert write(name, inputs, tmp_path / "whole").status == 0
    wanted = content(tmp_path / "whole").keys()
    for moment in range(1, 20):
        folder = tmp_path / str(moment)
        if not is_killed_at(name, inputs, folder, moment):
            break
        ended = write(name, inputs, folder)
        if "already exists" in ended.error:
            assert moment > 1 and len(WRITERS[name].outputs(folder)) + name.startswith("trim") > 1
            ended = write(name, inputs, folder, force=True)
        assert ended.status == 0, ended.error
        assert content(folder).keys() == wanted
    assert moment > len(WRITERS[name].outputs(folder)) - 1


@pytest.mark.slow_except(*QUICK)
@pytest.mark.parametrize("name", WRITERS)
def test_planted_files_have_no_effect(name: str, inputs: Path, tmp_path: Path) -> None:
    """Nothing outside of the folder of the outputs changes, and the outputs are those of a clean folder."""
    assert write(name, inputs, tmp_path / "clean").status == 0
    home = tmp_path / "home"
    home.mkdir()
    (home / "precious").write_text("mine")
    before = content(home)
    folder = tmp_path / "outputs"
    folder.mkdir()
    outputs = [output for output in WRITERS[name].outputs(folder) if output.name != "samples"]
    if name.startswith("lm_prepare"):  # they write files in a folder
        outputs[0].mkdir()
        outputs += [outputs[0] / path.name for path in (tmp_path / "clean" / outputs[0].name).iterdir()]
    for output in outputs:
        plant(output, home)
    ended = write(name, inputs, folder)
    assert ended.status == 0, ended.error
    assert content(home) == before and list(content(folder)) == list(content(tmp_path / "clean"))


@pytest.mark.slow_except("lm_prepare")
@pytest.mark.parametrize("name", ["lm_prepare", "trim"])
def test_names_that_the_command_chose_replace_links(name: str, inputs: Path, tmp_path: Path) -> None:
    """Only a link that an option names is followed."""
    clean, folder, home = tmp_path / "clean", tmp_path / "outputs", tmp_path / "home"
    assert write(name, inputs, clean).status == 0
    named = [path.relative_to(folder) for path in WRITERS[name].outputs(folder)]
    home.mkdir()
    for file in [
        path for path in clean.rglob("*") if path.is_file() and path.relative_to(clean) not in named
    ]:
        link = folder / file.relative_to(clean)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(home / file.name)
        (home / file.name).write_text("mine")
    before = content(home)
    ended = write(name, inputs, folder, force=True)
    assert ended.status == 0, ended.error
    assert content(home) == before and len(before) > 0
    assert content(folder).keys() == content(clean).keys()
    assert not any(path.is_symlink() for path in folder.rglob("*"))


@pytest.mark.slow_except(*QUICK)
@pytest.mark.parametrize("name", WRITERS)
def test_token_files_are_not_text(name: str, inputs: Path, tmp_path: Path) -> None:
    """Each input text is replaced by a token file of ``lm_prepare``."""
    tokens, folder = tmp_path / "train.npy", tmp_path / "outputs"
    np.save(tokens, np.arange(50, dtype=np.int32))
    folder.mkdir()
    writer = WRITERS[name]
    given = writer.given(inputs, folder)
    texts = ("/text", "/train.txt", "/words", "/long.src", "/test.src")
    for place in [number for number, word in enumerate(given) if word.endswith(texts)]:
        ended = run(writer.command, [*given[:place], str(tokens), *given[place + 1 :]])
        line = error_of(name, ended)
        assert ended.status == 2 and str(tokens) in line
        assert "UTF-8" in line or name == "onmt_rerank"  # counts lines first
        assert not [path for path in folder.rglob("*") if path.is_file()]


def test_token_files_are_not_a_corpus(inputs: Path, tmp_path: Path) -> None:
    """Worker processes read the corpus."""
    np.save(tmp_path / "train.npy", np.arange(50, dtype=np.int32))
    data = f"{{corpus: {{path_src: {tmp_path}/train.npy, path_tgt: {tmp_path}/train.npy}}}}"
    outputs = ["-src_vocab", f"{tmp_path}/source", "-tgt_vocab", f"{tmp_path}/target"]
    ended = run("onmt_build_vocab", ["-data", data, *outputs, "-save_data", str(tmp_path), "-n_sample", "-1"])
    assert ended.status == 2 and "is not UTF-8" in error_of("onmt_build_vocab", ended)
    assert [path.name for path in tmp_path.iterdir()] == ["train.npy"]


WRITING = [call for call in CALLS if any(not place.is_read for place in places(call))]
# Options of OpenNMT that mention files in their help but do not name one.
NO_FILES = {"data", "dump_beam", "log_file_level", "save_data", "src_subword_type", "tgt_subword_type"}


def error_line(call: str, given: list[str], folder: Path) -> str:
    """Run a command that must reject its arguments and change nothing; returns its one line."""
    command = call.split()[0]
    before = content(folder)
    status, error = run(command, given)
    assert status == 2, f"{given} ended with {status}: {error}"
    lines = [line for line in error.splitlines() if line.startswith(f"{command}: ")]
    assert len(lines) == 1 and "Traceback" not in error, error
    assert content(folder) == before, given
    return lines[0]


@pytest.mark.slow_except("onmt_release_model")
@pytest.mark.parametrize("call", WRITING)
def test_no_output_replaces_an_input(call: str, tmp_path: Path) -> None:
    """By its own name, by a link or by a hard link, even if the command may replace outputs."""
    arguments(call, tmp_path, {})
    for name in (place.name for place in places(call) if place.is_read):
        symbolic, hard = tmp_path / f"{name} link", tmp_path / f"{name} hard link"
        symbolic.symlink_to(tmp_path / name)
        hard.hardlink_to(tmp_path / name)
        for output in (place.name for place in places(call) if not place.is_read):
            for path in (tmp_path / name, symbolic, hard):
                line = error_line(call, arguments(call, tmp_path, {output: path}, force=True), tmp_path)
                assert f"{path} would replace the file of " in line


@pytest.mark.parametrize("call", WRITING)
def test_outputs_that_cannot_be_written_fail_before_any_work(call: str, tmp_path: Path) -> None:
    """Below a file, as another output, or where a file or a link is, without ``--force``."""
    file = tmp_path / "file"
    file.write_text("mine")
    first, *others = [place for place in places(call) if not place.is_read]
    for place in (first, *others):
        error_line(call, arguments(call, tmp_path, {place.name: file / "below"}), tmp_path)
        if place.kind == ">":
            given, path = arguments(call, tmp_path, {}), tmp_path / place.name
            path.write_text("mine")
            wanted = "add -overwrite" if call == "onmt_build_vocab" else "add --force"
            assert f"{path} already exists; {wanted}" in error_line(call, given, tmp_path)
            path.unlink()
            path.symlink_to(tmp_path / "home")  # a link to nothing would create that
            assert "already exists" in error_line(call, given, tmp_path)
            path.unlink()
    for place in others:
        error_line(call, arguments(call, tmp_path, {place.name: tmp_path / first.name}), tmp_path)


@pytest.mark.slow_except("lm_generate", "onmt_characters split")
@pytest.mark.parametrize("call", [call for call in CALLS if any(place.is_read for place in places(call))])
def test_inputs_are_regular_files(call: str, tmp_path: Path) -> None:
    """Reading pipes and devices could block or never end."""
    folder, pipe = tmp_path / "folder", tmp_path / "pipe"
    folder.mkdir()
    os.mkfifo(pipe)
    for place in places(call):
        if not place.is_read:
            continue
        odd = {pipe: "is a device or a pipe", Path("/dev/zero"): "is a device or a pipe"}
        odd[tmp_path / "none"] = "no such file"
        if place.kind == "<":
            odd[folder] = "is a folder"
        for path, words in odd.items():
            line = error_line(call, arguments(call, tmp_path, {place.name: path}), tmp_path)
            assert str(path) in line and words in line
        line = error_line(call, arguments(call, tmp_path, {place.name: "a\0b"}), tmp_path)
        assert "NUL byte" in line or "special characters are not allowed" in line


def test_every_command_is_covered() -> None:
    assert {call.split()[0] for call in CALLS} == set(COMMANDS) - set(OF_TRAINING)


def test_every_path_option_is_covered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every path option of every command is used in some call."""
    options: dict[str, set[str]] = {}
    given: dict[str, set[str]] = {}

    def note(actions: Any, found: Any) -> None:
        del found
        for action in actions:
            if isinstance(action.type, PathOption) and action.type is not PathOption.FOLDER:
                options.setdefault(program, set()).add(action.dest)
                if set(action.option_strings) & set(words):
                    given.setdefault(program, set()).add(action.dest)

    monkeypatch.setattr(command_line, "check_path_options", note)
    for call in CALLS:
        words = arguments(call, tmp_path, {place.name: tmp_path / "none" for place in places(call)})
        program = " ".join(call.split()[:2]) if call.startswith(("shared-", "onmt_char")) else call.split()[0]
        run(call.split()[0], words)
    assert len(options) > 12 and given == options


def test_a_path_option_without_a_role_is_a_bug() -> None:
    parser = command_line.Parser("program")
    parser.add_argument("--output", type=Path)
    with pytest.raises(TypeError, match="output: its type must be a PathOption"):
        parser.parse_args([])
