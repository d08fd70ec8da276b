"""``python -m recipes``: the steps of the recipes, and tables of their rows and results."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from recipes.common.recipe import find_recipe, recipe_names, run_step
from recipes.common.tools import run_main

USAGE = """usage: python -m recipes TASK STEP [ROW] [--smoke] [option ...]
       python -m recipes COMMAND [option ...]

TASK is a recipe: {recipes}
STEP is preprocess, train or eval (run for quickstart); its options: python -m recipes TASK STEP --help

commands:
  list      List the rows of one or all recipes, with the rows of papers that they reproduce
  run       Train and evaluate rows of a recipe, several at a time
  table     Write the tables of a recipe into its README, and plot its results
  report    Write a report that compares all results with the papers, as Markdown with pictures
  layers    Plot the correlations of the layers of an embedding; print the cosines of words in each
  smoke     Run all steps of every recipe on small generated data"""
COMMANDS = {
    "list": "common.recipe:list_rows",
    "run": "run:run",
    "table": "common.table:main",
    "report": "report:main",
    "layers": "layers:layers",
    "smoke": "run:smoke",
}


def main(arguments: Sequence[str]) -> None:
    """Run the command or step of the command line."""
    first, *rest = [*arguments, ""]
    if first in COMMANDS:
        module, _, function = COMMANDS[first].partition(":")
        getattr(importlib.import_module(f"recipes.{module}"), function)(arguments[1:])
    elif first in ("-h", "--help", ""):
        print(USAGE.format(recipes=", ".join(recipe_names())), file=sys.stdout if first else sys.stderr)
        raise SystemExit(0 if first else 2)
    else:
        run_step(find_recipe(first), rest[0], arguments[2:])


if __name__ == "__main__":
    # Messages begin with the step or the command.
    words = [word for word in sys.argv[1:3] if not word.startswith("-")] or ["recipes"]
    raise SystemExit(run_main(words[0] if words[0] in COMMANDS else words[-1], main))
