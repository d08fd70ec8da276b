"""How often words occur, from a file of counts or from texts.

Axis: ``V`` vocabulary.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.reading import read_lines

if TYPE_CHECKING:
    from torch import Tensor

# Every number of so many digits fits into 64 bits.
_COUNT = "[0-9]{1,18}"


def read_counts(path: Path) -> dict[str, int]:
    """The counts in a file with a word, a tab and its count on every line.

    Raises:
        UserError: the file is empty or not UTF-8, or a line is malformed or repeats a word (its number is
            named).
        OSError: it cannot be read.
    """
    counts: dict[str, int] = {}
    for number, line in enumerate(read_lines(path), 1):
        entry = split_count(line) if "\t" in line else None
        if entry is None:
            raise UserError(
                f"token counts {path}: line {number} is {line[:60]!r}, expected a word, a tab and its count; "
                "fix it, or pass the text itself with --text"
            )
        word, count = entry
        if word in counts:
            raise UserError(
                f"token counts {path}: line {number} repeats the word {word[:60]!r}; merge its counts"
            )
        counts[word] = count
    if not counts:
        raise UserError(f"token counts {path}: the file is empty; write a word and its count on every line")
    return counts


def count_words(paths: Sequence[Path]) -> dict[str, int]:
    """The counts of the words of texts, separated by spaces; UserError for none, or other than UTF-8."""
    counts: Counter[str] = Counter()
    for path in paths:
        for line in read_lines(path):
            counts.update(line.split())
    if not counts:
        raise UserError(f"text {', '.join(map(str, paths))}: has no words; name tokenized text")
    return dict(counts)


def counts_of(words: Sequence[str], counts: Mapping[str, int], sentence_marks: Sequence[str] = ()) -> Tensor:
    """The counts ``(V,)`` of words in their order; UserError if none of them has a count."""
    if not any(counts.get(word) for word in words):
        raise UserError(
            f"token counts: none of the {len(words)} words of the model is among the {len(counts)} counted; "
            "count text that is tokenized like the model's training data"
        )
    return completed(words, counts, sentence_marks)


def completed(words: Sequence[str], counts: Mapping[str, int], sentence_marks: Sequence[str]) -> Tensor:
    """The counts ``(V,)`` of words in their order, with a count for those that have none.

    Marks that every sentence gets, but no text contains, count as often as the most frequent word; any other
    word without a count, or with 0, counts once. The given counts are not empty.
    """
    import torch  # slow to import

    unlisted = dict.fromkeys(sentence_marks, max(counts.values()))
    return torch.tensor([max(1, counts.get(word, unlisted.get(word, 1))) for word in words])


def split_count(line: str) -> tuple[str, int] | None:
    """A word and its count, separated by a tab or a space; None for any other line."""
    for separator in ("\t", " "):
        word, _, count = line.rpartition(separator)
        if word and "\t" not in word and re.fullmatch(_COUNT, count):
            return word, int(count)
    return None
