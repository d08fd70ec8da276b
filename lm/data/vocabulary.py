"""The vocabulary of a corpus: words by frequency, with their counts.

Axis: ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import write_text

UNK = "<unk>"
EOS = "<eos>"


class Limits(NamedTuple):
    """Limits of the vocabulary.

    Attributes:
        min_frequency: rarer words become ``<unk>``.
        max_size: maximum of V, including ``<unk>`` and ``<eos>``; None for no limit.
    """

    min_frequency: int = 1
    max_size: int | None = None


class Vocabulary:
    """The V words of a corpus by descending frequency; the id of a word is its index.

    Attributes:
        words: the words, including ``<unk>`` and ``<eos>``.
        counts: number of occurrences of each word in the training text.
        index: id of each word.
        unk: id of ``<unk>``, which replaces all other words.
        eos: id of ``<eos>``, which ends each line.
    """

    def __init__(self, words: Sequence[str], counts: Sequence[int]) -> None:
        """Create a vocabulary from words and counts in the order of the ids.

        Raises:
            UserError: the numbers differ, a word is repeated, or ``<unk>`` or ``<eos>`` is missing.
        """
        if len(words) != len(counts):
            raise UserError(f"{len(words)} words, but {len(counts)} counts; give one count per word")
        self.words, self.counts = list(words), list(counts)
        self.index = {word: place for place, word in enumerate(self.words)}
        if len(self.index) < len(self.words):
            repeated = next(word for place, word in enumerate(self.words) if self.index[word] != place)
            raise UserError(f"the word {repeated!r} is repeated; remove the duplicate")
        for marker in (UNK, EOS):
            if marker not in self.index:
                raise UserError(f"the vocabulary has no {marker}; run lm_prepare again")
        self.unk, self.eos = self.index[UNK], self.index[EOS]

    def __len__(self) -> int:
        """V, the number of words."""
        return len(self.words)

    @classmethod
    def from_counts(cls, counts: Mapping[str, int], limits: Limits = Limits()) -> Vocabulary:  # noqa: B008
        """Create the vocabulary of a text from its word counts; ties are in code point order.

        Words excluded by `limits` count as ``<unk>``, so that the counts sum to the length of the text.
        """
        ordered = sorted((-count, word) for word, count in counts.items() if word not in (UNK, EOS))
        room = len(ordered) if limits.max_size is None else limits.max_size - 2
        kept = [(count, word) for count, word in ordered[:room] if -count >= limits.min_frequency]
        excluded = sum(count for count, _ in ordered) - sum(count for count, _ in kept)
        kept += [(excluded - counts.get(UNK, 0), UNK), (-counts.get(EOS, 0), EOS)]
        kept.sort()
        return cls([word for _, word in kept], [-count for count, _ in kept])

    def encode(self, text_line: str) -> list[int]:
        """Ids of the whitespace-separated words of a line, followed by ``<eos>``."""
        return [self.index.get(word, self.unk) for word in text_line.split()] + [self.eos]

    def save(self, path: Path) -> None:
        """Write one line ``word<TAB>count`` per word."""
        write_text(path, "".join(f"{word}\t{count}\n" for word, count in zip(self.words, self.counts)))

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read a file written by `save`.

        Raises:
            UserError: the file is missing or not UTF-8, or a line or the words are invalid; names the file.
        """
        try:
            lines = path.read_bytes().decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 at byte {error.start}; run lm_prepare") from error
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; run lm_prepare") from error
        if lines[-1] == "":
            lines.pop()
        words, counts = [], []
        for number, line in enumerate(lines, 1):
            word, _, count = line.partition("\t")
            if word.split() != [word] or not (count.isascii() and count.isdigit()):
                raise UserError(f"{path}: line {number} is {line[:60]!r}; expected word, tab and count")
            words.append(word)
            counts.append(int(count))
        try:
            return cls(words, counts)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
