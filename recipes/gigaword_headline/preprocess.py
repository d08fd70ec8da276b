"""English Gigaword and DUC 2004 as headline data, from the user's copies of the licensed texts.

The files are those that the scripts of Rush et al. (2015, https://github.com/facebookarchive/NAMAS) create
from Annotated English Gigaword (LDC2012T21) and DUC 2004 (NIST): one tokenized, lowercased text per line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from recipes.common.corpus import read_lines, write_lines
from recipes.common.recipe import Recipe, preprocess_options
from recipes.common.smoke import (
    LINES,
    MERGES,
    TEST_LINES,
    generated_words,
)
from recipes.common.tools import run_step
from recipes.headlines.data import describe, encode, read_settings, text_files, write_split
from shared_embeddings.errors import UserError

# Candidates in $DATA_DIR/gigaword, optionally with suffix .gz; the first existing one is used. They follow
# the
# layout of the archive "sumdata" and of the working folder of the scripts of Rush et al.
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
        sides: both sides of training and validation, and the test source, by name in the prepared data.
        references: references of the test set.
    """

    sides: dict[str, Path]
    references: list[Path]


def locate_licensed(folder: Path, references: int) -> Files:
    """Find all files.

    Args:
        folder: ``$DATA_DIR/gigaword``.
        references: number of references of the test set.

    Raises:
        UserError: files are missing.
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
            f"{folder}: {len(missing)} of {len(places)} files are missing ({listed}; or with suffix .gz); "
            "the texts are licensed, see recipes/gigaword_headline/README.md"
        )
    paths = {name: path for name, path in found.items() if path is not None}
    numbered = [paths.pop(f"reference {number}") for number in range(references)]
    return Files(paths, numbered)


def _first(folder: Path, candidates: tuple[str, ...]) -> Path | None:
    """Return the first existing candidate in `folder`, plain or compressed."""
    for candidate in candidates:
        for path in (folder / candidate, folder / f"{candidate}.gz"):
            if path.is_file():
                return path
    return None


def read_pairs(sources: Path, targets: Path) -> tuple[list[str], list[str]]:
    """Read texts and headlines, without pairs that have an empty side.

    Raises:
        UserError: a file cannot be read, or the numbers of lines differ.
    """
    sides = {path: read_lines(path) for path in (sources, targets)}
    check_lengths({path: len(lines) for path, lines in sides.items()})
    pairs = [pair for pair in zip(*sides.values()) if all(pair)]
    return [source for source, _ in pairs], [target for _, target in pairs]


def check_lengths(lines: Mapping[Path, int], wanted: int | None = None) -> None:
    """Check that files have equal numbers of lines, or `wanted` lines; raises `UserError` otherwise."""
    if len({*lines.values(), *([] if wanted is None else [wanted])}) > 1:
        listed = ", ".join(f"{path} has {number}" for path, number in lines.items())
        also = "equal numbers" if wanted is None else f"{wanted} in each"
        raise UserError(f"{listed} lines; expected {also}; create them again")


KINDS = {"bpe_operations": int, "lengths": list, "valid": int, "test": int, "references": int}


def write_training(files: Files, valid: int, folder: Path) -> None:
    """Write the text of training and of validation.

    Raises:
        UserError: a file cannot be read, the numbers of lines differ, or there are no pairs.
    """
    for split, most in (("train", None), ("valid", valid)):
        sources, targets = read_pairs(files.sides[f"{split}.source"], files.sides[f"{split}.target"])
        write_split(folder, split, sources[:most], targets[:most])


def write_test(files: Files, texts: int, folder: Path) -> None:
    """Copy the text of the test set and its references.

    Raises:
        UserError: a file cannot be read or does not have `texts` lines.
    """
    contents = {path: read_lines(path) for path in (files.sides["test.source"], *files.references)}
    check_lengths({path: len(lines) for path, lines in contents.items()}, texts)
    source, *references = contents.values()
    write_lines(folder / "text" / "test.source", source)
    for path, lines in zip(reference_files(folder, len(references)), references):
        write_lines(path, lines)


def reference_files(folder: Path, references: int) -> list[Path]:
    """Return the paths of the prepared references of the test set."""
    return [folder / "text" / f"test.reference.{number}" for number in range(references)]


def smoke_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings for small generated texts."""
    return {**settings, "bpe_operations": MERGES, "lengths": [20], "valid": TEST_LINES, "test": TEST_LINES}


def write_smoke_texts(folder: Path, references: int) -> None:
    """Write generated texts in the layout of the archive of Rush et al."""
    for seed, split in enumerate(("train", "valid")):
        lines = list(generated_words(LINES if split == "train" else TEST_LINES, seed))
        write_lines(folder / TRAIN[f"{split}.source"][0], (" ".join(words) for words in lines))
        write_lines(folder / TRAIN[f"{split}.target"][0], (" ".join(words[:3]) for words in lines))
    tests = list(generated_words(TEST_LINES, seed=2))
    write_lines(folder / TEST_FOLDERS[0] / "input.txt", (" ".join(words) for words in tests))
    for number in range(references):
        path = folder / TEST_FOLDERS[0] / f"task1_ref{number}.txt"
        write_lines(path, (" ".join(words[number % 3 : 3]) for words in tests))


def prepare(folder: Path, settings: dict[str, Any], data: Path) -> None:
    """Run all steps from the licensed texts in `folder` to ``data.json`` in `data`.

    Raises:
        UserError: a file is missing or cannot be read, or the numbers of lines differ.
    """
    files = locate_licensed(folder, settings["references"])
    stamps = data / "steps"
    references = reference_files(data, settings["references"])
    test_source = data / "text" / "test.source"
    run_step(
        "test",
        stamps,
        partial(write_test, files, settings["test"], data),
        inputs=[files.sides["test.source"], *files.references],
        outputs=[test_source, *references],
        settings={"test": settings["test"]},
    )
    run_step(
        "training",
        stamps,
        partial(write_training, files, settings["valid"], data),
        inputs=[path for name, path in files.sides.items() if name != "test.source"],
        outputs=[path for path in text_files(data) if path != test_source],
        settings={"valid": settings["valid"]},
    )
    encode(data, settings["bpe_operations"])
    describe(data, references, lengths=settings["lengths"])
    print(f"prepared {data}")


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Prepare the texts of $DATA_DIR/gigaword in $RUNS/gigaword_headline/data."""
    options = preprocess_options(recipe, main.__doc__, arguments)
    settings = read_settings(options.settings, KINDS)
    if options.smoke:
        recipe, settings = recipe.smoke(), smoke_settings(settings)
        write_smoke_texts(recipe.home / "raw", settings["references"])
        prepare(recipe.home / "raw", settings, recipe.data)
        return
    data_dir = os.environ.get("DATA_DIR")
    if not data_dir:
        raise UserError("DATA_DIR is not set; set it to the folder with the licensed texts in gigaword")
    prepare(Path(data_dir).absolute() / "gigaword", settings, recipe.data)
