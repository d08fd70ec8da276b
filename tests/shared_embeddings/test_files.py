"""Files appear whole or not at all, alone and as sets; outputs never replace inputs, links or devices."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from shared_embeddings.errors import UserError
from shared_embeddings.utils import files
from shared_embeddings.utils.files import (
    check_input,
    check_outputs,
    remove_leftovers,
    replacing,
    replacing_all,
    write_text,
)


def listing(folder: Path) -> list[str]:
    """The names of all that is in a folder, hidden files included."""
    return sorted(path.name for path in folder.iterdir())


class Killed(BaseException):
    """Stands for kill -9: nothing of ours runs after it."""


def kill_at_move(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Have the process end before its `number`-th rename of a finished output, with no clean-up."""
    moves = 0
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        nonlocal moves
        if ".set.tmp" not in str(target) and not str(self).endswith(".previous.tmp"):
            moves += 1
            if moves == number:
                raise Killed
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr(files, "remove", lambda path: None)


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old" and listing(tmp_path) == ["out"]


def test_the_mode_of_a_replaced_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old")
    path.chmod(0o640)
    write_text(path, "new")
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o640


def test_links_stay_and_what_they_point_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    link, target = tmp_path / "link", tmp_path / "far" / "file"
    link.symlink_to(target)
    for text in ("created", "replaced"):
        write_text(link, text)
        assert link.is_symlink() and target.read_text() == text
    assert listing(tmp_path) == ["far", "link"] and listing(tmp_path / "far") == ["file"]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "text")
    reader.join()
    assert found == ["text"] and pipe.is_fifo() and listing(tmp_path) == ["pipe"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_device_fails_and_no_file_of_the_set_appears(tmp_path: Path) -> None:
    with pytest.raises(OSError), replacing_all([tmp_path / "a", Path("/dev/full")]) as drafts:
        for draft in drafts:
            draft.write_text("x" * 100)
    assert listing(tmp_path) == []
    assert files.is_stream("/dev/full")


@pytest.mark.parametrize("move", [1, 2])
@pytest.mark.parametrize("there_before", [True, False])
def test_a_killed_set_is_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, move: int, there_before: bool
) -> None:
    paths = [tmp_path / "model", tmp_path / "report"]
    if there_before:
        for path in paths:
            path.write_text(f"old {path.name}")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at_move(patch, move)
        with replacing_all(paths) as drafts:
            for draft in drafts:
                draft.write_text("new")
    assert any(name.startswith(".") for name in listing(tmp_path))  # the kill left something
    remove_leftovers(*paths)
    assert listing(tmp_path) == (["model", "report"] if there_before else [])
    for path in paths:
        assert not there_before or path.read_text() == f"old {path.name}"


def test_files_of_running_processes_stay(tmp_path: Path) -> None:
    """Process 1 always runs; the other number is too large for one."""
    running, killed = tmp_path / ".model.1.tmp", tmp_path / f".model.{2**22 + 1}.tmp"
    trials = tmp_path / f"{running.name}.trials.tmp"
    for folder in (running, killed, trials):
        folder.mkdir()
    remove_leftovers(tmp_path / "model")
    assert listing(tmp_path) == [running.name, trials.name]


def test_a_killed_folder_is_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "old").touch()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at_move(patch, 1)
        with replacing(folder) as draft:
            draft.mkdir()
    assert not folder.exists()
    remove_leftovers(folder)
    assert listing(tmp_path) == ["model"] and listing(folder) == ["old"]


def test_sets_and_folders_are_replaced(tmp_path: Path) -> None:
    folder, text = tmp_path / "folder", tmp_path / "text"
    for number in range(2):
        with replacing_all([folder, text]) as (new_folder, new_text):
            new_folder.mkdir()
            (new_folder / f"part{number}").touch()
            new_text.write_text(str(number))
    assert listing(tmp_path) == ["folder", "text"] and listing(folder) == ["part1"]
    assert text.read_text() == "1"


def test_inputs_are_regular_files(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, reason in (
        (tmp_path / "none", "no such file"),
        (tmp_path, "is a folder"),
        (pipe, "is a device or a pipe"),
        ("/dev/zero", "is a device or a pipe"),
        ("a\0b", "NUL"),
        ("x" * 5000, "too long"),
    ):
        with pytest.raises(UserError, match=reason) as error:
            check_input("text", path)
        assert str(error.value).startswith("text: ")


def test_outputs_are_neither_inputs_nor_there(tmp_path: Path) -> None:
    source, hard, soft = tmp_path / "source", tmp_path / "hard", tmp_path / "soft"
    source.write_text("x")
    os.link(source, hard)
    soft.symlink_to(source)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").touch()
    for output in (source, hard, soft, tmp_path / "." / "source", tmp_path):
        with pytest.raises(UserError, match="would replace the file of --text"):
            check_outputs({"--output": output}, {"--text": source}, force=True)
    with pytest.raises(UserError, match="would replace the file of --model"):
        check_outputs({"--output": folder / "weights"}, {"--model": folder}, force=True)
    with pytest.raises(UserError, match="would replace the file of --output"):
        check_outputs({"--output": tmp_path / "a", "--report": tmp_path / "a"}, {})
    with pytest.raises(UserError, match="already exists; add --force"):
        check_outputs({"--output": source}, {})
    check_outputs({"--output": source, "--report": None}, {"--text": None}, force=True)
    check_outputs({"--output": folder / "new", "--report": Path("/dev/null")}, {"--model": folder})
