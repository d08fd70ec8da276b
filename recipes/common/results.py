"""`results.json`: what was run, on what, with which code, and what came out."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from recipes.common.errors import UserError
from shared_embeddings.utils.reading import read_json
from shared_embeddings.utils.results import provenance, write_record

REPOSITORY = Path(__file__).resolve().parents[2]
REQUIRED = ("recipe", "row", "config", "counts", "metrics", "data_checksum")
PACKAGES = ("torch", "OpenNMT-py", "sacrebleu", "shared-embeddings")
# Folder below a recipe's runs for what its scripts make with --smoke; no result of a row lies there.
SMOKE_FOLDER = "smoke"


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
    record = {
        "recipe": recipe,
        "row": row,
        "metrics": metrics,
        "counts": counts,
        "paper": paper,
        "data_checksum": data_checksum,
        **provenance(PACKAGES),
        "config": config,
        **extra,
    }
    write_record(path, record)


def read_results(source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """Read results files, sorted by recipe and row.

    Args:
        source: a folder, searched for ``results.json`` at any depth but below a folder ``smoke``; or the
            files.

    Raises:
        UserError: a folder or file that is not there, or a file that is not a results file.
    """
    if isinstance(source, (str, os.PathLike)):
        folder = Path(source)
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder of results; run an evaluation first")
        paths = sorted(path for path in folder.rglob("results.json") if not is_smoke(path, folder))
    else:
        paths = [Path(path) for path in source]
    return sorted((_read(path) for path in paths), key=lambda record: (record["recipe"], record["row"]))


def is_smoke(path: Path, runs: Path) -> bool:
    """Whether a file below the folder `runs` was made with ``--smoke``, on generated data."""
    return SMOKE_FOLDER in path.relative_to(runs).parts


def _read(path: Path) -> dict[str, Any]:
    """One results file, checked for the keys that every reader relies on."""
    try:
        record = read_json(path)
    except UserError as error:
        raise UserError(f"{path}: not a results file ({error}); evaluate again") from error
    missing = [key for key in REQUIRED if not isinstance(record, dict) or key not in record]
    if missing:
        raise UserError(f"{path}: not a results file, it has no {', '.join(missing)}; evaluate again")
    return record
