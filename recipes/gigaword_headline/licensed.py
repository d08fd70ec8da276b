"""The user's copies of the licensed texts: where they may lie, and what is missing.

They are what the scripts of Rush et al. (2015, https://github.com/facebookarchive/NAMAS) make of Annotated
English Gigaword (LDC2012T21) and of DUC 2004 (NIST): a text a line, tokenized, in small letters.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from recipes.common.corpus import read_lines
from recipes.common.errors import UserError

# Where each file may lie below $DATA_DIR/gigaword, the first one found is taken; any may end in .gz, too.
# First as the archive "sumdata" is laid out, then as the scripts of Rush et al. leave their working folder.
TRAIN = {
    "train.source": ("train/train.article.txt", "train.article.txt"),
    "train.target": ("train/train.title.txt", "train.title.txt"),
    "valid.source": ("train/valid.article.filter.txt", "valid.article.filter.txt", "valid.article.txt"),
    "valid.target": ("train/valid.title.filter.txt", "valid.title.filter.txt", "valid.title.txt"),
}
TEST_FOLDERS = ("DUC2004", "duc2004", "DUC/2004")


class Files(NamedTuple):
    """The files of the user.

    Attributes:
        sides: both sides of training and validation and the source of the test set, by the name that they get
            as prepared data.
        references: of the test set.
    """

    sides: dict[str, Path]
    references: list[Path]


def locate(folder: Path, references: int) -> Files:
    """Find all files.

    Args:
        folder: ``$DATA_DIR/gigaword``.
        references: how many the test set has.

    Raises:
        UserError: names every file that is missing, with the places where it was looked for.
    """
    places = {
        **TRAIN,
        "test.source": tuple(f"{place}/input.txt" for place in TEST_FOLDERS),
        **{
            f"reference {number}": tuple(f"{place}/task1_ref{number}.txt" for place in TEST_FOLDERS)
            for number in range(references)
        },
    }
    found = {name: _first(folder, candidates) for name, candidates in places.items()}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        listed = "; ".join(f"{name}: {' or '.join(places[name])}" for name in missing)
        raise UserError(
            f"{folder}: {len(missing)} of {len(places)} files are missing ({listed}; each may end in .gz); "
            "the texts are licensed, see recipes/gigaword_headline/README.md"
        )
    paths = {name: path for name, path in found.items() if path is not None}
    numbered = [paths.pop(f"reference {number}") for number in range(references)]
    return Files(paths, numbered)


def _first(folder: Path, candidates: tuple[str, ...]) -> Path | None:
    """The first of the `candidates` below `folder` that is there, perhaps compressed."""
    for candidate in candidates:
        for path in (folder / candidate, folder / f"{candidate}.gz"):
            if path.is_file():
                return path
    return None


def read_pairs(sources: Path, targets: Path) -> tuple[list[str], list[str]]:
    """Texts and headlines, without pairs of which one side is empty.

    Raises:
        UserError: files that cannot be read, or that differ in their number of lines.
    """
    sides = {path: read_lines(path) for path in (sources, targets)}
    check_lengths({path: len(lines) for path, lines in sides.items()})
    pairs = [pair for pair in zip(*sides.values()) if all(pair)]
    return [source for source, _ in pairs], [target for _, target in pairs]


def check_lengths(lines: Mapping[Path, int], wanted: int | None = None) -> None:
    """Refuse files whose numbers of lines differ, or are not as `wanted`.

    Raises:
        UserError: names all of them.
    """
    if len({*lines.values(), *([] if wanted is None else [wanted])}) > 1:
        listed = ", ".join(f"{path} has {number}" for path, number in lines.items())
        also = "as many in each" if wanted is None else f"{wanted} in each"
        raise UserError(f"{listed} lines; wanted {also}; make them again")
