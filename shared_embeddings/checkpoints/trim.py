"""Trimming a trained model: its vocabulary keeps the words that some texts use, its tables their rows.

This module knows no host; models come through `shared_embeddings.checkpoints.adapter`.

Axes: ``V`` vocabulary, ``n`` words that are kept.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from shared_embeddings.checkpoints.adapter import TrimmableModel, Vocabulary, find_host
from shared_embeddings.checkpoints.report import Coverage, Sizes, TrimmedVocabulary, TrimReport
from shared_embeddings.checkpoints.token_counts import text_lines
from shared_embeddings.utils.files import bytes_on_disk, staged, write_text
from shared_embeddings.utils.path_options import PathOption, check_paths

# Lines that are tokenized at a time.
_BLOCK = 1000


@dataclasses.dataclass(frozen=True)
class Texts:
    """The texts whose words are kept.

    Attributes:
        both: for a model with one vocabulary.
        source: for the source of a translation model.
        target: for its target.
    """

    both: Sequence[Path] = ()
    source: Sequence[Path] = ()
    target: Sequence[Path] = ()

    def of(self, vocabularies: Sequence[Vocabulary]) -> dict[str, list[Path]]:
        """The texts for each vocabulary.

        Raises:
            ValueError: a text could belong to several vocabularies or to none, or a vocabulary has no text.
        """
        if self.both and len(vocabularies) > 1:
            raise ValueError(
                f"--text {self.both[0]}: the model has a vocabulary for the source and one for the target; "
                "give --source-text and --target-text instead"
            )
        given = {"source": self.source, "target": self.target}
        for side, paths in given.items():
            if paths and not any(side in vocabulary.sides for vocabulary in vocabularies):
                raise ValueError(f"--{side}-text {paths[0]}: the model has no {side} side; give it as --text")
        found = {
            vocabulary.name: [*self.both, *(path for side in vocabulary.sides for path in given[side])]
            for vocabulary in vocabularies
        }
        for vocabulary in vocabularies:
            name = vocabulary.name
            if not found[name]:
                option = "--text" if len(vocabularies) == 1 else f"--{name}-text"
                raise ValueError(f"no text selects the words of the vocabulary '{name}'; give {option}")
            for side in vocabulary.sides:
                if not (self.both or given[side]):
                    raise ValueError(
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
    """

    min_count: int = 1
    words: Sequence[str] = ()
    first: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.min_count < 1:
            raise ValueError(f"--min-count is {self.min_count}, but it must be at least 1; raise it")
        if self.first < 0:
            raise ValueError(f"--keep-first is {self.first}, but it must be at least 0; raise it")

    def ids(self, vocabularies: Sequence[Vocabulary]) -> dict[str, set[int]]:
        """The ids of each vocabulary that are kept even if no text uses them.

        Raises:
            ValueError: a word is in no vocabulary.
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
                raise ValueError(
                    f"word to keep {word!r}: is not in the vocabulary; spell it as the vocabulary does, or "
                    "put it into a text"
                )
        return kept


def read_words(path: Path) -> list[str]:
    """The words of a file, one on every line.

    Raises:
        ValueError: there is none, or the file is not UTF-8.
        OSError: it cannot be read.
    """
    words = [line for line in text_lines(path) if line]
    if not words:
        raise ValueError(f"words to keep {path}: is empty; write one word per line, or remove the option")
    return words


def trim(model: Path, texts: Texts, output: Path, keep: Keep = Keep()) -> TrimReport:  # noqa: B008
    """Write a copy of a trained model without the words that texts do not use, and a map of the ids.

    Args:
        model: a file or folder of any host.
        texts: as the host's commands read them.
        output: the file or folder to write; it must not exist.
        keep: which words are kept.

    Raises:
        ValueError: no host recognizes the model, or it cannot be trimmed; invalid texts, words to keep or
            paths.
        OSError: a file cannot be read or written.
    """
    name, adapter = find_host(model)
    trained = adapter.read_trimmable(model)
    vocabularies = trained.vocabularies()
    files = trained.files(output)
    is_folder = any(map(os.path.isdir, trained.sources()))
    maps = _map_files(output, vocabularies, is_folder)
    outputs = files if is_folder else [*files, *maps.values()]
    check_paths(
        {
            "--model": (PathOption.SOURCE, trained.sources()),
            "--text": (PathOption.FILE, texts.both),
            "--source-text": (PathOption.FILE, texts.source),
            "--target-text": (PathOption.FILE, texts.target),
            "--output": (PathOption.NEW, outputs),
        }
    )
    given = texts.of(vocabularies)
    kept = _select(trained, vocabularies, given, keep)
    weights, disk = trained.weight_bytes(), sum(map(bytes_on_disk, trained.sources()))
    notes = trained.trim(kept)
    trimmed = [
        TrimmedVocabulary(
            name=vocabulary.name,
            rows=Sizes(len(vocabulary.words), len(kept[vocabulary.name])),
            map_file=os.fspath(maps[vocabulary.name]),
            texts=[
                _coverage(trained, vocabulary, path, kept[vocabulary.name]) for path in given[vocabulary.name]
            ],
        )
        for vocabulary in vocabularies
    ]
    with staged(outputs) as places:
        trained.write_trimmed(places[0])
        for vocabulary, path in _map_files(places[0], vocabularies, is_folder).items():
            write_text(path, _map_text(kept[vocabulary]))
        size_after = sum(map(bytes_on_disk, places[: len(files)]))
    return TrimReport(
        model=os.fspath(model),
        output=os.fspath(output),
        host=name,
        vocabularies=trimmed,
        bytes_of_weights=Sizes(weights, trained.weight_bytes()),
        bytes_on_disk=Sizes(disk, size_after),
        notes=notes,
    )


def _map_files(output: Path, vocabularies: Sequence[Vocabulary], is_folder: bool) -> dict[str, Path]:
    """The file for the ids of each vocabulary: in a model's folder, or next to its file."""
    if is_folder:
        return {vocabulary.name: output / "ids.tsv" for vocabulary in vocabularies}
    names = [vocabulary.name for vocabulary in vocabularies]
    endings = [".ids.tsv"] if len(names) == 1 else [f".{name}.ids.tsv" for name in names]
    return {name: output.with_name(output.name + ending) for name, ending in zip(names, endings)}


def _select(
    trained: TrimmableModel,
    vocabularies: Sequence[Vocabulary],
    texts: Mapping[str, Sequence[Path]],
    keep: Keep,
) -> dict[str, Tensor]:
    """The ids ``(n,)`` of each vocabulary that are kept, in ascending order.

    Raises:
        ValueError: the texts use too few words, or a word to keep does not exist.
    """
    always, kept = keep.ids(vocabularies), {}
    for vocabulary in vocabularies:
        counts = _count(trained, vocabulary, texts[vocabulary.name])
        wanted = {word for word, count in counts.items() if count >= keep.min_count}
        wanted |= always[vocabulary.name]
        if wanted <= vocabulary.specials:
            raise ValueError(
                f"no word of the vocabulary '{vocabulary.name}' is used {keep.min_count} times; lower "
                "--min-count"
            )
        ids = trained.closed(vocabulary.name, wanted | vocabulary.specials)
        kept[vocabulary.name] = torch.tensor(sorted(ids))
    return kept


def _blocks(path: Path) -> Iterator[list[str]]:
    """The lines of a text in blocks, with a progress bar on a terminal."""
    lines = text_lines(path)
    with tqdm(desc=path.name, unit=" lines", disable=None) as progress:
        while block := list(islice(lines, _BLOCK)):
            yield block
            progress.update(len(block))


def _count(trained: TrimmableModel, vocabulary: Vocabulary, paths: Sequence[Path]) -> Counter[int]:
    """How often texts use each word.

    Raises:
        ValueError: they use only special words.
    """
    counts: Counter[int] = Counter()
    for path in paths:
        for block in _blocks(path):
            counts.update(trained.used(vocabulary.name, block))
    if counts.keys() <= vocabulary.specials:
        raise ValueError(
            f"text {', '.join(map(str, paths))}: has no word of the vocabulary '{vocabulary.name}'; tokenize "
            "it like the model's training data"
        )
    return counts


def _coverage(trained: TrimmableModel, vocabulary: Vocabulary, path: Path, kept: Tensor) -> Coverage:
    """How much of a text the trimmed vocabulary covers.

    Raises:
        ValueError: a line whose tokens are all kept would be tokenized differently.
    """
    new_ids = {old: new for new, old in enumerate(kept.tolist())}
    tokens = known = unknown = whole = lines = 0
    for block in _blocks(path):
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
                raise ValueError(
                    f"text {path}: the trimmed vocabulary would tokenize line {number} differently, although "
                    "all of its words are kept; nothing was written: this type of tokenizer cannot be trimmed"
                )
            whole += 1
        lines += len(block)
    return Coverage(os.fspath(path), tokens, known, unknown, whole)


def _map_text(kept: Tensor) -> str:
    """The text of an id map: for each kept word the old id, a tab, and the new id."""
    return "".join(f"{old}\t{new}\n" for new, old in enumerate(kept.tolist()))
