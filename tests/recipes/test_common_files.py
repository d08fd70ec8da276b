"""Files written completely or not at all, steps that run once, and texts that are refused or cleaned."""

from __future__ import annotations

import gzip
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.common import corpus
from recipes.common.results import REPOSITORY
from recipes.common.tools import run_main, run_step
from shared_embeddings.errors import UserError
from shared_embeddings.utils.files import replacing, write_text


def test_failed_write_keeps_the_old_file_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_user_error_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(arguments: object) -> None:
        raise UserError("two\nlines")

    assert run_main("tool", fail, []) == 2
    assert capsys.readouterr().err == "tool: two lines\n"


@pytest.mark.slow_except("100000")
@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_has_gone_ends_a_tool_quietly(lines: int) -> None:
    program = (
        "import sys\n"
        "from recipes.common.tools import run_main\n"
        f'sys.exit(run_main("tool", lambda _: print("line\\n" * {lines}), []))'
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPOSITORY) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


class Steps:
    """A step from one input to one output that counts how often it runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, 0
        self.source, self.target = folder / "in", folder / "out"
        self.source.write_text("a")

    def make(self) -> None:
        self.runs += 1
        write_text(self.target, self.source.read_text())

    def run(self, size: int = 1) -> int:
        run_step(
            "step",
            self.folder / "stamps",
            self.make,
            inputs=[self.source],
            outputs=[self.target],
            settings={"size": size, "pair": ("x", "y")},
        )
        return self.runs


def test_step_runs_once_and_again_when_anything_changes(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    assert [steps.run(), steps.run()] == [1, 1]
    assert [steps.run(size=2), steps.run(size=2)] == [2, 2]
    steps.source.write_text("b")
    assert [steps.run(size=2), steps.run(size=2)] == [3, 3]
    steps.target.write_text("damaged")
    assert steps.run(size=2) == 4
    (tmp_path / "stamps" / "step.json").write_text("{")
    assert steps.run(size=2) == 5


@pytest.mark.slow
def test_lines_of_two_processes_do_not_mix() -> None:
    """Unbuffered, as in the images."""
    program = """
import os
from recipes.common.tools import print_line
other = os.fork()
for _ in range(2000):
    print_line("line")
if other:
    os.waitpid(other, 0)
"""
    command = [sys.executable, "-u", "-c", program]
    printed = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert printed.splitlines() == ["line"] * 4000


def test_interrupted_step_runs_again(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    make = steps.make

    def interrupted() -> None:
        make()
        raise KeyboardInterrupt

    steps.make = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        steps.run()
    steps.make = make  # type: ignore[method-assign]
    assert steps.run() == 2


def test_lines_end_at_line_feeds_only_and_white_space_is_one_space(tmp_path: Path) -> None:
    path = tmp_path / "text.gz"
    text = "\ufeffa\u00a0b  c \r\n\n d\u2028e\u2003f\x85\nlast"
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    assert corpus.read_lines(path) == ["a b c", "", "d e f", "last"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(b"a line\n" * 100, mtime=0)[:-10], "truncated"),
        (b"plain text\n", "not gzip"),
        (gzip.compress("Männer\n".encode("latin-1"), mtime=0), "not UTF-8 at byte 1"),
        (None, "No such file"),
    ],
)
def test_unreadable_text_is_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "text.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=said):
        corpus.read_lines(path)


def test_unequal_and_empty_sides_are_refused() -> None:
    with pytest.raises(UserError, match="a has 2 lines, b has 1 lines"):
        corpus.check_pairs({"a": ["x", "y"], "b": ["x"]})
    with pytest.raises(UserError, match="no sentences in a and b"):
        corpus.check_pairs({"a": [], "b": []})
