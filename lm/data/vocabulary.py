"""The words of texts, and the vocabulary of a corpus: words by frequency, with their counts.

Axis: ``V`` vocabulary.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shared_embeddings.utils.errors import UserError

UNK = "<unk>"
EOS = "<eos>"
BLOCK_BYTES = 1 << 18


def word_blocks(
    path: Path, lower: bool = False, progress: Callable[[int], object] | None = None
) -> Iterator[list[str]]:
    """Yield blocks of the words of a UTF-8 text, with ``<eos>`` after each line.

    Unicode whitespace separates words, and line feeds end lines. Byte order marks are dropped. Lines may be
    longer than memory, words may not. `progress` is called with the number of bytes of each block.

    Raises:
        UserError: the text cannot be read or is not UTF-8.
    """

    def words(text: str) -> list[str]:
        return (text.lower() if lower else text).replace("\n", f" {EOS} ").split()

    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    rest, line_ended, consumed = "", True, 0
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                consumed += len(block)
                if text := decoder.decode(block):
                    rest, line_ended = rest + text, text.endswith("\n")
                    end = max(rest.rfind(" "), rest.rfind("\n")) + 1
                    yield words(rest[:end])
                    rest = rest[end:]
                if progress:
                    progress(len(block))
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        place = consumed - len(error.object) + error.start
        raise UserError(f"{path}: not UTF-8 at byte {place}; convert it") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; check the path") from error
    if not line_ended:
        yield words(rest + "\n")


class Limits(NamedTuple):
    """Limits of the vocabulary."""

    min_frequency: int = 1  # rarer words become <unk>
    max_size: int | None = None  # of V, including <unk> and <eos>


class Vocabulary:
    """The V words of a corpus by descending frequency; the id of a word is its index.

    Args:
        words: including ``<unk>``, which replaces all other words, and ``<eos>``, which ends each line.
        counts: occurrences of each word in the training text; zeros by default.

    Raises:
        UserError: a word is repeated, or ``<unk>`` or ``<eos>`` is missing.
    """

    def __init__(self, words: Sequence[str], counts: Sequence[int] | None = None) -> None:
        self.words, self.counts = list(words), list(counts or [0] * len(words))
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
        lines = (f"{word}\t{count}\n" for word, count in zip(self.words, self.counts))
        path.write_text("".join(lines), encoding="utf-8", newline="")

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read a file written by `save`.

        Raises:
            UserError: the file is missing or not UTF-8, or a line or the words are invalid.
        """
        try:
            lines = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 at byte {error.start}; run lm_prepare") from error
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; run lm_prepare") from error
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
