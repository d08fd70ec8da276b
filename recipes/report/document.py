"""What a report is made of; as Markdown, and as one HTML page that works offline, by ``document.html``.

The script in the page draws charts when they come into sight, and sorts and filters tables.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from jinja2 import Environment, FileSystemLoader

from recipes.common.table import NONE, NOT_RUN

# Folder of the charts of a Markdown report.
FIGURES = "figures"
# Tables of more rows get a field that filters them.
_MANY_ROWS = 8


@dataclass(frozen=True)
class Heading:
    """A heading; those of level 2 and 3 are listed in the table of contents.

    Attributes:
        level: 1 for the title of the page, 2 for its parts, and so on.
        text: what it says.
        anchor: by which links find it.
    """

    level: int
    text: str
    anchor: str


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of plain text."""

    text: str


@dataclass(frozen=True)
class Items:
    """A list of plain texts."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table of plain texts; columns of numbers are aligned to the right.

    Attributes:
        columns: their titles, units included; the first column names the row.
        rows: of as many cells.
        idle: numbers of the rows that are folded away, since they were not run.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    idle: Collection[int] = ()

    def is_numeric(self, index: int) -> bool:
        """Whether a column has numbers, and nothing else but signs that there is none."""
        cells = [row[index] for row in self.rows if row[index] not in (NONE, NOT_RUN)]
        return index > 0 and bool(cells) and all(re.match(r"[+\-−]?\d", cell) for cell in cells)


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        name: of its file, without an ending.
        spec: its Vega-Lite specification.
        description: what it shows, for people who do not see it.
    """

    name: str
    spec: Mapping[str, Any]
    description: str


@dataclass(frozen=True)
class Code:
    """Lines of a command line."""

    text: str


@dataclass(frozen=True)
class Details:
    """Blocks that are folded below a summary line."""

    summary: str
    blocks: Sequence[Block]


Block: TypeAlias = "Heading | Paragraph | Items | Table | Chart | Code | Details"


def anchor(*texts: str) -> str:
    """An anchor made of texts: small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(texts).lower()).strip("-")


def charts(blocks: Sequence[Block]) -> Iterator[Chart]:
    """All charts, those in `Details` included."""
    for block in blocks:
        if isinstance(block, Chart):
            yield block
        elif isinstance(block, Details):
            yield from charts(block.blocks)


@functools.cache
def vega() -> str:
    """Vega-Lite with what it needs, as JavaScript."""
    from vl_convert import javascript_bundle

    return javascript_bundle("window.vegaEmbed = vegaEmbed;")


def as_page(blocks: Sequence[Block]) -> str:
    """The whole page.

    Args:
        blocks: a heading of level 1, an introduction, then parts that begin with a heading of level 2.
    """
    parts: list[tuple[Heading, list[Heading]]] = []
    for block in blocks:
        if isinstance(block, Heading) and block.level == 2:
            parts.append((block, []))
        elif isinstance(block, Heading) and block.level == 3 and parts:
            parts[-1][1].append(block)
    first = blocks.index(parts[0][0]) if parts else len(blocks)
    specs = {chart.name: chart.spec for chart in charts(blocks)}
    text = json.dumps(specs, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    here = Path(__file__)
    templates = Environment(
        loader=FileSystemLoader(here.parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    templates.tests["kind"] = lambda block, name: type(block).__name__ == name
    return templates.get_template(here.with_suffix(".html").name).render(
        title=next((block.text for block in blocks if isinstance(block, Heading)), ""),
        introduction=blocks[:first],
        contents=parts,
        body=blocks[first:],
        specs=text if specs else "",
        vega=vega() if specs else "",
        missing=(NOT_RUN, NONE),
        many_rows=_MANY_ROWS,
    )


def as_markdown(blocks: Sequence[Block]) -> str:
    """The blocks as Markdown, with links to ``figures/NAME.svg``; ends in a newline."""
    return "\n\n".join(map(_markdown, blocks)) + "\n"


def _markdown(block: Block) -> str:
    """One block, without an end of line."""
    match block:
        case Heading():
            return f"{'#' * block.level} {_text(block.text)}"
        case Paragraph():
            return _text(block.text)
        case Items():
            return "\n".join(f"- {_text(text)}" for text in block.texts)
        case Table():
            sides = ["--:" if block.is_numeric(index) else "---" for index in range(len(block.columns))]
            lines = [block.columns, sides, *block.rows]
            return "\n".join(f"| {' | '.join(map(_text, cells))} |" for cells in lines)
        case Chart():
            return f"![{_text(block.description)}]({FIGURES}/{block.name}.svg)"
        case Code():
            return f"```\n{block.text}\n```"
        case Details():
            inner = as_markdown(block.blocks)
            return f"<details>\n<summary>{_text(block.summary)}</summary>\n\n{inner}\n</details>"


def _text(text: str) -> str:
    """A text on one line in which nothing is Markdown's or HTML's."""
    for sign in "\\`*_<>[]|":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
