"""What trimming a model has done."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Coverage:
    """What one text finds in the trimmed vocabulary.

    Attributes:
        text: the file.
        tokens: how many it has, as the model cut it before.
        kept: how many of them have kept their row.
        unknown: how many of those are the mark for unknown words, as they were before.
        lines: how many lines have kept all of their tokens; each is cut into the same ones as before.
    """

    text: str
    tokens: int
    kept: int
    unknown: int
    lines: int


@dataclasses.dataclass(frozen=True)
class TrimmedVocabulary:
    """One vocabulary, before and after.

    Attributes:
        name: the host's.
        rows: before and after.
        map_file: the ids before and after, of all rows that were kept.
        texts: in the order in which they were given.
    """

    name: str
    rows: tuple[int, int]
    map_file: str
    texts: Sequence[Coverage]


@dataclasses.dataclass(frozen=True)
class TrimReport:
    """What was written, and how much smaller it is; sizes are before and after.

    Attributes:
        model: what was read.
        output: what was written.
        host: whose format it is in.
        vocabularies: each with rows of its own.
        bytes_of_weights: of the tensors.
        bytes_on_disk: of all files, with what only training needs where that was there.
        notes: what else has changed.
    """

    model: str
    output: str
    host: str
    vocabularies: Sequence[TrimmedVocabulary]
    bytes_of_weights: tuple[int, int]
    bytes_on_disk: tuple[int, int]
    notes: Sequence[str]

    def described(self) -> str:
        """The report for people."""
        lines = [f"{self.model} ({self.host}) -> {self.output}"]
        for vocabulary in self.vocabularies:
            lines.append(_change(f"rows of {vocabulary.name}", vocabulary.rows))
        lines.append(_change("bytes of weights", self.bytes_of_weights))
        lines.append(_change("bytes on disk", self.bytes_on_disk))
        lines += [_covered(text) for vocabulary in self.vocabularies for text in vocabulary.texts]
        lines += [f"ids before and after: {vocabulary.map_file}" for vocabulary in self.vocabularies]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _change(title: str, sizes: tuple[int, int]) -> str:
    """A line about a size before and after."""
    before, after = sizes
    return f"{title:<24}{before:>16,} -> {after:>14,}  ({after / max(before, 1):.1%})"


def _covered(text: Coverage) -> str:
    """A line about a text."""
    share = text.kept / max(text.tokens, 1)
    return (
        f"text {text.text}: {share:.2%} of {text.tokens:,} tokens kept ({text.unknown:,} of them unknown, as "
        f"before); {text.lines:,} lines kept whole, all cut as before"
    )
