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
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from shared_embeddings.compress.host import StoredModel, TrimmableModel, Vocabulary, find_host
from shared_embeddings.compress.report import Coverage, Sizes, TrimmedVocabulary, TrimReport
from shared_embeddings.compress.session import Settings, check_files
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import bytes_on_disk, staged, workplace, write_text
from shared_embeddings.utils.path_options import PathOption, check_paths
from shared_embeddings.words.token_counts import text_lines

# Lines that are tokenized at a time.
_BLOCK = 1000


@dataclasses.dataclass(frozen=True)
class Texts:
    """The texts whose words are kept.

    Attributes:
        both: for a model with one vocabulary.
        source: for the source of a translation model.
        target: for its target.
        held_out: other texts that the trimmed model should still read, for a model with one vocabulary; they
            select no words.
    """

    both: Sequence[Path] = ()
    source: Sequence[Path] = ()
    target: Sequence[Path] = ()
    held_out: Sequence[Path] = ()

    def of(self, vocabularies: Sequence[Vocabulary]) -> dict[str, list[Path]]:
        """The texts for each vocabulary.

        Raises:
            UserError: a text could belong to several vocabularies or to none, or a vocabulary has no text.
        """
        if self.both and len(vocabularies) > 1:
            raise UserError(
                f"--text {self.both[0]}: the model has a vocabulary for the source and one for the target; "
                "give --source-text and --target-text instead"
            )
        if self.held_out and len(vocabularies) > 1:
            raise UserError(
                f"--held-out {self.held_out[0]}: the model has a vocabulary for the source and one for the "
                "target, so lines of either side cannot be counted together; remove it"
            )
        given = {"source": self.source, "target": self.target}
        for side, paths in given.items():
            if paths and not any(side in vocabulary.sides for vocabulary in vocabularies):
                raise UserError(f"--{side}-text {paths[0]}: the model has no {side} side; give it as --text")
        found = {
            vocabulary.name: [*self.both, *(path for side in vocabulary.sides for path in given[side])]
            for vocabulary in vocabularies
        }
        for vocabulary in vocabularies:
            name = vocabulary.name
            if not found[name]:
                option = "--text" if len(vocabularies) == 1 else f"--{name}-text"
                raise UserError(f"no text selects the words of the vocabulary '{name}'; give {option}")
            for side in vocabulary.sides:
                if not (self.both or given[side]):
                    raise UserError(
                        f"no text selects the words of the {side}, which shares the vocabulary; give "
                        f"--{side}-text, or --text for both"
                    )
        return found


@dataclasses.dataclass(frozen=True)
class Keep:
    """Which words are kept.

    Attributes:
        min_count: how often the texts must use a word.
        words: kept even if no text uses them, spelled as in a vocabulary.
        first: how many words at the start of each vocabulary are kept even if no text uses them.
        top: at most so many words that the texts use, the most frequent ones; None for all.
        coverage: the most frequent words that make up this share of the texts; None for all words.
        characters: whether to keep what other texts need to be decoded from their ids.
    """

    min_count: int = 1
    words: Sequence[str] = ()
    first: int = 0
    top: int | None = None
    coverage: float | None = None
    characters: bool = True

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.min_count < 1:
            raise UserError(f"--min-count is {self.min_count}, but it must be at least 1; raise it")
        if self.first < 0:
            raise UserError(f"--keep-first is {self.first}, but it must be at least 0; raise it")
        if self.top is not None and self.top < 1:
            raise UserError(f"--top-k is {self.top}, but it must be at least 1; raise it")
        if self.coverage is not None and not 0.0 < self.coverage <= 1.0:
            raise UserError(f"--coverage is {self.coverage:.1%}, but it must be above 0% and at most 100%")
        limits = {"--min-count": self.min_count > 1, "--top-k": self.top, "--coverage": self.coverage}
        given = [name for name, value in limits.items() if value]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} each limit the words; give one of them")

    def ids(self, vocabularies: Sequence[Vocabulary]) -> dict[str, set[int]]:
        """The ids of each vocabulary that are kept even if no text uses them.

        Raises:
            UserError: a word is in no vocabulary.
        """
        kept: dict[str, set[int]] = {}
        missing = set(self.words)
        for vocabulary in vocabularies:
            index = {word: number for number, word in enumerate(vocabulary.words)}
            found = {word for word in self.words if word in index}
            missing -= found
            kept[vocabulary.name] = {index[word] for word in found} | set(
                range(min(self.first, len(vocabulary.words)))
            )
        for word in self.words:
            if word in missing:
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
        if self.coverage is not None:
            return set(
                ranked[: max(_shortest(reading, ranked, always, self.coverage) for reading in readings)]
            )
        return {word for word in ranked if counts[word] >= self.min_count}


def _shortest(counts: Counter[int], ranked: Sequence[int], always: set[int], coverage: float) -> int:
    """How many of the `ranked` words, after those kept `always`, make up a share of a text."""
    missing = coverage * counts.total() - sum(counts[word] for word in always)
    for number, word in enumerate(ranked):
        if missing <= 0:
            return number
        missing -= counts[word]
    return len(ranked)


@dataclasses.dataclass(frozen=True)
class Selection:
    """The words of a vocabulary that are kept.

    Attributes:
        ids: ``(n,)``, ascending.
        reasons: why -> how many words that no earlier reason keeps.
    """

    ids: Tensor
    reasons: Mapping[str, int]


def select(
    trained: TrimmableModel,
    vocabularies: Sequence[Vocabulary],
    texts: Mapping[str, Sequence[Path]],
    keep: Keep,
) -> dict[str, Selection]:
    """The words of each vocabulary that are kept.

    Raises:
        UserError: the texts use too few words, or a word to keep does not exist.
    """
    asked, found = keep.ids(vocabularies), {}
    for vocabulary in vocabularies:
        name = vocabulary.name
        readings = _count(trained, vocabulary, texts[name])
        characters = trained.characters(name) if keep.characters else set()
        frequent = keep.frequent(readings, asked[name] | vocabulary.specials | characters)
        wanted = frequent | asked[name] | vocabulary.specials
        used = {word for counts in readings for word, count in counts.items() if count >= keep.min_count}
        if (used | asked[name]) <= vocabulary.specials:
            raise UserError(
                f"no word of the vocabulary '{name}' is used {keep.min_count} times; lower --min-count"
            )
        ids = trained.closed(name, wanted | characters)
        reasons = {
            "special": vocabulary.specials,
            "asked for": asked[name],
            "characters that spell other texts": characters,
            "most used by the texts": frequent,
            "needed by the tokenizer": ids,
        }
        found[name] = Selection(torch.tensor(sorted(ids)), _counted(reasons))
    return found


def _counted(reasons: Mapping[str, Collection[int]]) -> dict[str, int]:
    """How many words each reason keeps that no earlier one does; reasons that keep none are left out."""
    before: set[int] = set()
    counted = {}
    for reason, words in reasons.items():
        if new := set(words) - before:
            counted[reason] = len(new)
        before |= new
    return counted


def read_words(path: Path) -> list[str]:
    """The words of a file, one on every line.

    Raises:
        UserError: there is none, or the file is not UTF-8.
        OSError: it cannot be read.
    """
    words = [line for line in text_lines(path) if line]
    if not words:
        raise UserError(f"words to keep {path}: is empty; write one word per line, or remove the option")
    return words


def blocks(path: Path) -> Iterator[list[str]]:
    """The lines of a text in blocks, with a progress bar on a terminal."""
    lines = text_lines(path)
    with tqdm(desc=path.name, unit=" lines", disable=None) as progress:
        while block := list(islice(lines, _BLOCK)):
            yield block
            progress.update(len(block))


def _count(trained: TrimmableModel, vocabulary: Vocabulary, paths: Sequence[Path]) -> list[Counter[int]]:
    """How often texts use each word, for each way of reading them.

    Raises:
        UserError: they use only special words.
    """
    readings: list[Counter[int]] = []
    for path in paths:
        for block in blocks(path):
            for number, counts in enumerate(trained.used(vocabulary.name, block)):
                if number == len(readings):
                    readings.append(Counter())
                readings[number].update(counts)
    if all(counts.keys() <= vocabulary.specials for counts in readings):
        raise UserError(
            f"text {', '.join(map(str, paths))}: has no word of the vocabulary '{vocabulary.name}'; tokenize "
            "it like the model's training data"
        )
    return readings


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
    trained = find_host(model)[1].read_trimmable(model)
    vocabularies = trained.vocabularies()
    if len(vocabularies) > 1:
        raise UserError(
            f"model {model}: has a vocabulary for each side; run shared-embeddings trim with "
            "--source-text and --target-text, then compress the result without --trim-to"
        )
    maps = {} if output is None else map_files(trained, output, vocabularies)
    with workplace(output) as folder:
        small = folder / (Path(model).name if output is None else output.name)
        # A folder contains its own map of ids.
        beside = {
            path: maps[name]
            for name, path in map_files(trained, small, vocabularies).items()
            if output is not None and maps[name].parent != output
        }
        settings = dataclasses.replace(settings, beside=beside)
        if output is not None:
            check_files(trained, output, dataclasses.replace(settings, texts=texts))
        report = trim(model, Texts(texts), small)
        found = [
            dataclasses.replace(one, map_file=os.fspath(maps[one.name]) if maps else None)
            for one in report.vocabularies
        ]
        name = None if output is None else os.fspath(output)
        yield (
            small,
            dataclasses.replace(
                settings, trimmed=dataclasses.replace(report, output=name, vocabularies=found)
            ),
        )
