"""``python -m recipes``: the steps of the recipes, and tables of their rows and results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from recipes.common.recipe import find_recipe, recipe_names, run_step, runs_folder
from recipes.common.tools import run_main
from recipes.layers import layers
from shared_embeddings.utils.command_line import Parser, positive
from shared_embeddings.utils.path_options import PathOption, check_paths

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
    recipes = [find_recipe(options.task)] if options.task else [find_recipe(name) for name in recipe_names()]
    for recipe in recipes:
        for row in recipe.rows.values():
            source = (row.paper or {}).get("source", "")
            print(f"{recipe.name} {row.name}" + (f": {source}" if source else ""))


def table(arguments: Sequence[str]) -> None:
    """Write the tables of a recipe into its README, and plot its results."""
    parser = Parser("python -m recipes table", description=table.__doc__)
    parser.add_argument("task", help="a recipe")
    parser.add_argument(
        "--results",
        type=PathOption.SOURCE,
        help="results.jsonl, or a folder with one, such as runs/TASK (default: the recipe's)",
    )
    parser.add_argument(
        "--readme", type=PathOption.UPDATED, help="README with the markers (default: the recipe's)"
    )
    options = parser.parse_args(arguments)
    from recipes.common.results import FILE, read_results
    from recipes.common.table import update_tables

    recipe = find_recipe(options.task)
    if options.results is not None:
        read_results(options.results)  # fails where there are none
    results = options.results or recipe.folder / FILE
    print(update_tables(recipe, results, options.readme or recipe.folder / "README.md"))


def sizes(arguments: Sequence[str]) -> None:
    """Print the size of the embedding of each row of a recipe, from the papers' formulas."""
    parser = Parser("python -m recipes sizes", description=sizes.__doc__)
    parser.add_argument("task", help="a recipe")
    parser.add_argument("--vocabulary", type=positive, required=True, help="lines of the vocabulary file")
    options = parser.parse_args(arguments)
    from recipes.common.recipe import describe_size

    for name, row in find_recipe(options.task).rows.items():
        print(f"{name}: {describe_size(row, options.vocabulary)}")


def ledger(arguments: Sequence[str]) -> None:
    """Compare every model size in the papers' tables with that of the same model built here."""
    parser = Parser("python -m recipes ledger", description=ledger.__doc__)
    parser.add_argument("--json", action="store_true", help="print a list of JSON objects")
    options = parser.parse_args(arguments)
    from recipes.papers import describe_ledger, read_papers

    print(describe_ledger(read_papers(), as_json=options.json))


def coverage(arguments: Sequence[str]) -> None:
    """List every row of the papers' tables with the row that trains it, or the reason why there is none."""
    parser = Parser("python -m recipes coverage", description=coverage.__doc__)
    parser.add_argument("--write", action="store_true", help="also write the tables into recipes/README.md")
    options = parser.parse_args(arguments)
    from recipes.common.table import update_readme
    from recipes.papers import MARKER, README, coverage_tables, list_coverage, read_papers

    if options.write:
        update_readme(README, MARKER, coverage_tables(read_papers()))
    for line in list_coverage(read_papers()):
        print(line)


def run_rows(arguments: Sequence[str]) -> None:
    """Train and evaluate rows of a recipe, several at a time."""
    from recipes.run_rows import main

    main(arguments)


def report(arguments: Sequence[str]) -> None:
    """Write a report that compares all results with the papers, as Markdown and as an HTML page."""
    from recipes.report.contents import main

    main(arguments)


def plot(arguments: Sequence[str]) -> None:
    """Plot the loss, perplexity and BLEU of training runs of lm_train and onmt_train as PNG."""
    parser = Parser("python -m recipes plot", description=plot.__doc__)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", type=PathOption.SOURCE, help="folder of a run, or its log"
    )
    parser.add_argument("--output", type=PathOption.NEW_FILE, required=True, help="the picture")
    parser.add_argument("--force", action="store_true", help="overwrite an existing picture")
    options = parser.parse_args(arguments)
    from recipes.common.plot import plot_runs

    plot_runs(options.runs, options.output)
    print(options.output)


def figures(arguments: Sequence[str]) -> None:
    """Draw the papers' figures that plot their tables (UnClE, Figures 3 to 5), with our results beside."""
    parser = Parser("python -m recipes figures", description=figures.__doc__)
    parser.add_argument(
        "--runs", type=PathOption.SOURCE, help="folder that recipes write to (default: $RUNS, else runs)"
    )
    parser.add_argument("--output", type=PathOption.FOLDER, required=True, help="folder of the pictures")
    parser.add_argument("--force", action="store_true", help="overwrite existing pictures")
    options = parser.parse_args(arguments)
    from recipes.papers import read_papers
    from recipes.report.lines import draw, measured_lines, points_of

    wanted = [(paper, table) for paper in read_papers() for table in paper.tables if table.plot]
    names = [f"{table.paper} {table.name}.png".lower().replace(" ", "_") for _, table in wanted]
    places = [options.output / name for name in names]
    check_paths({f"--output ({path.name})": (PathOption.NEW_FILE, path) for path in places}, options.force)
    runs = options.runs or runs_folder()
    lines = measured_lines(runs.absolute() if runs.is_dir() else None)
    for (paper, table), path in zip(wanted, places, strict=True):
        draw(table, points_of(table, paper.tables, lines), path)
        print(path)


def smoke(arguments: Sequence[str]) -> None:
    """Run all steps of every recipe on small generated data."""
    from recipes.smoke import main

    main(arguments)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "list": list_rows,
    "run": run_rows,
    "table": table,
    "sizes": sizes,
    "report": report,
    "plot": plot,
    "figures": figures,
    "coverage": coverage,
    "ledger": ledger,
    "layers": layers,
    "smoke": smoke,
}


def usage() -> str:
    """Return the text of ``--help``."""
    lines = [f"  {name:<10}{(command.__doc__ or '').rstrip('.')}" for name, command in COMMANDS.items()]
    return USAGE.format(recipes=", ".join(recipe_names()), commands="\n".join(lines))


def main(arguments: Sequence[str]) -> None:
    """Run the command or step of the command line."""
    first, *rest = [*arguments, ""]
    if first in ("-h", "--help", ""):
        print(usage(), file=sys.stdout if first else sys.stderr)
        raise SystemExit(0 if first else 2)
    if first in COMMANDS:
        COMMANDS[first](arguments[1:])
        return
    run_step(find_recipe(first), rest[0], arguments[2:])


def program(arguments: Sequence[str]) -> str:
    """Return the prefix of error messages: the step or the command."""
    words = [word for word in arguments[:2] if not word.startswith("-")]
    return words[-1] if len(words) == 2 and words[0] not in COMMANDS else (words or ["recipes"])[0]


if __name__ == "__main__":
    raise SystemExit(run_main(program(sys.argv[1:]), main))
