"""Pairs of words with the similarity that people gave them: RG-65, WordSim-353, SimLex-999 and their like."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple


class WordPair(NamedTuple):
    """Two words and how similar people found them."""

    first: str
    second: str
    score: float


class WordPairs(NamedTuple):
    """A set of pairs and the name of its file, without the suffix."""

    name: str
    pairs: list[WordPair]


def read_pairs(path: Path) -> WordPairs:
    """Read a set of pairs: two words and further columns, the first number of which is the score.

    Columns stand between tabs, or else semicolons, commas or spaces. The first line may be a header, which
    is a line without a number; empty lines, and those that begin with ``#``, are passed over.

    Raises:
        ValueError: the file is missing, not UTF-8, has no pairs, or a line is malformed; its number is named.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"pairs {path}: is no UTF-8 text (byte {error.start}); convert it") from error
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
                f"pairs {path}: line {number} is {line[:60]!r}, wanted two words and a score; correct it"
            )
        is_first = False
    if not pairs:
        raise ValueError(f"pairs {path}: has no lines with two words and a score; take another file")
    return WordPairs(path.stem, pairs)


def _pair(line: str) -> WordPair | None:
    """The pair of a line; None where there are no two words with a number behind them."""
    separator = next((mark for mark in "\t;," if mark in line), None)
    try:
        fields = line.split() if separator is None else next(csv.reader([line], delimiter=separator))
    except csv.Error:
        # A field that is longer than any word.
        return None
    fields = [field.strip() for field in fields]
    score = next((number for number in map(_number, fields[2:]) if number is not None), None)
    if score is None or not fields[0] or not fields[1]:
        return None
    return WordPair(fields[0], fields[1], score)


def _number(text: str) -> float | None:
    """A finite number, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None
