"""The cells of a grid, and their settings."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import shared_embeddings as se
from recipes.common.recipe import Recipe
from recipes.common.rows import FILE, read_file
from shared_embeddings.errors import UserError
from shared_embeddings.sizing.targets import options_within

DEFAULT = "full"
# Number of words for --smoke.
CHOSEN = 60
FIT_STEPS = "fit_steps"
# Optional parts of a grid.
_OPTIONAL = {FIT_STEPS, "learning_rates", "fixed"}
# Options of ALONE that are set per cell.
_OF_THE_CELL = ("hidden_dim", "seed")
SCHEDULES = ("constant", "cosine")
_TRAINING: dict[str, type] = {"epochs": int, "batch_size": int, "learning_rate": float, "schedule": str}
# A plain table would be exact; ALONE has separate rows.
_NOT_COMPARED = ("standard", "alone")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One embedding to fit to the source vectors.

    Attributes:
        row: row of the table: a row of ALONE, another method, or a row of one size.
        hidden: D_inter of ALONE, which determines the size of other methods; None for rows of one size.
        seed: random seed.
    """

    row: str
    hidden: int | None
    seed: int

    @property
    def name(self) -> str:
        """The name on the command line."""
        return self.row if self.hidden is None else f"{self.row}-{self.hidden}-{self.seed}"


@dataclasses.dataclass(frozen=True)
class Grid:
    """A grid of ``rows.yaml``, which explains each part.

    Optional parts are ``fit_steps`` for methods that are fitted by gradient descent (default: the method's),
    ``learning_rates`` of rows of ALONE that differ from ``training``, and ``fixed``, rows of one size.
    """

    words: int
    alone: dict[str, dict[str, Any]]
    hidden: list[int]
    seeds: list[int]
    training: dict[str, Any]
    fit_steps: int | None = None
    learning_rates: dict[str, float] = dataclasses.field(default_factory=dict)
    fixed: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def training_of(self, row: str) -> dict[str, Any]:
        """Return the training settings of a row of ALONE."""
        rate = self.learning_rates.get(row, self.training["learning_rate"])
        return {**self.training, "learning_rate": rate}

    def rows(self) -> list[str]:
        """Return the rows of the table with several widths: those of ALONE, then the other methods."""
        return [*self.alone, *(method for method in se.methods() if method not in _NOT_COMPARED)]

    def sizes(self) -> list[tuple[str, int | None]]:
        """Return all rows and widths."""
        several = [(row, hidden) for row in self.rows() for hidden in self.hidden]
        return [*several, *((row, None) for row in self.fixed)]

    def cells(self) -> list[Cell]:
        """Return all cells by row, smallest first."""
        return [
            Cell(row, hidden, seed)
            for row, hidden in self.sizes()
            for seed in (self.seeds if row in self.alone else self.seeds[:1])
        ]

    def chosen(self, patterns: Sequence[str]) -> list[Cell]:
        """Return the cells whose names match one of the patterns.

        Raises:
            UserError: a pattern matches none.
        """
        cells = self.cells()
        for pattern in patterns:
            if not any(fnmatchcase(cell.name, pattern) for cell in cells):
                raise UserError(
                    f"no cell matches {pattern!r}; cells are ROW-HIDDEN-SEED, such as "
                    f"{cells[0].name}, see --list"
                )
        return [cell for cell in cells if any(fnmatchcase(cell.name, pattern) for pattern in patterns)]

    def embedding(self, cell: Cell, words: int, dim: int) -> dict[str, Any]:
        """Return the method and options of a cell, for V words in D dimensions.

        Other methods have as many bytes, including codes, as ALONE's parameters at the same width; ALONE's
        filters follow from a seed.

        Raises:
            UserError: the method cannot be that small.
        """
        if cell.hidden is None:
            return {name: value for name, value in self.fixed[cell.row].items() if name != "store"}
        if cell.row in self.alone:
            return {"method": "alone", "hidden_dim": cell.hidden, **self.alone[cell.row], "seed": cell.seed}
        limit = 4 * se.num_parameters(
            "alone", num_embeddings=words, embedding_dim=dim, hidden_dim=cell.hidden
        )
        try:
            options = dict(options_within(cell.row, words, dim, limit))
        except se.OptionError as error:
            raise UserError(f"{cell.name}: {error}") from error
        # A fit determines the classes.
        options.pop("random_classes", None)
        return {"method": cell.row, **options}


def read_grid(recipe: Recipe, name: str = DEFAULT) -> Grid:
    """Return a grid of a recipe's ``rows.yaml``; with ``--smoke``, a small one with the same rows.

    Raises:
        UserError: there is no such grid, or a part is missing, unknown or invalid.
    """
    path = recipe.folder / FILE
    grids = read_file(path).get("grids", {})
    if name not in grids:
        raise UserError(f"{path}: no grid {name!r}; there are: {', '.join(grids)}")
    content = dict(grids[name])
    if "extends" in content:
        content = {**grids[content.pop("extends")], **content}
    grid = parse_grid(f"{path}: {name}", content)
    return smoke_grid(grid) if recipe.is_smoke else grid


def parse_grid(where: str, content: dict[str, Any]) -> Grid:
    """Check the content of a grid.

    Raises:
        UserError: a part is missing, unknown or invalid.
    """
    wanted = {field.name for field in dataclasses.fields(Grid)} - _OPTIONAL
    if not isinstance(content, dict) or set(content) - _OPTIONAL != wanted:
        raise UserError(f"{where}: it must contain {', '.join(sorted(wanted))}, and nothing else")
    for name in ("hidden", "seeds"):
        values = content[name]
        if not isinstance(values, list) or not values or any(type(value) is not int for value in values):
            raise UserError(f"{where}: {name} is {values!r}; it must be a list of integers")
    if type(content["words"]) is not int or content["words"] < 2:
        raise UserError(f"{where}: words is {content['words']!r}; it must be an integer of at least 2")
    steps = content.get(FIT_STEPS, 1)
    if type(steps) is not int or steps < 1:
        raise UserError(f"{where}: {FIT_STEPS} is {steps!r}; it must be an integer of at least 1")
    _check_rows(where, "alone", content["alone"])
    _check_alone(where, content["alone"])
    _check_rows(where, "fixed", content.get("fixed", {}))
    _check_fixed(where, content.get("fixed", {}))
    _check_training(f"{where}: training", content["training"])
    rates = content.get("learning_rates", {})
    if not isinstance(rates, dict) or not set(rates) <= set(content["alone"]):
        raise UserError(f"{where}: learning_rates is {rates!r}; it must be numbers by row of alone")
    for row, rate in rates.items():
        _check_training(f"{where}: learning_rates: {row}", {**content["training"], "learning_rate": rate})
    return Grid(**content)


def _check_rows(where: str, part: str, rows: Any) -> None:
    """Check the rows of ALONE, or those of one size."""
    if not isinstance(rows, dict) or any(not isinstance(row, dict) for row in rows.values()):
        raise UserError(f"{where}: {part} is {rows!r}; it must be options by row")
    if clash := sorted(set(rows) & set(se.methods())):
        raise UserError(f"{where}: {part} has a row {clash[0]!r}, which is a method; give it another name")


def _check_alone(where: str, rows: dict[str, dict[str, Any]]) -> None:
    """Check the options of ALONE's rows."""
    for row, options in rows.items():
        for name in options:
            if name in _OF_THE_CELL:
                raise UserError(
                    f"{where}: alone: {row}: {name!r} is set per cell; rows set options of alone except "
                    f"{' and '.join(_OF_THE_CELL)}"
                )


def _check_fixed(where: str, rows: dict[str, dict[str, Any]]) -> None:
    """Check the methods of rows of one size."""
    for row, options in rows.items():
        if options.get("method") not in se.methods():
            methods = ", ".join(se.methods())
            raise UserError(
                f"{where}: fixed: {row}: method is {options.get('method')!r}; choose one of {methods}"
            )


def _check_training(where: str, training: Any) -> None:
    """Check the settings of the training."""
    if not isinstance(training, dict) or set(training) != set(_TRAINING):
        raise UserError(f"{where}: it must contain {', '.join(_TRAINING)}, and nothing else")
    for name, kind in _TRAINING.items():
        value = training[name]
        if type(value) is not kind or (isinstance(value, (int, float)) and not 0 < value < math.inf):
            raise UserError(f"{where}: {name} is {value!r}; it must be a {kind.__name__} above 0")
    if training["schedule"] not in SCHEDULES:
        raise UserError(f"{where}: schedule is {training['schedule']!r}; it must be {' or '.join(SCHEDULES)}")


def smoke_grid(grid: Grid) -> Grid:
    """Return a grid with the same rows, one narrow width, one seed and few steps."""
    training = {**grid.training, "epochs": 2, "batch_size": 20}
    small: dict[str, Any] = {"words": CHOSEN, "hidden": [16], "seeds": grid.seeds[:1], "fit_steps": 20}
    return dataclasses.replace(grid, **small, training=training)


def add_grid_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--grid`` to a parser."""
    parser.add_argument("--grid", default=DEFAULT, help="a grid of rows.yaml (default: %(default)s)")
