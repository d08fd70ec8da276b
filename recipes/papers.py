"""The papers' tables, of ``papers.yaml`` and the ``tables`` of ``rows.yaml``, and which row trains which row.

``recipes/README.md`` explains the keys of the files.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

import shared_embeddings as se
from recipes.common.recipe import FILE, RECIPES
from recipes.common.results import find_measure
from recipes.common.table import NONE, markdown
from shared_embeddings.utils.reading import read_yaml

SOURCE = RECIPES / "papers.yaml"
# Where the coverage is.
README, MARKER = RECIPES / "README.md", "coverage"
# Figures in papers that are sizes of models; others are measures of `recipes.common.results`.
SIZES = {
    "embedding": "parameters of all embeddings",
    "input": "parameters of the input side of the embedding",
    "input-output": "embeddings without DeFINE's unit, and the output layer",
    "unit": "DeFINE's unit without its map",
    "filters": "entries of ALONE's fixed filters, not trained",
    "network": "parameters of the network around the embeddings",
    "ffn": "parameters of the network's feed-forward layers",
    "attention": "queries, keys and values of the network's attention",
    "linear": "output projections of the network's attention",
    "total": "all parameters",
    "compression": "plain table divided by the embedding",
    "input-compression": "plain table divided by the input side of the embedding",
    "memory": "embedding in MiB at 32 bits",
    "total-memory": "all parameters in MiB at 32 bits",
    "lookup": "vectors of the words in MB at 32 bits, or their codes and codebooks; without layers on top",
}
Content = dict[str, Any]


@dataclass(frozen=True)
class PrintedRow:
    """One model of a table: a row, or a column of it."""

    row: str
    column: str = ""  # empty for the whole row
    figures: Mapping[str, str] = field(default_factory=dict)  # printed figures by name
    trained_by: str = ""  # ``RECIPE/ROW`` or ``RECIPE/CELLS``; empty if it is not trained
    is_own: bool = False  # whether the row that trains it belongs to this table
    reason: str = ""  # why it is not trained; otherwise empty
    note: str = ""
    why: Mapping[str, str] = field(default_factory=dict)  # why a size differs from the printed one, by figure
    quoted: bool = False  # whether the paper quotes other authors
    model: Mapping[str, Any] = field(default_factory=dict)  # what is counted; empty if unknown

    @property
    def label(self) -> str:
        """The name of the row, unique in its table."""
        return f"{self.row}; {self.column}" if self.column else self.row


@dataclass(frozen=True)
class PrintedTable:
    """A table or a figure of a paper, with its models in the order of the paper."""

    paper: str
    table: str  # such as "Table 2a"
    title: str
    reason: str = ""  # why none of its rows is trained; otherwise empty
    note: str = ""
    unit: str = ""  # of its sizes
    cut: bool = False  # whether sizes may be truncated
    plot: Content = field(default_factory=dict)  # the tables whose rows a figure plots, and its axes
    cells: tuple[PrintedRow, ...] = ()


@dataclass(frozen=True)
class Paper:
    """A paper: its short name, title with authors and year, and tables, then figures, or why it has none."""

    name: str
    title: str
    reason: str
    tables: tuple[PrintedTable, ...]

    @property
    def cells(self) -> list[tuple[PrintedTable, PrintedRow]]:
        """All rows with their tables."""
        return [(table, cell) for table in self.tables for cell in table.cells]


@functools.cache
def read_papers(source: Path = SOURCE) -> tuple[Paper, ...]:
    """Read ``papers.yaml`` and the tables of the recipes beside it."""
    content, as_text = _read_twice(source)
    parts: list[tuple[str, Content]] = []
    for recipe in content["recipes"]:
        tables, texts = (read.get("tables", []) for read in _read_twice(source.parent / recipe / FILE))
        parts += [(recipe, _as_printed(*both)) for both in zip(tables, texts, strict=True)]
    rows = {f"{recipe}/{row['name']}": (table, row) for recipe, table in parts
            for row in table["rows"] if "name" in row}  # fmt: skip
    papers = []
    for paper, text in zip(content["papers"], as_text["papers"], strict=True):
        tables = []
        for table, table_text in zip(paper.get("tables", []), text.get("tables", []), strict=True):
            if isinstance(table, str):  # its parts are in recipes
                name = paper["paper"], table
                pieces = [part for part in parts if (part[1]["paper"], part[1]["table"]) == name]
            else:
                pieces = [("", {**_as_printed(table, table_text), "paper": paper["paper"]})]
            first = pieces[0][1]
            cells = tuple(cell for recipe, piece in pieces for cell in _cells(recipe, piece, rows))
            known = {each.name: first[each.name] for each in fields(PrintedTable) if each.name in first}
            tables.append(PrintedTable(**known, cells=cells))
        papers.append(Paper(paper["paper"], paper["title"], paper.get("reason", ""), tuple(tables)))
    return tuple(papers)


def _read_twice(path: Path) -> tuple[Any, Any]:
    """Read a YAML file with values, and with texts alone, where 60.90 stays "60.90"."""
    return read_yaml(path), yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)


def _as_printed(table: Content, text: Content) -> Content:
    """Return a table of a file with the figures of its rows as they are written; a label becomes a row."""
    rows = []
    for row, row_text in zip(table.get("rows", []), text.get("rows", []), strict=True):
        if isinstance(row_text, str):
            rows.append({"row": row_text})
        else:
            typed = {key: row[key] for key in ("embedding", "model", "why", "quoted") if key in row}
            rows.append({**row_text, **typed})
    return {**table, "rows": rows}


def _cells(recipe: str, table: Content, rows: Mapping[str, tuple[Content, Content]]) -> Iterator[PrintedRow]:
    """Yield the rows of a table, given all rows that are trained."""
    for row in table["rows"]:
        trained_by = next((row[key] for key in ("name", "same", "cells") if key in row), "")
        if trained_by and "/" not in trained_by:
            trained_by = f"{recipe}/{trained_by}"
        origin, figures = (table, row), row.get("figures", {})
        if "same" in row:  # figures that both tables print are given by name
            origin, figures = rows[trained_by], {}
            for figure in row["figures"]:
                figures |= {figure: origin[1]["figures"][figure]} if isinstance(figure, str) else figure
        why = {key: text for part in (*origin, table, row) for key, text in part.get("why", {}).items()}
        yield PrintedRow(
            **{key: row[key] for key in ("row", "column", "note", "quoted") if key in row},
            figures=figures,
            trained_by=trained_by,
            is_own="name" in row,
            reason=row.get("reason", "") or table.get("reason", ""),
            why=why,
            model=_model(*origin),
        )


def _model(table: Content, row: Content) -> Content:
    """Return what is counted for a row: its embedding, the table's model and its own; empty if unknown."""
    options = dict(row.get("embedding", {}))
    for name in se.get_method_config(options["method"]).file_options if options else ():
        options = {**options, name: se.STORED} if name in options else options
    for part in (table, row):
        options.update(part.get("model", {}).get("embedding", {}))
    model = {**table.get("model", {}), **row.get("model", {}), "embedding": options}
    return model if {"method", "num_embeddings"} <= options.keys() else {}


def coverage_tables(papers: Sequence[Paper]) -> str:
    """Return all papers as Markdown: a summary, then their tables."""
    cells = [both for paper in papers for both in paper.cells]
    own = {cell.trained_by: table for table, cell in cells if cell.is_own}
    counted = sum(table.table.startswith("Table") for paper in papers for table in paper.tables)
    trained = [cell.trained_by for _, cell in cells if cell.trained_by]
    parts = [
        f"{len(cells)} rows (counting columns that are separate models) of {counted} tables "
        f"and of ALONE's Figure 3: {len(trained)} are trained by {len(set(trained))} rows or grid points, "
        f"{len(cells) - len(trained)} are not, for the reasons given."
    ]
    for paper in papers:
        parts += [f"### {paper.title}", *filter(None, [paper.reason])]
        for table in paper.tables:
            parts.append(f"#### {table.table}: {table.title}")
            if table.plot:
                parts.append(f"A plot of {', '.join(table.plot['tables'])}, which is in the report.")
            elif table.reason:
                rows = "; ".join(dict.fromkeys(cell.row for cell in table.cells))
                parts.append(f"Not trained separately: {table.reason}." + (f" Rows: {rows}." if rows else ""))
            else:
                lines = [_coverage_line(table, cell, own.get(cell.trained_by, table)) for cell in table.cells]
                text = markdown(pd.DataFrame(lines, columns=["row", "paper", "trained by"])).rstrip()
                parts += [*filter(None, [table.note]), text]
    return "\n\n".join(parts) + "\n"


def _coverage_line(table: PrintedTable, cell: PrintedRow, other: PrintedTable) -> list[str]:
    """Return the cells of a row: its label, its figures, and the row that trains it, of the table `other`."""
    figures = [
        f"{measure.title} {value}" for name, value in cell.figures.items() if (measure := find_measure(name))
    ]
    for name, template in (("total", "{} {} parameters"), ("embedding", "{} {} in the embedding")):
        if size := cell.figures.get(name):
            unit = size[-1] if size[-1] in "kM" else table.unit
            figures.append(template.format(size.removesuffix(unit), unit))
    trained_by = f"not trained: {cell.reason}"
    if cell.trained_by:
        notes = [cell.note] if cell.note and not cell.is_own else []
        if other is not table:
            paper = f" of {other.paper}" if other.paper != table.paper else ""
            notes.insert(0, f"of {other.table}{paper}")
        trained_by = f"[`{cell.trained_by}`]({cell.trained_by.partition('/')[0]}/{FILE})"
        trained_by += f" ({'; '.join(notes)})" if notes else ""
    # A leading minus or plus would create a list.
    label = f"\\{cell.label}" if cell.label.startswith(("-", "+")) else cell.label
    return [label, ", ".join(figures) or NONE, trained_by]
