"""Running the project's commands from a recipe, and the small files beside a run."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from recipes.common.errors import UserError
from shared_embeddings.utils import reading
from shared_embeddings.utils.files import write_text


def run_tool(name: str, arguments: Sequence[str | Path], keep_open: Sequence[int] = ()) -> None:
    """Run the command `name` of the environment that this Python belongs to; its output goes where ours goes.

    Args:
        name: for instance ``onmt_train``.
        arguments: its arguments.
        keep_open: file descriptors that it inherits.

    Raises:
        UserError: the command is not installed, or it failed.
        SystemExit: with status 2 when the command has reported a mistake of the user's itself.
    """
    command = Path(sys.executable).with_name(name)
    if not command.exists():
        raise UserError(f"{command}: not installed; run 'make setup'")
    _run(name, [command, *arguments], keep_open)


def run_module(name: str, arguments: Sequence[str | Path], keep_open: Sequence[int] = ()) -> None:
    """As `run_tool`, for a module of this project that is a program, such as ``lm.train.command``."""
    _run(name, [sys.executable, "-m", name, *arguments], keep_open)


def with_overrides(own: Sequence[str | Path], given: Sequence[str]) -> list[str]:
    """The options of a command: ours, except those that the user sets; the command takes each once.

    Args:
        own: options with their values.
        given: those of the user, likewise.
    """
    names = {_option_name(text) for text in given}
    kept, is_kept = [], True
    for text in map(str, own):
        if name := _option_name(text):
            is_kept = name not in names
        if is_kept:
            kept.append(text)
    return [*kept, *given]


def _option_name(text: str) -> str:
    """The name of the option that an argument is; nothing for a value."""
    found = re.match(r"--?([a-zA-Z]\w*)", text)
    return found[1] if found else ""


def _run(name: str, command: Sequence[str | Path], keep_open: Sequence[int]) -> None:
    """Run a command; when interrupted, wait until it has saved its state."""
    with subprocess.Popen(command, pass_fds=keep_open) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:
            # It may have received the same Ctrl-C; its first SIGTERM does not count as a second one.
            process.terminate()
            process.wait()
            raise
    if status == 2:
        raise SystemExit(2)
    if status:
        raise UserError(f"{name} ended with status {status}; see its output above")


def option_value(options: Sequence[str], name: str) -> str | None:
    """The value of ``-name`` or ``--name`` among command line options, the last one if there are several."""
    value = None
    for index, option in enumerate(options):
        key, _, attached = option.partition("=")
        if key in (f"-{name}", f"--{name}"):
            value = attached or (options[index + 1] if index + 1 < len(options) else None)
    return value


def peak_memory_of_children() -> float:
    """Largest resident memory of any child process so far, in MiB."""
    return round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, 1)


def read_json(path: Path) -> Any:
    """The content of a JSON file; ``None`` when it is absent or damaged."""
    try:
        return reading.read_json(path)
    except (OSError, ValueError):
        return None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, completely or not at all."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_yaml(path: Path, content: dict[str, Any]) -> None:
    """Write a YAML file in the order of `content`, completely or not at all."""
    write_text(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
