"""The papers' tables: ``papers.yaml`` and the ``tables`` of the recipes' ``rows.yaml``.

A table has

- ``paper``, ``table`` (its name) and ``title``;
- ``rows`` in the order of the paper;
- ``reason``: why none of its rows is trained; rows may then be labels only;
- ``plot``: of a figure that plots rows of other tables, in place of a reason: ``tables``, ``x`` (ratio or
  width, see `recipes.papers.coverage`) and ``y`` (bleu or perplexity);
- ``note``: a note on all rows;
- ``group`` and ``hardware`` of the rows that the recipe trains;
- ``unit`` (k or M) of its sizes; ``cut: true`` if some sizes are truncated, not rounded;
- ``why``: why a size counted here differs from the printed one beyond rounding, by figure;
- ``model``: shared parts of the models of its rows, for counting.

A row has

- ``row``: its label in the paper, made unique;
- ``column``: the column, if each column is a separate model (the row is repeated);
- ``figures``: the printed figures, digit for digit, by the names in `FIGURES`;
- ``name``: the row of the recipe that trains it, with settings of `recipes.common.rows`; or ``same``: the row
  of another table with the same model (``RECIPE/NAME`` in ``papers.yaml``), where figures that both tables
  share are given by name only; or ``cells``: a pattern of cells of `recipes.glove_reconstruction`; or
  ``reason``: why it is not trained;
- ``quoted: true`` if the paper quotes other authors;
- ``note`` and ``why``, as in tables;
- ``model``: what is counted, in addition to the embedding of the row and the table's ``model``:
  ``embedding`` (``num_embeddings``, ``embedding_dim`` and options), ``copies`` (number of such embeddings),
  ``network`` (name and sizes, see `recipes.papers.ledger`), ``output`` (shapes of other parameters of the
  output layer), ``indices: true`` if the paper counts the index matrix, ``plain`` ([V, D] of the plain table
  for the compression).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shared_embeddings as se
from recipes.common.rows import FILE, read_rows
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.reading import read_yaml, read_yaml_as_text

SOURCE = Path(__file__).with_name("papers.yaml")
RECIPES = SOURCE.parents[1]

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
FIGURES = (*MEASURES, *SIZES)
Content = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One model of a table: a row, or a column of it.

    Attributes:
        row: label of the row.
        column: the column; empty for the whole row.
        figures: printed figures by name in `FIGURES`.
        trained_by: ``RECIPE/ROW`` or ``RECIPE/CELLS``; empty if it is not trained.
        is_own: whether the row that trains it belongs to this table.
        reason: why it is not trained; otherwise empty.
        note: a note.
        why: why a size differs from the printed one, by figure.
        quoted: whether the paper quotes other authors.
        model: what is counted; empty if unknown.
    """

    row: str
    column: str = ""
    figures: Mapping[str, str] = field(default_factory=dict)
    trained_by: str = ""
    is_own: bool = False
    reason: str = ""
    note: str = ""
    why: Mapping[str, str] = field(default_factory=dict)
    quoted: bool = False
    model: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Row and column."""
        return f"{self.row}; {self.column}" if self.column else self.row


@dataclass(frozen=True)
class Table:
    """A table or a figure of a paper.

    Attributes:
        paper: the paper.
        name: name such as "Table 2a".
        title: title of the table.
        reason: why none of its rows is trained; otherwise empty.
        note: a note on all rows.
        unit: unit of its sizes.
        cut: whether sizes may be truncated.
        cells: its models in the order of the paper.
        plot: the tables whose rows a figure plots, and its axes; otherwise empty.
    """

    paper: str
    name: str
    title: str
    reason: str = ""
    note: str = ""
    unit: str = ""
    cut: bool = False
    cells: tuple[Cell, ...] = ()
    plot: Content = field(default_factory=dict)

    @property
    def rows(self) -> list[str]:
        """The distinct labels of rows in the order of the paper."""
        return list(dict.fromkeys(cell.row for cell in self.cells))


@dataclass(frozen=True)
class Paper:
    """A paper with its tables and figures.

    Attributes:
        name: short name in tables.
        title: title, authors and year.
        reason: why it has no tables here; otherwise empty.
        tables: tables, then figures, in the order of the paper.
    """

    name: str
    title: str
    reason: str
    tables: tuple[Table, ...]


@functools.cache
def read_papers(source: Path = SOURCE, recipes: Path = RECIPES) -> tuple[Paper, ...]:
    """Read ``papers.yaml`` and the tables of its recipes.

    Raises:
        UserError: a file cannot be read, a table is missing or repeated, or a row is invalid.
    """
    content = read_yaml(source)
    parts = []
    for recipe in content["recipes"]:
        parts += [_Part(recipe, *each) for each in _tables(recipes / recipe / FILE)]
    as_text = read_yaml_as_text(source)
    found: list[Paper] = []
    for paper, text in zip(content["papers"], as_text["papers"], strict=True):
        named = [
            [part for part in parts if (part.table["paper"], part.table["table"]) == (paper["paper"], each)]
            if isinstance(each, str)
            else [_Part("", {"paper": paper["paper"], **each}, each_text)]
            for each, each_text in zip(paper.get("tables", []), text.get("tables", []), strict=True)
        ]
        for each, own in zip(paper.get("tables", []), named, strict=True):
            if not own:
                raise UserError(f"{source}: {paper['paper']}: no recipe has its {each}")
        tables = tuple(_merged(own, parts) for own in named)
        found.append(Paper(paper["paper"], paper["title"], paper.get("reason", ""), tables))
    return tuple(found)


@dataclass(frozen=True)
class _Part:
    """A table of a file, typed and as text; `recipe` is empty for ``papers.yaml``."""

    recipe: str
    table: Content
    text: Content

    def rows(self) -> Iterator[tuple[Content, Content]]:
        """Yield its rows, typed and as text; a label becomes a row."""
        for row, text in zip(self.table.get("rows", []), self.text.get("rows", []), strict=True):
            yield ({"row": text}, {"row": text}) if isinstance(text, str) else (row, text)


def _tables(path: Path) -> Iterator[tuple[Content, Content]]:
    """Yield the tables of a ``rows.yaml``, typed and as text."""
    read_rows(path.parent)  # checks rows
    yield from zip(read_yaml(path).get("tables", []), read_yaml_as_text(path).get("tables", []), strict=True)


def _merged(own: Sequence[_Part], parts: Sequence[_Part]) -> Table:
    """Merge the parts of a table in several recipes."""
    first = own[0].table
    where = f"{first['paper']}, {first['table']}"
    cells = tuple(cell for part in own for cell in _cells(where, part, parts))
    names = [cell.label for cell in cells]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{where}: two rows {repeated[0]!r}; give them different labels")
    text = {key: first.get(key, "") for key in ("title", "reason", "note", "unit")}
    plot = first.get("plot", {})
    if plot:
        text["reason"] = f"a plot of {', '.join(plot['tables'])}, which `python -m recipes figures` draws"
    return Table(first["paper"], first["table"], **text, cut=first.get("cut", False), cells=cells, plot=plot)


def _cells(where: str, part: _Part, parts: Sequence[_Part]) -> Iterator[Cell]:
    """Yield the models of a part of a table."""
    for row, text in part.rows():
        place = f"{where}: {text.get('row')}"
        ways = [key for key in ("name", "same", "cells", "reason") if key in row]
        if len(ways) != 1 and "reason" not in part.table:
            raise UserError(f"{place}: expected one of name, same, cells and reason")
        way = ways[0] if ways else "reason"
        trained_by = text.get(way, "") if way != "reason" else ""
        if trained_by and "/" not in trained_by:
            trained_by = f"{part.recipe}/{trained_by}"
        figures, model = text.get("figures", {}), _model(part.table, row)
        why = {**part.table.get("why", {}), **row.get("why", {})}
        if way == "same":
            table, other, printed = _row_of(place, trained_by, parts)
            figures, model = _same(place, figures, printed), _model(table, other)
            why = {**table.get("why", {}), **other.get("why", {}), **why}
        for figure in figures:
            if figure not in FIGURES:
                raise UserError(f"{place}: unknown figure {figure!r}; expected {', '.join(FIGURES)}")
        yield Cell(
            row=text["row"],
            column=text.get("column", ""),
            figures=figures,
            trained_by=trained_by,
            is_own=way == "name",
            reason=text.get("reason", "") or part.table.get("reason", ""),
            note=text.get("note", ""),
            why=why,
            quoted=row.get("quoted", False),
            model=model,
        )


def _row_of(where: str, trained_by: str, parts: Sequence[_Part]) -> tuple[Content, Content, Content]:
    """Return the table of a recipe's row, and the row, typed and as text."""
    recipe, _, name = trained_by.partition("/")
    for part in parts:
        for row, text in part.rows():
            if part.recipe == recipe and row.get("name") == name:
                return part.table, row, text
    raise UserError(f"{where}: there is no row {trained_by}")


def _same(where: str, figures: Sequence[Any], other: Content) -> dict[str, str]:
    """Return the figures of a row with the same model as another one."""
    found: dict[str, str] = {}
    for figure in figures:
        if not isinstance(figure, str):
            found.update(figure)
        elif figure in other["figures"]:
            found[figure] = other["figures"][figure]
        else:
            raise UserError(f"{where}: {other['name']} has no figure {figure!r}")
    return found


def _model(table: Content, row: Content) -> Content:
    """Return what is counted for a row: its embedding, the table's model and its own; empty if unknown."""
    options = dict(row.get("embedding", {}))
    for name in se.options(options["method"]).file_options if options else ():
        options = {**options, name: se.STORED} if name in options else options
    model = {**table.get("model", {}), **row.get("model", {})}
    for each in (table, row):
        options.update(each.get("model", {}).get("embedding", {}))
    return {**model, "embedding": options} if {"method", "num_embeddings"} <= options.keys() else {}
