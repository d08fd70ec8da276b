"""Recipes: their rows, data, runs and steps."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import shared_embeddings as se
from recipes.common.results import REPOSITORY, SMOKE_FOLDER
from recipes.common.rows import FILE, Row, read_file, read_rows
from recipes.common.smoke import SMOKE, SMOKE_HELP, smoke_row
from recipes.common.tools import read_json
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.path_options import PathOption

RECIPES = REPOSITORY / "recipes"
# The function ``(recipe, arguments)`` of each step, by the ``kind`` in ``rows.yaml``.
_TRANSLATION = {"train": "translation.train:train_command", "eval": "translation.train:eval_command"}
_HEADLINES = {**_TRANSLATION, "eval": "headlines.evaluate:main"}
KINDS = {
    "translation": {"preprocess": "translation.preprocess:main", **_TRANSLATION},
    "multi30k": {"preprocess": "translation.multi30k:main", **_TRANSLATION},
    "agnews": {"preprocess": "headlines.preprocess:prepare_news", **_HEADLINES},
    "gigaword": {"preprocess": "headlines.preprocess:prepare_gigaword", **_HEADLINES},
    "language_model": {
        "preprocess": "language_model:preprocess",
        "train": "language_model:train_command",
        "eval": "language_model:eval_command",
    },
    "reconstruction": {
        "preprocess": "glove_reconstruction.preprocess:main",
        "train": "glove_reconstruction.train:main",
        "eval": "glove_reconstruction.evaluate:main",
    },
    "shrink": {
        "preprocess": "shrink_a_model.preprocess:main",
        "train": "shrink_a_model.train:main",
        "eval": "shrink_a_model.evaluate:main",
    },
    "quickstart": {"run": "quickstart.run:main"},
}


@dataclass(frozen=True)
class Recipe:
    """A recipe, or its tiny version for ``--smoke``.

    Attributes:
        folder: scripts and settings; its name is the name of the recipe.
        is_smoke: use tiny rows, and a separate folder ``smoke`` for runs.
    """

    folder: Path
    is_smoke: bool = False

    @property
    def name(self) -> str:
        """The name of the recipe."""
        return self.folder.name

    @property
    def title(self) -> str:
        """The title of its README, or its name."""
        readme = self.folder / "README.md"
        first = readme.read_text(encoding="utf-8").partition("\n")[0] if readme.is_file() else ""
        return first.lstrip("# ").strip() or self.name

    @property
    def home(self) -> Path:
        """The output folder: ``$RUNS/NAME``, with ``--smoke`` ``$RUNS/NAME/smoke``."""
        home = runs_folder() / self.name
        return home / SMOKE_FOLDER if self.is_smoke else home

    @property
    def data(self) -> Path:
        """The folder of the prepared data."""
        return self.home / "data"

    @property
    def rows(self) -> dict[str, Row]:
        """The rows by name; with ``--smoke``, see `recipes.common.smoke.smoke_row`.

        Raises:
            UserError: ``rows.yaml`` is invalid.
        """
        rows = read_rows(self.folder)
        return {name: smoke_row(row) for name, row in rows.items()} if self.is_smoke else rows

    def row(self, name: str) -> Row:
        """Return a row.

        Raises:
            UserError: it does not exist.
        """
        if name not in self.rows:
            raise UserError(f"{self.name} has no row {name!r}; there are: {', '.join(self.rows)}")
        return self.rows[name]

    def smoke(self) -> Recipe:
        """Return the version for ``--smoke``."""
        return replace(self, is_smoke=True)

    def command(self, script: str, *arguments: str) -> str:
        """Return the command line of a script, for messages."""
        return " ".join([f"recipes/{self.name}/{script}", *arguments, *([SMOKE] if self.is_smoke else [])])

    def describe_data(self, folder: Path) -> dict[str, Any]:
        """Read ``data.json`` in a folder of prepared data; it is written last.

        Raises:
            UserError: the data are not prepared.
        """
        path = folder / "data.json"
        content = read_json(path)
        if not isinstance(content, dict) or "checksum" not in content:
            pieces = [folder.name] if folder.parent == self.data else []
            command = self.command("preprocess.sh", *pieces)
            raise UserError(f"{folder}: no prepared data; run {command}")
        return content

    def with_files(self, embedding: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Return the options of an embedding with the paths of its files in `folder`."""
        method = embedding.get("method")
        names = se.options(method).file_options if isinstance(method, str) and method in se.methods() else ()
        files = {name: str(folder / embedding[name]) for name in names if name in embedding}
        return {**embedding, **files}


def runs_folder() -> Path:
    """Return the folder of all runs: ``$RUNS``, or ``runs`` in the repository."""
    return Path(os.environ.get("RUNS") or REPOSITORY / "runs").absolute()


def recipe_names(folder: Path = RECIPES) -> list[str]:
    """Return the names of all recipes in `folder`: folders with a README and a script."""
    return sorted(
        readme.parent.name for readme in folder.glob("*/README.md") if list(readme.parent.glob("*.sh"))
    )


def find_recipe(name: str) -> Recipe:
    """Return a recipe.

    Raises:
        UserError: it does not exist.
    """
    if name not in recipe_names():
        raise UserError(f"no recipe {name!r}; there are: {', '.join(recipe_names())}")
    return Recipe(RECIPES / name)


def run_step(recipe: Recipe, step: str, arguments: Sequence[str]) -> None:
    """Run a step of a recipe.

    Raises:
        UserError: the recipe has no such step, or the step fails.
    """
    steps = KINDS[read_file(recipe.folder / FILE)["kind"]]
    if step not in steps:
        raise UserError(f"{recipe.name} has no step {step!r}; it has {', '.join(steps)}")
    module, _, function = steps[step].partition(":")
    getattr(importlib.import_module(f"recipes.{module}"), function)(recipe, arguments)


def parse_row(recipe: Recipe, usage: str, arguments: Sequence[str]) -> tuple[Recipe, Row, list[str]]:
    """Parse the command line ``ROW [--smoke] [option ...]``.

    ``--help`` prints `usage` and the rows and exits with status 0; without a row, it exits with status 2.

    Args:
        recipe: the recipe.
        usage: usage, which may contain ``{recipe}``.
        arguments: arguments of the command line.

    Returns:
        The recipe (for ``--smoke``, see `Recipe.smoke`), the row, and the other options.

    Raises:
        UserError: there is no such row.
    """
    wants_help = any(argument in ("-h", "--help") for argument in arguments[:1])
    if wants_help or not arguments:
        text = f"{usage.format(recipe=recipe.name)}\n\nROW is one of: {', '.join(recipe.rows)}"
        print(text, file=sys.stdout if wants_help else sys.stderr)
        raise SystemExit(0 if wants_help else 2)
    name, *options = arguments
    if SMOKE in options:
        recipe = recipe.smoke()
    return recipe, recipe.row(name), [option for option in options if option != SMOKE]


def preprocess_options(
    recipe: Recipe, description: str | None, arguments: Sequence[str]
) -> argparse.Namespace:
    """Parse the command line of a preprocess.sh with the options ``--settings FILE`` and ``--smoke`` only."""
    parser = Parser("preprocess.sh", description=description)
    default = recipe.folder / "data.yaml"
    parser.add_argument("--settings", type=PathOption.FILE, default=default, help="default: %(default)s")
    parser.add_argument(SMOKE, action="store_true", help=SMOKE_HELP)
    return parser.parse_args(arguments)
