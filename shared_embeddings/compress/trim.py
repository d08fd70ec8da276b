"""Trim a trained model: its vocabulary keeps the tokens that texts use most, its tables their rows.

This module knows no host; models come through `shared_embeddings.compress.host`.

Axes: ``V`` vocabulary, ``n`` tokens that are kept.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from shared_embeddings.compress.host import HostVocabulary, TrimmableModel, find_host
from shared_embeddings.compress.options import TrimOptions, parse_fraction
from shared_embeddings.compress.report import Coverage, Sizes, TrimmedVocabulary, TrimReport
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import bytes_on_disk, write_text
from shared_embeddings.utils.paths import check_outputs
from shared_embeddings.utils.reading import read_lines

# Lines that are tokenized at a time.
_BLOCK = 1000


def trim(options: TrimOptions) -> TrimReport:
    """Write a copy of a trained model without the tokens that texts do not use, and a map of the ids.

    Without an output, report what would be kept.

    Raises:
        UserError: no host recognizes the model, or it cannot be trimmed; invalid texts, tokens to keep or
            paths.
        OSError: a file cannot be read or written.
    """
    model, output = options.model, options.output
    host, adapter = find_host(model, options.skip_undecodable)
    trained: TrimmableModel = adapter.read_trimmable(model)
    vocabularies = trained.vocabularies()
    texts = _texts_of(options, vocabularies)
    files, maps = [], dict[str, Path]()
    if output is not None:
        files = trained.files(output)
        maps = map_files(model, output, [vocabulary.name for vocabulary in vocabularies])
        inputs = (*options.text, *options.source_text, *options.target_text, *options.held_out, *options.keep)
        # A folder contains its map.
        outside = [path for path in maps.values() if path.parent not in files]
        check_outputs([*files, *outside], [model, *inputs], options.force)
    ids, reasons = _select(trained, vocabularies, texts, options)
    weights, disk = trained.weight_bytes(), sum(map(bytes_on_disk, trained.files(model)))
    notes = trained.trim(ids)
    trimmed = [
        TrimmedVocabulary(
            name=(name := vocabulary.name),
            rows=Sizes(len(vocabulary.words), len(ids[name])),
            reasons=reasons[name],
            map_file=os.fspath(maps[name]) if maps else None,
            texts=[
                _coverage(trained, vocabulary, path, ids[name]) for path in (*texts[name], *options.held_out)
            ],
        )
        for vocabulary in vocabularies
    ]
    report = TrimReport(
        model=os.fspath(model),
        output=None if output is None else os.fspath(output),
        host=host,
        vocabularies=trimmed,
        bytes_of_weights=Sizes(weights, trained.weight_bytes()),
        bytes_on_disk=None,
        notes=notes,
    )
    if output is None:
        return report
    lines = {name: "".join(f"{old}\t{new}\n" for new, old in enumerate(ids[name].tolist())) for name in maps}
    for name, path in maps.items():
        if path.parent != output:
            write_text(path, lines[name])
    trained.write_trimmed(output, report.card())
    for name, path in maps.items():
        if path.parent == output:
            write_text(path, lines[name])
    return dataclasses.replace(report, bytes_on_disk=Sizes(disk, sum(map(bytes_on_disk, files))))


def map_files(model: Path, output: Path, names: Sequence[str]) -> dict[str, Path]:
    """Return the file for the ids of each vocabulary: in a model's folder, or next to its file."""
    if model.is_dir():
        return dict.fromkeys(names, output / "ids.tsv")
    endings = [".ids.tsv"] if len(names) == 1 else [f".{name}.ids.tsv" for name in names]
    return {name: output.with_name(output.name + ending) for name, ending in zip(names, endings)}


def _texts_of(options: TrimOptions, vocabularies: Sequence[HostVocabulary]) -> dict[str, list[Path]]:
    """Return the texts for each vocabulary, by its name."""
    for option, paths in (("text", options.text), ("held_out", options.held_out)):
        if paths and len(vocabularies) > 1:
            remedy = "give source_text and target_text" if option == "text" else "remove it"
            raise UserError(
                f"{option} {paths[0]}: the model has a vocabulary for the source and one for the target, "
                f"whose lines are counted separately; {remedy}"
            )
    by_side = {"source": options.source_text, "target": options.target_text}
    for side, paths in by_side.items():
        if paths and not any(side in vocabulary.sides for vocabulary in vocabularies):
            raise UserError(f"{side}_text {paths[0]}: the model has no {side} side; give it as text")
    texts = {}
    for vocabulary in vocabularies:
        for side in vocabulary.sides or ("",):
            if not options.text and not by_side.get(side):
                option = f"{side}_text" if side else "text"
                raise UserError(f"no text selects the tokens of the {side or 'vocabulary'}; give {option}")
        of_sides = (path for side in vocabulary.sides for path in by_side[side])
        texts[vocabulary.name] = [*options.text, *of_sides]
    return texts


def _select(
    trained: TrimmableModel,
    vocabularies: Sequence[HostVocabulary],
    texts: Mapping[str, Sequence[Path]],
    options: TrimOptions,
) -> tuple[dict[str, Tensor], dict[str, dict[str, int]]]:
    """Return the ids ``(n,)`` of each vocabulary to keep, ascending, and how many no earlier reason keeps."""
    always = _listed_ids(options.keep, vocabularies)
    selected: dict[str, Tensor] = {}
    reasons: dict[str, dict[str, int]] = {}
    for vocabulary in vocabularies:
        name, specials = vocabulary.name, vocabulary.specials
        # How often the texts use each token, for each way of reading them.
        readings: list[Counter[int]] = []
        for block in (block for path in texts[name] for block in _blocks(path)):
            for number, counts in enumerate(trained.used(name, block)):
                if number == len(readings):
                    readings.append(Counter())
                readings[number].update(counts)
        if all(counts.keys() <= specials for counts in readings):
            raise UserError(
                f"text {', '.join(map(str, texts[name]))}: has no word of the vocabulary '{name}'; tokenize "
                "it like the model's training data"
            )
        characters = trained.characters(name)
        frequent = _frequent(readings, always[name] | specials | characters, options)
        used = {word for counts in readings for word, count in counts.items() if count >= options.min_count}
        if used | always[name] <= specials:
            raise UserError(
                f"no word of the vocabulary '{name}' is used {options.min_count} times; lower min_count"
            )
        ids = trained.closed(name, frequent | always[name] | specials | characters)
        before: set[int] = set()
        reasons[name] = {}
        for reason, words in (
            ("special", specials),
            ("asked for", always[name]),
            ("characters that spell other texts", characters),
            ("most used by the texts", frequent),
            ("needed by the tokenizer", ids),
        ):
            if new := words - before:
                reasons[name][reason] = len(new)
            before |= words
        selected[name] = torch.tensor(sorted(ids))
    return selected, reasons


def _listed_ids(files: Sequence[Path], vocabularies: Sequence[HostVocabulary]) -> dict[str, set[int]]:
    """Return the ids of the tokens in files, one on every line, in each vocabulary."""
    words = dict.fromkeys(line for path in files for line in read_lines(path) if line)
    if files and not words:
        raise UserError(f"keep {files[0]}: is empty; write one token per line, or remove the option")
    ids: dict[str, set[int]] = {}
    missing = dict(words)
    for vocabulary in vocabularies:
        index = {word: number for number, word in enumerate(vocabulary.words)}
        ids[vocabulary.name] = {index[word] for word in words if word in index}
        missing = {word: None for word in missing if word not in index}
    for word in missing:
        raise UserError(
            f"token to keep {word!r}: is not in the vocabulary; spell it as the vocabulary does, or put it "
            "into a text"
        )
    return ids


def _frequent(readings: Sequence[Counter[int]], always: set[int], options: TrimOptions) -> set[int]:
    """Return the tokens that texts use often enough, besides those that are kept in any case."""
    counts = functools.reduce(operator.or_, readings)
    ranked = sorted(counts.keys() - always, key=lambda word: (-counts[word], word))
    if options.top_k is not None:
        return set(ranked[: options.top_k])
    if options.coverage is None:
        return {word for word in ranked if counts[word] >= options.min_count}
    fraction, most = parse_fraction("coverage", options.coverage), 0
    for reading in readings:
        missing = fraction * reading.total() - sum(reading[word] for word in always)
        number = 0
        while missing > 0 and number < len(ranked):
            missing -= reading[ranked[number]]
            number += 1
        most = max(most, number)
    return set(ranked[:most])


def _blocks(path: Path) -> Iterator[list[str]]:
    """Yield the lines of a text in blocks, with a progress bar on a terminal."""
    lines = read_lines(path)
    with tqdm(desc=path.name, unit=" lines", disable=None) as progress:
        while block := list(islice(lines, _BLOCK)):
            yield block
            progress.update(len(block))


def _coverage(trained: TrimmableModel, vocabulary: HostVocabulary, path: Path, ids: Tensor) -> Coverage:
    """Return how much of a text the trimmed vocabulary, of these original ids ``(n,)``, covers."""
    name = vocabulary.name
    new_ids = {old: new for new, old in enumerate(ids.tolist())}
    tokens = known = unknown = whole = lines = restored = restored_after = 0
    for block in _blocks(path):
        before, after = trained.encode(name, block), trained.encode(name, block, trimmed=True)
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
        restored += trained.restored(name, block, before)
        restored_after += trained.restored(name, block, after, trimmed=True)
    return Coverage(os.fspath(path), tokens, known, unknown, whole, lines, Sizes(restored, restored_after))
