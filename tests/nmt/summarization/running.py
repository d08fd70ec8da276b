"""The commands of the package, run inside this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from nmt import cli

MAINS = {
    "onmt_characters": cli.characters,
    "onmt_character_vocab": cli.character_vocab,
    "onmt_rerank": cli.rerank,
}


def run(command: str, *arguments: str | Path) -> None:
    """Run a command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [command, *map(str, arguments)])
        MAINS[command]()


def refused(capsys: pytest.CaptureFixture[str], command: str, *arguments: str | Path) -> str:
    """Run a command that must refuse with one line and exit code 2; returns the line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run(command, *arguments)
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and len(lines) == 1 and lines[0].startswith(f"{command}: "), lines
    return lines[0]
