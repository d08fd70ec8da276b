"""The commands of language models as the shell meets them: what becomes of errors."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from lm import cli
from shared_embeddings.utils import command_line
from tests.lm.command_line import one_line, write_corpus, write_model


def failing(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command whose work ends with an error."""

    def main(arguments: list[str]) -> None:
        raise error

    module = ModuleType("lm.failing")
    module.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys, "argv", ["lm_fail"])
    command_line.run_module("lm_fail", module.__name__, cli._explain)


NO_COMPILER = BackendCompilerFailed(print, RuntimeError("No working C++ compiler found"), None)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileExistsError(17, "File exists", "notes.txt"), "lm_fail: notes.txt: File exists; check the path"),
        (OSError(28, "No space left on device"), "lm_fail: No space left on device; "),
        (torch.OutOfMemoryError("CUDA out of memory."), "not enough memory (CUDA out of memory.); make"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9"), "not enough memory (Default"),
        (MemoryError(), "not enough memory (MemoryError); make batches, segments or the model smaller"),
        (NO_COMPILER, "compile: torch cannot compile here (No working C++ compiler found); install"),
        (
            UnicodeEncodeError("ascii", "caf\xe9", 3, 4, "no"),
            "encoding ascii cannot encode '\xe9'; set PYTHONIO",
        ),
    ],
)
def test_what_a_user_can_put_right_is_one_line(
    error: BaseException, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        failing(error, monkeypatch)
    assert end.value.code == 2
    assert said in one_line(capsys.readouterr().err, "lm_fail")


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        failing(RuntimeError("shapes do not fit"), monkeypatch)


@pytest.mark.slow
def test_a_reader_that_has_enough_ends_the_command_quietly(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus"))
    command = [sys.executable, "-m", "lm.evaluate.generate", "-model", str(model), "-length", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE
