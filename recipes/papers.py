"""The papers' tables, of ``papers.yaml`` and the ``tables`` of ``rows.yaml``: their rows and sizes.

A table has

- ``paper``, ``table`` (its name) and ``title``;
- ``rows`` in the order of the paper;
- ``reason``: why none of its rows is trained; rows may then be labels only;
- ``plot``: of a figure that plots rows of other tables, in place of a reason: ``tables``, ``x`` (ratio or
  width, see `recipes.report.lines`) and ``y`` (bleu or perplexity);
- ``note``: a note on all rows;
- ``group`` and ``hardware`` of the rows that the recipe trains;
- ``unit`` (k or M) of its sizes; ``cut: true`` if some sizes are truncated, not rounded;
- ``why``: why a size counted here differs from the printed one beyond rounding, by figure;
- ``model``: shared parts of the models of its rows, for counting.

A row has

- ``row``: its label in the paper, made unique;
- ``column``: the column, if each column is a separate model (the row is repeated);
- ``figures``: the printed figures, digit for digit, by the names in `FIGURES`;
- ``name``: the row of the recipe that trains it, with settings of `recipes.common.recipe`; or ``same``: the
  row of another table with the same model (``RECIPE/NAME`` in ``papers.yaml``), where figures that both
  tables share are given by name only; or ``cells``: a pattern of cells of `recipes.reconstruction`; or
  ``reason``: why it is not trained;
- ``quoted: true`` if the paper quotes other authors;
- ``note`` and ``why``, as in tables;
- ``model``: what is counted, in addition to the embedding of the row and the table's ``model``:
  ``embedding`` (``num_embeddings``, ``embedding_dim`` and options), ``copies`` (number of such embeddings),
  ``network`` (name and sizes, see `build_network`), ``output`` (shapes of other parameters of the output
  layer), ``indices: true`` if the paper counts the index matrix, ``plain`` ([V, D] of the plain table for the
  compression).
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

import shared_embeddings as se
from recipes.common.recipe import FILE, RECIPES, read_rows
from shared_embeddings.accounting import count_parameters, stored_bits
from shared_embeddings.modules.define import DefineEmbedding
from shared_embeddings.registry import build
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.reading import read_yaml, read_yaml_as_text

SOURCE = RECIPES / "papers.yaml"
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
_SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "x": 1.0, "MiB": 1.0, "MB": 1.0}
_OWN_UNITS = {
    **{"compression": "x", "input-compression": "x"},
    **{"memory": "MiB", "total-memory": "MiB", "lookup": "MB"},
}
_BYTES_PER_PARAMETER = 4
# Parts of networks that figures count, by substrings of parameter names.
_NETWORK_PARTS = {"ffn": (".linear1.", ".linear2."), "attention": (".in_proj",), "linear": (".out_proj",)}
Content = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One model of a table: a row, or a column of it."""

    row: str
    column: str = ""  # empty for the whole row
    figures: Mapping[str, str] = field(default_factory=dict)  # printed figures by name in `FIGURES`
    trained_by: str = ""  # ``RECIPE/ROW`` or ``RECIPE/CELLS``; empty if it is not trained
    is_own: bool = False  # whether the row that trains it belongs to this table
    reason: str = ""  # why it is not trained; otherwise empty
    note: str = ""
    why: Mapping[str, str] = field(default_factory=dict)  # why a size differs from the printed one, by figure
    quoted: bool = False  # whether the paper quotes other authors
    model: Mapping[str, Any] = field(default_factory=dict)  # what is counted; empty if unknown

    @property
    def label(self) -> str:
        return f"{self.row}; {self.column}" if self.column else self.row


@dataclass(frozen=True)
class Table:
    """A table or a figure of a paper, with its models in the order of the paper."""

    paper: str
    name: str  # such as "Table 2a"
    title: str
    reason: str = ""  # why none of its rows is trained; otherwise empty
    note: str = ""
    unit: str = ""  # of its sizes
    cut: bool = False  # whether sizes may be truncated
    cells: tuple[Cell, ...] = ()
    # The tables whose rows a figure plots, and its axes; otherwise empty.
    plot: Content = field(default_factory=dict)

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(cell.row for cell in self.cells))


@dataclass(frozen=True)
class Paper:
    """A paper: its short name, title with authors and year, and tables, then figures, or why it has none."""

    name: str
    title: str
    reason: str
    tables: tuple[Table, ...]


@functools.cache
def read_papers(source: Path = SOURCE, recipes: Path = RECIPES) -> tuple[Paper, ...]:
    """Read ``papers.yaml`` and the tables of its recipes."""
    content, as_text = read_yaml(source), read_yaml_as_text(source)
    parts: list[tuple[str, Content]] = []
    for recipe in content["recipes"]:
        path = recipes / recipe / FILE
        read_rows(path.parent)  # checks rows
        tables, texts = (read(path).get("tables", []) for read in (read_yaml, read_yaml_as_text))
        parts += [(recipe, _printed(*both)) for both in zip(tables, texts, strict=True)]
    rows = {
        f"{recipe}/{row['name']}": (table, row)
        for recipe, table in parts
        for row in table["rows"]
        if "name" in row
    }
    papers = []
    for paper, text in zip(content["papers"], as_text["papers"], strict=True):
        found = []
        for table, table_text in zip(paper.get("tables", []), text.get("tables", []), strict=True):
            if isinstance(table, str):
                name = paper["paper"], table
                own = [part for part in parts if (part[1]["paper"], part[1]["table"]) == name]
                if not own:
                    raise UserError(f"{source}: {paper['paper']}: no recipe has its {table}")
            else:
                own = [("", {**_printed(table, table_text), "paper": paper["paper"]})]
            found.append(_table(own, rows))
        papers.append(Paper(paper["paper"], paper["title"], paper.get("reason", ""), tuple(found)))
    return tuple(papers)


def _printed(table: Content, text: Content) -> Content:
    """Return a table of a file with the figures of its rows as they are written; a label becomes a row."""
    rows = []
    for row, row_text in zip(table.get("rows", []), text.get("rows", []), strict=True):
        if isinstance(row_text, str):
            rows.append({"row": row_text})
        else:
            typed = {key: row[key] for key in ("embedding", "model", "why", "quoted") if key in row}
            rows.append({**row_text, **typed})
    return {**table, "rows": rows}


def _table(parts: Sequence[tuple[str, Content]], rows: Mapping[str, tuple[Content, Content]]) -> Table:
    """Return a table whose parts are in several recipes, given all rows that are trained."""
    first = parts[0][1]
    where = f"{first['paper']}, {first['table']}"
    cells = tuple(cell for recipe, table in parts for cell in _cells(where, recipe, table, rows))
    names = [cell.label for cell in cells]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{where}: two rows {repeated[0]!r}; give them different labels")
    text = {key: first.get(key, "") for key in ("title", "reason", "note", "unit")}
    plot = first.get("plot", {})
    if plot:
        text["reason"] = f"a plot of {', '.join(plot['tables'])}, which `python -m recipes figures` draws"
    return Table(first["paper"], first["table"], **text, cut=first.get("cut", False), cells=cells, plot=plot)


def _cells(
    where: str, recipe: str, table: Content, rows: Mapping[str, tuple[Content, Content]]
) -> Iterator[Cell]:
    for row in table["rows"]:
        place = f"{where}: {row.get('row')}"
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
                if isinstance(figure, str) and figure not in other["figures"]:
                    raise UserError(f"{place}: {other['name']} has no figure {figure!r}")
                figures |= {figure: other["figures"][figure]} if isinstance(figure, str) else figure
            model = _model(other_table, other)
            why = {**other_table.get("why", {}), **other.get("why", {}), **why}
        for figure in figures:
            if figure not in FIGURES:
                raise UserError(f"{place}: unknown figure {figure!r}; expected {', '.join(FIGURES)}")
        yield Cell(
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
    model = {**table.get("model", {}), **row.get("model", {})}
    for each in (table, row):
        options.update(each.get("model", {}).get("embedding", {}))
    return {**model, "embedding": options} if {"method", "num_embeddings"} <= options.keys() else {}


# The coverage: which row trains which row of the papers.
# Where the coverage is, and the sizes in it; the ledger has all.
README, MARKER = RECIPES / "README.md", "coverage"
_SHOWN_SIZES = {"total": "{} parameters", "embedding": "{} in the embedding"}


def origins(papers: Iterable[Paper]) -> dict[str, tuple[str, str]]:
    """Return the paper and table of each row of a recipe, by ``RECIPE/ROW``."""
    return {
        cell.trained_by: (table.paper, table.name)
        for paper in papers
        for table in paper.tables
        for cell in table.cells
        if cell.is_own
    }


def coverage_tables(papers: Sequence[Paper]) -> str:
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
    for name, template in _SHOWN_SIZES.items():
        if name in cell.figures:
            _, _, unit = read_figure(cell.figures[name], table.unit)
            parts.append(template.format(f"{cell.figures[name].removesuffix(unit)} {unit}"))
    return ", ".join(parts)


def _trained_by(table: Table, cell: Cell, own: Mapping[str, tuple[str, str]]) -> str:
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


def list_coverage(papers: Iterable[Paper]) -> Iterator[str]:
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


# The ledger: the printed sizes next to those of the same models built here without weights.


def build_network(name: str, sizes: Mapping[str, Any]) -> nn.Module:
    """Build a network around the embeddings on the meta device, to count its parameters.

    - ``transformer`` (Vaswani et al., 2017): ``dim``, ``ffn_dim``, ``layers`` each in encoder and decoder,
      ``heads``. As in torch, it has biases everywhere and a final normalization of each stack.
    - ``lstm``: layers ``sizes[i] -> sizes[i + 1]`` with torch's two biases per gate. AWD-LSTM is
      ``[400, 1150, 1150, 400]``; DeFINE's model for WikiText-103 ``[m, 1024, 1024, 1024, n]``.
    - ``transformer_xl`` (Dai et al., 2019): ``dim``, ``heads``, ``head_dim``, ``ffn_dim``, ``layers``. A
      layer has projections of queries, keys, values, relative positions and the output without biases, a
      feed-forward network with biases, and two normalizations. All layers share the two biases of the
      attention scores (``untie_r`` off in the authors' code).
    """
    with torch.device("meta"):
        if name == "transformer":
            dim, layers = sizes["dim"], sizes["layers"]
            return nn.Transformer(
                dim, sizes.get("heads", 8), layers, layers, sizes["ffn_dim"], batch_first=True
            )
        if name == "lstm":
            widths = sizes["sizes"]
            return nn.ModuleList(nn.LSTM(inputs, outputs) for inputs, outputs in zip(widths, widths[1:]))
        dim, ffn_dim, shape = sizes["dim"], sizes["ffn_dim"], (sizes["heads"], sizes["head_dim"])
        network = nn.ModuleList(
            nn.ModuleDict(
                {
                    "in_proj": nn.Linear(dim, 3 * math.prod(shape), bias=False),
                    "positions": nn.Linear(dim, math.prod(shape), bias=False),
                    "out_proj": nn.Linear(math.prod(shape), dim, bias=False),
                    "attention_norm": nn.LayerNorm(dim),
                    "linear1": nn.Linear(dim, ffn_dim),
                    "linear2": nn.Linear(ffn_dim, dim),
                    "ffn_norm": nn.LayerNorm(dim),
                }
            )
            for _ in range(sizes["layers"])
        )
        for bias in ("content_bias", "position_bias"):
            network.register_parameter(bias, nn.Parameter(torch.empty(shape)))
        return network


@dataclass(frozen=True)
class Figure:
    """A figure in a paper and the same figure of the model built here."""

    paper: str
    table: str
    row: str
    counted: str  # what is counted, a key of `SIZES`
    indices: bool  # whether index matrices count as parameters in this row
    printed: str
    unit: str  # "k", "M", "x" (a ratio), "MiB" or "MB"
    paper_value: float  # the printed figure as a number: parameters, a ratio, MiB or MB
    our_value: float | None  # the same for the model built here; None without a model
    difference: float | None  # `our_value` - `paper_value`
    # "agrees"; "agrees (digits cut)" if the last digit is truncated, not rounded; "differs"; "quoted" for
    # figures of other authors' models.
    agreement: str
    quoted: bool  # whether the paper quotes the row from other authors
    notes: tuple[str, ...]  # why a figure differs, and other notes on the row
    model: Mapping[str, Any] | None  # embedding, network and output layer with sizes and options


def figures(papers: Iterable[Paper]) -> list[Figure]:
    """Compare every printed size with ours; distinct models are built once, without weights."""
    cells = [(table, cell) for paper in papers for table in paper.tables for cell in table.cells]
    return [
        _figure(table, cell, counted, printed)
        for table, cell in tqdm(cells, "building the papers' models", disable=None)
        for counted, printed in cell.figures.items()
        if counted in SIZES
    ]


def _figure(table: Table, cell: Cell, counted: str, printed: str) -> Figure:
    paper_value, decimals, unit = read_figure(printed, _OWN_UNITS.get(counted, table.unit))
    value, agreement = None, "quoted"
    if cell.model:
        value, step = measure(cell.model)[counted], _SCALES[unit] * 10.0**-decimals
        agreement = "differs"
        if rounds_to(value, paper_value, step):
            agreement = "agrees"
        elif table.cut and truncates_to(value, paper_value, step):
            agreement = "agrees (digits cut)"
    why = cell.why.get(counted) if agreement == "differs" else None
    return Figure(
        paper=table.paper,
        table=table.name,
        row=cell.label,
        counted=counted,
        indices=bool(cell.model.get("indices")),
        printed=printed,
        unit=unit,
        paper_value=paper_value,
        our_value=value,
        difference=None if value is None else value - paper_value,
        agreement=agreement,
        quoted=cell.quoted,
        notes=tuple(note for note in (why, cell.note) if note),
        model=cell.model or None,
    )


def read_figure(printed: str, unit: str) -> tuple[float, int, str]:
    """Parse a printed figure such as "516k", or a number in `unit`, to (number, decimals, unit)."""
    match = re.fullmatch(r"(\d+(?:\.(\d+))?)(\D*)", printed)
    own_unit = (match[3] if match else "") or unit
    if match is None or own_unit not in _SCALES:
        raise ValueError(f"figure '{printed}' must be a number, optionally followed by k, M, x, MiB or MB")
    return float(match[1]) * _SCALES[own_unit], len(match[2] or ""), own_unit


def rounds_to(value: float, paper_value: float, step: float) -> bool:
    """Return whether `value`, rounded to multiples of `step`, is the printed figure (half up or down)."""
    return abs(value - paper_value) <= step / 2 + _tolerance(paper_value)


def truncates_to(value: float, paper_value: float, step: float) -> bool:
    """Return whether `value`, truncated to multiples of `step`, is the printed figure."""
    return -_tolerance(paper_value) <= value - paper_value < step


def _tolerance(value: float) -> float:
    """Return the tolerance for rounding errors of binary fractions."""
    return 1e-9 * max(abs(value), 1.0)


def measure(model: Mapping[str, Any]) -> dict[str, float]:
    """Return all `SIZES` of a model."""
    spec = dict(model["embedding"])
    copies = model.get("copies", 1)
    parts = _embedding_parts(json.dumps(spec, sort_keys=True))
    embedding = copies * (parts["trained"] + (parts["indices"] if model.get("indices") else 0))
    unit = copies * parts["unit"]
    output = sum(math.prod(shape) for shape in model.get("output", []))
    network = _network_parts(json.dumps(model.get("network"), sort_keys=True))
    total = network["network"] + embedding + output
    plain = math.prod(model.get("plain", (spec["num_embeddings"], spec["embedding_dim"])))
    return {
        "embedding": embedding,
        "input": parts["input"],
        "input-output": embedding - unit + output,
        "unit": unit,
        "filters": parts["filters"],
        **{name: network[name] for name in ("network", *_NETWORK_PARTS)},
        "total": total,
        "compression": plain / embedding,
        "input-compression": plain / parts["input"],
        "memory": embedding * _BYTES_PER_PARAMETER / 2**20,
        "total-memory": total * _BYTES_PER_PARAMETER / 2**20,
        "lookup": copies * parts["lookup_bits"] / 8e6,
    }


@functools.cache
def _embedding_parts(spec: str) -> Counter[str]:
    with torch.device("meta"):
        embedding = build(**json.loads(spec))
        table = embedding.inner_embedding()
    counts, unit = embedding.counts(), 0
    if isinstance(embedding, DefineEmbedding):  # all except the map and the output projection
        rest = [part for part in (embedding.map, embedding.output_projection) if part is not None]
        unit = count_parameters(embedding) - sum(map(count_parameters, rest))
    index_entries = getattr(embedding.options, "index_entries", lambda words, dim: 0)
    return Counter(
        trained=counts["total"],
        input=counts["input"] + counts["shared"],
        unit=unit,
        indices=int(index_entries(embedding.num_embeddings, embedding.embedding_dim)),
        lookup_bits=stored_bits(table),
        filters=sum(buffer.numel() for name, buffer in embedding.named_buffers() if name == "codebooks"),
    )


@functools.cache
def _network_parts(spec: str) -> Counter[str]:
    """Return the counts of a network, given as JSON; none for null."""
    sizes = json.loads(spec)
    if sizes is None:
        return Counter()
    network = build_network(sizes.pop("name"), sizes)
    parts = Counter(network=count_parameters(network))
    for name, parameter in network.named_parameters():
        for part, names in _NETWORK_PARTS.items():
            if any(piece in name for piece in names):
                parts[part] += parameter.numel()
    return parts


def describe_ledger(papers: Sequence[Paper], as_json: bool = False) -> str:
    """Return the ledger as Markdown, one table for each table of a paper and a summary, or as a JSON list."""
    found = figures(papers)
    if as_json:
        return json.dumps([asdict(figure) for figure in found], indent=1, ensure_ascii=False)
    lines: list[str] = []
    for table in (table for paper in papers for table in paper.tables):
        rows = [one for one in found if (one.paper, one.table) == (table.paper, table.name)]
        if rows:
            lines += [f"## {table.paper}, {table.name}: {table.title}", "", *_ledger_table(rows), ""]
    counts = sorted(Counter(figure.agreement for figure in found).items())
    lines += ["## What is counted", "", *(f"- {name}: {meaning}" for name, meaning in SIZES.items()), ""]
    lines += [f"{len(found)} figures: {', '.join(f'{count} {name}' for name, count in counts)}."]
    return "\n".join(lines)


def _ledger_table(rows: Sequence[Figure]) -> Iterator[str]:
    """Yield the lines of one table, followed by numbered notes; our figures have two more decimals."""
    notes = list(dict.fromkeys(note for figure in rows for note in figure.notes))
    yield "| row | counted | paper | ours | difference | | notes |"
    yield "| --- | --- | --: | --: | --: | --- | --- |"
    for figure in rows:
        printed, unit, scale = figure.printed, figure.unit, _SCALES[figure.unit]
        decimals = read_figure(printed, unit)[1] + 2
        ours = difference = "–"
        if figure.our_value is not None and figure.difference is not None:
            ours = f"{figure.our_value / scale:.{decimals}f}"
            share = 100 * figure.difference / figure.paper_value
            difference = f"{figure.difference / scale:+.{decimals}f} ({share:+.1f} %)"
        cells = [
            figure.row + (" (quoted)" if figure.quoted else ""),
            figure.counted + (" with indices" if figure.indices else ""),
            printed if printed.endswith(unit) else f"{printed} {unit}".strip(),
            *(ours, difference, figure.agreement),
            ", ".join(str(notes.index(note) + 1) for note in figure.notes),
        ]
        yield f"| {' | '.join(cells)} |"
    if notes:
        yield ""
    yield from (f"{number}. {note}" for number, note in enumerate(notes, start=1))
