"""Trim a trained model: its vocabulary keeps the words that some texts use most, its tables their rows.

This module knows no host; models come through `shared_embeddings.compress.host`.

Axes: ``V`` vocabulary, ``n`` words that are kept.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from shared_embeddings.compress.host import TrimmableModel, Vocabulary, find_host
from shared_embeddings.compress.report import Coverage, Sizes, TrimmedVocabulary, TrimReport
from shared_embeddings.compress.session import Settings, check_files
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import bytes_on_disk, staged, workplace, write_text
from shared_embeddings.utils.path_options import PathOption, check_paths
from shared_embeddings.utils.reading import read_lines

# Lines that are tokenized at a time.
_BLOCK = 1000


@dataclasses.dataclass(frozen=True)
class Texts:
    """The texts whose words are kept."""

    both: Sequence[Path] = ()  # for a model with one vocabulary
    source: Sequence[Path] = ()  # for the source of a translation model
    target: Sequence[Path] = ()  # for its target
    # Other texts that the trimmed model should still read, for a model with one vocabulary; they select
    # no words.
    held_out: Sequence[Path] = ()

    def of(self, vocabularies: Sequence[Vocabulary]) -> dict[str, list[Path]]:
        """The texts for each vocabulary."""
        for option, paths in (("--text", self.both), ("--held-out", self.held_out)):
            if paths and len(vocabularies) > 1:
                instead = "give --source-text and --target-text" if paths is self.both else "remove it"
                raise UserError(
                    f"{option} {paths[0]}: the model has a vocabulary for the source and one for the target, "
                    f"whose lines are counted separately; {instead}"
                )
        given = {"source": self.source, "target": self.target}
        for side, paths in given.items():
            if paths and not any(side in vocabulary.sides for vocabulary in vocabularies):
                raise UserError(f"--{side}-text {paths[0]}: the model has no {side} side; give it as --text")
        found = {}
        for vocabulary in vocabularies:
            name, sides = vocabulary.name, vocabulary.sides
            found[name] = [*self.both, *(path for side in sides for path in given[side])]
            if not found[name]:
                option = "--text" if len(vocabularies) == 1 else f"--{name}-text"
                raise UserError(f"no text selects the words of the vocabulary '{name}'; give {option}")
            for side in sides:
                if not (self.both or given[side]):
                    raise UserError(
                        f"no text selects the words of the {side}, which shares the vocabulary; give "
                        f"--{side}-text, or --text for both"
                    )
        return found


@dataclasses.dataclass(frozen=True)
class Keep:
    """Which words are kept."""

    min_count: int = 1  # how often the texts must use a word
    words: Sequence[str] = ()  # kept even if no text uses them, spelled as in a vocabulary
    first: int = 0  # how many words at the start of each vocabulary are kept even if no text uses them
    top: int | None = None  # at most so many words that the texts use, the most frequent ones; None for all
    # The most frequent words that make up this share of the texts; None for all words.
    coverage: float | None = None
    characters: bool = True  # whether to keep what other texts need to be decoded from their ids

    def __post_init__(self) -> None:
        for option, value in (("--min-count", self.min_count), ("--top-k", self.top)):
            if value is not None and value < 1:
                raise UserError(f"{option} is {value}, but it must be at least 1; raise it")
        if self.first < 0:
            raise UserError(f"--keep-first is {self.first}, but it must be at least 0; raise it")
        if self.coverage is not None and not 0.0 < self.coverage <= 1.0:
            raise UserError(f"--coverage is {self.coverage:.1%}, but it must be above 0% and at most 100%")
        limits = {"--min-count": self.min_count > 1, "--top-k": self.top, "--coverage": self.coverage}
        given = [name for name, value in limits.items() if value]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} each limit the words; give one of them")

    def ids(self, vocabularies: Sequence[Vocabulary]) -> dict[str, set[int]]:
        """The ids of each vocabulary that are kept even if no text uses them."""
        kept: dict[str, set[int]] = {}
        missing = dict.fromkeys(self.words)
        for vocabulary in vocabularies:
            index = {word: number for number, word in enumerate(vocabulary.words)}
            found = [word for word in self.words if word in index]
            kept[vocabulary.name] = {index[word] for word in found} | {*range(len(index))[: self.first]}
            for word in found:
                missing.pop(word, None)
        for word in missing:
            raise UserError(
                f"word to keep {word!r}: is not in the vocabulary; spell it as the vocabulary does, or "
                "put it into a text"
            )
        return kept

    def frequent(self, readings: Sequence[Counter[int]], always: set[int]) -> set[int]:
        """The words that texts use often enough.

        Args:
            readings: how often the texts use each word, for each way of reading them.
            always: words that are kept in any case.
        """
        counts = functools.reduce(operator.or_, readings)
        ranked = sorted(counts.keys() - always, key=lambda word: (-counts[word], word))
        if self.top is not None:
            return set(ranked[: self.top])
        if self.coverage is None:
            return {word for word in ranked if counts[word] >= self.min_count}
        most = 0
        for reading in readings:
            missing = self.coverage * reading.total() - sum(reading[word] for word in always)
            number = 0
            while missing > 0 and number < len(ranked):
                missing -= reading[ranked[number]]
                number += 1
            most = max(most, number)
        return set(ranked[:most])


@dataclasses.dataclass(frozen=True)
class Selection:
    """The words of a vocabulary that are kept."""

    ids: Tensor  # ``(n,)``, ascending
    reasons: Mapping[str, int]  # why -> how many words that no earlier reason keeps


def select(
    trained: TrimmableModel,
    vocabularies: Sequence[Vocabulary],
    texts: Mapping[str, Sequence[Path]],
    keep: Keep,
) -> dict[str, Selection]:
    """The words of each vocabulary that are kept."""
    asked, selections = keep.ids(vocabularies), {}
    for vocabulary in vocabularies:
        name, specials = vocabulary.name, vocabulary.specials
        readings = _count(trained, name, texts[name])
        if all(counts.keys() <= specials for counts in readings):
            raise UserError(
                f"text {', '.join(map(str, texts[name]))}: has no word of the vocabulary '{name}'; tokenize "
                "it like the model's training data"
            )
        characters = trained.characters(name) if keep.characters else set()
        frequent = keep.frequent(readings, asked[name] | specials | characters)
        used = {word for counts in readings for word, count in counts.items() if count >= keep.min_count}
        if used | asked[name] <= specials:
            raise UserError(
                f"no word of the vocabulary '{name}' is used {keep.min_count} times; lower --min-count"
            )
        ids = trained.closed(name, frequent | asked[name] | specials | characters)
        before: set[int] = set()
        reasons = {}
        for reason, words in (
            ("special", specials),
            ("asked for", asked[name]),
            ("characters that spell other texts", characters),
            ("most used by the texts", frequent),
            ("needed by the tokenizer", ids),
        ):
            if new := words - before:
                reasons[reason] = len(new)
            before |= words
        selections[name] = Selection(torch.tensor(sorted(ids)), reasons)
    return selections


def _count(trained: TrimmableModel, vocabulary: str, paths: Sequence[Path]) -> list[Counter[int]]:
    """How often texts use each word, for each way of reading them."""
    readings: list[Counter[int]] = []
    for path in paths:
        for block in _blocks(path):
            for number, counts in enumerate(trained.used(vocabulary, block)):
                if number == len(readings):
                    readings.append(Counter())
                readings[number].update(counts)
    return readings


def read_words(path: Path) -> list[str]:
    """The words of a file, one on every line."""
    words = [line for line in read_lines(path) if line]
    if not words:
        raise UserError(f"words to keep {path}: is empty; write one word per line, or remove the option")
    return words


def _blocks(path: Path) -> Iterator[list[str]]:
    """The lines of a text in blocks, with a progress bar on a terminal."""
    lines = read_lines(path)
    with tqdm(desc=path.name, unit=" lines", disable=None) as progress:
        while block := list(islice(lines, _BLOCK)):
            yield block
            progress.update(len(block))


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
    host, adapter = find_host(model)
    return _trim(model, host, adapter.read_trimmable(model), texts, output, keep, force)


def _trim(
    model: Path,
    host: str,
    trained: TrimmableModel,
    texts: Texts,
    output: Path | None,
    keep: Keep,
    force: bool,
) -> TrimReport:
    """As `trim`, for a model that has been read."""
    vocabularies = trained.vocabularies()
    maps = {} if output is None else map_files(model, output, vocabularies)
    files = [] if output is None else trained.files(output)
    # A folder contains its map.
    outputs = [*files, *(path for path in maps.values() if path.parent not in files)]
    check_paths(
        {
            "--model": (PathOption.SOURCE, trained.files(model)),
            "--text": (PathOption.FILE, texts.both),
            "--source-text": (PathOption.FILE, texts.source),
            "--target-text": (PathOption.FILE, texts.target),
            "--held-out": (PathOption.FILE, texts.held_out),
            "--output": (PathOption.NEW, outputs),
        },
        force,
    )
    given = texts.of(vocabularies)
    kept = select(trained, vocabularies, given, keep)
    weights, disk = trained.weight_bytes(), sum(map(bytes_on_disk, trained.files(model)))
    notes = trained.trim({name: found.ids for name, found in kept.items()})
    trimmed = [
        TrimmedVocabulary(
            name=(name := vocabulary.name),
            rows=Sizes(len(vocabulary.words), len(kept[name].ids)),
            reasons=kept[name].reasons,
            map_file=os.fspath(maps[name]) if maps else None,
            texts=[
                _coverage(trained, vocabulary, path, kept[name].ids)
                for path in (*given[name], *texts.held_out)
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
    with staged(outputs) as places:
        trained.write_trimmed(places[0], report.card())
        for name, path in map_files(model, places[0], vocabularies).items():
            ids = enumerate(kept[name].ids.tolist())
            write_text(path, "".join(f"{old}\t{new}\n" for new, old in ids))
        after = sum(map(bytes_on_disk, places[: len(files)]))
    return dataclasses.replace(report, bytes_on_disk=Sizes(disk, after))


def map_files(model: Path, output: Path, vocabularies: Sequence[Vocabulary]) -> dict[str, Path]:
    """The file for the ids of each vocabulary: in a model's folder, or next to its file."""
    names = [vocabulary.name for vocabulary in vocabularies]
    if model.is_dir():
        return dict.fromkeys(names, output / "ids.tsv")
    endings = [".ids.tsv"] if len(names) == 1 else [f".{name}.ids.tsv" for name in names]
    return {name: output.with_name(output.name + ending) for name, ending in zip(names, endings)}


def _coverage(trained: TrimmableModel, vocabulary: Vocabulary, path: Path, kept: Tensor) -> Coverage:
    """How much of a text the trimmed vocabulary covers."""
    name = vocabulary.name
    new_ids = {old: new for new, old in enumerate(kept.tolist())}
    tokens = known = unknown = whole = lines = restored = restored_after = 0
    for block in _blocks(path):
        before, after = trained.encode(name, block), trained.encode_trimmed(name, block)
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
        restored_after += trained.restored_trimmed(name, block, after)
    return Coverage(os.fspath(path), tokens, known, unknown, whole, lines, Sizes(restored, restored_after))


@contextmanager
def trimmed_copy(
    model: Path, output: Path | None, texts: Sequence[Path], settings: Settings
) -> Iterator[tuple[Path, Settings]]:
    """Trim a trained model to the words of texts, to be compressed from a temporary copy.

    Args:
        model: a file or folder of any host.
        output: where the compressed model will be; None if none is written.
        texts: as the host's commands read them.
        settings: as in `shared_embeddings.compress.session.compress`; `texts` are for measuring.

    Yields:
        The trimmed model, and the settings for compressing it: the maps of ids appear with the output.

    Raises:
        UserError: the model cannot be trimmed, its sides have their own vocabularies, or the paths clash.
        OSError: a file cannot be read or written.
    """
    host, adapter = find_host(model)
    trained = adapter.read_trimmable(model)
    vocabularies = trained.vocabularies()
    if len(vocabularies) > 1:
        raise UserError(
            f"model {model}: has a vocabulary for each side; run shared-embeddings trim with "
            "--source-text and --target-text, then compress the result without --trim-to"
        )
    maps = {} if output is None else map_files(model, output, vocabularies)
    with workplace(output) as folder:
        small = folder / (Path(model).name if output is None else output.name)
        inner = map_files(model, small, vocabularies)
        # A folder contains its own map.
        beside = {inner[name]: path for name, path in maps.items() if path.parent != output}
        settings = dataclasses.replace(settings, beside=beside)
        if output is not None:
            check_files(trained, model, output, dataclasses.replace(settings, texts=texts))
        report = _trim(model, host, trained, Texts(texts), small, Keep(), force=False)
        del trained  # it is read again, trimmed
        trimmed = dataclasses.replace(
            report,
            output=None if output is None else os.fspath(output),
            vocabularies=[
                dataclasses.replace(one, map_file=os.fspath(maps[one.name]) if maps else None)
                for one in report.vocabularies
            ],
        )
        yield small, dataclasses.replace(settings, trimmed=trimmed)
