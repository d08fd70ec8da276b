"""Read word vector files of GloVe, word2vec and fastText, text and binary, with gensim.

Axes: ``V`` vocabulary, ``D`` dimension.
"""

from __future__ import annotations

import gzip
import math
import string
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shared_embeddings.utils.errors import UserError, first_line, require
from shared_embeddings.utils.files import replacing

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


def read_vectors(path: Path, limit: int | None = None) -> WordVectors:
    """Read word vectors in any common format, detected from the content.

    Formats: lines of a word and its numbers, separated by spaces (GloVe); the same after a header line V D
    (word2vec, fastText ``.vec``); word2vec's binary format; fastText's ``.bin``. All but the last may be
    gzipped if their name ends in ``.gz``.

    Args:
        limit: read only this many words; all if None.

    Raises:
        UserError: the file is malformed or truncated, or repeats a word, or `limit` is below 1.
        ImportError: gensim is not installed.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit is {limit}, but must be at least 1; raise it")
    kind, announced = "word vectors", 0
    try:
        kind, announced = _kind_of(path)
        if kind in ("lines", "lines below a header"):
            _check_lines(path, has_header=kind != "lines", limit=limit)
        if kind == "a fastText model":
            keyed = require("gensim.models.fasttext").load_facebook_vectors(str(path))
        else:
            with np.errstate(over="ignore"):  # infinity is an error below
                keyed = require("gensim.models").KeyedVectors.load_word2vec_format(
                    str(path), binary=kind == "binary vectors", no_header=kind == "lines", limit=limit
                )
    except (ImportError, UserError, FileNotFoundError):
        raise
    except Exception as error:  # gensim's binary readers raise many kinds for other files
        raise UserError(
            f"vectors {path}: cannot be read as {kind} ({first_line(error)}); it is damaged, truncated, "
            "or in another format"
        ) from error
    number = min(len(keyed.key_to_index), limit or len(keyed.key_to_index))
    words, vectors = keyed.index_to_key[:number], np.asarray(keyed.vectors, np.float32)[:number]
    if kind == "binary vectors" and number < min(announced, limit or announced):
        raise UserError(f"vectors {path}: repeats words; remove all but one of the vectors of a word")
    if 0 in vectors.shape:
        raise UserError(f"vectors {path}: has no words or no dimensions; use another file")
    broken = ~np.isfinite(vectors).all(axis=1)
    if broken.any():
        raise UserError(
            f"vectors {path}: the vector of {words[int(broken.argmax())]!r} contains NaN or infinity; "
            "replace the file"
        )
    return WordVectors(words, vectors)


def looks_like_vectors(path: Path) -> bool:
    """Return whether a file starts like one that `read_vectors` reads, or like a pickle of gensim."""
    try:
        with _opened(path) as file:
            first, second = file.readline(_LONGEST_LINE), file.readline(_LONGEST_LINE)
    except (OSError, EOFError):
        return False
    if first.startswith(_FASTTEXT_MAGIC) or _is_pickle(first + second):
        return True
    if _is_header(first):
        return bool(second)
    numbers = first.split()[1:]
    try:
        return len(numbers) > 1 and all(math.isfinite(float(number)) for number in numbers)
    except ValueError:
        return False


def _is_pickle(start: bytes) -> bool:
    return start.startswith(b"\x80") and b"gensim" in start[:4096]


def _is_header(line: bytes) -> bool:
    fields = line.split()
    return len(fields) == 2 and all(field.isdigit() and len(field) < 19 for field in fields)


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


def _kind_of(path: Path) -> tuple[str, int]:
    """Return the format of a file, and the number of words in its header, if it has one."""
    with _opened(path) as file:
        first, second = file.readline(_LONGEST_LINE), file.readline(_LONGEST_LINE)
    if first.startswith(_FASTTEXT_MAGIC):
        return "a fastText model", 0
    if _is_pickle(first + second):
        raise UserError(
            f"vectors {path}: is a pickle of gensim, which could run code; in gensim, write a file with "
            "KeyedVectors.save_word2vec_format and use that"
        )
    if not first.strip():
        raise UserError(f"vectors {path}: is empty or starts with an empty line; replace it")
    if not _is_header(first):
        return "lines", 0
    try:
        is_text = all(character.isprintable() or character.isspace() for character in second.decode("utf-8"))
    except UnicodeDecodeError:
        is_text = False
    return "lines below a header" if is_text else "binary vectors", int(first.split()[0])


def _check_lines(path: Path, has_header: bool, limit: int | None) -> None:
    """Raise UserError for the first line that is not a new word with as many numbers.

    gensim would broadcast a single number over all dimensions, and skip repeated words.
    """
    lines_of: dict[bytes, int] = {}
    with _opened(path) as file:
        announced, dim = map(int, file.readline().split()) if has_header else (None, None)
        for number, line in enumerate(islice(file, limit), 1 + has_header):
            word, _, numbers = line.rstrip().partition(b" ")
            fields = numbers.split(b" ") if numbers else []
            dim = dim or len(fields)
            odd = next((field for field in fields if field.translate(None, _NUMBERS)), None)
            if not word:
                reason = "starts with a space, not a word"
            elif len(fields) != dim or not fields:
                reason = f"has {len(fields)} numbers after its word, expected {dim or 'some'}"
            elif odd is not None:
                reason = f"has {odd.decode(errors='replace')[:40]!r}, expected a number"
            elif lines_of.setdefault(word, number) != number:
                reason = f"repeats {word.decode(errors='replace')[:60]!r} of line {lines_of[word]}"
            else:
                continue
            raise UserError(f"vectors {path}: line {number} {reason}; correct or remove it")
    # gensim would ignore lines after those that are announced.
    if announced is not None and len(lines_of) != min(announced, limit or max(announced, len(lines_of))):
        raise UserError(
            f"vectors {path}: its header announces {announced} words, but there are {len(lines_of)}; it is "
            "truncated, or the header is wrong"
        )


def _opened(path: Path) -> Any:
    """Open a file that may be gzipped."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")
