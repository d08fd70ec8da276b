"""The runner of all commands: one line and an exit status for whatever ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch

from shared_embeddings.errors import UserError
from shared_embeddings.utils.command_line import TRACEBACK_VARIABLE, run


def raising(error: BaseException):
    """A program that ends with an error."""

    def main(arguments: Sequence[str]) -> None:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("size: 0 is too\nsmall"), "tool: size: 0 is too small"),
        (FileNotFoundError(2, "No such file", "x.txt"), "tool: x.txt: No such file; check the path"),
        (RecursionError("maximum"), "tool: the input is nested too deeply"),
        (MemoryError(), "tool: not enough memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "tool: not enough memory"),
        (ModuleNotFoundError("No module named 'x'"), "tool: No module named 'x'; install"),
        (UserError("x" * 100_000), "tool: xxx"),
    ],
)
def test_mistakes_are_one_line(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("tool", raising(error), []) == 2
    found = capsys.readouterr().err
    assert found.startswith(line) and found.count("\n") == 1 and len(found) < 1100
    monkeypatch.setenv(TRACEBACK_VARIABLE, "1")
    with pytest.raises(type(error)):
        run("tool", raising(error), [])


def test_our_own_errors_are_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        run("tool", raising(ZeroDivisionError()), [])


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_signals_are_one_line(number: int, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    def main(arguments: Sequence[str]) -> None:
        os.kill(os.getpid(), number)

    assert run("tool", main, [], advice="try again") == 128 + number
    assert capsys.readouterr().err == f"tool: {word}; try again\n"


def test_status_of_the_program() -> None:
    assert run("tool", lambda arguments: len(arguments), ["a", "b", "c"]) == 3
    assert run("tool", lambda arguments: None, []) == 0


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_output_that_cannot_be_written_fails() -> None:
    code = (
        "from shared_embeddings.utils.command_line import run; "
        "raise SystemExit(run('tool', lambda _: print('x'), []))"
    )
    with open("/dev/full", "w") as full:
        found = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert found.returncode == 2 and found.stderr.startswith("tool: No space left on device")
    assert found.stderr.count("\n") == 1
