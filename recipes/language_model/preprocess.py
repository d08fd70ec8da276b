"""Prepare the data of a recipe for language models.

The recipe's ``data.yaml`` has ``dataset``, a name in `lm.data.datasets.SOURCES`, and ``classes``: the class
files for UnClE by name, each with ``num_classes`` and the ``epochs`` of the word vectors. The optional
``small`` names the dataset of rows with ``data: data_small``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lm.data.corpus import VOCABULARY
from lm.data.datasets import SOURCES, locate
from recipes.common.corpus import write_lines
from recipes.common.recipe import Recipe
from recipes.common.smoke import CLASSES, LINES, SMOKE, SMOKE_HELP, TEST_LINES, generated_words, sentence
from recipes.common.tools import print_result, run_module, run_step
from shared_embeddings.classes import make_classes, regroup
from shared_embeddings.errors import UserError
from shared_embeddings.utils.reading import read_yaml

CLASS_SETTINGS = ("num_classes", "epochs")
SMALL = "small"
USAGE = """usage: preprocess.sh [{choices}]

Prepares texts from $DATA_DIR/{folder} or from the network, and semantic word classes, in $RUNS/{recipe}/data.
Steps that are up to date are skipped.
"""
SMALL_USAGE = "  small    prepare $DATA_DIR/{folder} in $RUNS/{recipe}/data_small, for the rows small_*"
SMOKE_USAGE = f"  {SMOKE}  {SMOKE_HELP}"


class DataSettings(NamedTuple):
    """Content of ``data.yaml``.

    Attributes:
        dataset: name of the corpus.
        classes: settings of each class file by name.
        small: name of the corpus for small rows; None if they use the same one.
    """

    dataset: str
    classes: Mapping[str, Mapping[str, int]]
    small: str | None = None


def read_settings(recipe: Recipe) -> DataSettings:
    """Read the recipe's ``data.yaml``.

    Raises:
        UserError: it is missing, not YAML, or has a missing, unknown or invalid setting.
    """
    path = recipe.folder / "data.yaml"
    content = read_yaml(path)
    if not isinstance(content, dict) or set(content) - {SMALL} != {"dataset", "classes"}:
        raise UserError(f"{path}: it must contain dataset and classes, and nothing else but {SMALL}")
    for key in ("dataset", SMALL):
        if key in content and content[key] not in SOURCES:
            raise UserError(f"{path}: {key} is {content[key]!r}; it may be {', '.join(SOURCES)}")
    if not isinstance(content["classes"], dict):
        raise UserError(f"{path}: classes is {content['classes']!r}; it must be settings by file name")
    for name, settings in content["classes"].items():
        _check_classes(f"{path}: classes {name}", settings)
    return DataSettings(**content)


def _check_classes(where: str, settings: Any) -> None:
    """Check that the settings of a class file are integers of at least 1."""
    if not isinstance(settings, dict) or set(settings) != set(CLASS_SETTINGS):
        raise UserError(f"{where}: expected {' and '.join(CLASS_SETTINGS)}, and nothing else")
    for name, value in settings.items():
        if type(value) is not int or value < 1:
            raise UserError(f"{where}: {name} is {value!r}; it must be an integer of at least 1")


def prepare(recipe: Recipe) -> None:
    """Create the token files and class files of a recipe unless they are up to date.

    Raises:
        UserError: the settings or the texts are invalid.
        SystemExit: ``lm_prepare`` reported a user error.
    """
    settings = read_settings(recipe)
    _prepare_dataset(recipe, settings.dataset, recipe.data)
    data_dir = os.environ.get("DATA_DIR")
    texts = locate(settings.dataset, Path(data_dir) if data_dir else None, _downloads(recipe))["train"]
    _make_class_files(recipe, texts, settings.classes)


def prepare_small(recipe: Recipe) -> None:
    """Create the token files of the small rows of a recipe.

    Raises:
        UserError: small rows use the same texts as others.
        SystemExit: see `prepare`.
    """
    settings = read_settings(recipe)
    if settings.small is None:
        raise UserError(f"{recipe.name} has no {SMALL} data; small rows use the data of preprocess.sh")
    _prepare_dataset(recipe, settings.small, recipe.home / f"data_{SMALL}")


def prepare_smoke(recipe: Recipe) -> None:
    """Like `prepare`, with generated text in the layout of the recipe's.

    Raises:
        UserError, SystemExit: see `prepare`.
    """
    recipe, settings = recipe.smoke(), read_settings(recipe)
    texts = write_smoke_corpus(settings.dataset, recipe.home / "raw")
    named: list[str | Path] = [part for split, path in texts.items() for part in (f"-{split}", path)]
    run_module("lm.data.prepare", [*named, "-output", recipe.data, "-force"])
    classes = {name: {"num_classes": CLASSES, "epochs": 1} for name in settings.classes}
    _make_class_files(recipe, [texts["train"]], classes)


def _downloads(recipe: Recipe) -> Path:
    """Return the folder of downloads."""
    return recipe.home / "downloads"


def _prepare_dataset(recipe: Recipe, dataset: str, output: Path) -> None:
    """Create the token files of a dataset."""
    downloads = _downloads(recipe)
    run_module("lm.data.prepare", ["-dataset", dataset, "-output", output, "-downloads", downloads, "-force"])


def _make_class_files(
    recipe: Recipe, texts: Sequence[Path], classes: Mapping[str, Mapping[str, int]]
) -> None:
    """Create class files unless they are up to date; files with equal epochs share word vectors."""
    trained: dict[int, Path] = {}
    for name, numbers in classes.items():
        output = recipe.home / name
        first = trained.setdefault(numbers["epochs"], output)
        make = partial(make_classes, texts, recipe.data / VOCABULARY, epochs=numbers["epochs"], force=True)
        if output != first:
            make = partial(regroup, first, force=True)
        run_step(
            output.stem,
            recipe.data / "steps",
            partial(print_result, partial(make, num_classes=numbers["num_classes"], output=output)),
            inputs=[*texts, recipe.data / VOCABULARY] if output == first else [first],
            outputs=[output],
            settings=numbers,
        )


def usage(recipe: Recipe) -> str:
    """Return the text of ``--help``."""
    settings = read_settings(recipe)
    lines = [SMOKE_USAGE]
    if settings.small is not None:
        lines.insert(0, SMALL_USAGE.format(folder=SOURCES[settings.small].folder, recipe=recipe.name))
    choices = " | ".join([SMALL] * (settings.small is not None) + [SMOKE])
    first = USAGE.format(choices=choices, folder=SOURCES[settings.dataset].folder, recipe=recipe.name)
    return "\n".join([first, *lines])


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Prepare the data of a recipe."""
    ways: dict[tuple[str, ...], Callable[[Recipe], None]] = {
        (): prepare,
        (SMALL,): prepare_small,
        (SMOKE,): prepare_smoke,
    }
    if arguments and arguments[0] in ("-h", "--help"):
        print(usage(recipe))
        raise SystemExit(0)
    if tuple(arguments) not in ways:
        raise UserError(
            f"{' '.join(arguments)!r} is not an argument of preprocess.sh; see preprocess.sh --help"
        )
    ways[tuple(arguments)](recipe)


_PARAGRAPH = 10


def write_smoke_corpus(dataset: str, folder: Path) -> dict[str, Path]:
    """Write generated text for each split, with the file names and layout of `dataset`.

    Args:
        dataset: a name in `lm.data.datasets.SOURCES`.
        folder: output folder.
    """
    layout = _LAYOUTS.get(dataset, _articles)
    texts = {}
    for seed, (split, name) in enumerate(SOURCES[dataset].files.items()):
        lines = LINES if split == "train" else 5 * TEST_LINES
        texts[split] = folder / name
        write_lines(texts[split], layout(list(generated_words(lines, seed))))
    return texts


def _plain(lines: list[list[str]]) -> Iterator[str]:
    """Yield lowercase sentences without punctuation, with ``N`` for numbers and surrounding spaces."""
    for words in lines:
        yield f" {' '.join(['<unk>', *words, 'N'])} "


def _articles(lines: list[list[str]]) -> Iterator[str]:
    """Yield articles with headings in equals signs, one paragraph per line, and empty lines between them."""
    for start in range(0, len(lines), _PARAGRAPH):
        title, *paragraph = lines[start : start + _PARAGRAPH]
        text = " ".join(sentence(words).replace(".", " .") for words in paragraph)
        for line in (f"= {' '.join(title[:3]).title()} =", f"{text} 3 @.@ 5 <unk>"):
            yield from (" ", f" {line} ")


_LAYOUTS: dict[str, Callable[[list[list[str]]], Iterator[str]]] = {"ptb": _plain}
