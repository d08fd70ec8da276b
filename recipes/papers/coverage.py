"""Coverage of the papers' tables by rows of recipes, as a list and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from recipes.common.rows import FILE
from recipes.papers.ledger import read_figure
from recipes.papers.tables import MEASURES, RECIPES, Cell, Paper, Table

README, MARKER = RECIPES / "README.md", "coverage"
# Sizes in the list; the ledger has all.
_SIZES = {"total": "{} parameters", "embedding": "{} in the embedding"}
Origins = dict[str, tuple[str, str]]


def origins(papers: Iterable[Paper]) -> Origins:
    """Return the paper and table of each row of a recipe, by ``RECIPE/ROW``."""
    return {
        cell.trained_by: (table.paper, table.name)
        for paper in papers
        for table in paper.tables
        for cell in table.cells
        if cell.is_own
    }


def markdown(papers: Sequence[Paper]) -> str:
    """Return all papers as Markdown: a summary, then their tables."""
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
    """Return the number of rows, and of those that a recipe trains."""
    tables = [table for paper in papers for table in paper.tables]
    cells = [cell for table in tables for cell in table.cells]
    counted = sum(table.name.startswith("Table") for table in tables)
    trained = [cell for cell in cells if cell.trained_by]
    rows = {cell.trained_by for cell in trained}
    return (
        f"{len(cells)} rows (counting columns that are separate models) of {counted} tables "
        f"and of ALONE's Figure 3: {len(trained)} are trained by {len(rows)} rows or grid points, "
        f"{len(cells) - len(trained)} are not, for the reasons given."
    )


def _table_lines(table: Table, own: Origins) -> Iterator[str]:
    """Yield the parts of a table's Markdown."""
    yield f"#### {table.name}: {table.title}"
    if table.reason:
        labels = f" Rows: {'; '.join(table.rows)}." if table.rows else ""
        yield f"Not trained separately: {table.reason}.{labels}"
        return
    if table.note:
        yield table.note
    lines = ["| row | paper | trained by |", "| --- | --- | --- |"]
    for cell in table.cells:
        # A leading minus or plus would create a list.
        label = f"\\{cell.label}" if cell.label.startswith(("-", "+")) else cell.label
        columns = (label, describe_figures(table, cell) or "–", _trained_by(table, cell, own))
        lines.append("| " + " | ".join(columns) + " |")
    yield "\n".join(lines)


def describe_figures(table: Table, cell: Cell) -> str:
    """Return the paper's figures of a cell: measures, model size and embedding size."""
    parts = [MEASURES[name].format(value) for name, value in cell.figures.items() if name in MEASURES]
    for name, template in _SIZES.items():
        if name in cell.figures:
            _, _, unit = read_figure(cell.figures[name], table.unit)
            parts.append(template.format(f"{cell.figures[name].removesuffix(unit)} {unit}"))
    return ", ".join(parts)


def _trained_by(table: Table, cell: Cell, own: Origins) -> str:
    """Return a link to the row that trains a cell, with its table if it is another one; or the reason."""
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
    """Yield a line for each row: paper, table, row, figures, and the row that trains it or the reason."""
    for paper in papers:
        if paper.reason:
            yield f"{paper.name}: {paper.reason}"
        for table in paper.tables:
            where = f"{paper.name}, {table.name}"
            if not table.cells:
                yield f"{where}: not trained separately: {table.reason}"
            for cell in table.cells:
                trained_by = cell.trained_by or f"not trained: {cell.reason}"
                parts = (where, cell.row, cell.column, describe_figures(table, cell))
                yield f"{': '.join(part for part in parts if part)}: {trained_by}"
