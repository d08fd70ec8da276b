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


def locate_licensed(folder: Path, references: int) -> Files:
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


KINDS = {"bpe_operations": int, "lengths": list, "valid": int, "test": int, "references": int}


def write_training(files: Files, valid: int, folder: Path) -> None:
    """Write the text of training and of validation.

    Raises:
        UserError: files that cannot be read or do not fit together, or without any pair.
    """
    for split, most in (("train", None), ("valid", valid)):
        sources, targets = read_pairs(files.sides[f"{split}.source"], files.sides[f"{split}.target"])
        write_split(folder, split, sources[:most], targets[:most])


def write_test(files: Files, texts: int, folder: Path) -> None:
    """Write the text of the test set and its references as they are.

    Raises:
        UserError: files that cannot be read, or have another number of lines than `texts`.
    """
    contents = {path: read_lines(path) for path in (files.sides["test.source"], *files.references)}
    check_lengths({path: len(lines) for path, lines in contents.items()}, texts)
    source, *references = contents.values()
    write_lines(folder / "text" / "test.source", source)
    for path, lines in zip(reference_files(folder, len(references)), references):
        write_lines(path, lines)


def reference_files(folder: Path, references: int) -> list[Path]:
    """Where the references of the test set go."""
    return [folder / "text" / f"test.reference.{number}" for number in range(references)]


def smoke_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The same steps for generated texts, at one length that their short headlines have."""
    return {**settings, "bpe_operations": MERGES, "lengths": [20], "valid": TEST_LINES, "test": TEST_LINES}


def write_smoke_texts(folder: Path, references: int) -> None:
    """Write generated texts as the archive of Rush et al. lays out the licensed ones."""
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
    """All steps from the licensed texts in `folder` to ``data.json`` in `data`.

    Raises:
        UserError: files are missing, cannot be read or do not fit together.
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
    """Prepare what lies in $DATA_DIR/gigaword below $RUNS/gigaword_headline/data."""
    options = preprocess_options(recipe, main.__doc__, arguments)
    settings = read_settings(options.settings, KINDS)
    if options.smoke:
        recipe, settings = recipe.smoke(), smoke_settings(settings)
        write_smoke_texts(recipe.home / "raw", settings["references"])
        prepare(recipe.home / "raw", settings, recipe.data)
        return
    data_dir = os.environ.get("DATA_DIR")
    if not data_dir:
        raise UserError("DATA_DIR is not set; it names the folder in which gigaword has the licensed texts")
    prepare(Path(data_dir).absolute() / "gigaword", settings, recipe.data)
