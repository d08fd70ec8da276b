"""``python -m recipes report``: the report of all results, in ``runs/report`` or another folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from recipes.common.recipe import RECIPES, Recipe, recipe_names, runs_folder
from recipes.papers.ledger import figures
from recipes.report import contents, page
from recipes.report.charts import as_svg
from recipes.report.document import FIGURES, Block, as_markdown, charts
from recipes.report.lines import LeftOut, collect, committed, lines_of, of_runs
from shared_embeddings.errors import UserError
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.files import write_text
from shared_embeddings.utils.path_options import PathOption


def build(recipes: Path, runs: Path | None) -> list[Block]:
    """The report of the recipes in a folder and of what was run.

    Args:
        recipes: folder of the recipes.
        runs: folder that recipes have written to, ``$RUNS``; None without one.

    Raises:
        UserError: the rows of a recipe cannot be read.
    """
    folders = [recipes / name for name in recipe_names(recipes)]
    files = [*committed(recipes), *(of_runs(runs) if runs is not None else ())]
    found, left_out = collect(
        tqdm(files, "reading results", disable=None), [folder.name for folder in folders]
    )
    tasks = []
    replaced: list[LeftOut] = []
    for recipe in map(Recipe, folders):
        lines, others = lines_of(recipe, found)
        tasks.append(contents.Task(recipe.folder, recipe.title, lines))
        replaced += others
    return contents.report(tasks, figures(), [*left_out, *replaced])


def write(blocks: Sequence[Block], output: Path) -> None:
    """Write ``report.html``, ``report.md`` and its charts into a folder."""
    write_text(output / "report.html", page.as_page(blocks))
    write_text(output / "report.md", as_markdown(blocks))
    for chart in tqdm(list(charts(blocks)), "charts of report.md", disable=None):
        write_text(output / FIGURES / f"{chart.name}.svg", as_svg(chart.spec))


def main(arguments: Sequence[str]) -> None:
    """Write the report of the results in the repository and in $RUNS, as Markdown and as an HTML page."""
    parser = Parser("python -m recipes report", description=main.__doc__)
    parser.add_argument(
        "--runs", type=PathOption.SOURCE, help="folder that recipes write to (default: $RUNS, else runs)"
    )
    parser.add_argument(
        "--output", type=PathOption.FOLDER, help="folder of the report (default: report in that folder)"
    )
    options = parser.parse_args(arguments)
    if options.runs is not None and not options.runs.is_dir():
        raise UserError(
            f"--runs {options.runs}: no such folder; give the folder that recipes have written to"
        )
    runs = (options.runs or runs_folder()).absolute()
    output = options.output or runs / "report"
    blocks = build(RECIPES, runs if runs.is_dir() else None)
    try:
        write(blocks, output)
    except OSError as error:
        raise UserError(f"{output}: the report cannot be written: {error.strerror or error}") from error
    print(f"report: {output / 'report.html'} and {output / 'report.md'}")
