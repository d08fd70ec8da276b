"""The sizes that the papers print, next to those of the same models built here without weights."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from recipes.papers.tables import SIZES, Cell, Paper, Table, read_papers
from shared_embeddings.accounting import count_distinct, count_parameters, stored_bits
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.methods.define import DefineEmbedding
from shared_embeddings.registry import build, methods


def build_network(name: str, sizes: dict[str, object]) -> nn.Module:
    """Build a network around the embeddings on the meta device, to count its parameters.

    Raises:
        ValueError: there is no such network.
    """
    if name not in _NETWORKS:
        raise ValueError(f"unknown network '{name}'; choose one of {', '.join(sorted(_NETWORKS))}")
    with torch.device("meta"):
        network: nn.Module = _NETWORKS[name](**sizes)
    return network


def transformer(dim: int, ffn_dim: int, layers: int, heads: int = 8) -> nn.Module:
    """The Transformer of Vaswani et al. (2017) without embeddings, `layers` each in encoder and decoder.

    As in torch, it has biases everywhere and a final normalization of each stack.
    """
    return nn.Transformer(dim, heads, layers, layers, ffn_dim, batch_first=True)


def lstm(sizes: Sequence[int]) -> nn.Module:
    """A stack of LSTM layers, ``sizes[i] -> sizes[i + 1]`` each, with torch's two biases per gate.

    AWD-LSTM is ``[400, 1150, 1150, 400]``; DeFINE's model for WikiText-103 ``[m, 1024, 1024, 1024, n]``.
    """
    return nn.ModuleList(nn.LSTM(inputs, outputs) for inputs, outputs in zip(sizes, sizes[1:]))


def transformer_xl(dim: int, heads: int, head_dim: int, ffn_dim: int, layers: int) -> nn.Module:
    """The context model of Transformer-XL (Dai et al., 2019).

    A layer has projections of queries, keys, values, relative positions and the output without biases, a
    feed-forward network with biases, and two normalizations. All layers share the two biases of the attention
    scores (``untie_r`` off in the authors' code).
    """
    network = nn.ModuleList(_transformer_xl_layer(dim, heads * head_dim, ffn_dim) for _ in range(layers))
    network.register_parameter("content_bias", nn.Parameter(torch.empty(heads, head_dim)))
    network.register_parameter("position_bias", nn.Parameter(torch.empty(heads, head_dim)))
    return network


def _transformer_xl_layer(dim: int, attention_dim: int, ffn_dim: int) -> nn.Module:
    """The weights of one layer, see `transformer_xl`."""
    return nn.ModuleDict(
        {
            "in_proj": nn.Linear(dim, 3 * attention_dim, bias=False),
            "positions": nn.Linear(dim, attention_dim, bias=False),
            "out_proj": nn.Linear(attention_dim, dim, bias=False),
            "attention_norm": nn.LayerNorm(dim),
            "linear1": nn.Linear(dim, ffn_dim),
            "linear2": nn.Linear(ffn_dim, dim),
            "ffn_norm": nn.LayerNorm(dim),
        }
    )


_NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "transformer": transformer,
    "lstm": lstm,
    "transformer_xl": transformer_xl,
}


_SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "x": 1.0, "MiB": 1.0, "MB": 1.0}
_OWN_UNITS = {
    **{"compression": "x", "input-compression": "x"},
    **{"memory": "MiB", "total-memory": "MiB", "lookup": "MB"},
}
_BYTES_PER_PARAMETER = 4

# Parts of networks that figures count, by substrings of parameter names.
_NETWORK_PARTS = {"ffn": (".linear1.", ".linear2."), "attention": (".in_proj",), "linear": (".out_proj",)}

_METHOD_IS_MISSING = "method not available"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure in a paper and the same figure of the model built here.

    Attributes:
        paper: the paper.
        table: number of the table.
        row: the row.
        counted: what is counted, a key of `SIZES`.
        indices: whether index matrices count as parameters in this row.
        printed: the printed figure.
        unit: "k", "M", "x" (a ratio), "MiB" or "MB".
        paper_value: the printed figure as a number: parameters, a ratio, MiB or MB.
        our_value: the same for the model built here; None without a model or its method.
        difference: `our_value` - `paper_value`.
        agreement: "agrees"; "agrees (digits cut)" if the last digit is truncated, not rounded; "differs";
            "quoted" for figures of other authors' models; "method not available".
        quoted: whether the paper quotes the row from other authors.
        notes: why a figure differs, and other notes on the row.
        model: embedding, network and output layer with sizes and options.
    """

    paper: str
    table: str
    row: str
    counted: str
    indices: bool
    printed: str
    unit: str
    paper_value: float
    our_value: float | None
    difference: float | None
    agreement: str
    quoted: bool
    notes: tuple[str, ...]
    model: Mapping[str, Any] | None


def describe_ledger(as_json: bool = False) -> str:
    """Return the ledger as Markdown, one table for each table of a paper, or as a JSON list."""
    if as_json:
        return json.dumps([dataclasses.asdict(figure) for figure in figures()], indent=1, ensure_ascii=False)
    return _as_markdown(figures())


def figures(papers: Iterable[Paper] | None = None) -> list[Figure]:
    """Compare every printed size with ours; distinct models are built once, without weights.

    Args:
        papers: default: `read_papers`.
    """
    cells = [
        (table, cell)
        for paper in (read_papers() if papers is None else papers)
        for table in paper.tables
        for cell in table.cells
    ]
    return [
        _figure(table, cell, counted, printed)
        for table, cell in tqdm(cells, "building the papers' models", disable=None)
        for counted, printed in cell.figures.items()
        if counted in SIZES
    ]


def measure(model: Mapping[str, Any]) -> dict[str, float]:
    """Return all `SIZES` of a model.

    Raises:
        ValueError: an embedding or a network cannot be built.
    """
    spec = dict(model["embedding"])
    copies = model.get("copies", 1)
    parts = _embedding_parts(_key(spec))
    embedding = copies * (parts["trained"] + (parts["indices"] if model.get("indices") else 0))
    unit = copies * parts["unit"]
    output = sum(math.prod(shape) for shape in model.get("output", []))
    network = _network_parts(_key(model["network"])) if "network" in model else Counter()
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


def missing_method(model: Mapping[str, Any]) -> str | None:
    """Return the method of `model` if it is not registered, or None."""
    spec = model["embedding"]
    wanted = (spec["method"], spec.get("map", spec["method"]))
    return next((method for method in wanted if method not in methods()), None)


def read_figure(printed: str, unit: str) -> tuple[float, int, str]:
    """Parse a printed figure such as "516k" to (number, decimals, unit).

    Args:
        printed: a number, optionally followed by its unit.
        unit: default unit.

    Raises:
        ValueError: it is not a number, or the unit is unknown.
    """
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


def _agreement(value: float, paper_value: float, step: float, may_be_cut: bool) -> str:
    """Return how `value` agrees with a figure whose last digit is worth `step`."""
    if rounds_to(value, paper_value, step):
        return "agrees"
    return "agrees (digits cut)" if may_be_cut and truncates_to(value, paper_value, step) else "differs"


def _figure(table: Table, cell: Cell, counted: str, printed: str) -> Figure:
    """Compare one figure of a row."""
    paper_value, decimals, unit = read_figure(printed, _OWN_UNITS.get(counted, table.unit))
    value, agreement = None, "quoted"
    if cell.model and missing_method(cell.model):
        agreement = _METHOD_IS_MISSING
    elif cell.model:
        value = measure(cell.model)[counted]
        step = _SCALES[unit] * 10.0**-decimals
        agreement = _agreement(value, paper_value, step, table.cut)
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


def _key(spec: Mapping[str, Any]) -> str:
    """Return a mapping of plain values as text, for caching."""
    return json.dumps(spec, sort_keys=True)


@functools.cache
def _embedding_parts(key: str) -> Counter[str]:
    """Return the counts of an embedding, see `_key`."""
    with torch.device("meta"):
        embedding = build(**json.loads(key))
        table = embedding.inner_embedding()
    counts = embedding.counts()
    return Counter(
        trained=counts["total"],
        input=counts["input"] + counts["shared"],
        unit=_count_unit(embedding),
        indices=_count_indices(embedding),
        lookup_bits=stored_bits(table),
        filters=count_distinct(buffer for name, buffer in embedding.named_buffers() if name == "codebooks"),
    )


def _count_unit(embedding: SharedEmbedding) -> int:
    """Return the parameters of DeFINE's unit: all except the map and the output projection."""
    if not isinstance(embedding, DefineEmbedding):
        return 0
    projection = embedding.output_projection
    rest = count_parameters(embedding.map) + (count_parameters(projection) if projection is not None else 0)
    return count_parameters(embedding) - rest


def _count_indices(embedding: SharedEmbedding) -> int:
    """Return the entries of the index matrix of methods that have one."""
    index_entries = getattr(embedding.options, "index_entries", None)
    if index_entries is None:
        return 0
    return int(index_entries(embedding.num_embeddings, embedding.embedding_dim))


@functools.cache
def _network_parts(key: str) -> Counter[str]:
    """Return the counts of a network, see `_key`."""
    sizes = json.loads(key)
    network = build_network(sizes.pop("name"), sizes)
    parts = Counter(network=count_parameters(network))
    for name, parameter in network.named_parameters():
        for part, names in _NETWORK_PARTS.items():
            if any(piece in name for piece in names):
                parts[part] += parameter.numel()
    return parts


def _as_markdown(found: list[Figure]) -> str:
    """Return one table for each table of a paper, and a summary."""
    titles = {(table.paper, table.name): table.title for paper in read_papers() for table in paper.tables}
    by_table: dict[tuple[str, str], list[Figure]] = {}
    for figure in found:
        by_table.setdefault((figure.paper, figure.table), []).append(figure)
    lines: list[str] = []
    for (paper, table), rows in by_table.items():
        lines += [f"## {paper}, {table}: {titles[paper, table]}", "", *_markdown_table(rows), ""]
    lines += ["## What is counted", "", *(f"- {name}: {meaning}" for name, meaning in SIZES.items()), ""]
    lines.append(_summary(found))
    return "\n".join(lines)


def _markdown_table(rows: list[Figure]) -> Iterator[str]:
    """Yield the lines of one table, followed by numbered notes."""
    notes = list(dict.fromkeys(note for figure in rows for note in figure.notes))
    yield "| row | counted | paper | ours | difference | | notes |"
    yield "| --- | --- | --: | --: | --: | --- | --- |"
    for figure in rows:
        name = figure.row + (" (quoted)" if figure.quoted else "")
        counted = figure.counted + (" with indices" if figure.indices else "")
        numbers = ", ".join(str(notes.index(note) + 1) for note in figure.notes)
        cells = [name, counted, _in_print(figure), *_ours(figure), figure.agreement, numbers]
        yield "| " + " | ".join(cells) + " |"
    if notes:
        yield ""
    yield from (f"{number}. {note}" for number, note in enumerate(notes, start=1))


def _in_print(figure: Figure) -> str:
    """Return the printed figure with its unit."""
    return (
        figure.printed if figure.printed.endswith(figure.unit) else f"{figure.printed} {figure.unit}".strip()
    )


def _ours(figure: Figure) -> Iterator[str]:
    """Yield our figure and the difference in the paper's unit, with two more decimals."""
    decimals = read_figure(figure.printed, figure.unit)[1] + 2
    scale = _SCALES[figure.unit]
    yield "–" if figure.our_value is None else f"{figure.our_value / scale:.{decimals}f}"
    if figure.difference is None:
        yield "–"
    else:
        share = 100 * figure.difference / figure.paper_value
        yield f"{figure.difference / scale:+.{decimals}f} ({share:+.1f} %)"


def _summary(found: list[Figure]) -> str:
    """Return the number of figures by agreement."""
    counts = Counter(figure.agreement for figure in found)
    listed = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return f"{len(found)} figures: {listed}."
