"""The report as Markdown; its pictures are files beside it."""

from __future__ import annotations

from collections.abc import Sequence

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

PICTURES = "figures"


def as_markdown(blocks: Sequence[Block]) -> str:
    """The blocks as Markdown, with links to ``figures/NAME.svg``; ends in a newline."""
    return "\n\n".join(_block(block) for block in blocks) + "\n"


def _block(block: Block) -> str:
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
        case Picture():
            return f"![{_text(block.description)}]({PICTURES}/{block.name}.svg)\n\n{_text(block.caption)}"
        case Code():
            return f"```\n{block.text}\n```"
        case Details():
            inner = as_markdown(block.blocks)
            return f"<details>\n<summary>{_text(block.summary)}</summary>\n\n{inner}\n</details>"


def _table(table: Table) -> str:
    """A table; columns whose cells are mostly numbers are aligned to the right."""
    right = [sum(is_number(row[i]) for row in table.rows) * 2 > len(table.rows) for i in _columns(table)]
    lines = [table.columns, ["--:" if is_right else "---" for is_right in right], *table.rows]
    return "\n".join(f"| {' | '.join(_text(cell) for cell in cells)} |" for cells in lines)


def _columns(table: Table) -> range:
    """The numbers of a table's columns."""
    return range(len(table.columns))


def _text(text: str) -> str:
    """A text on one line in which nothing is Markdown's or HTML's."""
    for sign in "\\`*_<>[]|":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
