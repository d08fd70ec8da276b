"""``python -m recipes report``: the report of all results, in ``runs/report`` or another folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recipes.common.recipe import RECIPES, Recipe, recipe_names, runs_folder
from recipes.papers.ledger import figures
from recipes.report import contents, markdown, page
from recipes.report.collect import LeftOut, collect, committed, of_runs
from recipes.report.document import Block, Details, Picture
from recipes.report.lines import lines_of
from shared_embeddings.errors import UserError
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.files import write_text
from shared_embeddings.utils.path_options import PathOption


def title(folder: Path) -> str:
    """The title of a recipe's README."""
    first = (folder / "README.md").read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ").strip() or folder.name


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
    found, left_out = collect(files, [folder.name for folder in folders])
    tasks = []
    replaced: list[LeftOut] = []
    for folder in folders:
        lines, others = lines_of(Recipe(folder), found)
        tasks.append(contents.Task(folder, title(folder), lines))
        replaced += others
    return contents.report(tasks, figures(), [*left_out, *replaced])


def write(blocks: Sequence[Block], output: Path) -> None:
    """Write ``report.md``, its pictures, and ``report.html`` into a folder."""
    for picture in _pictures(blocks):
        write_text(output / markdown.PICTURES / f"{picture.name}.svg", picture.svg)
    write_text(output / "report.md", markdown.as_markdown(blocks))
    write_text(output / "report.html", page.as_page(blocks))


def _pictures(blocks: Sequence[Block]) -> list[Picture]:
    """All pictures, those that are folded away included."""
    found: list[Picture] = []
    for block in blocks:
        if isinstance(block, Picture):
            found.append(block)
        elif isinstance(block, Details):
            found += _pictures(block.blocks)
    return found


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
