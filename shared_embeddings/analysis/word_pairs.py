"""Word pairs with human similarity scores: RG-65, WordSim-353, SimLex-999 and similar sets."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple


class WordPair(NamedTuple):
    """Two words and their human similarity score."""

    first: str
    second: str
    score: float


class WordPairs(NamedTuple):
    """A set of pairs and its file name without the suffix."""

    name: str
    pairs: list[WordPair]


def read_pairs(path: Path) -> WordPairs:
    """Read a set of pairs: two words, then columns of which the first number is the score.

    Columns are separated by tabs, or else by semicolons, commas or spaces. The first line may be a header
    without numbers. Empty lines and lines that start with ``#`` are skipped.

    Raises:
        ValueError: the file is missing, not UTF-8, has no pairs, or has a malformed line.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"pairs {path}: is not UTF-8 text (byte {error.start}); convert it") from error
    except OSError as error:
        raise ValueError(f"pairs {path}: cannot be read ({error.strerror}); check the path") from error
    pairs: list[WordPair] = []
    is_first = True
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        pair = _pair(line)
        if pair is not None:
            pairs.append(pair)
        elif not is_first:
            raise ValueError(
                f"pairs {path}: line {number} is {line[:60]!r}, expected two words and a score; correct it"
            )
        is_first = False
    if not pairs:
        raise ValueError(f"pairs {path}: has no lines with two words and a score; use another file")
    return WordPairs(path.stem, pairs)


def _pair(line: str) -> WordPair | None:
    """The pair of a line; None unless it has two words followed by a number."""
    separator = next((mark for mark in "\t;," if mark in line), None)
    try:
        fields = line.split() if separator is None else next(csv.reader([line], delimiter=separator))
    except csv.Error:
        # A field longer than the csv limit.
        return None
    fields = [field.strip() for field in fields]
    score = next((number for number in map(_number, fields[2:]) if number is not None), None)
    if score is None or not fields[0] or not fields[1]:
        return None
    return WordPair(fields[0], fields[1], score)


def _number(text: str) -> float | None:
    """The finite number in a text, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None
