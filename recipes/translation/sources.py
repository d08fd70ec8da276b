"""A recipe's ``data.yaml``, and the parallel text that it names: found, downloaded and read."""

from __future__ import annotations

import gzip
import html
import re
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from recipes.common.corpus import decode_lines, stream_lines
from shared_embeddings.errors import UserError
from shared_embeddings.utils.download import download, verify
from shared_embeddings.utils.reading import read_yaml

FORMATS = ("lines", "tags", "segments")
_SEGMENT = re.compile(r"<seg[^>]*>(.*?)</seg>")
Pair = tuple[str, str]


@dataclass(frozen=True)
class Texts:
    """Both sides of one published text.

    Attributes:
        name: name of plain files ``NAME.LANGUAGE`` that replace the archive.
        archive: name of the archive (tar, optionally compressed).
        url: URL of the archive.
        source: member with the source, optionally gzipped (``.gz``).
        target: member with the target.
        format: ``lines`` (one sentence each), ``tags`` (lines that start with ``<`` are skipped) or
            ``segments`` (sentences in ``<seg>`` elements, as in SGML and XML test sets).
        sha256: checksum of the archive, or ``None``.
    """

    name: str
    archive: str
    url: str
    source: str
    target: str
    format: str = "lines"
    sha256: str | None = None


@dataclass(frozen=True)
class Located:
    """A located text: two plain files, or one archive.

    Attributes:
        texts: the text.
        files: source and target file, or the archive.
    """

    texts: Texts
    files: tuple[Path, ...]


def locate(texts: Texts, languages: Pair, folders: list[Path]) -> Located:
    """Find a text in `folders`, or download its archive to the last one.

    Raises:
        DownloadError: the download fails, or the checksum is wrong.
    """
    for folder in folders:
        found = plain_files(folder, texts.name, languages)
        if found:
            return Located(texts, found)
        archive = folder / texts.archive
        if archive.is_file():
            verify(archive, texts.sha256)
            return Located(texts, (archive,))
    archive = folders[-1] / texts.archive
    plain = " and ".join(f"{texts.name}.{language}" for language in languages)
    advice = f"put {texts.archive}, or {plain}, into {folders[0]} and run again"
    download(texts.url, archive, texts.sha256, advice)
    return Located(texts, (archive,))


def plain_files(folder: Path, name: str, languages: Pair) -> tuple[Path, ...]:
    """Return the files ``NAME.LANGUAGE[.gz]`` of both languages; empty unless both exist."""
    found = []
    for language in languages:
        places = (folder / f"{name}.{language}", folder / f"{name}.{language}.gz")
        found += [place for place in places if place.is_file()][:1]
    return tuple(found) if len(found) == len(languages) else ()


def read_pairs(located: Located) -> Iterator[Pair]:
    """Yield the sentence pairs of a text, including empty sides.

    Raises:
        UserError: a side cannot be read, or the sides differ in length.
    """
    texts = located.texts
    with ExitStack() as stack:
        if len(located.files) == 1:
            members = (texts.source, texts.target)
            sides = [_member_lines(stack, located.files[0], member, texts.format) for member in members]
        else:
            sides = [stream_lines(path) for path in located.files]
        for number, pair in enumerate(zip_longest(*sides), start=1):
            if None in pair:
                short = "source" if pair[0] is None else "target"
                raise UserError(
                    f"{texts.name}: the {short} side ends before line {number}; replace its files"
                )
            yield cast(Pair, pair)


def _member_lines(stack: ExitStack, archive: Path, member: str, format: str) -> Iterator[str]:
    """Yield the sentences of one member of an archive."""
    try:
        lines = decode_lines(_open_member(stack, archive, member), f"{archive}: {member}")
        if format == "lines":
            yield from lines
        elif format == "tags":
            yield from (line for line in lines if not line.startswith("<"))
        else:
            for line in lines:
                yield from (" ".join(html.unescape(text).split()) for text in _SEGMENT.findall(line))
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise UserError(f"{archive}: truncated or not an archive ({error}); replace it") from error


def _open_member(stack: ExitStack, archive: Path, member: str) -> IO[bytes]:
    """Open a member of an archive and decompress it; `stack` closes the archive."""
    opened = stack.enter_context(tarfile.open(archive, "r|*"))
    for entry in opened:
        if entry.name.removeprefix("./") == member and entry.isfile():
            file = cast(IO[bytes], opened.extractfile(entry))
            return cast(IO[bytes], gzip.GzipFile(fileobj=file)) if member.endswith(".gz") else file
    raise UserError(f"{archive}: has no member {member}; if the archive has changed, update data.yaml")


KINDS = ("bpe", "sentencepiece")
MODELS = ("bpe", "unigram")
Content = TypeVar("Content")


@dataclass(frozen=True)
class Pieces:
    """Subword segmentation and vocabulary: a folder of prepared data.

    Attributes:
        kind: ``bpe`` (subword-nmt, on Moses tokens) or ``sentencepiece`` (on plain text).
        size: merges for ``bpe``; size of the vocabulary including special tokens for ``sentencepiece``.
        model: ``bpe`` or ``unigram``, for ``sentencepiece``.
        shared_vocabulary: one vocabulary for both languages.
        classes: numbers of semantic classes, for UnClE.
    """

    kind: str
    size: int
    model: str = "unigram"
    shared_vocabulary: bool = True
    classes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Settings:
    """Content of ``data.yaml``.

    Attributes:
        source: source language.
        target: target language.
        shard: pairs per shard; an interrupted run resumes after the last complete shard.
        max_words: longest sentence of the training text, in words.
        max_ratio: maximum length ratio of the sides.
        sentences: evenly spaced training sentences for SentencePiece.
        corpora: training texts.
        tests: validation and test texts.
        pieces: subword segmentations by name.
    """

    source: str
    target: str
    shard: int
    max_words: int
    max_ratio: float
    sentences: int
    corpora: tuple[Texts, ...]
    tests: tuple[Texts, ...]
    pieces: dict[str, Pieces]

    @property
    def languages(self) -> tuple[str, str]:
        """The source and target language."""
        return self.source, self.target


def read_settings(path: Path) -> Settings:
    """Read ``data.yaml``.

    Raises:
        UserError: it is missing, not YAML, or has a missing, unknown or invalid setting.
    """
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: it must contain {', '.join(field.name for field in fields(Settings))}")
    for name, kind in (("corpora", list), ("tests", list), ("pieces", dict)):
        if not isinstance(content.get(name), kind) or not content[name]:
            raise UserError(f"{path}: {name} is {content.get(name)!r}; expected a nonempty {kind.__name__}")
    parts = {
        "corpora": tuple(_fill(path, Texts, each) for each in content["corpora"]),
        "tests": tuple(_fill(path, Texts, each) for each in content["tests"]),
        "pieces": {name: _fill(path, Pieces, each) for name, each in content["pieces"].items()},
    }
    settings = _fill(path, Settings, {**content, **parts})
    for name in ("shard", "max_words", "sentences"):
        _check_number(f"{path}: {name}", getattr(settings, name))
    if type(settings.max_ratio) not in (int, float) or settings.max_ratio < 1:
        raise UserError(f"{path}: max_ratio is {settings.max_ratio!r}; expected a number of at least 1")
    for texts in (*settings.corpora, *settings.tests):
        if texts.format not in FORMATS:
            raise UserError(
                f"{path}: {texts.name}: format is {texts.format!r}; expected {' or '.join(FORMATS)}"
            )
    for name, pieces in settings.pieces.items():
        if pieces.kind not in KINDS:
            raise UserError(f"{path}: {name}: kind is {pieces.kind!r}; expected {' or '.join(KINDS)}")
        if pieces.model not in MODELS:
            raise UserError(f"{path}: {name}: model is {pieces.model!r}; expected {' or '.join(MODELS)}")
        _check_number(f"{path}: {name}: size", pieces.size)
        if not isinstance(pieces.classes, tuple):
            raise UserError(f"{path}: {name}: classes is {pieces.classes!r}; expected a list of numbers")
        for number in pieces.classes:
            _check_number(f"{path}: {name}: classes", number)
    return settings


def _check_number(where: str, number: Any) -> None:
    """Check that a number is an integer of at least 1."""
    if type(number) is not int or number < 1:
        raise UserError(f"{where} is {number!r}; expected an integer of at least 1")


def _fill(path: Path, kind: type[Content], given: Any) -> Content:
    """Create a dataclass of `kind` from a mapping."""
    if not isinstance(given, dict):
        raise UserError(f"{path}: {given!r} must be a mapping, see {kind.__name__} in {__name__}")
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    unknown = [str(key) for key in given if key not in known]
    if unknown:
        raise UserError(f"{path}: unknown key {unknown[0]!r}; expected one of {', '.join(sorted(known))}")
    try:
        return kind(**{key: tuple(each) if isinstance(each, list) else each for key, each in given.items()})
    except TypeError as error:
        raise UserError(f"{path}: {error}") from error
