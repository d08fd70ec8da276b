"""The papers' tables, which row trains which, and their sizes next to those of the same models built here.

``papers.yaml`` and the ``tables`` of ``rows.yaml`` have them; ``recipes/README.md`` explains the keys.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import yaml
from torch import nn
from tqdm import tqdm

import shared_embeddings as se
from recipes.common.recipe import FILE, RECIPES
from recipes.common.results import find_measure
from recipes.common.table import NONE, markdown
from shared_embeddings.accounting import count_parameters, stored_bits
from shared_embeddings.modules.define import DefineEmbedding
from shared_embeddings.registry import build
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
            known = {key.name: first[key.name] for key in fields(PrintedTable) if key.name in first}
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
    owners = {cell.trained_by: table for table, cell in cells if cell.is_own}
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
                lines = []
                for cell in table.cells:
                    lines.append(_coverage_line(table, cell, owners.get(cell.trained_by, table)))
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


_SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "x": 1.0, "MiB": 1.0, "MB": 1.0}
_UNITS = {
    **{"compression": "x", "input-compression": "x"},
    **{"memory": "MiB", "total-memory": "MiB", "lookup": "MB"},
}
_BYTES_PER_PARAMETER = 4
# Parts of networks that figures count, by substrings of parameter names.
_NETWORK_PARTS = {"ffn": (".linear1.", ".linear2."), "attention": (".in_proj",), "linear": (".out_proj",)}


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


def compare_sizes(papers: Sequence[Paper]) -> pd.DataFrame:
    """Compare every printed size with ours, a row each; models are built without weights.

    ``printed`` and ``ours`` are texts, ``paper_value`` and ``our_value`` numbers (of parameters, a ratio, MiB
    or MB), ``notes`` say why a figure differs. ``agreement`` is that of `agreement_of`, or "quoted" for
    figures of other authors' models.
    """
    cells = [both for paper in papers for both in paper.cells]
    lines: list[dict[str, Any]] = []
    for table, cell in tqdm(cells, "building the papers' models", disable=None):
        printed_sizes = {name: printed for name, printed in cell.figures.items() if name in SIZES}
        our_sizes = measure(cell.model) if cell.model and printed_sizes else {}
        for counted, printed in printed_sizes.items():
            # Such as "516k", or a number in the unit of the table.
            number, end = re.fullmatch(r"([\d.]+)(\D*)", printed).groups()  # type: ignore[union-attr]
            unit = end or _UNITS.get(counted, table.unit)
            scale, decimals = _SCALES[unit], len(number.partition(".")[2])
            paper_value, value = float(number) * scale, our_sizes.get(counted)
            agreement, ours, difference = "quoted", NONE, NONE
            if value is not None:
                agreement = agreement_of(value, paper_value, scale * 10.0**-decimals, table.cut)
                ours = f"{value / scale:.{decimals + 2}f}"  # our figures have two more decimals
                share = 100 * (value - paper_value) / paper_value
                difference = f"{(value - paper_value) / scale:+.{decimals + 2}f} ({share:+.1f} %)"
            why = cell.why.get(counted) if agreement == "differs" else None
            line = {
                "paper": table.paper,
                "table": table.table,
                "title": table.title,
                "row": cell.label,
                "quoted": cell.quoted,
                "counted": counted + (" with indices" if cell.model.get("indices") else ""),
                "printed": printed if printed.endswith(unit) else f"{printed} {unit}".strip(),
                "ours": ours,
                "paper_value": paper_value,
                "our_value": value,
                "difference": difference,
                "agreement": agreement,
                "notes": [note for note in (why, cell.note) if note],
            }
            lines.append(line)
    return pd.DataFrame(lines)


def agreement_of(value: float, paper_value: float, step: float, cut: bool = False) -> str:
    """Return whether `value`, in multiples of `step`, is the printed figure: rounded (half up or down), or
    truncated where digits may be `cut`.
    """
    tolerance = 1e-9 * max(abs(paper_value), 1.0)  # for rounding errors of binary fractions
    if abs(value - paper_value) <= step / 2 + tolerance:
        return "agrees"
    return "agrees (digits cut)" if cut and -tolerance <= value - paper_value < step else "differs"


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
    has_fitted_codes = embedding.method in ("structured", "compositional_code")
    return Counter(
        trained=counts["total"],
        input=counts["input"] + counts["shared"],
        unit=unit,
        indices=embedding.get_buffer("codes").numel() if has_fitted_codes else 0,
        lookup_bits=stored_bits(table),
        filters=sum(buffer.numel() for name, buffer in embedding.named_buffers() if name == "codebooks"),
    )


@functools.cache
def _network_parts(spec: str) -> Counter[str]:
    """Return the counts of a network, given as JSON; none for null."""
    parts: Counter[str] = Counter()
    if sizes := json.loads(spec):
        for name, parameter in build_network(sizes.pop("name"), sizes).named_parameters():
            parts["network"] += parameter.numel()
            for part, names in _NETWORK_PARTS.items():
                if any(piece in name for piece in names):
                    parts[part] += parameter.numel()
    return parts


def sizes_tables(papers: Sequence[Paper]) -> str:
    """Return the comparison as Markdown, one table for each table of a paper and a summary."""
    sizes = compare_sizes(papers)
    parts = []
    for (paper, table, title), rows in sizes.groupby(["paper", "table", "title"], sort=False):
        notes = list(dict.fromkeys(note for row in rows["notes"] for note in row))
        shown = pd.DataFrame(
            {
                "row": rows["row"] + rows["quoted"].map({True: " (quoted)", False: ""}),
                "counted": rows["counted"],
                "paper": rows["printed"],
                "ours": rows["ours"],
                "difference": rows["difference"],
                "": rows["agreement"],
                "notes": [", ".join(str(notes.index(note) + 1) for note in row) for row in rows["notes"]],
            }
        )
        text = markdown(shown, right=("paper", "ours", "difference"))
        if notes:
            text += "\n" + "".join(f"{number}. {note}\n" for number, note in enumerate(notes, start=1))
        parts.append(f"## {paper}, {table}: {title}\n\n{text}")
    counted = "".join(f"- {name}: {meaning}\n" for name, meaning in SIZES.items())
    counts = ", ".join(f"{count} {name}" for name, count in sorted(Counter(sizes["agreement"]).items()))
    return "\n".join([*parts, f"## What is counted\n\n{counted}", f"{len(sizes)} figures: {counts}."])


def papers_table(papers: Sequence[Paper]) -> str:
    """Return the numbers of rows in each paper, of those in recipes, of sizes, and of those that agree."""
    sizes = compare_sizes(papers)
    agreement = sizes["agreement"].str.split(" ").str[0]
    lines = []
    for paper in (paper for paper in papers if paper.cells):
        counts = agreement[sizes["paper"] == paper.name].value_counts()
        line = {
            "paper": paper.title,
            "rows": len(paper.cells),
            "trained by a recipe": sum(bool(cell.trained_by) for _, cell in paper.cells),
            "sizes in print": counts.sum(),
        }
        names = {"agree": "agrees", "differ": "differs", "quoted": "quoted"}
        lines.append(line | {title: counts.get(name, 0) for title, name in names.items()})
    return markdown(pd.DataFrame(lines), right=list(lines[0])[1:])
