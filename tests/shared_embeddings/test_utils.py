"""Files, signals, paths, options, documents, downloads and results."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import multiprocessing
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from email.message import Message
from pathlib import Path
from typing import Any, Literal
from urllib.response import addinfourl

import numpy as np
import pytest

from lm.data.datasets import ATTEMPTS, DownloadError, download
from shared_embeddings.utils import paths
from shared_embeddings.utils.command_line import Parser, StopFlag, Terminated, run
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import locked, replacing, sha256, write_lines, write_text
from shared_embeddings.utils.options import (
    OptionError,
    add_options,
    describe_type,
    option,
    parse_options,
    parse_words,
)
from shared_embeddings.utils.reading import parse_json, parse_yaml, read_json, read_lines, read_yaml
from shared_embeddings.utils.results import ROOT, encoded, git_state, provenance
from tests.helpers import content

# Files


def test_texts_and_lines(tmp_path: Path) -> None:
    write_text(tmp_path / "new folder/text", "a\r\nb")
    assert (tmp_path / "new folder/text").read_bytes() == b"a\r\nb"
    write_lines(tmp_path / "lines", ["é", "b"])
    assert (tmp_path / "lines").read_bytes() == "é\nb\n".encode()


@pytest.mark.parametrize("is_old", [True, False])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, is_old: bool, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    if is_old:
        path.write_text("old")
    before = content(tmp_path)
    with pytest.raises(error) as raised, replacing(path) as temporary:
        temporary.write_text("half")
        raise error(28, "full")
    assert content(tmp_path) == before
    if isinstance(raised.value, OSError):
        assert raised.value.filename == str(path)


@pytest.mark.parametrize("old", ["nothing", "file", "folder", "link"])
def test_folders_are_replaced_as_a_whole(tmp_path: Path, old: str) -> None:
    path, elsewhere = tmp_path / "output", tmp_path / "elsewhere"
    elsewhere.mkdir()
    if old == "file":
        path.write_text("old")
    elif old == "folder":
        path.mkdir()
        (path / "old").write_text("old")
    elif old == "link":
        path.symlink_to(elsewhere)
    with replacing(path) as temporary:
        temporary.mkdir()
        (temporary / "new").write_text("new")
    assert content(tmp_path) == {
        "elsewhere": elsewhere.stat().st_mode,
        "output": path.stat().st_mode,
        "output/new": b"new",
    }


def test_a_file_does_not_replace_a_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="folder"):
        write_text(tmp_path / "folder", "x")
    assert (tmp_path / "folder").is_dir()


def test_a_locked_folder_is_in_use(tmp_path: Path) -> None:
    path = tmp_path / "run/.lock"
    with locked(path), pytest.raises(BlockingIOError, match="run: another process"), locked(path):
        pass
    with locked(path):
        pass


# Signals


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_workers_that_are_terminated_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def wait(has_begun: Any) -> None:
        has_begun.set()
        time.sleep(60)

    def main(arguments: Sequence[str]) -> None:
        context = multiprocessing.get_context("fork")
        has_begun = context.Event()
        worker = context.Process(target=wait, args=(has_begun,))
        worker.start()
        has_begun.wait()  # Python loses signals that arrive while it forks
        worker.terminate()
        worker.join()
        print(worker.exitcode)

    assert run("name", main, ["one"]) == 0
    assert capfd.readouterr() == ("143\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_recorded_and_the_second_acts(number: int) -> None:
    kind = Terminated if number == signal.SIGTERM else KeyboardInterrupt
    before, received = signal.getsignal(signal.SIGINT), []
    previous = signal.signal(number, lambda *_: received.append(number))
    try:
        with StopFlag() as stop:
            assert not stop.requested
            stop.raise_requested()
            send(number)
            assert stop.requested == number and not received
            send(signal.SIGINT if number == signal.SIGTERM else signal.SIGTERM)
            assert stop.requested == number and not received
            send(number)
            assert received == [number]
            with pytest.raises(kind, match="resume") as raised:
                stop.raise_requested("resume")
            assert type(raised.value) is kind
    finally:
        signal.signal(number, previous)
    assert signal.getsignal(signal.SIGINT) is before


# Paths


def test_paths_of_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser("tool")
    parser.add_argument("--input", type=paths.existing_file)
    parser.add_argument("--source", type=paths.existing_path, nargs="+")
    parser.add_argument("--model", type=paths.model_path)
    parser.add_argument("--new", type=paths.new_path)
    parser.add_argument("--output", type=paths.output_path)
    parser.add_argument("--force", action="store_true")
    file, folder, link = tmp_path / "file", tmp_path / "folder", tmp_path / "link"
    file.write_text("x")
    folder.mkdir()
    (folder / "inner").write_text("x")
    link.symlink_to(file)

    def error(*words: object) -> str:
        with pytest.raises(SystemExit) as ended:
            parser.parse_args([*map(str, words)])
        printed = capsys.readouterr().err
        assert ended.value.code == 2 and printed.count("\n") == 1
        return printed

    assert parser.parse_args(["--model", "google/gemma-3"]).model == Path("google/gemma-3")
    assert parser.parse_args(["--source", str(file), str(folder)]).source == [file, folder]
    assert parser.parse_args(["--new", str(file), "--force"]).new == file
    assert parser.parse_args(["--output", str(file)]).output == file
    missing = tmp_path / "missing"
    for name in ("input", "source", "model"):
        assert f"--{name}: no such file: {missing}" in error(f"--{name}", missing)
    assert "is a folder" in error("--input", folder)
    assert "already exists; add --force" in error("--new", file)
    for same in (file, link):
        assert f"{same} would replace an input" in error("--input", file, "--new", same, "--force")
        assert f"{same} would replace an input" in error("--input", file, "--output", same)
    assert f"{folder} would replace an input" in error(
        "--input", folder / "inner", "--new", folder, "--force"
    )
    assert "another output" in error("--new", missing, "--output", missing)


# Options


@dataclasses.dataclass(frozen=True)
class Inner:
    size: int
    name: str = "x"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise OptionError(f"option 'size' is {self.size}, but it must be at least 1; raise it")


@dataclasses.dataclass(frozen=True)
class Options:
    rank: int = option("The rank.")
    rate: float = option("The rate, 5% by default.", 0.05)
    kind: Literal["a", "b"] | None = option("The kind.", None)
    sizes: int | tuple[int, ...] = option("The sizes.", (1,))
    words: tuple[str, ...] = option("The words.", ())
    flag: bool = option("The flag.", True)
    inner: tuple[Inner, ...] = option("More.", ())
    more: Mapping[str, Any] = option("Free.", factory=dict)


def test_plain_values_become_options() -> None:
    values = {"rank": np.int64(3), "rate": 2, "sizes": [4, 5], "inner": [{"size": 2}], "more": {"a": [1]}}
    options = parse_options("here", Options, values)
    assert options == Options(rank=3, rate=2.0, sizes=(4, 5), inner=(Inner(2),), more={"a": [1]})
    assert type(options.rank) is int and type(options.rate) is float


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, ["'rank'", "missing"]),
        ({"rank": 1, "rnak": 2}, ["'rnak'", "Did you mean 'rank'"]),
        ({"rank": "3"}, ["'rank'", "'3'", "int"]),
        ({"rank": 1, "rate": float("nan")}, ["finite", "nan"]),
        ({"rank": 1, "kind": "c"}, ["'kind'", "'c'", "'a' | 'b' | null"]),
        ({"rank": 1, "sizes": [1, "x"]}, ["'sizes'", "[1, 'x']", "int | list[int]"]),
        ({"rank": 1, "inner": [{"size": 0}]}, ["inner.0", "'size' is 0", "at least 1"]),
        ([1], ["[1]", "not a mapping"]),
    ],
)
def test_wrong_values_are_named(values: object, words: list[str]) -> None:
    with pytest.raises(OptionError) as error:
        parse_options("here", Options, values)
    message = str(error.value)
    assert message.startswith("here: ") and "\n" not in message
    assert all(word in message for word in words), message


def test_options_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser("tool")
    add_options(parser, Options)
    arguments = ["--rank", "3", "--kind", "b", "--words", "u", "v", "--no-flag"]
    options = parse_options("tool", Options, vars(parser.parse_args(arguments)))
    assert options == Options(rank=3, kind="b", words=("u", "v"), flag=False)
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    assert "5% by default" in capsys.readouterr().out


def test_words_of_a_command_line() -> None:
    words = ["--map-dim", "8", "-rate=1e-3", "--cutoffs", "100,200", "--map", "{a: 1}", "--name", "{"]
    values = {"map_dim": 8, "rate": 0.001, "cutoffs": [100, 200], "map": {"a": 1}, "name": "{"}
    assert parse_words(words) == values
    for wrong in (["rank", "3"], ["--rank"]):
        with pytest.raises(OptionError, match="rank"):
            parse_words(wrong)


def test_types_in_words() -> None:
    assert describe_type(int | tuple[int, ...] | None) == "int | list[int] | null"


# Documents


def test_yaml_and_json(tmp_path: Path) -> None:
    assert parse_yaml("{a: 1e-3, b: [x, 2]}", "here") == {"a": 0.001, "b": ["x", 2]}
    path = tmp_path / "file"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_yaml(path) == read_json(path) == {"a": 1}


@pytest.mark.parametrize("text", ["a: [", "!!python/object/apply:os.system [ls]", "a: \0"])
def test_other_yaml_fails_in_one_line(text: str) -> None:
    with pytest.raises(UserError, match="^here: ") as error:
        parse_yaml(text, "here")
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="^here: "):
        parse_json(text, "here")


def test_lines_of_a_text(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("\ufeffa\r\nb\x85c\n\nd".encode())
    assert list(read_lines(path)) == ["a", "b\x85c", "", "d"]
    path.write_bytes(b"a\n\xff\n")
    for read in (lambda path: list(read_lines(path)), read_yaml, read_json):
        with pytest.raises(UserError, match="text.* is not UTF-8"):
            read(path)


# Downloads and results


def test_download_checks_the_content(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "folder" / "target"
    source.write_text("content")
    with pytest.raises(DownloadError, match=f"^{source.as_uri()}: SHA-256 is .*, expected 0000.*; ask$"):
        download(source.as_uri(), target, "0" * 64, "ask")
    assert not list(tmp_path.rglob("target*"))
    download(source.as_uri(), target, sha256(source), "ask")
    assert target.read_text() == "content"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            urllib.error.HTTPError("https://example.org", 404, "Not Found", Message(), None),
            "404: Not Found",
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
        asked.append(request)
        if isinstance(answer, Exception):
            raise answer
        headers = Message()
        headers["Content-Length"] = "10"
        return addinfourl(io.BytesIO(answer), headers, "")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    target = tmp_path / "target.gz"
    with pytest.raises(DownloadError, match=reason):
        download("https://example.org/target.gz", target, None, "ask", wait_seconds=0)
    assert len(asked) == ATTEMPTS and not list(tmp_path.iterdir())


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
    record = provenance(["torch", "no-such-package"])
    assert set(record) == {"date", "git", "versions", "device"} and record["device"]
    assert record["versions"]["no-such-package"] is None and record["versions"]["torch"]


def test_paths_are_relative_to_the_repository() -> None:
    text = encoded("results.json", {"a": [str(ROOT / "runs" / "x"), {"b": "/elsewhere"}], "n": 1})
    assert json.loads(text) == {"a": [str(Path("runs") / "x"), {"b": "/elsewhere"}], "n": 1}


@pytest.mark.parametrize("bad", [float("nan"), object()])
def test_values_without_json(bad: object) -> None:
    with pytest.raises(UserError, match="results.json.* cannot be written"):
        encoded("results.json", {"a": bad})
