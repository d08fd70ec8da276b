"""No command overwrites an input or replaces a file unasked, and none waits for a pipe."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from shared_embeddings.utils import command_line
from shared_embeddings.utils.path_options import PathOption
from tests.files.commands import CALLS, COMMANDS, OF_TRAINING, arguments, content, places, run

WRITING = [call for call in CALLS if any(not place.is_read for place in places(call))]
KEEPING = [call for call in CALLS if any(place.kind == ">" for place in places(call))]
# Options of OpenNMT that mention files in their help but do not name one.
NO_FILES = {"data", "dump_beam", "log_file_level", "save_data", "src_subword_type", "tgt_subword_type"}


def refused(call: str, given: list[str], folder: Path) -> str:
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
    inputs = [place.name for place in places(call) if place.is_read]
    for output in (place.name for place in places(call) if not place.is_read):
        for name in inputs:
            symbolic, hard = tmp_path / f"{name} link", tmp_path / f"{name} hard link"
            if not hard.exists():
                symbolic.symlink_to(tmp_path / name)
                hard.hardlink_to(tmp_path / name)
            for path in (tmp_path / name, symbolic, hard):
                line = refused(call, arguments(call, tmp_path, {output: path}, force=True), tmp_path)
                assert f"{path} would replace the file of " in line


@pytest.mark.parametrize("call", WRITING)
def test_no_two_outputs_are_one_file(call: str, tmp_path: Path) -> None:
    first, *others = [place.name for place in places(call) if not place.is_read]
    for name in others:
        given = arguments(call, tmp_path, {name: tmp_path / first})
        refused(call, given, tmp_path)


@pytest.mark.parametrize("call", KEEPING)
def test_what_is_there_is_replaced_on_demand_only(call: str, tmp_path: Path) -> None:
    for place in places(call):
        if place.kind == ">":
            given = arguments(call, tmp_path, {})
            (tmp_path / place.name).write_text("mine")
            line = refused(call, given, tmp_path)
            wanted = "add -overwrite" if call == "onmt_build_vocab" else "add --force"
            assert f"{tmp_path / place.name} already exists; {wanted}" in line
            (tmp_path / place.name).unlink()


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
            line = refused(call, arguments(call, tmp_path, {place.name: path}), tmp_path)
            assert str(path) in line and words in line
        line = refused(call, arguments(call, tmp_path, {place.name: "a\0b"}), tmp_path)
        assert "NUL byte" in line or "special characters are not allowed" in line


@pytest.mark.parametrize("call", WRITING)
def test_outputs_that_cannot_be_written_fail_before_any_work(call: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for place in places(call):
        if not place.is_read:
            refused(call, arguments(call, tmp_path, {place.name: file / "below"}), tmp_path)


def test_every_command_is_here() -> None:
    assert {call.split()[0] for call in CALLS} == set(COMMANDS) - set(OF_TRAINING)


def test_every_option_that_names_a_file_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("command", ["translate", "build_vocab", "train"])
def test_options_of_upstream_that_speak_of_files_are_known(command: str) -> None:
    """A new release of OpenNMT may add some."""
    import importlib

    from nmt.options import arguments
    from nmt.patches.table import apply_patches

    apply_patches()
    parser = importlib.import_module(f"onmt.bin.{command}")._get_parser()
    known = {
        *arguments.TRANSLATE,
        *arguments.TRAIN,
        *NO_FILES,
        "config",
        "save_config",
        "src_vocab",
        "tgt_vocab",
    }
    of_training = {"save_model", "tensorboard_log_dir", "override_opts", "tensorboard"}
    for action in parser._actions:
        takes_text = action.type in (None, str) and action.nargs != 0 and not action.choices
        if takes_text and re.search(r"\b(path|file|files|directory)\b", action.help or "", re.IGNORECASE):
            assert action.dest in known | of_training, f"{action.dest}: {action.help}"
