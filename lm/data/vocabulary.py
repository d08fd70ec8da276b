"""The vocabulary of a corpus: words by frequency, with their counts.

Axis: ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shared_embeddings.errors import UserError
from shared_embeddings.utils.files import write_text

UNK = "<unk>"
EOS = "<eos>"


class Limits(NamedTuple):
    """Which words of the training text get an id of their own.

    Attributes:
        min_frequency: words that are rarer become ``<unk>``.
        max_size: V at most, ``<unk>`` and ``<eos>`` included; ``None`` for no limit.
    """

    min_frequency: int = 1
    max_size: int | None = None


class Vocabulary:
    """The V words of a corpus, the most frequent first; a word's id is its place.

    Attributes:
        words: the words, ``<unk>`` and ``<eos>`` among them.
        counts: how often each occurs in the training text; the counts of adaptive and grouped methods.
        index: id of every word.
        unk: id of ``<unk>``, which stands for all words that are not here.
        eos: id of ``<eos>``, which ends every line.
    """

    def __init__(self, words: Sequence[str], counts: Sequence[int]) -> None:
        """Take words and counts in the order of the ids.

        Raises:
            UserError: counts of another number, a word twice, or ``<unk>`` or ``<eos>`` missing.
        """
        if len(words) != len(counts):
            raise UserError(f"{len(words)} words have {len(counts)} counts; each needs one")
        self.words, self.counts = list(words), list(counts)
        self.index = {word: place for place, word in enumerate(self.words)}
        if len(self.index) < len(self.words):
            repeated = next(word for place, word in enumerate(self.words) if self.index[word] != place)
            raise UserError(f"the word {repeated!r} comes twice; every word needs one id")
        for marker in (UNK, EOS):
            if marker not in self.index:
                raise UserError(f"the vocabulary has no {marker}; make it again with lm_prepare")
        self.unk, self.eos = self.index[UNK], self.index[EOS]

    def __len__(self) -> int:
        """V, the number of words."""
        return len(self.words)

    @classmethod
    def from_counts(cls, counts: Mapping[str, int], limits: Limits = Limits()) -> Vocabulary:  # noqa: B008
        """The vocabulary of a text whose words were counted; equally frequent ones stand in code point order.

        What `limits` leave out is counted for ``<unk>``: all counts together are the length of the text.
        """
        ordered = sorted((-count, word) for word, count in counts.items() if word not in (UNK, EOS))
        room = len(ordered) if limits.max_size is None else limits.max_size - 2
        kept = [(count, word) for count, word in ordered[:room] if -count >= limits.min_frequency]
        left_out = sum(count for count, _ in ordered) - sum(count for count, _ in kept)
        kept += [(left_out - counts.get(UNK, 0), UNK), (-counts.get(EOS, 0), EOS)]
        kept.sort()
        return cls([word for _, word in kept], [-count for count, _ in kept])

    def encode(self, text_line: str) -> list[int]:
        """Ids of the words of a line, which white space sets apart, and of ``<eos>`` at its end."""
        return [self.index.get(word, self.unk) for word in text_line.split()] + [self.eos]

    def save(self, path: Path) -> None:
        """Write one line for every word, with a tab and its count behind it."""
        write_text(path, "".join(f"{word}\t{count}\n" for word, count in zip(self.words, self.counts)))

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read what `save` wrote.

        Raises:
            UserError: names the file, and the line where there is one: it is absent, not UTF-8, a line is not
                a word with its count, or the words are refused by the class.
        """
        try:
            lines = path.read_bytes().decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 at byte {error.start}; make it with lm_prepare") from error
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; make it with lm_prepare") from error
        if lines[-1] == "":
            lines.pop()
        words, counts = [], []
        for number, line in enumerate(lines, 1):
            word, _, count = line.partition("\t")
            if word.split() != [word] or not (count.isascii() and count.isdigit()):
                raise UserError(f"{path}: line {number} is {line[:60]!r}; wanted a word, a tab and its count")
            words.append(word)
            counts.append(int(count))
        try:
            return cls(words, counts)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
