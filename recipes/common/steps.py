"""Steps of a preparation that run again only when something that they depend on has changed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared_embeddings.utils.files import sha256, write_text
from shared_embeddings.utils.reading import read_json


def run_step(
    name: str,
    stamps: Path,
    action: Callable[[], object],
    *,
    inputs: Sequence[Path],
    outputs: Sequence[Path],
    settings: Mapping[str, Any],
) -> None:
    """Run `action` unless its outputs are there, undamaged, and come from the same inputs and settings.

    The stamp is written after the outputs, so that an interrupted step runs again. `action` must write each
    output under a temporary name (`shared_embeddings.utils.files.replacing`).

    Args:
        name: what is printed, and the name of the stamp.
        stamps: folder of the stamps.
        action: makes the outputs.
        inputs: files whose content decides about the outputs.
        outputs: files that `action` leaves.
        settings: everything else that decides about the outputs, as JSON values.
    """
    stamp = stamps / f"{name}.json"
    key = {"settings": json.loads(json.dumps(dict(settings))), "inputs": _checksums(inputs)}
    if _read(stamp) == {**key, "outputs": _checksums(outputs)}:
        print_line(f"{name}: up to date")
        return
    print_line(f"{name}: running")
    action()
    write_text(stamp, json.dumps({**key, "outputs": _checksums(outputs)}, indent=2) + "\n")


def print_result(work: Callable[[], str]) -> None:
    """Do `work` and print the line that it returns."""
    print_line(work())


def print_line(line: str) -> None:
    """Print a line in one piece: ``print`` of an unbuffered process writes its end apart, and workers mix."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _checksums(paths: Sequence[Path]) -> dict[str, str | None]:
    """Checksum by file name; ``None`` where the file is absent."""
    return {path.name: sha256(path) if path.is_file() else None for path in paths}


def _read(stamp: Path) -> Any:
    """The content of a stamp; ``None`` when it is absent or damaged."""
    try:
        return read_json(stamp)
    except (OSError, ValueError):
        return None
