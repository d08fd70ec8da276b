"""Results as JSON files with version, machine and date; progress of trainings for Weights & Biases."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch

from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.extras import require
from shared_embeddings.utils.files import write_text

# The repository, whose git state is part of every record.
ROOT = Path(__file__).resolve().parents[2]


def provenance(packages: Iterable[str] = ("torch", "shared-embeddings")) -> dict[str, Any]:
    """The date (UTC), the commit, the versions of Python and of `packages`, and the machine of a result."""
    commit, dirty = git_state(ROOT)
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git": {"commit": commit, "dirty": dirty},
        "versions": versions,
        "device": describe_device("cuda" if torch.cuda.is_available() else "cpu"),
    }


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """The commit of `folder` and whether its tree is dirty; ``(None, None)`` outside of git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        ).stdout

    try:
        top, commit = git("rev-parse", "--show-toplevel", "HEAD").splitlines()
        # An installed copy may be inside another repository.
        if Path(top).resolve() != folder.resolve():
            return None, None
        return commit, bool(git("status", "--porcelain").strip())
    except (OSError, subprocess.CalledProcessError):
        return None, None


def describe_device(kind: str) -> str:
    """The GPUs for ``"cuda"``; otherwise the processor, if known, and torch's number of threads."""
    if kind == "cuda":
        return f"cuda: {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
        processor = found[1] if found else processor
    return f"cpu: {processor}, {torch.get_num_threads()} threads"


def write_record(path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Write a record atomically as indented JSON; see `encoded`."""
    write_text(Path(path), encoded(path, record, indent=2) + "\n")


def encoded(path: str | os.PathLike[str], record: Mapping[str, Any], indent: int | None = None) -> str:
    """A record for a file as JSON, with paths relative to the repository.

    UserError for a value that is not valid JSON (a tensor, a NaN).
    """
    try:
        return json.dumps(portable(record), indent=indent, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: results cannot be written: {error}") from error


def portable(value: Any) -> Any:
    """`value` with the paths in its strings made relative to the repository."""
    if isinstance(value, Mapping):
        return {key: portable(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [portable(part) for part in value]
    return value.replace(f"{ROOT}{os.sep}", "") if isinstance(value, str) else value


class Writer(Protocol):
    """The part of ``torch.utils.tensorboard.SummaryWriter`` that trainings use."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Record a value at a step."""

    def close(self) -> None:
        """Write everything."""


class WandbWriter:
    """Sends scalars to a project of Weights & Biases.

    A resumed training is another run of the same group, which is named after its folder. The environment
    variables of wandb apply, such as ``WANDB_MODE=offline``.

    Args:
        project: name of the project.
        folder: of the training, where wandb keeps its files.
        config: settings to show with the run.
    """

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        name = folder.absolute().name
        self._run = require("wandb").init(
            project=project, group=name, name=name, dir=str(folder), config=dict(config)
        )

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self._run.log({tag: scalar_value}, step=global_step)

    def close(self) -> None:
        self._run.finish()


class Writers:
    """Several writers as one."""

    def __init__(self, writers: Iterable[Writer]) -> None:
        self._writers = list(writers)

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        for writer in self._writers:
            writer.add_scalar(tag, scalar_value, global_step)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
