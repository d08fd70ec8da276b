"""Parallel text as it is published: plain files, archives, and the three formats that their members have.

Everything is read line by line; an archive is unpacked in memory as it is read, never on the disk.
"""

from __future__ import annotations

import gzip
import html
import re
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import IO, cast

from recipes.common.corpus import decode_lines, stream_lines
from recipes.common.errors import UserError
from shared_embeddings.utils.download import download, verify

FORMATS = ("lines", "tags", "segments")
_SEGMENT = re.compile(r"<seg[^>]*>(.*?)</seg>")
Pair = tuple[str, str]


@dataclass(frozen=True)
class Texts:
    """Both sides of one published text.

    Attributes:
        name: of the plain files ``NAME.LANGUAGE`` that may take its place.
        archive: name of the archive (tar, compressed or not).
        url: where the archive is.
        source: name of the source side's member; gzipped when it ends in ``.gz``.
        target: likewise.
        format: of the members: ``lines``, one sentence each; ``tags``, the same with lines of markup, which
            begin with ``<``; ``segments``, the sentences in ``<seg>`` elements, as in SGML and XML test sets.
        sha256: of the archive; ``None`` where no checksum is published.
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
    """Where the two sides of a text are: two plain files, or one archive.

    Attributes:
        texts: what was looked for.
        files: the plain files, source and target, or the archive alone.
    """

    texts: Texts
    files: tuple[Path, ...]


def locate(texts: Texts, languages: Pair, folders: list[Path]) -> Located:
    """Find a text in the first of the `folders` that has it; download its archive to the last one otherwise.

    Raises:
        DownloadError: it cannot be downloaded, or the checksum is another one.
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
    """The files ``NAME.LANGUAGE`` or ``NAME.LANGUAGE.gz`` of both languages; none unless both are there."""
    found = []
    for language in languages:
        places = (folder / f"{name}.{language}", folder / f"{name}.{language}.gz")
        found += [place for place in places if place.is_file()][:1]
    return tuple(found) if len(found) == len(languages) else ()


def read_pairs(located: Located) -> Iterator[Pair]:
    """The sentence pairs of a text, empty sides included.

    Raises:
        UserError: a side cannot be read, or the two differ in length.
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
    """The sentences of one member of an archive, which is read through once for it."""
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
        raise UserError(f"{archive}: truncated or no archive ({error}); replace it") from error


def _open_member(stack: ExitStack, archive: Path, member: str) -> IO[bytes]:
    """The bytes of a member, unzipped; the archive stays open as long as `stack`.

    Raises:
        UserError: there is no such member.
    """
    opened = stack.enter_context(tarfile.open(archive, "r|*"))
    for entry in opened:
        if entry.name.removeprefix("./") == member and entry.isfile():
            file = cast(IO[bytes], opened.extractfile(entry))
            return cast(IO[bytes], gzip.GzipFile(fileobj=file)) if member.endswith(".gz") else file
    raise UserError(f"{archive}: has no member {member}; another version of it? Correct data.yaml")
