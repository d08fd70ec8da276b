"""The command `shared-embeddings`, the runner of all commands, and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch

import shared_embeddings as se
from shared_embeddings.cli.main import main
from shared_embeddings.utils.command_line import TRACEBACK_VARIABLE, run
from shared_embeddings.utils.errors import UserError

SIZES = ["--vocab-size", "5000", "--dim", "64"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The output of a command that succeeds."""
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def error_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command prints on stderr for a user error."""
    try:
        code = main(arguments)
    except SystemExit as error:
        code = error.code
    assert code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def test_methods(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "methods")
    for method in se.methods():
        assert f"\n{method}: " in f"\n{text}"
    assert "cutoffs: list[int] (required)" in text
    assert "factor: int (default: 4)" in text
    assert printed(capsys, "methods", "adaptive").startswith("adaptive: ")


def test_params(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "params", "--method", "projective", *SIZES, "--rank", "8")
    assert "40,512" in text  # 8 * (5000 + 64)
    assert "bytes int8" in text
    report = json.loads(printed(capsys, "params", "--method", "projective", *SIZES, "--rank", "8", "--json"))
    assert report["total"] == 40512 and report["compression"] == 7.9
    assert {part["name"] for part in report["parts"]} >= {"codes", "basis", "total"}
    options = ["--bits", "4", "--codec", "uniform"]
    report = json.loads(printed(capsys, "params", "--method", "quantized", *SIZES, *options, "--json"))
    (total,) = (part["bytes"] for part in report["parts"] if part["name"] == "total")
    embedding = se.build("quantized", num_embeddings=5000, embedding_dim=64, bits=4, codec="uniform")
    for store, size in total.items():
        assert 8 * size == se.accounting.stored_bits(embedding, store)


def test_sizes_are_counted_in_a_new_process() -> None:
    """Modules are imported while tensors have no memory, which those of modules must have."""
    script = "import sys; from shared_embeddings.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "params", "--method", "quantized", *SIZES, "--bits", "4"]
    assert "total parameters" in subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_suggest(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "suggest", *SIZES, "--budget", "40k")
    assert "embedding: {method: projective, rank: 7}" in text
    report = json.loads(printed(capsys, "suggest", *SIZES, "--budget", "40k", "--json"))
    assert {suggestion["method"] for suggestion in report["suggestions"]} == set(se.methods())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["params", "--method", "projectiv", *SIZES], ["projective"]),
        (["params", "--method", "projective", *SIZES], ["rank", "missing"]),
        (["params", "--method", "projective", *SIZES, "8"], ["'8'", "--option value"]),
        (["params", "--method", "standard", *SIZES, "--num-embeddings", "5"], ["num_embeddings", "--dim"]),
        (["suggest", "--vocab-size", "0", "--dim", "4", "--budget", "1k"], ["--vocab-size", "0 is not"]),
        (["compress", "--model", __file__, "--fit-steps", "0", "--output", "o"], ["fit_steps"]),
        (["params", "--method", "uncle", *SIZES, "--unique-dim", "3", "--classes", "x.npz"], ["x.npz"]),
        (["classes", "--text", __file__, "--num-classes", "2", "--output", "o.npz"], ["--vocab"]),
        (
            ["classes", "--vectors-of", __file__, "--num-classes", "2", "--output", "o.npz", "--dim", "4"],
            ["--dim", "--vectors-of"],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_user_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]) -> None:
    line = error_line(capsys, *arguments)
    for word in words:
        assert word in line


def test_a_bare_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    bare = capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and capsys.readouterr().out == bare and "--version" in bare


@pytest.mark.slow
def test_a_closed_pipe_ends_the_command_quietly() -> None:
    command = [sys.executable, "-m", "shared_embeddings.cli.main", "methods"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


def raising(error: BaseException):
    """A program that fails."""

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
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9"), "tool: not enough memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "tool: not enough memory"),
        (ModuleNotFoundError("No module named 'x'"), "tool: No module named 'x'; install"),
    ],
)
def test_user_errors_are_one_line(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("tool", raising(error), []) == 2
    message = capsys.readouterr().err
    assert message.startswith(line) and message.count("\n") == 1
    monkeypatch.setenv(TRACEBACK_VARIABLE, "1")
    with pytest.raises(type(error)):
        run("tool", raising(error), [])


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_signals_are_one_line(number: int, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tool", lambda arguments: os.kill(os.getpid(), number), [], advice="try again") == 128 + number
    assert capsys.readouterr().err == f"tool: {word}; try again\n"


def test_status_of_the_program() -> None:
    assert run("tool", lambda arguments: len(arguments), ["a", "b", "c"]) == 3
    assert run("tool", lambda arguments: None, []) == 0
    with pytest.raises(ZeroDivisionError):  # a bug
        run("tool", raising(ZeroDivisionError()), [])


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_unwritable_output_fails() -> None:
    code = (
        "from shared_embeddings.utils.command_line import run; "
        "raise SystemExit(run('tool', lambda _: print('x'), []))"
    )
    with open("/dev/full", "w") as full:
        process = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert process.returncode == 2 and process.stderr.startswith("tool: No space left on device")
    assert process.stderr.count("\n") == 1
