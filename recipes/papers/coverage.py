"""Which row of a recipe trains each row of the papers' tables, as a list and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from recipes.common.rows import FILE
from recipes.papers.ledger import read_figure
from recipes.papers.tables import RECIPES, SCORES, Cell, Paper, Table

README, MARKER = RECIPES / "README.md", "coverage"
# Sizes that the list shows; the ledger has all.
_SIZES = {"total": "{} parameters", "embedding": "{} in the embedding"}
Origins = dict[str, tuple[str, str]]


def origins(papers: Iterable[Paper]) -> Origins:
    """The paper and the table that each row of a recipe belongs to, by ``RECIPE/ROW``."""
    return {
        cell.trained_by: (table.paper, table.name)
        for paper in papers
        for table in paper.tables
        for cell in table.cells
        if cell.is_own
    }


def markdown(papers: Sequence[Paper]) -> str:
    """All papers as Markdown: how much is covered, then a table for each of theirs."""
    own = origins(papers)
    parts = [_summary(papers)]
    for paper in papers:
        parts.append(f"### {paper.title}")
        if paper.reason:
            parts.append(paper.reason)
        for table in paper.tables:
            parts.extend(_table_lines(table, own))
    return "\n\n".join(parts) + "\n"


def _summary(papers: Sequence[Paper]) -> str:
    """How many rows there are, and how many of them a recipe trains."""
    tables = [table for paper in papers for table in paper.tables]
    cells = [cell for table in tables for cell in table.cells]
    counted = sum(table.name.startswith("Table") for table in tables)
    trained = [cell for cell in cells if cell.trained_by]
    rows = {cell.trained_by for cell in trained}
    return (
        f"{len(cells)} rows (columns that are models of their own counted one by one) of {counted} tables "
        f"and of ALONE's Figure 3: {len(trained)} are trained by {len(rows)} rows or points of a grid, "
        f"{len(cells) - len(trained)} have a reason why they are not."
    )


def _table_lines(table: Table, own: Origins) -> Iterator[str]:
    """The parts of a table's Markdown."""
    yield f"#### {table.name}: {table.title}"
    if table.reason:
        labels = f" Rows: {'; '.join(table.rows)}." if table.rows else ""
        yield f"Trains nothing of its own: {table.reason}.{labels}"
        return
    if table.note:
        yield table.note
    lines = ["| row | in print | trained by |", "| --- | --- | --- |"]
    for cell in table.cells:
        # A minus or a plus in front would make a list.
        label = f"\\{cell.label}" if cell.label.startswith(("-", "+")) else cell.label
        columns = (label, describe_figures(table, cell) or "–", _trained_by(table, cell, own))
        lines.append("| " + " | ".join(columns) + " |")
    yield "\n".join(lines)


def describe_figures(table: Table, cell: Cell) -> str:
    """The printed figures of a cell: scores, then the size of the model and of its embedding."""
    parts = [SCORES[name].format(value) for name, value in cell.figures.items() if name in SCORES]
    for name, template in _SIZES.items():
        if name in cell.figures:
            _, _, unit = read_figure(cell.figures[name], table.unit)
            parts.append(template.format(f"{cell.figures[name].removesuffix(unit)} {unit}"))
    return ", ".join(parts)


def _trained_by(table: Table, cell: Cell, own: Origins) -> str:
    """A link to the row that trains a cell, with the table that it belongs to if another; or the reason."""
    if not cell.trained_by:
        return f"not trained: {cell.reason}"
    recipe = cell.trained_by.partition("/")[0]
    paper, name = own.get(cell.trained_by, (table.paper, table.name))
    other = "" if (paper, name) == (table.paper, table.name) else f"of {name}"
    if paper != table.paper:
        other += f" of {paper}"
    notes = "; ".join(note for note in (other, "" if cell.is_own else cell.note) if note)
    return f"[`{cell.trained_by}`]({recipe}/{FILE})" + (f" ({notes})" if notes else "")


def listing(papers: Iterable[Paper]) -> Iterator[str]:
    """A line for each row: paper, table, row, figures, and what trains it or why nothing does."""
    for paper in papers:
        if paper.reason:
            yield f"{paper.name}: {paper.reason}"
        for table in paper.tables:
            where = f"{paper.name}, {table.name}"
            if not table.cells:
                yield f"{where}: trains nothing of its own: {table.reason}"
            for cell in table.cells:
                trained_by = cell.trained_by or f"not trained: {cell.reason}"
                parts = (where, cell.row, cell.column, describe_figures(table, cell))
                yield f"{': '.join(part for part in parts if part)}: {trained_by}"
