"""Coverage of the papers' tables by rows of recipes: as a list, as Markdown, and as pictures with ours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from recipes.common.plot import legend_order, new_figure, quality_axis, shown_method, style, write_png
from recipes.common.recipe import FILE, RECIPES, Recipe, find_recipe, recipe_names
from recipes.papers import MEASURES, Cell, Paper, Table, read_figure
from recipes.report.lines import Line, Spread, collect, committed, lines_of, of_paper, of_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

README, MARKER = RECIPES / "README.md", "coverage"
# Sizes in the list; the ledger has all.
_SIZES = {"total": "{} parameters", "embedding": "{} in the embedding"}
# What the axis of a figure can show of a row.
AXES = {"ratio": "reduction ratio", "width": "width of the unique part, $U_d$"}
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
    tables = [table for paper in papers for table in paper.tables]
    cells = [cell for table in tables for cell in table.cells]
    counted = sum(table.name.startswith("Table") for table in tables)
    trained = [cell for cell in cells if cell.trained_by]
    rows = {cell.trained_by for cell in trained}
    parts = [
        f"{len(cells)} rows (counting columns that are separate models) of {counted} tables "
        f"and of ALONE's Figure 3: {len(trained)} are trained by {len(rows)} rows or grid points, "
        f"{len(cells) - len(trained)} are not, for the reasons given."
    ]
    own = origins(papers)
    for paper in papers:
        parts.append(f"### {paper.title}")
        if paper.reason:
            parts.append(paper.reason)
        for table in paper.tables:
            parts.append(f"#### {table.name}: {table.title}")
            if table.reason:
                labels = f" Rows: {'; '.join(table.rows)}." if table.rows else ""
                parts.append(f"Not trained separately: {table.reason}.{labels}")
                continue
            if table.note:
                parts.append(table.note)
            lines = ["| row | paper | trained by |", "| --- | --- | --- |"]
            for cell in table.cells:
                # A leading minus or plus would create a list.
                label = f"\\{cell.label}" if cell.label.startswith(("-", "+")) else cell.label
                figures = describe_figures(table, cell) or "–"
                lines.append(f"| {label} | {figures} | {_trained_by(table, cell, own)} |")
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


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


class Point(NamedTuple):
    """A row of a table in a figure: its method or `PLAIN`, its place, the paper's score, and ours, if any."""

    recipe: str
    method: str
    x: float
    paper: float
    ours: Spread | None


def measured_lines(runs: Path | None) -> dict[str, Line]:
    """The rows of all recipes with our results, in the repository and in `runs`, by ``RECIPE/ROW``."""
    names = recipe_names()
    found, _ = collect([*committed(RECIPES), *(of_runs(runs) if runs is not None else ())], names)
    lines = [line for name in names for line in lines_of(Recipe(RECIPES / name), found)[0]]
    return {f"{line.recipe}/{line.row}": line for line in lines}


def points_of(figure: Table, tables: Iterable[Table], lines: Mapping[str, Line]) -> list[Point]:
    """The points of a figure with a ``plot``: the rows of the paper's `tables` that a recipe trains."""
    points = []
    for cell in (cell for table in tables if table.name in figure.plot["tables"] for cell in table.cells):
        if not cell.trained_by:
            continue
        recipe, _, name = cell.trained_by.partition("/")
        score = figure.plot["y"]
        ours = of_paper(score, lines[cell.trained_by].measured) if cell.trained_by in lines else None
        method = shown_method({"config": {"embedding": find_recipe(recipe).row(name).embedding}})
        if figure.plot["x"] == "ratio":
            x = float(cell.figures.get("compression") or cell.figures["input-compression"])
        else:  # the width at the end of its label
            x = float(re.findall(r"\d+", cell.row)[-1])
        points.append(Point(recipe, method, x, float(cell.figures[score]), ours))
    return points


def draw(figure: Table, points: Sequence[Point], path: Path) -> None:
    """Draw a figure as PNG, a panel for each recipe: hollow markers are the paper's, filled ones ours."""
    from matplotlib.lines import Line2D

    recipes = list(dict.fromkeys(point.recipe for point in points))
    methods = sorted({point.method for point in points}, key=legend_order)
    title = f"{figure.paper}, {figure.name}: {figure.title}"
    picture, panels = new_figure(len(recipes), title)
    for axes, recipe in zip(panels, recipes, strict=True):
        for method in methods:
            _draw_method(axes, [one for one in points if (one.recipe, one.method) == (recipe, method)])
        run = [one for one in points if one.recipe == recipe and one.ours is not None]
        axes.set_xscale("log", base=2)
        if figure.plot["x"] == "width":
            axes.set_xticks(sorted({point.x for point in points}))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(AXES[figure.plot["x"]])
        axes.set_title(f"{recipe}: {len(run)} rows run" if run else f"{recipe}: not run", fontsize=10)
        axes.grid(alpha=0.3, linewidth=0.6)
    quality_axis(panels[0], figure.plot["y"])
    look: dict[str, Any] = {"marker": "o", "color": "#8c8c8c"}
    handles = [
        *(Line2D([], [], color=style(name).color, marker=style(name).marker, label=name) for name in methods),
        Line2D([], [], **look, markerfacecolor="white", linestyle="--", label="in the paper"),
        Line2D([], [], **look, label="ours"),
    ]
    picture.legend(
        handles=handles, loc="outside lower center", ncols=3 * len(panels), fontsize=9, frameon=False
    )
    write_png(picture, path)


def _draw_method(axes: Axes, points: Sequence[Point]) -> None:
    """Draw the paper's points of a method, and ours with one standard deviation over the seeds."""
    ordered = sorted(points, key=lambda point: point.x)
    if not ordered:
        return
    color, marker, _ = style(ordered[0].method)
    x, y = [point.x for point in ordered], [point.paper for point in ordered]
    axes.plot(x, y, color=color, marker=marker, markerfacecolor="white", linestyle="--", linewidth=1)
    ours = [(point.x, point.ours) for point in ordered if point.ours is not None]
    if ours:
        axes.errorbar(
            [place for place, _ in ours],
            [spread.mean for _, spread in ours],
            yerr=[spread.deviation or 0.0 for _, spread in ours],
            color=color,
            marker=marker,
            linewidth=1,
            capsize=2,
        )
