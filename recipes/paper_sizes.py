"""The sizes that papers print next to those of the same models built here, without weights."""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch import nn
from tqdm import tqdm

from recipes.common.table import NONE, markdown
from recipes.papers import SIZES, Paper
from shared_embeddings.accounting import count_parameters, stored_bits
from shared_embeddings.modules.define import DefineEmbedding
from shared_embeddings.registry import build

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


def papers_table(papers: Sequence[Paper], measured: Container[str]) -> str:
    """Return the numbers of rows and sizes in each paper, of trained rows, and of sizes that agree.

    `measured` are the rows ``RECIPE/ROW`` with results.
    """
    sizes = compare_sizes(papers)
    agreement = sizes["agreement"].str.split(" ").str[0]
    lines = []
    for paper in papers:
        trained = [cell.trained_by for _, cell in paper.cells if cell.trained_by]
        counts = agreement[sizes["paper"] == paper.name].value_counts()
        line = {
            "paper": paper.title,
            "rows": len(paper.cells),
            "trained by a recipe": len(trained),
            "measured here": sum(row in measured for row in trained),
            "sizes in print": counts.sum(),
        }
        names = {"agree": "agrees", "differ": "differs", "quoted": "quoted"}
        lines.append(line | {title: counts.get(name, 0) for title, name in names.items()})
    return markdown(pd.DataFrame(lines), right=list(lines[0])[1:])
