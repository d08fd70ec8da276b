"""Texts of many languages and of Python code, for what a model knows beyond the text of a user.

Languages are lists of words, drawn as often as they are used, without sentences: which tokens a language
uses, and how often, is what they tell. Their source is the package ``wordfreq`` (Speer, 2022, Apache 2.0; the
data CC BY-SA 4.0), its lists of words that are at least one in a million; code is the standard library's.
"""

from __future__ import annotations

import importlib.util
import random
import sysconfig
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path

# Modules of the standard library whose names begin with these letters; others are left to measure with.
_MODULES = "[n-z]*.py"
# The first lines of each.
_LINES = 300
# Words of a line, and the share of them that are capitalized.
_LINE, _CAPITALIZED = 20, 0.15
_WITHOUT_SPACES = ("ja", "zh")
# A list has the words that are used once in 10 ** (-n / 100) at place n.
_PLACES = 100


def languages() -> list[str]:
    """Return the codes of the languages that have lists of words; none without the package wordfreq."""
    if importlib.util.find_spec("wordfreq") is None:
        return []
    import wordfreq

    return sorted(wordfreq.available_languages("small"))


def write_words(path: Path, language: str, number: int, seed: int) -> None:
    """Write about `number` words of a language in random order, twenty on a line.

    Args:
        path: of the text.
        language: one of `languages`.
        number: how many words; each occurs as often as expected, rounded up or down.
        seed: of the rounding and the order.
    """
    import wordfreq

    draw = random.Random(f"{language} {seed}")
    buckets = wordfreq.get_frequency_list(language, "small")
    words = [word for bucket in buckets for word in bucket]
    shares = [10 ** (-place / _PLACES) for place, bucket in enumerate(buckets) for _ in bucket]
    total, offset = sum(shares), draw.random()
    ends = [0, *(int(end / total * number + offset) for end in accumulate(shares))]
    drawn = [word for word, (first, last) in zip(words, pairwise(ends)) for _ in range(last - first)]
    draw.shuffle(drawn)
    drawn = [word.capitalize() if draw.random() < _CAPITALIZED else word for word in drawn]
    space = "" if language in _WITHOUT_SPACES else " "
    lines = (space.join(drawn[first : first + _LINE]) for first in range(0, len(drawn), _LINE))
    path.write_text("".join(f"{line[:1].upper()}{line[1:]}.\n" for line in lines), encoding="utf-8")


def code_lines() -> Iterator[str]:
    """Yield the lines of Python's standard library, of the second half of the alphabet."""
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob(_MODULES)):
        yield from file.read_text(encoding="utf-8", errors="replace").splitlines()[:_LINES]
