"""``python -m recipes``: the steps of the recipes, and tables of their rows and results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from recipes.common.recipe import find_recipe, recipe_names, run_step
from recipes.common.tools import run_main
from recipes.layers import layers
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.paths import existing_path

USAGE = """usage: python -m recipes TASK STEP [ROW] [--smoke] [option ...]
       python -m recipes COMMAND [option ...]

TASK is a recipe: {recipes}
STEP is preprocess, train or eval (run for quickstart); its options: python -m recipes TASK STEP --help

commands:
{commands}"""


def list_rows(arguments: Sequence[str]) -> None:
    """List the rows of one or all recipes, with the rows of papers that they reproduce."""
    parser = Parser("python -m recipes list", description=list_rows.__doc__)
    parser.add_argument("task", nargs="?", help="a recipe (default: all)")
    options = parser.parse_args(arguments)
    for name in [options.task] if options.task else recipe_names():
        for row in find_recipe(name).rows.values():
            source = (row.paper or {}).get("source", "")
            print(f"{name} {row.name}" + (f": {source}" if source else ""))


def run(arguments: Sequence[str]) -> None:
    """Train and evaluate rows of a recipe, several at a time."""
    from recipes.run_rows import main

    main(arguments)


def table(arguments: Sequence[str]) -> None:
    """Write the tables of a recipe into its README, and plot its results."""
    parser = Parser("python -m recipes table", description=table.__doc__)
    parser.add_argument("task", help="a recipe")
    parser.add_argument(
        "--results",
        type=existing_path,
        help="results.jsonl, or a folder with one, such as runs/TASK (default: the recipe's)",
    )
    options = parser.parse_args(arguments)
    from recipes.common.results import FILE, read_results
    from recipes.common.table import update_tables

    recipe = find_recipe(options.task)
    if options.results is not None:
        read_results(options.results)  # fails where there are none
    print(update_tables(recipe, options.results or recipe.folder / FILE, recipe.folder / "README.md"))


def report(arguments: Sequence[str]) -> None:
    """Write a report that compares all results with the papers, as Markdown with pictures."""
    from recipes.report import main

    main(arguments)


def smoke(arguments: Sequence[str]) -> None:
    """Run all steps of every recipe on small generated data."""
    from recipes.smoke import main

    main(arguments)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "list": list_rows,
    "run": run,
    "table": table,
    "report": report,
    "layers": layers,
    "smoke": smoke,
}


def main(arguments: Sequence[str]) -> None:
    """Run the command or step of the command line."""
    first, *rest = [*arguments, ""]
    if first in COMMANDS:
        COMMANDS[first](arguments[1:])
    elif first in ("-h", "--help", ""):
        lines = [f"  {name:<10}{(command.__doc__ or '').rstrip('.')}" for name, command in COMMANDS.items()]
        text = USAGE.format(recipes=", ".join(recipe_names()), commands="\n".join(lines))
        print(text, file=sys.stdout if first else sys.stderr)
        raise SystemExit(0 if first else 2)
    else:
        run_step(find_recipe(first), rest[0], arguments[2:])


if __name__ == "__main__":
    # Messages begin with the step or the command.
    words = [word for word in sys.argv[1:3] if not word.startswith("-")] or ["recipes"]
    raise SystemExit(run_main(words[0] if words[0] in COMMANDS else words[-1], main))
