"""What a report is made of, before it becomes Markdown or HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias


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
        columns: their titles; the first column names the row.
        rows: of as many cells.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A picture.

    Attributes:
        name: of its file, without an ending.
        svg: its content.
        description: what there is to see, for those who do not see it.
        caption: what stands below it.
    """

    name: str
    svg: str
    description: str
    caption: str


@dataclass(frozen=True)
class Code:
    """Lines of a command line."""

    text: str


@dataclass(frozen=True)
class Details:
    """Blocks that are folded below a summary line."""

    summary: str
    blocks: Sequence[Block]


Block: TypeAlias = "Heading | Paragraph | Items | Table | Picture | Code | Details"


def anchor(*texts: str) -> str:
    """An anchor made of texts: small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(texts).lower()).strip("-")


def is_number(text: str) -> bool:
    """Whether a cell begins as a number does."""
    return re.match(r"[+\-−]?\d", text) is not None
