"""The user's Gigaword and DUC 2004 to subwords and characters."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from recipes.common.corpus import read_lines, write_lines
from recipes.common.errors import UserError, run_main
from recipes.common.headlines import describe, encode, read_settings, text_files, write_split
from recipes.common.recipe import Recipe
from recipes.common.steps import run_step
from recipes.gigaword_headline.licensed import Files, check_lengths, locate, read_pairs

RECIPE = Recipe("gigaword_headline")
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


def main(arguments: Sequence[str]) -> None:
    """Prepare what lies in $DATA_DIR/gigaword below $RUNS/gigaword_headline/data."""
    parser = argparse.ArgumentParser(prog="preprocess.sh", description=main.__doc__)
    default = RECIPE.folder / "data.yaml"
    parser.add_argument("--settings", type=Path, default=default, help="default: %(default)s")
    settings = read_settings(parser.parse_args(arguments).settings, KINDS)
    data_dir = os.environ.get("DATA_DIR")
    if not data_dir:
        raise UserError("DATA_DIR is not set; it names the folder in which gigaword has the licensed texts")
    files = locate(Path(data_dir).absolute() / "gigaword", settings["references"])
    folder, stamps = RECIPE.data, RECIPE.data / "steps"
    references = reference_files(folder, settings["references"])
    test_source = folder / "text" / "test.source"
    run_step(
        "test",
        stamps,
        partial(write_test, files, settings["test"], folder),
        inputs=[files.sides["test.source"], *files.references],
        outputs=[test_source, *references],
        settings={"test": settings["test"]},
    )
    run_step(
        "training",
        stamps,
        partial(write_training, files, settings["valid"], folder),
        inputs=[path for name, path in files.sides.items() if name != "test.source"],
        outputs=[path for path in text_files(folder) if path != test_source],
        settings={"valid": settings["valid"]},
    )
    encode(folder, settings["bpe_operations"])
    describe(folder, references, lengths=settings["lengths"])
    print(f"prepared {folder}")


if __name__ == "__main__":
    raise SystemExit(run_main("preprocess", main))
