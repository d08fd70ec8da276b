"""Results as JSON with version, machine and date; progress of trainings for Weights & Biases."""

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
from typing import Any

import torch

from shared_embeddings.utils.errors import UserError, require

# The repository, whose git state is part of every record.
ROOT = Path(__file__).resolve().parents[2]


def provenance(packages: Iterable[str] = ("torch", "shared-embeddings")) -> dict[str, Any]:
    """Return the date (UTC), the commit, the versions of Python and of `packages`, and the machine."""
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
    """Return the commit of `folder` and whether its tree is dirty; ``(None, None)`` outside of git."""
    asked: dict[str, Any] = {"cwd": folder, "stderr": subprocess.DEVNULL, "text": True}
    try:
        printed = subprocess.check_output(["git", "rev-parse", "--show-toplevel", "HEAD"], **asked)
        top, commit = printed.splitlines()
        # An installed copy may be inside another repository.
        if Path(top).resolve() != folder.resolve():
            return None, None
        return commit, bool(
            subprocess.check_output(["git", "--no-optional-locks", "status", "--porcelain"], **asked).strip()
        )
    except (OSError, subprocess.CalledProcessError):
        return None, None


def describe_device(kind: str) -> str:
    """Return the GPUs for ``"cuda"``; otherwise the processor, if known, and torch's number of threads."""
    if kind == "cuda":
        return f"cuda: {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        match = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
        processor = match[1] if match else processor
    return f"cpu: {processor}, {torch.get_num_threads()} threads"


def encoded(path: str | os.PathLike[str], record: Mapping[str, Any], indent: int | None = None) -> str:
    """Return a record for a file as JSON, with paths relative to the repository.

    UserError for a value that is not valid JSON (a tensor, a NaN).
    """
    try:
        return json.dumps(portable(record), indent=indent, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: results cannot be written: {error}") from error


def portable(value: Any) -> Any:
    """Return `value` with the paths in its strings made relative to the repository."""
    if isinstance(value, Mapping):
        return {key: portable(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [portable(part) for part in value]
    return value.replace(f"{ROOT}{os.sep}", "") if isinstance(value, str) else value


class WandbWriter:
    """Sends scalars to a project of Weights & Biases, as TensorBoard's ``SummaryWriter`` writes them.

    A resumed training is another run of the same group, which is named after its folder. The environment
    variables of wandb apply, such as ``WANDB_MODE=offline``.

    Args:
        project: name of the project.
        folder: of the training, where wandb keeps its files.
        config: settings to show with the run.
        others: writers that get the same scalars.
    """

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any], *others: Any) -> None:
        name, self._others = folder.absolute().name, others
        self._run = require("wandb").init(
            project=project, group=name, name=name, dir=str(folder), config=dict(config)
        )

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Record a value at a step."""
        self._run.log({tag: value}, step=step)
        for writer in self._others:
            writer.add_scalar(tag, value, step)

    def close(self) -> None:
        """Write everything."""
        self._run.finish()
        for writer in self._others:
            writer.close()
