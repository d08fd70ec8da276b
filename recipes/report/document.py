"""What a report is made of, and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from recipes.common.table import NOT_RUN

NONE = "–"
# Folder of the charts of a Markdown report.
FIGURES = "figures"


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
        return index > 0 and bool(cells) and all(map(is_number, cells))


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


def is_number(text: str) -> bool:
    """Whether a cell begins as a number does."""
    return re.match(r"[+\-−]?\d", text) is not None


def charts(blocks: Sequence[Block]) -> Iterator[Chart]:
    """All charts, those in `Details` included."""
    for block in blocks:
        if isinstance(block, Chart):
            yield block
        elif isinstance(block, Details):
            yield from charts(block.blocks)


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
            return _table(block)
        case Chart():
            return f"![{_text(block.description)}]({FIGURES}/{block.name}.svg)"
        case Code():
            return f"```\n{block.text}\n```"
        case Details():
            inner = as_markdown(block.blocks)
            return f"<details>\n<summary>{_text(block.summary)}</summary>\n\n{inner}\n</details>"


def _table(table: Table) -> str:
    """A table; columns of numbers are aligned to the right."""
    sides = ["--:" if table.is_numeric(index) else "---" for index in range(len(table.columns))]
    lines = [table.columns, sides, *table.rows]
    return "\n".join(f"| {' | '.join(_text(cell) for cell in cells)} |" for cells in lines)


def _text(text: str) -> str:
    """A text on one line in which nothing is Markdown's or HTML's."""
    for sign in "\\`*_<>[]|":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
