"""Read word vector files of GloVe, word2vec and fastText, text and binary.

Axes: ``V`` vocabulary, ``D`` dimension.
"""

from __future__ import annotations

import codecs
import math
import mmap
import string
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shared_embeddings.utils.errors import UserError, first_line, require
from shared_embeddings.utils.files import replacing
from shared_embeddings.utils.reading import open_bytes

# The first bytes of a fastText model with subwords.
_FASTTEXT_MAGIC = (793712314).to_bytes(4, "little")
# What numbers are written with, including NaN and infinity; not the underscores and the digits of other
# scripts that Python accepts.
_NUMBERS = b"0123456789+-.eE naifityNAIFITY"
# Longer than any line of a text file; binary files may have no line end.
_LONGEST_LINE = 1 << 20


class WordVectors(NamedTuple):
    """Words and their vectors."""

    words: list[str]  # V distinct words in file order, usually by frequency
    vectors: np.ndarray  # ``(V, D)`` float32
    notes: tuple[str, ...] = ()  # what the file has, but not these


def read_vectors(path: Path, limit: int | None = None, skip_undecodable: bool = False) -> WordVectors:
    """Read word vectors in any common format, detected from the content.

    Formats: lines of a word and its numbers, separated by spaces (GloVe), where words may contain spaces; the
    same after a header line V D (word2vec, fastText ``.vec``); word2vec's binary format; fastText's ``.bin``,
    without its subwords. All but the last may be gzipped if their name ends in ``.gz``.

    Args:
        limit: read only this many words; all if None.
        skip_undecodable: leave out words that are not UTF-8 text.

    Raises:
        UserError: the file is malformed or truncated, or repeats a word, or `limit` is below 1.
        ImportError: gensim, which reads ``.bin``, is not installed.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit is {limit}, but must be at least 1; raise it")
    kind, announced = _kind_of(path)
    if kind == "fastText":
        return _checked(path, _read_fasttext(path, limit))
    unit = "word" if kind == "binary" else "line"
    entries = _binary_entries(path) if kind == "binary" else _text_entries(path, announced is not None)
    first = 1 if kind == "binary" or announced is None else 2
    places: dict[str, int] = {}
    numbers, read, dim = bytearray(), 0, 0
    for place, (encoded, row) in enumerate(islice(entries, limit), first):
        read, dim = read + 1, len(row)
        try:
            word = encoded.decode("utf-8")
        except UnicodeDecodeError:
            if skip_undecodable:
                continue
            raise UserError(
                f"vectors {path}: {unit} {place} has the word {encoded[:60]!r}, which is not UTF-8 text; "
                "convert the file, or leave such words out (skip_undecodable)"
            ) from None
        if places.setdefault(word, place) != place:
            raise UserError(
                f"vectors {path}: {unit} {place} repeats {word[:60]!r} of {unit} {places[word]}; correct or "
                "remove it"
            )
        numbers += row.tobytes()
    if announced is not None and read != min(announced, limit or announced):
        raise UserError(
            f"vectors {path}: its header announces {announced} words, but there are {read}; it is "
            "truncated, or the header is wrong"
        )
    skipped = read - len(places)
    notes = (f"{skipped:,} words that are not UTF-8 text are left out",) if skipped else ()
    return _checked(
        path, WordVectors(list(places), np.frombuffer(numbers, np.float32).reshape(len(places), dim), notes)
    )


def _checked(path: Path, read: WordVectors) -> WordVectors:
    """Return what was read, unless it is empty or not finite."""
    if 0 in read.vectors.shape:
        raise UserError(f"vectors {path}: has no words or no dimensions; use another file")
    broken = ~np.isfinite(read.vectors).all(axis=1)
    if broken.any():
        raise UserError(
            f"vectors {path}: the vector of {read.words[int(broken.argmax())]!r} contains NaN or infinity; "
            "replace the file"
        )
    return read


def _read_fasttext(path: Path, limit: int | None) -> WordVectors:
    """Read the words of a fastText model with gensim."""
    try:
        keyed = require("gensim.models.fasttext").load_facebook_vectors(str(path))
    except ImportError:
        raise
    except Exception as error:  # gensim raises many kinds for other files
        raise UserError(
            f"vectors {path}: cannot be read as a fastText model ({first_line(error)}); it is damaged or "
            "truncated"
        ) from error
    note = (
        "the subword vectors of fastText are lost: words that are not in the vocabulary have no vectors any "
        "more; keep the original for them"
    )
    return WordVectors(keyed.index_to_key[:limit], np.asarray(keyed.vectors, np.float32)[:limit], (note,))


def looks_like_vectors(path: Path) -> bool:
    """Return whether a file starts like one that `read_vectors` reads, or like a pickle of gensim."""
    try:
        with open_bytes(path) as file:
            first, second = file.readline(_LONGEST_LINE), file.readline(_LONGEST_LINE)
    except (OSError, EOFError):
        return False
    if first.startswith(_FASTTEXT_MAGIC) or _is_pickle(first + second):
        return True
    first = first.removeprefix(codecs.BOM_UTF8)
    if _is_header(first):
        return bool(second)
    numbers = first.split()[1:][-2:]  # words may contain spaces
    return len(numbers) == 2 and all(
        _is_number(number) and math.isfinite(float(number)) for number in numbers
    )


def _is_pickle(start: bytes) -> bool:
    return start.startswith(b"\x80") and b"gensim" in start[:4096]


def _is_header(line: bytes) -> bool:
    fields = line.split()
    return len(fields) == 2 and all(field.isdigit() and len(field) < 19 for field in fields)


def _is_number(field: bytes) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return not field.translate(None, _NUMBERS)


def write_vectors(path: Path, vectors: WordVectors) -> None:
    """Write lines of a word and its numbers below a header V D, as word2vec and fastText do.

    UserError for a word that is empty or contains white space of ASCII. Other spaces, which words of GloVe
    contain, separate nothing.
    """
    broken = next((word for word in vectors.words if not word or set(word) & set(string.whitespace)), None)
    if broken is not None:
        raise UserError(f"word {broken!r} is empty or contains white space, which text cannot store")
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.write(f"{len(vectors.words)} {vectors.vectors.shape[1]}\n")
        for word, row in zip(vectors.words, vectors.vectors.tolist()):
            file.write(f"{word} {' '.join(f'{number:.6g}' for number in row)}\n")


def _kind_of(path: Path) -> tuple[str, int | None]:
    """Return the format of a file, and the number of words in its header, None without one."""
    with open_bytes(path) as file:
        first, second = file.readline(_LONGEST_LINE), file.readline(_LONGEST_LINE)
    if first.startswith(_FASTTEXT_MAGIC):
        return "fastText", None
    if _is_pickle(first + second):
        raise UserError(
            f"vectors {path}: is a pickle of gensim, which could run code; in gensim, write a file with "
            "KeyedVectors.save_word2vec_format and use that"
        )
    first = first.removeprefix(codecs.BOM_UTF8)
    if not first.strip():
        raise UserError(f"vectors {path}: is empty or starts with an empty line; replace it")
    if not _is_header(first):
        return "text", None
    announced, dim = map(int, first.split())
    try:
        is_text = all(character.isprintable() or character.isspace() for character in second.decode("utf-8"))
    except UnicodeDecodeError:  # of the word, or binary numbers
        is_text = all(map(_is_number, second.split()[-dim:]))
    return "text" if is_text else "binary", announced


def _text_entries(path: Path, has_header: bool) -> Iterator[tuple[bytes, np.ndarray]]:
    """Yield the word and the numbers ``(D,)`` of each line: the last D fields; words may contain spaces.

    UserError for a line without a word and D numbers.
    """
    with open_bytes(path) as file, np.errstate(over="ignore"):  # infinity is an error later
        dim = int(file.readline().split()[1]) if has_header else None
        for place, line in enumerate(file, 1 + has_header):
            line = (line.removeprefix(codecs.BOM_UTF8) if place == 1 else line).rstrip()
            if dim is None:
                dim = _count_numbers(line)
            word, *fields = line.rsplit(b" ", dim)
            odd = next((field for field in fields if not _is_number(field)), None)
            if not word or word.startswith(b" "):
                reason = "starts with a space, not a word"
            elif len(fields) != dim or not fields or _count_numbers(word):
                reason = f"has {_count_numbers(line)} numbers after its word, expected {dim or 'some'}"
            elif odd is not None:
                reason = f"has {odd.decode(errors='replace')[:40]!r}, expected a number"
            else:
                yield word, np.array(list(map(float, fields)), np.float32)
                continue
            raise UserError(f"vectors {path}: line {place} {reason}; correct or remove it")


def _count_numbers(line: bytes) -> int:
    """Return how many fields at the end of a line, but not the first one, are numbers."""
    fields = line.split(b" ")[1:]
    return next((count for count, field in enumerate(reversed(fields)) if not _is_number(field)), len(fields))


def _binary_entries(path: Path) -> Iterator[tuple[bytes, np.ndarray]]:
    """Yield each word, which ends at a space, and the D numbers of four bytes after it.

    A line end after a vector is optional, but then after all. UserError for words that end early or late.
    """
    with open_bytes(path) as file:
        count, dim = map(int, file.readline().removeprefix(codecs.BOM_UTF8).split())
        place = file.tell()
        content: bytes | mmap.mmap
        if path.suffix == ".gz":
            file.seek(0)
            content = file.read()
        else:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    has_line_ends = False
    for number in range(1, count + 1):
        start = content.find(b" ", place) + 1
        end = start + 4 * dim
        word = content[place : start - 1]
        line_end = content[end : end + 1] == b"\n"
        has_line_ends = line_end if number == 1 else has_line_ends
        if not start or end > len(content):
            raise UserError(
                f"vectors {path}: ends within word {number} of {count}; it is truncated; copy it again"
            )
        if not word or min(word) < 32 or number < count and line_end != has_line_ends:
            raise UserError(
                f"vectors {path}: word {number} ({word[:60]!r}) or the one before it ends early: words in "
                "binary files must not contain spaces; write the file again with _ instead, or as text"
            )
        yield word, np.frombuffer(content[start:end], "<f4")
        place = end + line_end
    if content[place:].strip():
        raise UserError(
            f"vectors {path}: {len(content) - place} bytes are left after word {count}, the last one that "
            "its header announces: the header is wrong, or a word contains a space; write the file again"
        )
