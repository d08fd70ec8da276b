"""``results.jsonl``: settings, data, code versions and metrics of each row, one line per row."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import open_lock, write_text
from shared_embeddings.utils.reading import parse_json
from shared_embeddings.utils.results import encoded, provenance

REPOSITORY = Path(__file__).resolve().parents[2]
FILE = "results.jsonl"
# Folder in a recipe's runs for --smoke.
SMOKE_FOLDER = "smoke"
PACKAGES = ("torch", "OpenNMT-py", "sacrebleu", "shared-embeddings")
BASELINE = "standard"
# Between the name of a row and another seed of it.
SEED = "_seed"
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
    """Write or replace the line of `row` in the ``results.jsonl`` of a folder, and return the file.

    Paths in the repository become relative. The date, git commit, dirty flag, versions and device are added.

    Args:
        config: settings that are not defaults.
        counts: parameter counts, see `nmt.models.describe_checkpoint`.
        metrics: scores with signatures, speed, training time.
        data_checksum: SHA-256 of the data.
        extra: other values, such as ``peak_memory_mib``; it may override the device.
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
    line = encoded(path, record)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_lock(path.with_name(f".{path.name}.lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines = {record["row"]: text for text, record in _lines(path)} if path.is_file() else {}
        lines[row] = line
        write_text(path, "".join(f"{lines[name]}\n" for name in sorted(lines, key=natural)))
    return path


def read_results(path: Path) -> list[Record]:
    """Read a ``results.jsonl``, or the one in a folder, in natural order of the rows."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{file}: no such file; run an evaluation first")
    return sorted((record for _, record in _lines(file)), key=lambda record: natural(record["row"]))


def find_result(folder: Path, row: str) -> Record | None:
    """Return the record of `row` in the ``results.jsonl`` of a folder, or None."""
    if not (folder / FILE).is_file():
        return None
    return next((record for record in read_results(folder) if record["row"] == row), None)


def _lines(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield the lines of a file with their records, after checking required keys."""
    try:
        # Other line ends than "\n" may be inside of a string.
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); evaluate again") from error
    for number, line in enumerate(lines, start=1):
        where = f"{path}: line {number}"
        advice = "remove the line and evaluate again"
        try:
            record = parse_json(line, where)
        except UserError as error:
            raise UserError(f"{where}: invalid result ({error}); {advice}") from error
        for key, kind in _REQUIRED.items():
            if not isinstance(record, dict) or not isinstance(record.get(key), kind):
                raise UserError(f"{where}: invalid result, {key} is missing; {advice}")
        yield line, record


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sorting key that compares numbers in a name as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", name)]


def is_baseline(row: str) -> bool:
    """Whether a row is what others are compared with: ``standard``, or ``small_standard`` for ``small_…``."""
    return row == BASELINE or row.endswith(f"_{BASELINE}")


def not_run(row: str, config: dict[str, Any]) -> Record:
    """The record of a row that has no results."""
    return {"row": row, "config": config, "counts": {}, "metrics": {}, "data_checksum": ""}


def describe_options(record: Record) -> str:
    """The method's options and what the row starts from, as they are written in ``rows.yaml``.

    Sizes that a fit found, such as those of directions, are left out.
    """
    config = record["config"]
    options = (config.get("embedding") or {}).items()
    parts = [f"{key} {value}" for key, value in options if key not in ("method", "directions")]
    if distill := dict(config.get("distill") or {}):
        parts.append(f"distilled from {distill.pop('teacher')}")
        parts += [f"{name} {value}" for name, value in distill.items()]
    if fit := config.get("fit"):
        steps = f"recovered in {fit['recover_steps']:,} steps" if "recover_steps" in fit else "not trained"
        parts.append(f"fitted to {fit['teacher']}, {steps}")
    return ", ".join(parts) or "–"


def embedding_bits(counts: Mapping[str, float]) -> float:
    """Return the bits of input and output embeddings, including codes; the rest is in float32."""
    return counts["stored_bits"] - 32 * counts.get("rest", 0)


def times_smaller(counts: Mapping[str, float]) -> float:
    """Return how many times fewer bits than a plain table in float32, without biases, the embedding takes."""
    dense = counts["dense_embedding"] if "dense_embedding" in counts else counts["table"]
    return 32 * dense / embedding_bits(counts)
