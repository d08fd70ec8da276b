"""Trimming a trained model: its vocabulary keeps the words that some texts use, its tables their rows.

This module knows no host; models come through `shared_embeddings.checkpoints.adapter`. What is kept is chosen
by `shared_embeddings.checkpoints.selection`.

Axes: ``V`` vocabulary, ``n`` words that are kept.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from shared_embeddings.checkpoints.adapter import StoredModel, TrimmableModel, Vocabulary, find_host
from shared_embeddings.checkpoints.compress import DEFAULTS, Settings, checked_files, publish
from shared_embeddings.checkpoints.report import (
    CompressionReport,
    Coverage,
    Sizes,
    TrimmedVocabulary,
    TrimReport,
)
from shared_embeddings.checkpoints.selection import Keep, Selection, Texts, blocks, select
from shared_embeddings.errors import UserError
from shared_embeddings.utils.files import bytes_on_disk, staged, workplace, write_text
from shared_embeddings.utils.path_options import PathOption, check_paths


def trim(
    model: Path,
    texts: Texts,
    output: Path | None,
    keep: Keep = Keep(),  # noqa: B008
    force: bool = False,
) -> TrimReport:
    """Write a copy of a trained model without the words that texts do not use, and a map of the ids.

    Args:
        model: a file or folder of any host.
        texts: as the host's commands read them.
        output: the file or folder to write. None reports what would be kept, and writes nothing.
        keep: which words are kept.
        force: replace existing files.

    Raises:
        UserError: no host recognizes the model, or it cannot be trimmed; invalid texts, words to keep or
            paths.
        OSError: a file cannot be read or written.
    """
    name, adapter = find_host(model)
    trained = adapter.read_trimmable(model)
    vocabularies = trained.vocabularies()
    maps = {} if output is None else map_files(trained, output, vocabularies)
    files = [] if output is None else trained.files(output)
    outputs = files if _is_folder(trained) else [*files, *maps.values()]
    _check_paths(trained, texts, outputs, force)
    given = texts.of(vocabularies)
    kept = select(trained, vocabularies, given, keep)
    weights, disk = trained.weight_bytes(), sum(map(bytes_on_disk, trained.sources()))
    notes = trained.trim({vocabulary: found.ids for vocabulary, found in kept.items()})
    trimmed = [
        _trimmed(trained, vocabulary, kept[vocabulary.name], maps, [*given[vocabulary.name], *texts.held_out])
        for vocabulary in vocabularies
    ]
    report = TrimReport(
        model=os.fspath(model),
        output=None if output is None else os.fspath(output),
        host=name,
        vocabularies=trimmed,
        bytes_of_weights=Sizes(weights, trained.weight_bytes()),
        bytes_on_disk=None,
        notes=notes,
    )
    if output is None:
        return report
    with staged(outputs) as places:
        trained.write_trimmed(places[0], report.card())
        for vocabulary, path in map_files(trained, places[0], vocabularies).items():
            write_text(path, _map_text(kept[vocabulary].ids))
        after = sum(map(bytes_on_disk, places[: len(files)]))
    return dataclasses.replace(report, bytes_on_disk=Sizes(disk, after))


def _trimmed(
    trained: TrimmableModel,
    vocabulary: Vocabulary,
    kept: Selection,
    maps: Mapping[str, Path],
    texts: Sequence[Path],
) -> TrimmedVocabulary:
    """What the report says of a vocabulary; `maps` has the files of its new ids, if they are written."""
    return TrimmedVocabulary(
        name=vocabulary.name,
        rows=Sizes(len(vocabulary.words), len(kept.ids)),
        reasons=kept.reasons,
        map_file=os.fspath(maps[vocabulary.name]) if maps else None,
        texts=[_coverage(trained, vocabulary, path, kept) for path in texts],
    )


def _check_paths(trained: TrimmableModel, texts: Texts, outputs: Sequence[Path], force: bool) -> None:
    """Raise UserError if the paths clash, or a file is missing or exists."""
    check_paths(
        {
            "--model": (PathOption.SOURCE, trained.sources()),
            "--text": (PathOption.FILE, texts.both),
            "--source-text": (PathOption.FILE, texts.source),
            "--target-text": (PathOption.FILE, texts.target),
            "--held-out": (PathOption.FILE, texts.held_out),
            "--output": (PathOption.NEW, outputs),
        },
        force,
    )


def _is_folder(trained: StoredModel) -> bool:
    """Whether a model was read from a folder."""
    return any(map(os.path.isdir, trained.sources()))


def map_files(trained: StoredModel, output: Path, vocabularies: Sequence[Vocabulary]) -> dict[str, Path]:
    """The file for the ids of each vocabulary: in a model's folder, or next to its file."""
    if _is_folder(trained):
        return {vocabulary.name: output / "ids.tsv" for vocabulary in vocabularies}
    names = [vocabulary.name for vocabulary in vocabularies]
    endings = [".ids.tsv"] if len(names) == 1 else [f".{name}.ids.tsv" for name in names]
    return {name: output.with_name(output.name + ending) for name, ending in zip(names, endings)}


def _coverage(trained: TrimmableModel, vocabulary: Vocabulary, path: Path, kept: Selection) -> Coverage:
    """How much of a text the trimmed vocabulary covers.

    Raises:
        UserError: a line whose tokens are all kept would be tokenized differently.
    """
    new_ids = {old: new for new, old in enumerate(kept.ids.tolist())}
    tokens = known = unknown = whole = lines = restored = restored_after = 0
    for block in blocks(path):
        before = trained.encode(vocabulary.name, block)
        after = trained.encode_trimmed(vocabulary.name, block)
        for number, (old, new) in enumerate(zip(before, after, strict=True), lines + 1):
            mapped = [new_ids.get(word) for word in old]
            tokens += len(old)
            known += len(old) - mapped.count(None)
            unknown += old.count(vocabulary.unknown) if vocabulary.unknown is not None else 0
            if None in mapped:
                continue
            if mapped != new:
                raise UserError(
                    f"text {path}: the trimmed vocabulary would tokenize line {number} differently, although "
                    "all of its words are kept; nothing was written: this type of tokenizer cannot be trimmed"
                )
            whole += 1
        lines += len(block)
        restored += trained.restored(vocabulary.name, block, before)
        restored_after += trained.restored_trimmed(vocabulary.name, block, after)
    return Coverage(os.fspath(path), tokens, known, unknown, whole, lines, Sizes(restored, restored_after))


def _map_text(kept: Tensor) -> str:
    """The text of an id map: for each kept word the old id, a tab, and the new id."""
    return "".join(f"{old}\t{new}\n" for new, old in enumerate(kept.tolist()))


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
    run: Callable[[Path, Path | None, Settings], Compressed],
    settings: Settings = DEFAULTS,
) -> Compressed:
    """Trim a trained model to the words of texts, and compress what is left; all outputs appear, or none.

    Args:
        model: a file or folder of any host.
        output: the file or folder to write; None writes nothing.
        texts: as the host's commands read them.
        run: compresses a model: its arguments are the trimmed model, the output, and the settings for it.
        settings: as in `shared_embeddings.checkpoints.compress.compress`; `texts` are for measuring.

    Raises:
        UserError: the model cannot be trimmed or compressed, its sides have their own vocabularies, or the
            paths clash.
        OSError: a file cannot be read or written.
    """
    trained = find_host(model)[1].read_trimmable(model)
    vocabularies = trained.vocabularies()
    if len(vocabularies) > 1:
        raise UserError(
            f"model {model}: has a vocabulary for each side; run shared-embeddings trim with "
            "--source-text and --target-text, then compress the result without --trim-to"
        )
    maps = {} if output is None else map_files(trained, output, vocabularies)
    if output is not None:
        checked = dataclasses.replace(settings, texts=texts)
        checked_files(trained, output, checked, beside=_beside(output, maps))
    name = Path(model).name if output is None else output.name
    with workplace(output) as folder:
        small, place = folder / "trimmed" / name, folder / "compressed" / name
        for path in (small, place):
            path.parent.mkdir()
        trimmed = _with_output(trim(model, Texts(texts), small), output, maps)
        inner = dataclasses.replace(settings, force=False, report_file=None, trimmed=trimmed)
        if output is None:
            return run(small, None, inner)
        found = run(small, place, inner).with_output(output)
        moves = dict(zip(trained.files(place), trained.files(output)))
        small_maps = map_files(trained, small, vocabularies)
        beside = _beside(output, maps)
        moves |= {small_maps[key]: path for key, path in maps.items() if path in beside}
        publish(moves, found.written(), settings.report_file)
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
