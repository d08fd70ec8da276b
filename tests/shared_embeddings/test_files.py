"""Writing, reading and downloading files, and records of results."""

from __future__ import annotations

import io
import json
import os
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from urllib.response import addinfourl

import pytest

from shared_embeddings.utils import download, files
from shared_embeddings.utils.download import DownloadError
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import (
    followed,
    locked,
    remove_leftovers,
    replacing,
    sha256,
    staged,
    write_text,
)
from shared_embeddings.utils.path_options import PathOption, check_input, check_outputs, check_paths
from shared_embeddings.utils.reading import (
    DocumentError,
    parse_json,
    parse_yaml,
    read_json,
    read_yaml,
    read_yaml_as_text,
)
from shared_embeddings.utils.results import (
    ROOT,
    git_state,
    provenance,
    write_record,
)
from tests.shared_embeddings.support import Killed, kill_at_move


def listing(folder: Path) -> list[str]:
    """The names of all that is in a folder, hidden files included."""
    return sorted(path.name for path in folder.iterdir())


def test_a_failed_write_keeps_the_old_file_and_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old")
    path.chmod(0o640)
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old" and listing(tmp_path) == ["out"]
    write_text(path, "new")
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o640


def test_links_are_replaced_unless_the_user_named_them(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    link, target = tmp_path / "link", tmp_path / "far" / "file"
    link.symlink_to(target)
    for text in ("created", "replaced"):
        write_text(followed(link), text)
        assert link.is_symlink() and target.read_text() == text
    write_text(link, "here")
    assert not link.is_symlink() and link.read_text() == "here" and target.read_text() == "replaced"
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
    with pytest.raises(OSError), staged([tmp_path / "a", Path("/dev/full")]) as drafts:
        for draft in drafts:
            draft.write_text("x" * 100)
    assert listing(tmp_path) == []
    assert files.is_stream("/dev/full")


@pytest.mark.parametrize("move", [1, 2])
@pytest.mark.parametrize("there_before", [True, False])
def test_a_killed_set_lacks_its_main_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, move: int, there_before: bool
) -> None:
    """The main output is renamed last, and every output is old or new."""
    paths = [tmp_path / "model", tmp_path / "report"]
    if there_before:
        for path in paths:
            path.write_text("old")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at_move(patch, move)
        with staged(paths) as drafts:
            for draft in drafts:
                draft.write_text("new")
    assert any(name.startswith(".") for name in listing(tmp_path))  # the kill left something
    remove_leftovers(*paths)
    new = {"report": "new"} if move == 2 else {}
    old = {"model": "old", "report": "old"} if there_before else {}
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {**old, **new}


@pytest.mark.parametrize("there_before", [True, False])
def test_a_failed_rename_restores_the_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there_before: bool
) -> None:
    paths = [tmp_path / "model", tmp_path / "folder", tmp_path / "report"]
    if there_before:
        write_text(paths[0], "old")
        write_text(paths[1] / "old", "old")
        write_text(paths[2], "old")
    real = Path.replace

    def failing(self: Path, target: Path) -> Path:
        if target.name == "model":
            raise OSError(5, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(OSError, match="Input/output"), staged(paths) as drafts:
        drafts[0].write_text("new")
        drafts[1].mkdir()
        drafts[2].write_text("new")
    assert listing(tmp_path) == (["folder", "model", "report"] if there_before else [])
    if there_before:
        assert paths[0].read_text() == paths[2].read_text() == "old" and listing(paths[1]) == ["old"]


def test_outputs_in_a_new_folder_appear_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = [tmp_path / "new" / "inner" / name for name in ("a", "b")]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at_move(patch, 1)
        with staged(outputs) as drafts:
            for draft in drafts:
                draft.touch()
    remove_leftovers(*outputs)
    assert listing(tmp_path) == []
    with staged(outputs) as drafts:
        for draft in drafts:
            draft.touch()
        assert not (tmp_path / "new").exists()
    assert listing(tmp_path / "new" / "inner") == ["a", "b"]


def test_a_new_folder_may_appear_meanwhile(tmp_path: Path) -> None:
    outputs = [tmp_path / "new" / "a", tmp_path / "new" / "inner" / "b"]
    with staged(outputs) as drafts:
        for draft in drafts:
            draft.write_text("new")
        write_text(tmp_path / "new" / "c", "of another process")
    assert listing(tmp_path / "new") == ["a", "c", "inner"] and outputs[1].read_text() == "new"
    assert listing(tmp_path) == ["new"]


def test_nothing_is_read_from_planted_files(tmp_path: Path) -> None:
    """Whatever lies beside an output, links lead nowhere."""
    home, run = tmp_path / "home", tmp_path / "run"
    home.mkdir(), run.mkdir()
    (home / "s").write_text("mine")
    path = run / "last.pt"
    for name in ("4999999", "4999999.old", f"{os.getpid()}.old"):
        (run / f".last.pt.{name}.tmp").write_bytes(b"junk")
    for name in ("4999998.old", "4999998"):
        (run / f".last.pt.{name}.tmp").symlink_to(home)
    remove_leftovers(path)
    assert not path.exists()
    write_text(path, "new")
    assert listing(run) == ["last.pt"] and path.read_text() == "new"
    assert listing(home) == ["s"] and (home / "s").read_text() == "mine"


def test_only_missing_folders_are_restored(tmp_path: Path) -> None:
    for name in ("model", ".model.4999999.old.tmp"):
        (tmp_path / name).mkdir()
    remove_leftovers(tmp_path / "model")
    assert listing(tmp_path) == ["model"]


def test_a_lock_changes_no_file(tmp_path: Path) -> None:
    """Neither through a symbolic link, which is refused, nor through a hard link."""
    precious, lock = tmp_path / "precious", tmp_path / "run" / ".lock"
    precious.write_text("mine")
    lock.parent.mkdir()
    lock.symlink_to(precious)
    with pytest.raises(UserError, match="is a symbolic link"), locked(lock):
        pass
    lock.unlink()
    os.link(precious, lock)
    with locked(lock):
        with pytest.raises(BlockingIOError, match="another process is running here"), locked(lock):
            pass
    assert precious.read_text() == "mine" and listing(lock.parent) == []
    with pytest.raises(UserError, match="refused"), locked(tmp_path / "a" / "b" / ".lock"):
        raise UserError("refused")
    assert not (tmp_path / "a").exists()


def test_files_of_running_processes_are_kept(tmp_path: Path) -> None:
    """Process 1 always runs; the other number is too large for one."""
    running, killed = tmp_path / ".model.1.tmp", tmp_path / f".model.{2**22 + 1}.tmp"
    trials = tmp_path / f"{running.name}.trials.tmp"
    for folder in (running, killed, trials):
        folder.mkdir()
    remove_leftovers(tmp_path / "model")
    assert listing(tmp_path) == [running.name, trials.name]


@pytest.mark.parametrize("move", [1, 2])
def test_a_killed_folder_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, move: int) -> None:
    """Between the two renames, the old folder has another name."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "old").touch()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at_move(patch, move)
        with replacing(folder) as draft:
            draft.mkdir()
    assert folder.exists() == (move == 1)
    remove_leftovers(folder)
    assert listing(tmp_path) == ["model"] and listing(folder) == ["old"]


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


def test_outputs_are_neither_inputs_nor_existing_files(tmp_path: Path) -> None:
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
    with pytest.raises(UserError, match="would replace the file of --output"):  # the folder is replaced
        check_outputs({"--output": folder, "--report": folder / "new"}, {}, force=True)
    kept = {"--output": (PathOption.NEW, tmp_path / "fresh")}
    with pytest.raises(UserError, match="/fresh/file is inside --output"):
        check_paths({**kept, "--calibration": (PathOption.OUTPUT, tmp_path / "fresh" / "file")})
    check_paths({**kept, "--report": (PathOption.NEW_FILE, tmp_path / "fresh" / "file")})
    with pytest.raises(UserError, match="already exists; add --force"):
        check_outputs({"--output": source}, {})
    (tmp_path / "dangling").symlink_to(tmp_path / "home")
    with pytest.raises(UserError, match="already exists; add --force"):
        check_outputs({"--output": tmp_path / "dangling"}, {})
    check_outputs({"--output": source, "--report": None}, {"--text": None}, force=True)
    check_outputs({"--output": folder / "new", "--report": Path("/dev/null")}, {"--model": folder})


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join(f'*{old}' for _ in range(9))}]\n" for old, new in zip("abcdefgh", "bcdefghi")
)


DEEP = ["[" * 100_000, "[" * 5000 + "]" * 5000]


def test_plain_values() -> None:
    text = "a: 1e-3\nb: [1, 2.5, true, null, text]\nc: {d: 2020-01-01}\ne: &x {f: 1, g: 2}\nh: {<<: *x, f: 3}"
    assert parse_yaml(text, "t") == {
        "a": 0.001,
        "b": [1, 2.5, True, None, "text"],
        "c": {"d": "2020-01-01"},
        "e": {"f": 1, "g": 2},
        "h": {"f": 3, "g": 2},
    }
    assert parse_yaml("", "t") is None
    assert parse_json('{"a": [1, {"b": null}]}', "t") == {"a": [1, {"b": None}]}


@pytest.mark.parametrize(
    ("parse", "text", "reason"),
    [
        *((parse_yaml, text, "nested more than 100 levels deep") for text in DEEP),
        *((parse_json, text, "nested more than 100 levels deep") for text in DEEP[:2]),
        (parse_yaml, "{b: " * 300 + "1" + "}" * 300, "nested more than 100 levels deep"),
        (parse_yaml, "a: 1\na: 2", "the key 'a' is given twice"),
        (parse_yaml, "a: {b: 1, b: 2}", "the key 'b' is given twice"),
        (parse_json, '{"x": {"a": 1, "a": 2}}', "the key 'a' is given twice"),
        (parse_yaml, "5: a", "the key '5' is not text"),
        (parse_yaml, "yes: a", "the key 'yes' is not text"),
        (parse_yaml, "[a, b]: c", "the key 'a list or mapping' is not text"),
        (parse_yaml, "a: !!python/object/apply:os.system [ls]", "is not a plain value"),
        (parse_yaml, "a: !!binary aGk=", "is not a plain value"),
        (parse_yaml, "a: !!set {b}", "is not a plain value"),
        (parse_yaml, BOMB, "has more than 1,000,000 values"),
        (parse_yaml, "a: &a [*a]", "an alias refers to a value that contains it"),
        (parse_yaml, "a: [", "cannot be read as YAML"),
        (parse_yaml, "a: *b", "cannot be read as YAML"),
        (parse_yaml, "a: \0", "cannot be read as YAML"),
        (parse_yaml, "a: 1\n---\nb: 2", "cannot be read as YAML"),
        (parse_json, "", "cannot be read as JSON"),
        (parse_yaml, 'a: "\\0"', "contains NUL or surrogate characters"),
        (parse_yaml, '{"a\\0": 1}', "contains NUL or surrogate characters"),
        (parse_yaml, 'a: "\\ud800"', "contains NUL or surrogate characters"),
        (parse_yaml, "a: " + "9" * 5000, "t: "),
    ],
)
def test_other_documents_fail_in_one_line(
    parse: Callable[[str, str], object], text: str, reason: str
) -> None:
    with pytest.raises(DocumentError) as error:
        parse(text, "t")
    message = str(error.value)
    assert reason in message and message.startswith("t: ") and "\n" not in message and len(message) < 400


def test_values_as_text(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("a: 60.90\nb: [yes, 1e-3, null]\n")
    assert read_yaml_as_text(path) == {"a": "60.90", "b": ["yes", "1e-3", "null"]}
    path.write_text("a: 1\na: 2")
    with pytest.raises(DocumentError, match="the key 'a' is given twice"):
        read_yaml_as_text(path)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xef\xbb\xbfa: 1")
    assert read_yaml(path) == {"a": 1}
    path.write_bytes(b"\xff")
    for read in (read_yaml, read_json):
        with pytest.raises(DocumentError, match="config .* is not UTF-8 text"):
            read(path, "config")
        with pytest.raises(UserError, match="config: no such file"):
            read(tmp_path / "none", "config")


def test_download_checks_the_content(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "folder" / "target"
    source.write_text("content")
    with pytest.raises(DownloadError, match=f"^{source.as_uri()}: SHA-256 is .*, expected 0000.*; ask$"):
        download.download(source.as_uri(), target, "0" * 64, "ask")
    assert not target.parent.exists()
    download.download(source.as_uri(), target, sha256(source), "ask")
    assert target.read_text() == "content"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            urllib.error.HTTPError("https://example.org", 404, "Not Found", Message(), None),
            "the server returned 404 Not Found",
        ),
        (OSError("no route"), "target.gz: cannot be downloaded .no route. after 3 attempts; ask"),
        (b"short", "closed after 5 of 10 bytes"),
    ],
)
def test_failed_downloads_are_tried_again_and_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Exception | bytes, reason: str
) -> None:
    asked = []

    def urlopen(request: urllib.request.Request, timeout: float) -> addinfourl:
        assert request.get_header("User-agent") == download.USER_AGENT
        asked.append(request)
        if isinstance(answer, Exception):
            raise answer
        headers = Message()
        headers["Content-Length"] = "10"
        return addinfourl(io.BytesIO(answer), headers, "")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    target = tmp_path / "target.gz"
    with pytest.raises(DownloadError, match=reason):
        download.download("https://example.org/target.gz", target, None, "ask", wait_seconds=0)
    assert len(asked) == download.ATTEMPTS and not list(tmp_path.iterdir())


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_git_state(tmp_path: Path) -> None:
    assert git_state(tmp_path) == (None, None)
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) == (None, None)
    (tmp_path / "file").write_text("x")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "m")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert git_state(tmp_path) == (commit, False)
    (tmp_path / "file").write_text("y")
    assert git_state(tmp_path) == (commit, True)
    # A folder inside another repository is not that repository.
    (tmp_path / "inner").mkdir()
    assert git_state(tmp_path / "inner") == (None, None)


def test_provenance() -> None:
    found = provenance(["torch", "no-such-package"])
    assert set(found) == {"date", "git", "versions", "device"} and found["device"]
    assert found["versions"]["no-such-package"] is None and found["versions"]["torch"]


def test_paths_are_absolute(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_record(path, {"a": [str(ROOT / "runs" / "x"), {"b": "/elsewhere"}], "n": 1})
    assert json.loads(path.read_text()) == {"a": [str(Path("runs") / "x"), {"b": "/elsewhere"}], "n": 1}


@pytest.mark.parametrize("bad", [float("nan"), object()])
def test_values_without_json(bad: object, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        write_record(tmp_path / "results.json", {"a": bad})
    assert list(tmp_path.iterdir()) == []
