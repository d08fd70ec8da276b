"""``python -m recipes report``: all results as Markdown, and as one HTML page that works offline.

The script in ``build.html`` draws charts when they come into sight, and sorts and filters tables.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from tqdm import tqdm

from recipes.common.recipe import RECIPES, Recipe, recipe_names, runs_folder
from recipes.common.table import NOT_RUN
from recipes.papers.ledger import figures
from recipes.report import contents
from recipes.report.charts import as_svg
from recipes.report.document import (
    FIGURES,
    NONE,
    Block,
    Chart,
    Code,
    Details,
    Heading,
    Items,
    Paragraph,
    Table,
    as_markdown,
    charts,
)
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
    write_text(output / "report.html", as_page(blocks))
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


# Tables of more rows get a field that filters them.
_MANY_ROWS = 8


def as_page(blocks: Sequence[Block]) -> str:
    """The whole page.

    Args:
        blocks: a heading of level 1, an introduction, then parts that begin with a heading of level 2.
    """
    first = next(
        (i for i, block in enumerate(blocks) if isinstance(block, Heading) and block.level == 2), len(blocks)
    )
    title = next((block.text for block in blocks if isinstance(block, Heading)), "")
    body = [
        "<header>",
        _blocks(blocks[:first]),
        "</header>",
        *_contents(blocks),
        "<main>",
        _blocks(blocks[first:]),
        "</main>",
        *_charts(blocks),
    ]
    parts = {"@title@": escape(title), "@body@": "\n".join(body)}
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    return re.sub("|".join(parts), lambda mark: parts[mark[0]], template)


@functools.cache
def vega() -> str:
    """Vega-Lite with what it needs, as JavaScript."""
    from vl_convert import javascript_bundle

    return javascript_bundle("window.vegaEmbed = vegaEmbed;")


def _charts(blocks: Sequence[Block]) -> Iterator[str]:
    """The specifications of the charts, and Vega-Lite, if there are any."""
    specs = {chart.name: chart.spec for chart in charts(blocks)}
    if specs:
        text = json.dumps(specs, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
        yield f'<script type="application/json" id="charts">{text}</script>'
        yield f"<script>{vega()}</script>"


def _contents(blocks: Sequence[Block]) -> Iterator[str]:
    """The table of contents: links to headings of level 2, and below them those of level 3."""
    parts: list[tuple[Heading, list[Heading]]] = []
    for block in blocks:
        if isinstance(block, Heading) and block.level == 2:
            parts.append((block, []))
        elif isinstance(block, Heading) and block.level == 3 and parts:
            parts[-1][1].append(block)
    if not parts:
        return
    yield '<nav aria-label="Contents"><details><summary>Contents</summary><ol>'
    for part, inner in parts:
        below = "".join(f"<li>{_link(heading)}</li>" for heading in inner)
        yield f"<li>{_link(part)}{f'<ol>{below}</ol>' if below else ''}</li>"
    yield "</ol></details></nav>"


def _link(heading: Heading) -> str:
    """A link to a heading."""
    return f'<a href="#{escape(heading.anchor)}">{escape(heading.text)}</a>'


def _blocks(blocks: Sequence[Block]) -> str:
    """Blocks; charts that follow each other are side by side where there is room."""
    found = []
    for is_chart, group in itertools.groupby(blocks, lambda block: isinstance(block, Chart)):
        text = "\n".join(map(_block, group))
        found.append(f'<div class="figures">\n{text}\n</div>' if is_chart else text)
    return "\n".join(found)


def _block(block: Block) -> str:
    """One block."""
    match block:
        case Heading():
            return f'<h{block.level} id="{escape(block.anchor)}">{escape(block.text)}</h{block.level}>'
        case Paragraph():
            return f"<p>{escape(block.text)}</p>"
        case Items():
            return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in block.texts)}</ul>"
        case Table():
            return _table(block)
        case Chart():
            label = f'data-chart="{escape(block.name)}" role="img" aria-label="{escape(block.description)}"'
            return f'<figure class="chart" {label}></figure>'
        case Code():
            return f'<pre tabindex="0"><code>{escape(block.text)}</code></pre>'
        case Details():
            inner = _blocks(block.blocks)
            return f"<details><summary>{escape(block.summary)}</summary>\n{inner}\n</details>"


def _table(table: Table) -> str:
    """A table in a box that scrolls sideways, below a field to filter it and a button for rows not run."""
    numeric = [table.is_numeric(index) for index in range(len(table.columns))]
    heads = "".join(
        f'<th scope="col" class="number"><button>{escape(title)}</button></th>'
        if is_number
        else f'<th scope="col"><button>{escape(title)}</button></th>'
        for title, is_number in zip(table.columns, numeric, strict=True)
    )
    rows = "\n".join(
        f'<tr class="idle">{_cells(row, numeric)}</tr>'
        if number in table.idle
        else f"<tr>{_cells(row, numeric)}</tr>"
        for number, row in enumerate(table.rows)
    )
    name = escape(table.columns[0])
    tools = '<input type="search" placeholder="filter rows" aria-label="filter rows">' * (
        len(table.rows) > _MANY_ROWS
    )
    if table.idle and len(table.idle) < len(table.rows):
        tools += f'<button class="fold">{len(table.idle)} rows not run</button>'
    return (
        f'<div class="table">{tools and f"<p>{tools}</p>"}<div class="scroll" role="group" tabindex="0" '
        f'aria-label="Table by {name}"><table><thead><tr>{heads}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div></div>"
    )


def _cells(row: Sequence[str], numeric: Sequence[bool]) -> str:
    """The cells of a row; the first is its head."""
    cells = [f'<th scope="row">{escape(row[0])}</th>']
    for text, is_number in zip(row[1:], numeric[1:], strict=True):
        names = ["number"] * is_number + ["none"] * (text in (NOT_RUN, NONE))
        label = f' class="{" ".join(names)}"' if names else ""
        cells.append(f"<td{label}>{escape(text)}</td>")
    return "".join(cells)
