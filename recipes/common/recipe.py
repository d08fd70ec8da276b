"""A recipe: where it keeps its rows, its data and its runs, and the steps that it has."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import shared_embeddings as se
from recipes.common.results import REPOSITORY, SMOKE_FOLDER
from recipes.common.rows import Row, read_file, read_rows
from recipes.common.smoke import SMOKE, SMOKE_HELP, smoke_row
from recipes.common.tools import read_json
from shared_embeddings.errors import UserError
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.path_options import PathOption

RECIPES = REPOSITORY / "recipes"
# The steps of each kind of recipe in their order, and the packages that have those which a recipe does not
# have itself.
STEPS = ("preprocess", "train", "eval")
KINDS = {
    "translation": (STEPS, ("translation",)),
    "headlines": (STEPS, ("headlines", "translation")),
    "language_model": (STEPS, ("language_model",)),
    "reconstruction": (STEPS, ()),
    "shrink": (STEPS, ()),
    "quickstart": (("run",), ()),
}
_MODULES = {"eval": "evaluate"}


@dataclass(frozen=True)
class Recipe:
    """A recipe, or what ``--smoke`` makes of it.

    Attributes:
        folder: of its scripts and settings; its name is the recipe's.
        is_smoke: whether its rows are tiny and its runs lie in a folder ``smoke`` of their own.
    """

    folder: Path
    is_smoke: bool = False

    @property
    def name(self) -> str:
        """Name of the recipe."""
        return self.folder.name

    @property
    def title(self) -> str:
        """The title of its README, or its name."""
        readme = self.folder / "README.md"
        first = readme.read_text(encoding="utf-8").partition("\n")[0] if readme.is_file() else ""
        return first.lstrip("# ").strip() or self.name

    @property
    def home(self) -> Path:
        """Folder of everything that it writes: ``$RUNS/NAME``, with ``--smoke`` ``$RUNS/NAME/smoke``."""
        home = runs_folder() / self.name
        return home / SMOKE_FOLDER if self.is_smoke else home

    @property
    def data(self) -> Path:
        """Folder of the prepared data."""
        return self.home / "data"

    @property
    def rows(self) -> dict[str, Row]:
        """Its rows by name; with ``--smoke``, those of `recipes.common.smoke.smoke_row`.

        Raises:
            UserError: ``rows.yaml`` cannot be used.
        """
        rows = read_rows(self.folder)
        return {name: smoke_row(row) for name, row in rows.items()} if self.is_smoke else rows

    def row(self, name: str) -> Row:
        """The row `name`.

        Raises:
            UserError: there is none; the message names all.
        """
        if name not in self.rows:
            raise UserError(f"{self.name} has no row {name!r}; there are: {', '.join(self.rows)}")
        return self.rows[name]

    def smoke(self) -> Recipe:
        """What ``--smoke`` makes of it."""
        return replace(self, is_smoke=True)

    def command(self, script: str, *arguments: str) -> str:
        """The command line of one of its scripts, for a message that asks to run it."""
        return " ".join([f"recipes/{self.name}/{script}", *arguments, *([SMOKE] if self.is_smoke else [])])

    def describe_data(self, folder: Path) -> dict[str, Any]:
        """The content of ``data.json`` in a folder of prepared data, which is written last.

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
        """The options of an embedding with its files, which preprocess.sh has written below `folder`."""
        method = embedding.get("method")
        names = se.file_options(method) if isinstance(method, str) and method in se.methods() else ()
        files = {name: str(folder / embedding[name]) for name in names if name in embedding}
        return {**embedding, **files}


def runs_folder() -> Path:
    """Folder of all runs: ``$RUNS``, or ``runs`` in the repository."""
    return Path(os.environ.get("RUNS") or REPOSITORY / "runs").absolute()


def recipe_names(folder: Path = RECIPES) -> list[str]:
    """Names of all recipes in `folder`: the folders with a README and a script."""
    return sorted(
        readme.parent.name for readme in folder.glob("*/README.md") if list(readme.parent.glob("*.sh"))
    )


def find_recipe(name: str) -> Recipe:
    """The recipe `name`.

    Raises:
        UserError: there is none; the message names all.
    """
    if name not in recipe_names():
        raise UserError(f"no recipe {name!r}; there are: {', '.join(recipe_names())}")
    return Recipe(RECIPES / name)


def step_module(recipe: Recipe, step: str) -> str:
    """The module whose ``main(recipe, arguments)`` is a step: the recipe's own, or that of its kind.

    Raises:
        UserError: the recipe has no such step.
    """
    steps, packages = KINDS[read_file(recipe.folder / "rows.yaml")["kind"]]
    if step not in steps:
        raise UserError(f"{recipe.name} has no step {step!r}; it has {', '.join(steps)}")
    names = [f"recipes.{package}.{_MODULES.get(step, step)}" for package in (recipe.name, *packages)]
    return next(name for name in names if importlib.util.find_spec(name))


def parse_row(recipe: Recipe, usage: str, arguments: Sequence[str]) -> tuple[Recipe, Row, list[str]]:
    """Take the command line ``ROW [--smoke] [option ...]`` apart.

    ``--help`` prints `usage` and the rows and exits with 0; without a row, that goes to stderr with status 2.

    Args:
        recipe: whose row it is.
        usage: may name ``{recipe}``.
        arguments: of the command line.

    Returns:
        The recipe, with ``--smoke`` that of `Recipe.smoke`; its row; and the other options.

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
    """The options ``settings``, a file, and ``smoke`` of a preprocess.sh that has no others."""
    parser = Parser("preprocess.sh", description=description)
    default = recipe.folder / "data.yaml"
    parser.add_argument("--settings", type=PathOption.FILE, default=default, help="default: %(default)s")
    parser.add_argument(SMOKE, action="store_true", help=SMOKE_HELP)
    return parser.parse_args(arguments)
