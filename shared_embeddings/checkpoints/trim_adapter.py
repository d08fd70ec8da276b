"""What a program offers so that the vocabulary of its models can be trimmed.

Axes: ``V`` vocabulary, ``n`` words that are kept.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from shared_embeddings.utils.files import write_text

GROUP = "shared_embeddings.trimming"
BANDS_NOTE = (
    "the words of a band of an adaptive softmax share out what the whole band had before: probabilities are "
    "the original's over kept words within a band, not across bands"
)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The words of one or more tables of a model.

    Attributes:
        name: the host's name of it.
        words: in the order of their ids.
        specials: the ids that the model cannot do without, and that no text has to contain.
        unknown: the id of every word that is not here, or None where there is none.
        sides: the sides of a translation model that have these words, of "source" and "target"; empty where
            a model has no sides.
    """

    name: str
    words: Sequence[str]
    specials: frozenset[int]
    unknown: int | None
    sides: tuple[str, ...] = ()


class TrimmableModel(Protocol):
    """A model whose words can be left out."""

    def vocabularies(self) -> list[Vocabulary]:
        """Its vocabularies, as they were read, each with rows of its own."""

    def encoded(self, vocabulary: str, lines: Sequence[str]) -> list[list[int]]:
        """The ids of each line in a vocabulary as it was read, with those that every line gets."""

    def used(self, vocabulary: str, lines: Sequence[str]) -> Counter[int]:
        """How often lines use each word, whether each is read by itself or all as one text."""

    def closed(self, vocabulary: str, ids: set[int]) -> set[int]:
        """The ids, and those without which texts would not be cut into the same words."""

    def trim(self, kept: Mapping[str, Tensor]) -> list[str]:
        """Leave out all words but the `kept` ids ``(n,)`` of each vocabulary; gives what else that changes.

        Raises:
            ValueError: the model cannot do without the others.
        """

    def encoded_anew(self, vocabulary: str, lines: Sequence[str]) -> list[list[int]]:
        """As `encoded`, in the trimmed vocabulary and its ids."""

    def weight_bytes(self) -> int:
        """The bytes of the tensors that `write` writes."""

    def sources(self) -> list[Path]:
        """The files that it was read from."""

    def files(self, output: Path) -> list[Path]:
        """The files, or the folder, of a model that is called `output`; ValueError for an unfit name."""

    def map_files(self, output: Path) -> dict[str, Path]:
        """The file for the ids of each vocabulary."""

    def write(self, output: Path, maps: Mapping[Path, str]) -> None:
        """Write the model and the texts of `maps`."""


class TrimmingHost(Protocol):
    """What an entry point of `GROUP` gives."""

    def recognises(self, path: Path) -> bool:
        """Whether a file or folder is a model of this host; runs no code from it."""

    def read(self, path: Path) -> TrimmableModel:
        """Read a model; ValueError where its words cannot be left out."""


def maps_beside(output: Path, vocabularies: Sequence[Vocabulary]) -> dict[str, Path]:
    """The files for ids beside a model of one file: ``OUT.ids.tsv``, or ``OUT.NAME.ids.tsv`` for each."""
    if len(vocabularies) == 1:
        return {vocabularies[0].name: output.with_name(f"{output.name}.ids.tsv")}
    return {v.name: output.with_name(f"{output.name}.{v.name}.ids.tsv") for v in vocabularies}


def write_maps(maps: Mapping[Path, str]) -> None:
    """Write the files for ids."""
    for path, text in maps.items():
        write_text(path, text)
