"""``results.jsonl``: what was run, on what data, with which code, and with what outcome; a line per row."""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared_embeddings.errors import UserError
from shared_embeddings.utils.files import write_text
from shared_embeddings.utils.reading import parse_json
from shared_embeddings.utils.results import portable, provenance

REPOSITORY = Path(__file__).resolve().parents[2]
FILE = "results.jsonl"
# Folder below a recipe's runs for what its scripts make with --smoke; no result of a row lies there.
SMOKE_FOLDER = "smoke"
PACKAGES = ("torch", "OpenNMT-py", "sacrebleu", "shared-embeddings")
_REQUIRED = {"row": str, "config": dict, "counts": dict, "metrics": dict, "data_checksum": str}
Record = dict[str, Any]


def write_result(
    folder: Path,
    row: str,
    *,
    config: dict[str, Any],
    counts: dict[str, Any],
    metrics: dict[str, Any],
    data_checksum: str,
    **extra: Any,
) -> Path:
    """Write the line of `row` in ``results.jsonl``; lines of other rows stay. Returns the file.

    Paths inside the repository are written relative to its root. The date, the git commit and whether the
    tree was dirty, versions and the device are added; `extra` comes last and may replace the device.

    Args:
        folder: of the file, usually that of the recipe's runs.
        row: name of the row.
        config: the settings that decide about the outcome; what they leave out has its default.
        counts: parameter counts, as `nmt.checkpoint.build.describe_checkpoint` gives them.
        metrics: scores with their signatures, speed, training time.
        data_checksum: SHA-256 over the data.
        extra: anything else, for instance ``peak_memory_mib``.

    Raises:
        ValueError: a value that JSON does not have (a tensor, a NaN).
        UserError: the file has a line that is no result.
    """
    record = {
        "row": row,
        "metrics": metrics,
        "counts": counts,
        "data_checksum": data_checksum,
        **provenance(PACKAGES),
        "config": config,
        **extra,
    }
    path = folder / FILE
    try:
        line = json.dumps(portable(record), ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        raise ValueError(f"{path}: results cannot be written: {error}") from error
    with _alone(path):
        lines = {record["row"]: text for text, record in _lines(path)} if path.is_file() else {}
        lines[row] = line
        write_text(path, "".join(f"{lines[name]}\n" for name in sorted(lines, key=natural)))
    return path


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other process writes to a file of results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def read_results(path: Path) -> list[Record]:
    """The records of a ``results.jsonl``, or of that in a folder, in natural order of their rows.

    Raises:
        UserError: there is no such file, or a line of it is no result.
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{file}: no such file of results; run an evaluation first")
    return sorted((record for _, record in _lines(file)), key=lambda record: natural(record["row"]))


def find_result(folder: Path, row: str) -> Record | None:
    """The record of `row` in the ``results.jsonl`` of a folder, or None.

    Raises:
        UserError: a line of the file is no result.
    """
    if not (folder / FILE).is_file():
        return None
    return next((record for record in read_results(folder) if record["row"] == row), None)


def _lines(path: Path) -> Iterator[tuple[str, Record]]:
    """The lines of a file with their records, checked for the keys that every reader relies on."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); evaluate again") from error
    for number, line in enumerate(lines, start=1):
        where = f"{path}: line {number}"
        try:
            record = parse_json(line, where)
        except UserError as error:
            raise UserError(f"{where}: no result ({error}); remove the line and evaluate again") from error
        for key, kind in _REQUIRED.items():
            if not isinstance(record, dict) or not isinstance(record.get(key), kind):
                raise UserError(f"{where}: no result, {key} is missing; remove the line and evaluate again")
        yield line, record


def natural(name: str) -> list[tuple[int, str]]:
    """Sorting key that counts numbers in a name as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", name)]


def is_smoke(path: Path, runs: Path) -> bool:
    """Whether a file below the folder `runs` was made with ``--smoke``, on generated data."""
    return SMOKE_FOLDER in path.relative_to(runs).parts


def embedding_bits(counts: Mapping[str, float]) -> float:
    """The bits that input and output take, codes and other integers included; the rest is in float32."""
    return counts["stored_bits"] - 32 * counts.get("rest", 0)
