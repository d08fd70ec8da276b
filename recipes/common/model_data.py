"""Preparing the data of a recipe for language models: ``python -m recipes.common.model_data RECIPE``.

The recipe's ``data.yaml`` holds ``dataset``, a name of `lm.datasets.SOURCES`, and ``classes``: the class
files for UnClE by their names below the recipe's home, each with ``num_classes`` and the ``epochs`` of the
word vectors.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lm.corpus import VOCABULARY
from lm.datasets import SOURCES, locate
from recipes.common.config import read_yaml
from recipes.common.errors import UserError, run_main
from recipes.common.model_rows import RECIPES, Recipe
from recipes.common.steps import run_step
from recipes.common.tools import run_module
from shared_embeddings.classes import make_classes

CLASS_SETTINGS = ("num_classes", "epochs")
USAGE = """usage: preprocess.sh

Prepares {dataset}, from $DATA_DIR or else from the network, and the semantic classes of its words in
$RUNS/{recipe}. What is up to date is not done again."""


class DataSettings(NamedTuple):
    """The content of ``data.yaml``.

    Attributes:
        dataset: name of the corpus.
        classes: settings of each class file, by its name below the recipe's home.
    """

    dataset: str
    classes: Mapping[str, Mapping[str, int]]


def read_settings(recipe: Recipe) -> DataSettings:
    """Read the recipe's ``data.yaml``.

    Raises:
        UserError: absent, not YAML, or a setting that is missing, unknown or impossible.
    """
    path = recipe.folder / "data.yaml"
    content = read_yaml(path)
    if not isinstance(content, dict) or set(content) != set(DataSettings._fields):
        raise UserError(f"{path}: it must hold {' and '.join(DataSettings._fields)}, and nothing else")
    if content["dataset"] not in SOURCES:
        raise UserError(f"{path}: dataset is {content['dataset']!r}; it may be {', '.join(SOURCES)}")
    if not isinstance(content["classes"], dict):
        raise UserError(f"{path}: classes is {content['classes']!r}; it must be settings by file name")
    for name, settings in content["classes"].items():
        _check_classes(f"{path}: classes {name}", settings)
    return DataSettings(**content)


def _check_classes(where: str, settings: Any) -> None:
    """Refuse settings of a class file that are not whole numbers of at least 1."""
    if not isinstance(settings, dict) or set(settings) != set(CLASS_SETTINGS):
        raise UserError(f"{where}: wanted {' and '.join(CLASS_SETTINGS)}, and nothing else")
    for name, value in settings.items():
        if type(value) is not int or value < 1:
            raise UserError(f"{where}: {name} is {value!r}; it must be a whole number of at least 1")


def prepare(recipe: Recipe) -> None:
    """Make the token files and every class file of a recipe that are not there or out of date.

    Raises:
        UserError: the settings or the texts cannot be used.
        SystemExit: ``lm_prepare`` has found a mistake of the user's and said so itself.
    """
    settings = read_settings(recipe)
    downloads = recipe.home / "downloads"
    where: list[str | Path] = ["-output", recipe.data, "-downloads", downloads]
    run_module("lm.prepare", ["-dataset", settings.dataset, *where])
    data_dir = os.environ.get("DATA_DIR")
    texts = locate(settings.dataset, Path(data_dir) if data_dir else None, downloads)["train"]
    for name, numbers in settings.classes.items():
        output = recipe.home / name
        run_step(
            output.stem,
            recipe.data / "steps",
            partial(_make_classes, texts, recipe.data / VOCABULARY, output, numbers),
            inputs=[*texts, recipe.data / VOCABULARY],
            outputs=[output],
            settings=numbers,
        )


def _make_classes(texts: Sequence[Path], vocabulary: Path, output: Path, numbers: Mapping[str, int]) -> None:
    """Make one class file, and print what is in it."""
    print(make_classes(texts, vocabulary, numbers["num_classes"], output, epochs=numbers["epochs"]))


def main(arguments: Sequence[str]) -> None:
    """Prepare the data of the recipe that the command line names."""
    name, *rest = arguments
    recipe = Recipe(RECIPES / name)
    if rest:
        wants_help = rest[0] in ("-h", "--help")
        text = USAGE.format(dataset=read_settings(recipe).dataset, recipe=name)
        print(text, file=sys.stdout if wants_help else sys.stderr)
        raise SystemExit(0 if wants_help else 2)
    prepare(recipe)


if __name__ == "__main__":
    raise SystemExit(run_main("preprocess", main))
