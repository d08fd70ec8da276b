"""Trimming and compressing a trained model in one go, without leaving the trimmed model behind."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from shared_embeddings.checkpoints.adapter import find_host
from shared_embeddings.checkpoints.compress import checked_files, publish
from shared_embeddings.checkpoints.quality import Validation
from shared_embeddings.checkpoints.report import CompressionReport, TrimReport
from shared_embeddings.checkpoints.selection import Texts
from shared_embeddings.checkpoints.trim import map_files, trim
from shared_embeddings.utils.files import workplace


class Compressed(Protocol):
    """What compressing gives: a report, or the trials and the report of the best one."""

    def with_output(self, output: Path) -> Compressed:
        """The same for a model that was moved."""

    def written(self) -> CompressionReport:
        """The report of the model that was written."""

    def described(self) -> str:
        """The report as text."""


def trim_and_compress(
    model: Path,
    output: Path | None,
    texts: Sequence[Path],
    run: Callable[[Path, Path | None, TrimReport], Compressed],
    *,
    validation: Validation | None = None,
    force: bool = False,
    report_file: Path | None = None,
) -> Compressed:
    """Trim a trained model to the words of texts, and compress what is left; all outputs appear, or none.

    Args:
        model: a file or folder of any host.
        output: the file or folder to write; None writes nothing.
        texts: as the host's commands read them.
        run: compresses a model: its arguments are the trimmed model, the output, and the report of trimming.
        validation, force, report_file: as in `shared_embeddings.checkpoints.compress.compress`.

    Raises:
        ValueError: the model cannot be trimmed or compressed, its sides have their own vocabularies, or the
            paths clash.
        OSError: a file cannot be read or written.
    """
    trained = find_host(model)[1].read_trimmable(model)
    vocabularies = trained.vocabularies()
    if len(vocabularies) > 1:
        raise ValueError(
            f"model {model}: has a vocabulary for each side; run shared-embeddings trim with "
            "--source-text and --target-text, then compress the result without --trim-to"
        )
    maps = {} if output is None else map_files(trained, output, vocabularies)
    if output is not None:
        checked_files(trained, output, texts, validation, report_file, force, beside=_beside(output, maps))
    name = Path(model).name if output is None else output.name
    with workplace(output) as folder:
        small, place = folder / "trimmed" / name, folder / "compressed" / name
        for path in (small, place):
            path.parent.mkdir()
        trimmed = _with_output(trim(model, Texts(texts), small), output, maps)
        if output is None:
            return run(small, None, trimmed)
        found = run(small, place, trimmed).with_output(output)
        moves = dict(zip(trained.files(place), trained.files(output)))
        small_maps = map_files(trained, small, vocabularies)
        beside = _beside(output, maps)
        moves |= {small_maps[key]: path for key, path in maps.items() if path in beside}
        publish(moves, found.written(), report_file)
        return found


def _beside(output: Path, maps: Mapping[str, Path]) -> list[Path]:
    """The maps of ids that are files next to the output; a folder contains its own."""
    return [path for path in maps.values() if path.parent != output]


def _with_output(trimmed: TrimReport, output: Path | None, maps: Mapping[str, Path]) -> TrimReport:
    """The report of a trimmed model that was compressed to `output`."""
    vocabularies = [
        dataclasses.replace(found, map_file=os.fspath(maps[found.name]) if maps else None)
        for found in trimmed.vocabularies
    ]
    name = None if output is None else os.fspath(output)
    return dataclasses.replace(trimmed, output=name, vocabularies=vocabularies)
