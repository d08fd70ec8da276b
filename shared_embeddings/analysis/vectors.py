"""Word vectors from files: GloVe, word2vec and fastText, text and binary, read by gensim.

Axes: ``V`` vocabulary, ``D`` dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shared_embeddings.utils.files import UNREADABLE, first_line

# How a model of fastText with its sub-words begins.
_FASTTEXT_MAGIC = (793712314).to_bytes(4, "little")
# No line of a text of vectors is longer; in a binary file there may be no end of a line for long.
_LONGEST_LINE = 1 << 20


class WordVectors(NamedTuple):
    """Vectors of words.

    Attributes:
        words: V different words, in the order of the file, which mostly is that of their frequency.
        vectors: ``(V, D)`` in 32 bits.
    """

    words: list[str]
    vectors: np.ndarray


def read_vectors(path: Path, limit: int | None = None) -> WordVectors:
    """Read word vectors in any of the usual formats, which is found out from the content.

    These are lines of a word and its numbers with spaces between them (GloVe), the same below a line with V
    and D (word2vec, fastText ``.vec``), word2vec's binary format, and fastText's ``.bin``; all but the last
    may be gzipped when their name ends in ``.gz``. Of a word that is there twice, the first vector counts.

    Args:
        path: the file.
        limit: read the first so many words only; all when left out.

    Raises:
        ValueError: the file is missing, malformed (the line is named) or cut short, or `limit` is below 1.
        ImportError: gensim is not installed.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}, but at least 1 word has to be read; raise it")
    if not path.is_file():
        raise ValueError(f"vectors {path}: no such file; check the path")
    kind = _kind_of(path)
    if kind in ("lines", "lines below a header"):
        _check_lines(path, has_header=kind != "lines", limit=limit)
    try:
        keyed = _load(path, kind, limit)
    # gensim's readers of binary files fail in many ways on what is none.
    except (*UNREADABLE, MemoryError, NotImplementedError) as error:
        raise ValueError(
            f"vectors {path}: cannot be read as {kind} ({first_line(error)}); it is damaged or cut short, "
            "or of another format"
        ) from error
    # Words that are repeated leave empty places at the end.
    number = len(keyed.key_to_index) if limit is None else min(limit, len(keyed.key_to_index))
    found = WordVectors(keyed.index_to_key[:number], np.asarray(keyed.vectors, np.float32)[:number])
    _check_content(path, found)
    return found


def _gensim() -> Any:
    """gensim, or what to do without it."""
    try:
        import gensim  # type: ignore[import-untyped]
        import gensim.models.fasttext  # type: ignore[import-untyped]
    except ImportError:
        raise ImportError(
            "reading word vectors needs gensim, which is not installed; pip install gensim"
        ) from None
    return gensim


def _load(path: Path, kind: str, limit: int | None) -> Any:
    """gensim's vectors of a file."""
    gensim = _gensim()
    if kind == "a fastText model":
        return gensim.models.fasttext.load_facebook_vectors(str(path))
    return gensim.models.KeyedVectors.load_word2vec_format(
        str(path), binary=kind == "binary vectors", no_header=kind == "lines", limit=limit
    )


def _kind_of(path: Path) -> str:
    """The format of a file, by its beginning."""
    try:
        with _gensim().utils.open(str(path), "rb") as file:
            first, second = file.readline(_LONGEST_LINE), file.readline(_LONGEST_LINE)
    except (OSError, EOFError) as error:
        raise ValueError(f"vectors {path}: cannot be read ({first_line(error)}); replace it") from error
    if first.startswith(_FASTTEXT_MAGIC):
        return "a fastText model"
    if not first.strip():
        raise ValueError(f"vectors {path}: is empty, or begins with an empty line; replace it")
    if not _is_header(first):
        return "lines"
    return "lines below a header" if _is_text(second) else "binary vectors"


def _is_header(line: bytes) -> bool:
    """Whether a line has V and D, and nothing else."""
    fields = line.split()
    return len(fields) == 2 and all(field.isdigit() for field in fields)


def _is_text(line: bytes) -> bool:
    """Whether a line has no bytes that only numbers in binary have."""
    try:
        return all(character.isprintable() or character.isspace() for character in line.decode("utf-8"))
    except UnicodeDecodeError:
        return False


def _check_lines(path: Path, has_header: bool, limit: int | None) -> None:
    """Raise ValueError for the first line that has another number of fields than its fellows.

    gensim would repeat a single number over all dimensions.
    """
    wanted, expected = None, None
    for number, line in enumerate(_lines(path, limit, has_header), 1):
        if number == 1 and has_header:
            count, dim = (int(field) for field in line.split())
            wanted, expected = dim, min(count, limit or count)
            continue
        if line.startswith(b" "):
            raise ValueError(f"vectors {path}: line {number} begins with a space, not a word; correct it")
        dim = line.rstrip().count(b" ")
        wanted = wanted or dim
        if dim != wanted or dim == 0:
            raise ValueError(
                f"vectors {path}: line {number} has {dim} numbers behind its word, wanted "
                f"{wanted or 'some'}; correct or remove it"
            )
    if expected is not None and number - 1 < expected:
        raise ValueError(
            f"vectors {path}: its first line tells of {expected} words, but there are {number - 1}; it is "
            "cut short"
        )
    if expected is not None and limit is None and number - 1 > expected:
        # gensim would pass over the rest.
        raise ValueError(
            f"vectors {path}: its first line tells of {expected} words, but there are {number - 1}; correct "
            "that line"
        )


def _lines(path: Path, limit: int | None, has_header: bool) -> Iterator[bytes]:
    """The lines that are read."""
    try:
        with _gensim().utils.open(str(path), "rb") as file:
            for number, line in enumerate(file):
                if limit is not None and number >= limit + has_header:
                    return
                yield line
    except (OSError, EOFError) as error:
        raise ValueError(f"vectors {path}: cannot be read ({first_line(error)}); replace it") from error


def _check_content(path: Path, found: WordVectors) -> None:
    """Raise ValueError unless there are vectors, all of finite numbers."""
    if found.vectors.ndim != 2 or 0 in found.vectors.shape:
        raise ValueError(f"vectors {path}: has no words, or no dimensions; take another file")
    broken = ~np.isfinite(found.vectors).all(axis=1)
    if broken.any():
        raise ValueError(
            f"vectors {path}: the vector of {found.words[int(broken.argmax())]!r} has values that are no "
            "finite numbers; replace the file"
        )
