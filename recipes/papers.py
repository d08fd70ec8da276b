"""The papers' tables, of ``papers.yaml`` and the ``tables`` of ``rows.yaml``, and which row trains which row.

A table has

- ``paper``, ``table`` (its name) and ``title``;
- ``rows`` in the order of the paper;
- ``reason``: why none of its rows is trained; rows may then be labels only;
- ``plot``: of a figure that plots rows of other tables, in place of a reason: ``tables``, ``x`` (ratio or
  width) and ``y`` (bleu or perplexity), see `recipes.report.draw_figure`;
- ``note``: a note on all rows;
- ``group`` and ``hardware`` of the rows that the recipe trains;
- ``unit`` (k or M) of its sizes; ``cut: true`` if some sizes are truncated, not rounded;
- ``why``: why a size counted here differs from the printed one beyond rounding, by figure;
- ``model``: shared parts of the models of its rows, for counting.

A row has

- ``row``: its label in the paper, made unique;
- ``column``: the column, if each column is a separate model (the row is repeated);
- ``figures``: the printed figures, digit for digit, by the names in `MEASURES` and `SIZES`;
- ``name``: the row of the recipe that trains it, with settings of `recipes.common.recipe`; or ``same``: the
  row of another table with the same model (``RECIPE/NAME`` in ``papers.yaml``), where figures that both
  tables share are given by name only; or ``cells``: a pattern of cells of `recipes.reconstruction`; or
  ``reason``: why it is not trained;
- ``quoted: true`` if the paper quotes other authors;
- ``note`` and ``why``, as in tables;
- ``model``: what is counted, in addition to the embedding of the row and the table's ``model``, see
  `recipes.paper_sizes`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

import shared_embeddings as se
from recipes.common.recipe import FILE, RECIPES
from recipes.common.table import markdown
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.reading import read_yaml, read_yaml_as_text

SOURCE = RECIPES / "papers.yaml"
# Where the coverage is.
README, MARKER = RECIPES / "README.md", "coverage"
# The figures in papers, and their format in lists; sizes get their unit.
MEASURES = {
    "bleu": "BLEU {}",
    "bleu_newstest2014": "BLEU {} on newstest2014",
    "bleu_newstest2017": "BLEU {} on newstest2017",
    "perplexity": "test perplexity {}",
    "valid_perplexity": "validation perplexity {}",
    "pointer_perplexity": "test perplexity {} with pointer",
    "rouge1": "ROUGE-1 {}",
    "rouge2": "ROUGE-2 {}",
    "rougeL": "ROUGE-L {}",
    "reconstruction_loss": "reconstruction loss {}",
    "training_ms": "{} ms per batch in training",
    "inference_ms": "{} ms per batch in inference",
}
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
    name: str  # such as "Table 2a"
    title: str
    reason: str = ""  # why none of its rows is trained; otherwise empty
    note: str = ""
    unit: str = ""  # of its sizes
    cut: bool = False  # whether sizes may be truncated
    cells: tuple[PrintedRow, ...] = ()
    # The tables whose rows a figure plots, and its axes; otherwise empty.
    plot: Content = field(default_factory=dict)

    @property
    def rows(self) -> list[str]:
        """The labels of its rows."""
        return list(dict.fromkeys(cell.row for cell in self.cells))


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
def read_papers(source: Path = SOURCE, recipes: Path = RECIPES) -> tuple[Paper, ...]:
    """Read ``papers.yaml`` and the tables of its recipes."""
    content, as_text = read_yaml(source), read_yaml_as_text(source)
    parts: list[tuple[str, Content]] = []
    for recipe in content["recipes"]:
        path = recipes / recipe / FILE
        tables, texts = (read(path).get("tables", []) for read in (read_yaml, read_yaml_as_text))
        parts += [(recipe, _as_printed(*both)) for both in zip(tables, texts, strict=True)]
    rows = {
        f"{recipe}/{row['name']}": (table, row)
        for recipe, table in parts
        for row in table["rows"]
        if "name" in row
    }
    papers = []
    for paper, text in zip(content["papers"], as_text["papers"], strict=True):
        tables = []
        for table, table_text in zip(paper.get("tables", []), text.get("tables", []), strict=True):
            if isinstance(table, str):
                name = paper["paper"], table
                pieces = [part for part in parts if (part[1]["paper"], part[1]["table"]) == name]
                if not pieces:
                    raise UserError(f"{source}: {paper['paper']}: no recipe has its {table}")
            else:
                pieces = [("", {**_as_printed(table, table_text), "paper": paper["paper"]})]
            first = pieces[0][1]
            cells = tuple(cell for recipe, piece in pieces for cell in _cells(recipe, piece, rows))
            texts = {key: first.get(key, "") for key in ("title", "reason", "note", "unit")}
            if plot := first.get("plot", {}):
                texts["reason"] = f"a plot of {', '.join(plot['tables'])}, which is in the report"
            cut = first.get("cut", False)
            tables.append(
                PrintedTable(first["paper"], first["table"], **texts, cut=cut, cells=cells, plot=plot)
            )
        papers.append(Paper(paper["paper"], paper["title"], paper.get("reason", ""), tuple(tables)))
    return tuple(papers)


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
        place = f"{table['paper']}, {table['table']}: {row['row']}"
        ways = [key for key in ("name", "same", "cells", "reason") if key in row]
        if len(ways) != 1 and "reason" not in table:
            raise UserError(f"{place}: expected one of name, same, cells and reason")
        way = ways[0] if ways else "reason"
        trained_by = "" if way == "reason" else row[way]
        if trained_by and "/" not in trained_by:
            trained_by = f"{recipe}/{trained_by}"
        figures, model = row.get("figures", {}), _model(table, row)
        why = {**table.get("why", {}), **row.get("why", {})}
        if way == "same":
            if trained_by not in rows:
                raise UserError(f"{place}: there is no row {trained_by}")
            other_table, other = rows[trained_by]
            figures = {}
            for figure in row["figures"]:
                figures |= {figure: other["figures"][figure]} if isinstance(figure, str) else figure
            model = _model(other_table, other)
            why = {**other_table.get("why", {}), **other.get("why", {}), **why}
        if unknown := figures.keys() - MEASURES.keys() - SIZES.keys():
            names = ", ".join([*MEASURES, *SIZES])
            raise UserError(f"{place}: unknown figure {min(unknown)!r}; expected {names}")
        yield PrintedRow(
            row=row["row"],
            column=row.get("column", ""),
            figures=figures,
            trained_by=trained_by,
            is_own=way == "name",
            reason=row.get("reason", "") or table.get("reason", ""),
            note=row.get("note", ""),
            why=why,
            quoted=row.get("quoted", False),
            model=model,
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


def origins(papers: Sequence[Paper]) -> dict[str, PrintedTable]:
    """Return the table of each row of a recipe, by ``RECIPE/ROW``."""
    return {cell.trained_by: table for paper in papers for table, cell in paper.cells if cell.is_own}


def coverage_tables(papers: Sequence[Paper]) -> str:
    """Return all papers as Markdown: a summary, then their tables."""
    cells = [cell for paper in papers for _, cell in paper.cells]
    counted = sum(table.name.startswith("Table") for paper in papers for table in paper.tables)
    trained = [cell.trained_by for cell in cells if cell.trained_by]
    parts = [
        f"{len(cells)} rows (counting columns that are separate models) of {counted} tables "
        f"and of ALONE's Figure 3: {len(trained)} are trained by {len(set(trained))} rows or grid points, "
        f"{len(cells) - len(trained)} are not, for the reasons given."
    ]
    own = origins(papers)
    for paper in papers:
        parts += [f"### {paper.title}", *filter(None, [paper.reason])]
        for table in paper.tables:
            parts.append(f"#### {table.name}: {table.title}")
            if table.reason:
                labels = f" Rows: {'; '.join(table.rows)}." if table.rows else ""
                parts.append(f"Not trained separately: {table.reason}.{labels}")
                continue
            lines = []
            for cell in table.cells:
                # A leading minus or plus would create a list.
                label = f"\\{cell.label}" if cell.label.startswith(("-", "+")) else cell.label
                lines.append([label, describe_figures(table, cell) or "–", _trained_by(table, cell, own)])
            frame = pd.DataFrame(lines, columns=["row", "paper", "trained by"])
            parts += [*filter(None, [table.note]), markdown(frame).rstrip()]
    return "\n\n".join(parts) + "\n"


def describe_figures(table: PrintedTable, cell: PrintedRow) -> str:
    """Return the paper's figures of a row: measures, model size and embedding size."""
    parts = [MEASURES[name].format(value) for name, value in cell.figures.items() if name in MEASURES]
    for name, template in (("total", "{} {} parameters"), ("embedding", "{} {} in the embedding")):
        if size := cell.figures.get(name):
            unit = size[-1] if size[-1] in "kM" else table.unit
            parts.append(template.format(size.removesuffix(unit), unit))
    return ", ".join(parts)


def _trained_by(table: PrintedTable, cell: PrintedRow, own: Mapping[str, PrintedTable]) -> str:
    """Return a link to the row that trains a cell, with its table if it is another one; or the reason."""
    if not cell.trained_by:
        return f"not trained: {cell.reason}"
    other = own.get(cell.trained_by, table)
    notes = []
    if other is not table:
        notes.append(f"of {other.name}" + (f" of {other.paper}" if other.paper != table.paper else ""))
    if cell.note and not cell.is_own:
        notes.append(cell.note)
    recipe = cell.trained_by.partition("/")[0]
    return f"[`{cell.trained_by}`]({recipe}/{FILE})" + (f" ({'; '.join(notes)})" if notes else "")
