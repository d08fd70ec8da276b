"""``--smoke``: the same steps with a tiny network on generated text, in the folder ``smoke`` of the runs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from recipes.common.results import SMOKE_FOLDER

SMOKE = "--smoke"
SMOKE_HELP = f"use a generated text of a few hundred lines, in a separate folder {SMOKE_FOLDER}"
# Lines of text to train on, and to validate or test on.
LINES, TEST_LINES = 250, 10
# Words and semantic classes of a generated text, and BPE merges.
WORDS, CLASSES, MERGES = 400, 12, 200
# Longest translation in subwords or characters; longer than the desired length of headlines.
LONGEST = 30
CUTOFFS = (60, 120, 180)
# For methods that are fitted by gradient descent.
FIT_STEPS = 20
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


def classes_file(number: int) -> str:
    """Return the file name of `number` semantic classes, in recipes with several."""
    return f"classes_{number}.npz"


def generated_words(lines: int, seed: int) -> Iterator[list[str]]:
    """Yield lines of three to fifteen of `generated_vocabulary`, sampled by Zipf's law."""
    words = generated_vocabulary()
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    draw = random.Random(seed)
    for _ in range(lines):
        yield draw.choices(words, weights, k=draw.randint(3, 15))


def generated_vocabulary() -> list[str]:
    """Return the `WORDS` of a made-up language, of one to four syllables, short words first."""
    draw = random.Random(0)
    words: dict[str, None] = dict.fromkeys(_SYLLABLES)
    while len(words) < WORDS:
        words["".join(draw.choices(_SYLLABLES, k=draw.randint(2, 4)))] = None
    return list(words)


def generated_pairs(lines: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield sentences of the made-up language, and the same sentences with reversed words."""
    for words in generated_words(lines, seed):
        yield sentence(words), sentence([word[::-1] for word in words])


def sentence(words: Sequence[str]) -> str:
    """Join words to a sentence."""
    return f"{' '.join(words).capitalize()}."
