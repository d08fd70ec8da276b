"""Write the help of the commands of `lm` and `nmt` to their folders ``help``: ``make readme``.

These commands take seconds to import; with the files, their ``--help`` takes a fraction of a second. Those
whose options are OpenNMT-py's have no file: most of the text is its.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from importlib import metadata
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[1]
OF_OPENNMT = {"onmt_build_vocab", "onmt_train", "onmt_translate"}


def stored_help() -> Iterator[tuple[Path, metadata.EntryPoint]]:
    """The file with the help of each command."""
    commands = metadata.entry_points(group="console_scripts")
    for command in sorted(commands, key=lambda command: command.name):
        package = command.module.split(".")[0]
        if package in ("lm", "nmt") and command.name not in OF_OPENNMT:
            yield ROOT / package / "help" / f"{command.name}.txt", command


def live_help(command: metadata.EntryPoint) -> str:
    """What the parser of a command prints."""
    # The file is not read if there is another argument.
    words = [command.name, "--help", "--"]
    output = io.StringIO()
    environment = mock.patch.dict(os.environ, COLUMNS="100")
    with environment, mock.patch.object(sys, "argv", words), redirect_stdout(output), suppress(SystemExit):
        command.load()()
    return output.getvalue().rstrip() + "\n"


if __name__ == "__main__":
    for file, command in stored_help():
        file.parent.mkdir(exist_ok=True)
        file.write_text(live_help(command), encoding="utf-8")
