"""The report as one HTML page that needs nothing from anywhere else, and no script."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from html import escape

from recipes.report.document import (
    Block,
    Code,
    Details,
    Heading,
    Items,
    Paragraph,
    Picture,
    Table,
    is_number,
)
from recipes.report.measures import NOT_RUN
from recipes.report.style import CSS

# A cell of more letters gets a wide column, and is broken into lines.
_LONG = 34


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
        f"<style>{CSS}</style>",
        "</head>",
        "<body>",
        "<header>",
        *(_block(block) for block in blocks[:first]),
        "</header>",
        *_contents(blocks),
        "<main>",
        *(_block(block) for block in blocks[first:]),
        "</main>",
        "</body>",
        "</html>",
    ]
    return "\n".join(lines) + "\n"


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
    yield '<nav aria-label="Contents"><details open><summary>Contents</summary><ol>'
    for part, inner in parts:
        below = "".join(f"<li>{_link(heading)}</li>" for heading in inner)
        yield f"<li>{_link(part)}{f'<ol>{below}</ol>' if below else ''}</li>"
    yield "</ol></details></nav>"


def _link(heading: Heading) -> str:
    """A link to a heading."""
    return f'<a href="#{escape(heading.anchor)}">{escape(heading.text)}</a>'


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
        case Picture():
            return _picture(block)
        case Code():
            return f'<pre tabindex="0"><code>{escape(block.text)}</code></pre>'
        case Details():
            inner = "\n".join(_block(each) for each in block.blocks)
            return f"<details><summary>{escape(block.summary)}</summary>\n{inner}\n</details>"


def _picture(picture: Picture) -> str:
    """A picture inside the page."""
    data = base64.b64encode(picture.svg.encode()).decode()
    return (
        f'<figure><img src="data:image/svg+xml;base64,{data}" alt="{escape(picture.description)}">'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )


def _table(table: Table) -> str:
    """A table in a box of its own that scrolls sideways."""
    number = [any(is_number(row[index]) for row in table.rows) for index in range(len(table.columns))]
    heads = "".join(
        f'<th scope="col"{_class("number" if is_right else "")}>{escape(title)}</th>'
        for title, is_right in zip(table.columns, number, strict=True)
    )
    rows = "\n".join(f"<tr>{_cells(row)}</tr>" for row in table.rows)
    return (
        f'<div class="scroll" role="group" tabindex="0" aria-label="Table by {escape(table.columns[0])}">'
        f"<table><thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>"
    )


def _cells(row: Sequence[str]) -> str:
    """The cells of a row; the first is its head."""
    cells = [f'<th scope="row">{escape(row[0])}</th>']
    for text in row[1:]:
        names = ["none"] * (text == NOT_RUN) + ["long"] * (len(text) > _LONG)
        names += ["number"] * (is_number(text) and len(text) <= _LONG)
        cells.append(f"<td{_class(' '.join(names))}>{escape(text)}</td>")
    return "".join(cells)


def _class(names: str) -> str:
    """The attribute that gives an element its classes, if any."""
    return f' class="{names}"' if names else ""
