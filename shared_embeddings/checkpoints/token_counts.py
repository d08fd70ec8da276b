"""How often words occur, from a file of counts or from texts.

Axis: ``V`` vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

# Of a count: so many always fit into 64 bits.
_MOST_DIGITS = 18


def read_counts(path: Path) -> dict[str, int]:
    """The counts of a file with a word, a tab or a space, and its count on every line.

    Raises:
        ValueError: the file is empty, no UTF-8, a line is something else, or has a word again (its number is
            named).
        OSError: it cannot be read.
    """
    counts: dict[str, int] = {}
    for number, line in enumerate(lines_of(path), 1):
        word, separator, count = _split(line)
        if not word or not separator or not count.isdecimal() or len(count) > _MOST_DIGITS:
            raise ValueError(
                f"token counts {path}: line {number} is {line[:60]!r}, wanted a word, a tab and its count; "
                "correct it, or give the text itself with --text"
            )
        if word in counts:
            raise ValueError(
                f"token counts {path}: line {number} counts {word[:60]!r} a second time; add its counts up"
            )
        counts[word] = int(count)
    if not counts:
        raise ValueError(f"token counts {path}: the file is empty; give one with a word and a count a line")
    return counts


def count_words(paths: Sequence[Path]) -> dict[str, int]:
    """The counts of the words of texts, which stand between spaces.

    Raises:
        ValueError: a text is no UTF-8, or there are no words in any.
        OSError: a text cannot be read.
    """
    counts: Counter[str] = Counter()
    for path in paths:
        for line in lines_of(path):
            counts.update(line.split())
    if not counts:
        raise ValueError(f"text {', '.join(map(str, paths))}: has no words; give tokenised text")
    return dict(counts)


def counts_of(words: Sequence[str], counts: Mapping[str, int], sentence_marks: Sequence[str] = ()) -> Tensor:
    """The counts ``(V,)`` of words in their order.

    Raises:
        ValueError: none of the words has a count.
    """
    if not any(counts.get(word) for word in words):
        raise ValueError(
            f"token counts: none of the {len(words)} words of the model is among the {len(counts)} counted; "
            "count text that is tokenised as the model's own"
        )
    return completed(words, counts, sentence_marks)


def completed(words: Sequence[str], counts: Mapping[str, int], sentence_marks: Sequence[str]) -> Tensor:
    """The counts ``(V,)`` of words in their order, with a count for those that have none.

    Marks that stand in every sentence, but in no text, count as often as the most frequent word; any other
    word that has no count, or 0, counts once.

    Args:
        counts: of one word at least.
    """
    unlisted = dict.fromkeys(sentence_marks, max(counts.values()))
    return torch.tensor([max(1, counts.get(word, unlisted.get(word, 1))) for word in words])


def _split(line: str) -> tuple[str, str, str]:
    """A word, what separates it from its count, and the count."""
    parts = line.rpartition("\t")
    return parts if parts[1] else line.rpartition(" ")


def lines_of(path: Path) -> list[str]:
    """The lines of a text; only a line feed ends one."""
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is no UTF-8 text (byte {error.start}); convert it") from error
    return [line.rstrip("\r") for line in lines[:-1] + ([lines[-1]] if lines[-1] else [])]
