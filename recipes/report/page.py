"""The report as one HTML page that works offline.

``page.js`` draws charts when they come into sight, and sorts and filters tables.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from recipes.common.table import NOT_RUN
from recipes.report.document import (
    NONE,
    Block,
    Chart,
    Code,
    Details,
    Heading,
    Items,
    Paragraph,
    Table,
    charts,
)

_FOLDER = Path(__file__).parent
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
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        # Browsers ask for /favicon.ico where a page names none.
        '<link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title>",
        f"<style>{_read('page.css')}</style>",
        "</head>",
        "<body>",
        "<header>",
        _blocks(blocks[:first]),
        "</header>",
        *_contents(blocks),
        "<main>",
        _blocks(blocks[first:]),
        "</main>",
        *_scripts(blocks),
        "</body>",
        "</html>",
    ]
    return "\n".join(lines) + "\n"


def _read(name: str) -> str:
    """A file beside this module."""
    return (_FOLDER / name).read_text(encoding="utf-8")


@functools.cache
def vega() -> str:
    """Vega-Lite with what it needs, as JavaScript."""
    from vl_convert import javascript_bundle

    return javascript_bundle("window.vegaEmbed = vegaEmbed;")


def _scripts(blocks: Sequence[Block]) -> Iterator[str]:
    """The specifications of the charts, Vega-Lite if there are any, and the script of the page."""
    specs = {chart.name: chart.spec for chart in charts(blocks)}
    if specs:
        text = json.dumps(specs, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
        yield f'<script type="application/json" id="charts">{text}</script>'
        yield f"<script>{vega()}</script>"
    yield f"<script>{_read('page.js')}</script>"


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
