"""Trimming a trained model: its vocabulary keeps the words of some texts, its tables the rows of those.

Host programs are behind `shared_embeddings.checkpoints.trim_adapter`; this module knows none.

Axes: ``V`` vocabulary, ``n`` words that are kept.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from shared_embeddings.checkpoints.adapter import find_host
from shared_embeddings.checkpoints.trim_adapter import GROUP, TrimmableModel, Vocabulary
from shared_embeddings.checkpoints.trim_report import Coverage, TrimmedVocabulary, TrimReport
from shared_embeddings.utils.files import staged
from shared_embeddings.utils.path_options import PathOption, check_paths

# Lines that are cut into words at a time.
_BLOCK = 1000


@dataclasses.dataclass(frozen=True)
class Texts:
    """The texts whose words stay.

    Attributes:
        both: of a model with one vocabulary.
        source: of the source of a translation model.
        target: of its target.
    """

    both: Sequence[Path] = ()
    source: Sequence[Path] = ()
    target: Sequence[Path] = ()

    def of(self, vocabularies: Sequence[Vocabulary]) -> dict[str, list[Path]]:
        """The texts that the words of each vocabulary are looked for in.

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
                raise ValueError(f"no text says which words of the vocabulary '{name}' stay; give {option}")
            for side in vocabulary.sides:
                if not (self.both or given[side]):
                    raise ValueError(
                        f"no text says which words of the {side} stay, which has the same vocabulary; give "
                        f"--{side}-text, or --text for both"
                    )
        return found


@dataclasses.dataclass(frozen=True)
class Keep:
    """Which words stay.

    Attributes:
        min_count: how often the texts must use a word.
        words: stay whatever the texts say, spelled as in a vocabulary.
        first: so many words stay whatever the texts say, from the first of each vocabulary on.
    """

    min_count: int = 1
    words: Sequence[str] = ()
    first: int = 0

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        if self.min_count < 1:
            raise ValueError(f"min count is {self.min_count}, but it must be at least 1; raise it")
        if self.first < 0:
            raise ValueError(f"keep first is {self.first}, but it must be at least 0; raise it")

    def ids(self, vocabularies: Sequence[Vocabulary]) -> dict[str, set[int]]:
        """The ids of each vocabulary that stay whatever the texts say.

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
                    f"word to keep {word!r}: the model does not have it; spell it as the vocabulary does, or "
                    "give it within a text"
                )
        return kept


def read_words(path: Path) -> list[str]:
    """The words of a file, one on every line.

    Raises:
        ValueError: there is none, or the file is no UTF-8.
        OSError: it cannot be read.
    """
    words = [line for line in text_lines(path) if line]
    if not words:
        raise ValueError(f"words to keep {path}: has no words; write one on every line, or leave it out")
    return words


def trim(model: Path, texts: Texts, output: Path, keep: Keep = Keep()) -> TrimReport:  # noqa: B008
    """Write a copy of a trained model without the words that texts do not use, and what became of its ids.

    Args:
        model: a file or folder of any host.
        texts: as the host's commands read them.
        output: the file or folder to write; there must be none.
        keep: which words stay.

    Raises:
        ValueError: no host knows the model, or its words cannot be left out; texts, words to keep or paths
            that cannot be.
        OSError: a file cannot be read or written.
    """
    name, host = find_host(model, GROUP)
    trained: TrimmableModel = host.read(model)
    vocabularies = trained.vocabularies()
    files, maps = trained.files(output), trained.map_files(output)
    outputs = [*files, *(path for path in maps.values() if path.parent not in files)]
    check_paths(
        {
            "--model": (PathOption.SOURCE, trained.sources()),
            "--text": (PathOption.FILE, texts.both),
            "--source-text": (PathOption.FILE, texts.source),
            "--target-text": (PathOption.FILE, texts.target),
            "--output": (PathOption.NEW, outputs),
        }
    )
    given, always = texts.of(vocabularies), keep.ids(vocabularies)
    kept = {}
    for vocabulary in vocabularies:
        counts = _count(trained, vocabulary, given[vocabulary.name])
        wanted = {word for word, count in counts.items() if count >= keep.min_count}
        wanted |= always[vocabulary.name]
        if wanted <= vocabulary.specials:
            raise ValueError(
                f"no word of the vocabulary '{vocabulary.name}' is used {keep.min_count} times; lower "
                "--min-count"
            )
        kept[vocabulary.name] = torch.tensor(
            sorted(trained.closed(vocabulary.name, wanted | vocabulary.specials))
        )
    weights, disk = trained.weight_bytes(), _size_on_disk(trained.sources())
    notes = trained.trim(kept)
    trimmed = [
        TrimmedVocabulary(
            name=vocabulary.name,
            rows=(len(vocabulary.words), len(kept[vocabulary.name])),
            map_file=os.fspath(maps[vocabulary.name]),
            texts=[
                _coverage(trained, vocabulary, path, kept[vocabulary.name]) for path in given[vocabulary.name]
            ],
        )
        for vocabulary in vocabularies
    ]
    with staged(outputs) as places:
        written = trained.map_files(places[0])
        trained.write(places[0], {path: _map_text(kept[name]) for name, path in written.items()})
        size_after = _size_on_disk(places[: len(files)])
    return TrimReport(
        model=os.fspath(model),
        output=os.fspath(output),
        host=name,
        vocabularies=trimmed,
        bytes_of_weights=(weights, trained.weight_bytes()),
        bytes_on_disk=(disk, size_after),
        notes=notes,
    )


def text_lines(path: Path) -> Iterator[str]:
    """The lines of a text, without their ends; only a line feed ends one.

    Raises:
        ValueError: it is no UTF-8; the line is named.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                # Some editors put a mark at the start of a text, which is no part of it.
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: line {number} is no UTF-8 text; convert it") from error


def _blocks(path: Path) -> Iterator[list[str]]:
    """The lines of a text, some at a time; shows how far it is on a terminal."""
    lines = text_lines(path)
    with tqdm(desc=path.name, unit=" lines", disable=None) as progress:
        while block := list(islice(lines, _BLOCK)):
            yield block
            progress.update(len(block))


def _count(trained: TrimmableModel, vocabulary: Vocabulary, paths: Sequence[Path]) -> Counter[int]:
    """How often texts use each word.

    Raises:
        ValueError: they use none but special ones.
    """
    counts: Counter[int] = Counter()
    for path in paths:
        for block in _blocks(path):
            counts.update(trained.used(vocabulary.name, block))
    if counts.keys() <= vocabulary.specials:
        raise ValueError(
            f"text {', '.join(map(str, paths))}: has no word of the vocabulary '{vocabulary.name}'; give "
            "text that is written as the model's own"
        )
    return counts


def _coverage(trained: TrimmableModel, vocabulary: Vocabulary, path: Path, kept: Tensor) -> Coverage:
    """What a text finds in the trimmed vocabulary.

    Raises:
        ValueError: a line that has kept all of its tokens would be cut into others.
    """
    new_ids = {old: new for new, old in enumerate(kept.tolist())}
    tokens = known = unknown = whole = lines = 0
    for block in _blocks(path):
        before = trained.encoded(vocabulary.name, block)
        after = trained.encoded_anew(vocabulary.name, block)
        for number, (old, new) in enumerate(zip(before, after, strict=True), lines + 1):
            mapped = [new_ids.get(word) for word in old]
            tokens += len(old)
            known += len(old) - mapped.count(None)
            unknown += old.count(vocabulary.unknown) if vocabulary.unknown is not None else 0
            if None in mapped:
                continue
            if mapped != new:
                raise ValueError(
                    f"text {path}: line {number} would be cut into other words by the trimmed vocabulary, "
                    "although all of its words are kept; nothing was written: this kind of tokenizer cannot "
                    "be trimmed"
                )
            whole += 1
        lines += len(block)
    return Coverage(os.fspath(path), tokens, known, unknown, whole)


def _map_text(kept: Tensor) -> str:
    """The lines of an id map: the id before, a tab, and the id after, for all words that were kept."""
    return "".join(f"{old}\t{new}\n" for new, old in enumerate(kept.tolist()))


def _size_on_disk(paths: Sequence[Path]) -> int:
    """The bytes of files, and of those in folders."""
    files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else (path,))]
    return sum(file.stat().st_size for file in files if file.is_file())
