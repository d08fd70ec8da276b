"""`results.json`: what was run, on what, with which code, and what came out."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from recipes.common.errors import UserError
from shared_embeddings.files import write_text

REPOSITORY = Path(__file__).resolve().parents[2]
REQUIRED = ("recipe", "row", "config", "counts", "metrics", "data_checksum")
PACKAGES = ("torch", "OpenNMT-py", "sacrebleu", "shared-embeddings")


def write_results(
    path: str | os.PathLike[str],
    *,
    recipe: str,
    row: str,
    config: dict[str, Any],
    counts: dict[str, Any],
    metrics: dict[str, Any],
    data_checksum: str,
    paper: dict[str, Any] | None = None,
    **extra: Any,
) -> None:
    """Write one evaluation, completely or not at all.

    Paths inside the repository are written from its root on, so that the files can be handed on.

    The date, the git commit and whether the tree was dirty, versions and the device are added; `extra` comes
    last and may replace the device.

    Args:
        path: the file, usually ``results.json`` beside the model.
        recipe: name of the recipe.
        row: name of the configuration, a row of the recipe's table.
        config: the whole resolved configuration.
        counts: parameter counts, as `nmt.describe_checkpoint` gives them.
        metrics: scores with their signatures, speed, training time.
        data_checksum: SHA-256 over the data.
        paper: what the paper reports for this row.
        extra: anything else, for instance ``peak_memory_mib``.

    Raises:
        ValueError: a value that JSON does not have (a tensor, a NaN).
    """
    commit, dirty = git_state(REPOSITORY)
    record = {
        "recipe": recipe,
        "row": row,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "metrics": metrics,
        "counts": counts,
        "paper": paper,
        "data_checksum": data_checksum,
        "git": {"commit": commit, "dirty": dirty},
        "versions": versions(),
        "device": describe_device(),
        "config": _portable(config),
        **extra,
    }
    try:
        text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        raise ValueError(f"results of {recipe}/{row} cannot be written: {error}") from error
    write_text(Path(path), text + "\n")


def _portable(value: Any) -> Any:
    """`value` with the paths in its strings told from the repository's root on."""
    if isinstance(value, dict):
        return {key: _portable(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_portable(part) for part in value]
    return value.replace(f"{REPOSITORY}{os.sep}", "") if isinstance(value, str) else value


def read_results(source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """Read results files, sorted by recipe and row.

    Args:
        source: a folder, searched for ``results.json`` at any depth; or the files.

    Raises:
        UserError: a folder or file that is not there, or a file that is not a results file.
    """
    if isinstance(source, (str, os.PathLike)):
        folder = Path(source)
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder of results; run an evaluation first")
        paths = sorted(folder.rglob("results.json"))
    else:
        paths = [Path(path) for path in source]
    return sorted((_read(path) for path in paths), key=lambda record: (record["recipe"], record["row"]))


def _read(path: Path) -> dict[str, Any]:
    """One results file, checked for the keys that every reader relies on."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: not a results file ({error}); evaluate again") from error
    missing = [key for key in REQUIRED if not isinstance(record, dict) or key not in record]
    if missing:
        raise UserError(f"{path}: not a results file, it has no {', '.join(missing)}; evaluate again")
    return record


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Commit of `folder` and whether the tree differs from it; ``(None, None)`` outside git."""
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()
        status = subprocess.run(
            ["git", "status", "--porcelain"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return commit, bool(status.strip())


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages behind a result; ``None`` where one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def describe_device() -> str:
    """The accelerator that torch sees, or else the processor and the number of torch's threads."""
    import torch

    if torch.cuda.is_available():
        return f"cuda: {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"cpu: {_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
