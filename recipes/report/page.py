"""What a report is made of; as Markdown, and as one HTML page that works offline, by ``page.html``.

The script in the page draws charts when they come into sight, and sorts and filters tables. Charts are
Vega-Lite specifications, in which `currentColor` follows light and dark pages.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from jinja2 import Environment, FileSystemLoader

from recipes.common.plot import (
    HIGHEST,
    PLAIN,
    STAGES,
    Curve,
    bytes_text,
    legend_order,
    place,
    plain_series,
    shown_method,
    stage,
    style,
    teachers,
)
from recipes.common.results import describe_options
from recipes.common.table import NONE, NOT_RUN
from recipes.report.lines import Line, Measure

# Folder of the charts of a Markdown report.
FIGURES = "figures"
# Tables of more rows get a field that filters them.
_MANY_ROWS = 8
Spec = dict[str, Any]


@dataclass(frozen=True)
class Heading:
    """A heading with an anchor for links: level 1 for the title, 2 for its parts, and so on.

    Those of level 2 and 3 are listed in the table of contents.
    """

    level: int
    text: str
    anchor: str


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of plain text."""

    text: str


@dataclass(frozen=True)
class Items:
    """A list of plain texts."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table of plain texts; columns of numbers are aligned to the right."""

    columns: Sequence[str]  # their titles, units included; the first column names the row
    rows: Sequence[Sequence[str]]  # of as many cells
    idle: Collection[int] = ()  # numbers of the rows that are folded away, since they were not run

    def is_numeric(self, index: int) -> bool:
        """Whether a column has numbers, and nothing else but signs that there is none."""
        cells = [row[index] for row in self.rows if row[index] not in (NONE, NOT_RUN)]
        return index > 0 and bool(cells) and all(re.match(r"[+\-−]?\d", cell) for cell in cells)


@dataclass(frozen=True)
class Chart:
    """A Vega-Lite chart, the name of its file without an ending, and what it shows in words."""

    name: str
    spec: Mapping[str, Any]
    description: str


@dataclass(frozen=True)
class Code:
    """Lines of a command line."""

    text: str


@dataclass(frozen=True)
class Details:
    """Blocks that are folded below a summary line."""

    summary: str
    blocks: Sequence[Block]


Block: TypeAlias = "Heading | Paragraph | Items | Table | Chart | Code | Details"


def anchor(*texts: str) -> str:
    """An anchor made of texts: small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(texts).lower()).strip("-")


def charts(blocks: Sequence[Block]) -> Iterator[Chart]:
    """All charts, those in `Details` included."""
    for block in blocks:
        if isinstance(block, Chart):
            yield block
        elif isinstance(block, Details):
            yield from charts(block.blocks)


@functools.cache
def vega() -> str:
    """Vega-Lite with what it needs, as JavaScript."""
    from vl_convert import javascript_bundle

    return javascript_bundle("window.vegaEmbed = vegaEmbed;")


def as_page(blocks: Sequence[Block]) -> str:
    """The whole page: a heading of level 1, an introduction, then parts below headings of level 2."""
    parts: list[tuple[Heading, list[Heading]]] = []
    for block in blocks:
        if isinstance(block, Heading) and block.level == 2:
            parts.append((block, []))
        elif isinstance(block, Heading) and block.level == 3 and parts:
            parts[-1][1].append(block)
    first = blocks.index(parts[0][0]) if parts else len(blocks)
    specs = {chart.name: chart.spec for chart in charts(blocks)}
    text = json.dumps(specs, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    here = Path(__file__)
    templates = Environment(
        loader=FileSystemLoader(here.parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    templates.tests["kind"] = lambda block, name: type(block).__name__ == name
    return templates.get_template(here.with_suffix(".html").name).render(
        title=next((block.text for block in blocks if isinstance(block, Heading)), ""),
        introduction=blocks[:first],
        contents=parts,
        body=blocks[first:],
        specs=text if specs else "",
        vega=vega() if specs else "",
        missing=(NOT_RUN, NONE),
        many_rows=_MANY_ROWS,
    )


def as_markdown(blocks: Sequence[Block]) -> str:
    """The blocks as Markdown, with links to ``figures/NAME.svg``; ends in a newline."""
    return "\n\n".join(map(_markdown, blocks)) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {_text(block.text)}"
        case Paragraph():
            return _text(block.text)
        case Items():
            return "\n".join(f"- {_text(text)}" for text in block.texts)
        case Table():
            sides = ["--:" if block.is_numeric(index) else "---" for index in range(len(block.columns))]
            lines = [block.columns, sides, *block.rows]
            return "\n".join(f"| {' | '.join(map(_text, cells))} |" for cells in lines)
        case Chart():
            return f"![{_text(block.description)}]({FIGURES}/{block.name}.svg)"
        case Code():
            return f"```\n{block.text}\n```"
        case Details():
            inner = as_markdown(block.blocks)
            return f"<details>\n<summary>{_text(block.summary)}</summary>\n\n{inner}\n</details>"


def _text(text: str) -> str:
    """A text on one line in which nothing is Markdown's or HTML's."""
    return " ".join(re.sub(r"[\\`*_<>\[\]|]", r"\\\g<0>", text).split())


# Charts

HEIGHT = 300
_MUTED = "#8c8c8c"
_PARTS = {"embedding": "#1f77b4", "output only": "#ff7f0e", "rest": _MUTED}
_CONFIG: Spec = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        **{"labelColor": "currentColor", "titleColor": "currentColor", "titleFontWeight": "normal"},
        **{"domainColor": _MUTED, "tickColor": _MUTED, "gridColor": _MUTED, "gridOpacity": 0.25},
    },
    "legend": {"labelColor": "currentColor", "symbolSize": 90, "symbolStrokeWidth": 2, "columns": 3},
    "title": {"color": "currentColor", "fontWeight": 600, "fontSize": 13, "anchor": "start"},
}
# Bytes as in `recipes.common.plot.bytes_text`.
_BYTES = (
    "datum.value >= 1e9 ? format(datum.value / 1e9, '.3~f') + ' GB' : "
    "datum.value >= 1e6 ? format(datum.value / 1e6, '.3~f') + ' MB' : "
    "format(datum.value / 1e3, '.3~f') + ' kB'"
)


def _chart(values: Sequence[Spec], title: str, height: int, **parts: Any) -> Spec:
    """A specification as wide as its place on the page."""
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "title": title,
        "data": {"values": values},
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "config": _CONFIG,
        **parts,
    }


def quality_size(lines: Sequence[Line], key: str, measure: Measure) -> dict[str, Spec]:
    """A chart of quality against stored bytes for each of `STAGES` with rows, all with the same axes.

    All lines have counts and the measure of the key.
    """
    records = {line.row: line.as_record() for line in lines}
    points: list[Spec] = []
    for line in lines:
        record, spread = records[line.row], line.measured[key]
        size, quality = place(record, key)
        point: Spec = {
            "row": line.row,
            "method": shown_method(record),
            "options": describe_options({"config": line.config}),
            "stage": stage(record, records),
            "bytes": size,
            "size": bytes_text(size),
            "quality": round(quality, 4),
            "score": f"{spread.describe(measure.decimals)} {measure.title}",
        }
        if spread.deviation is not None:
            point |= {"low": quality - spread.deviation, "high": quality + spread.deviation}
        points.append(point)
    series = [record["row"] for record in plain_series(records)]
    plain = [point for point in points if point["row"] in series]
    starts = [record["row"] for record in teachers(records.values(), records)]
    wholes = [one for one in points if one["method"] == PLAIN and one["row"] in (starts or series)]
    y = _quality_axis(
        [point["quality"] for point in points], [one["quality"] for one in wholes], key, measure
    )
    sizes = [point["bytes"] for point in points]
    low, high = min(sizes) / 1.25, max(sizes) * 1.25
    ticks = [m * 10**e for e in range(int(math.log10(low)), int(math.log10(high)) + 1) for m in (1, 2, 5)]
    x = {
        "field": "bytes",
        "type": "quantitative",
        "title": "bytes of the stored embedding",
        "scale": {"type": "log", "domain": [low, high], "nice": False},
        "axis": {
            "values": [tick for tick in ticks if low <= tick <= high],
            "labelExpr": _BYTES,
            "grid": True,
        },
    }
    found = {}
    for name in STAGES:
        shown = [point for point in points if point["stage"] == name]
        if shown:
            values = [*shown, *(point for point in plain if point not in shown)]
            found[name] = _chart(values, name, HEIGHT, layer=_layers(values, wholes, x, y))
    return found


def _layers(values: Sequence[Spec], wholes: Sequence[Spec], x: Spec, y: Spec) -> list[Spec]:
    """Dashed lines at the quality of `wholes`, deviations over seeds, and points that name their rows."""
    methods = sorted({point["method"] for point in values}, key=legend_order)
    styles = [style(method) for method in methods]
    colors = ["currentColor" if name == PLAIN else one.color for name, one in zip(methods, styles)]
    legend = {"orient": "bottom", "title": None}
    scale = {"domain": methods, "range": colors}
    shapes = {"domain": methods, "range": [one.shape for one in styles]}
    tooltips = ("row", "method", "options", "size", "score")
    pick = {"name": "pick", "select": {"type": "point", "fields": ["method"]}, "bind": "legend"}
    return [
        {
            "data": {"values": [{"quality": point["quality"]} for point in wholes]},
            "mark": {"type": "rule", "strokeDash": [4, 4], "color": _MUTED},
            "encoding": {"y": y},
        },
        {
            "transform": [{"filter": "isValid(datum.low)"}],
            "mark": {"type": "rule", "color": _MUTED},
            "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}},
        },
        {
            "params": [pick],
            "mark": {"type": "point", "filled": True, "size": 75, "stroke": None},
            "encoding": {
                "x": x,
                "y": y,
                "color": {"field": "method", "scale": scale, "legend": legend},
                "shape": {"field": "method", "scale": shapes, "legend": legend},
                "opacity": {"condition": {"param": "pick", "value": 0.9}, "value": 0.12},
                "tooltip": [{"field": field} for field in tooltips],
            },
        },
    ]


def _quality_axis(values: Sequence[float], plain: Sequence[float], key: str, measure: Measure) -> Spec:
    """The axis of a measure; it begins below zero only if values do, and high perplexities are at its end."""
    low, high = min(values), max(values)
    title = measure.title + ("" if measure.higher_is_better else " (lower is better)")
    scale: Spec = {"nice": False}
    if "perplexity" in key:
        scale["type"] = "log"
        if plain and high > HIGHEST * min(plain):
            high = HIGHEST * min(plain)
            scale["clamp"] = True
            title = f"{title}, at most {high:.0f}"
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    scale["domain"] = [max(low - margin, 0.0) if low >= 0 else low - margin, high + margin]
    return {"field": "quality", "type": "quantitative", "title": title, "scale": scale}


def parameter_bars(lines: Sequence[Line]) -> Spec:
    """A bar for each line with counts: parameters of embedding, output only and rest in millions."""
    values = []
    for line in lines:
        rest, output = line.counts.get("rest", 0), line.counts.get("output", 0)
        total = line.counts.get("total", line.counts["embedding"] + rest)
        parts = {"embedding": max(total - rest - output, 0), "output only": output, "rest": rest}
        values += [
            {"row": line.row, "part": part, "order": number, "parameters": count / 1e6}
            for number, (part, count) in enumerate(parts.items())
        ]
    x = {"field": "parameters", "type": "quantitative", "stack": "zero", "title": "parameters (millions)"}
    encoding = {
        "x": x,
        "y": {"field": "row", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 240}},
        "color": {
            "field": "part",
            "scale": {"domain": list(_PARTS), "range": list(_PARTS.values())},
            "legend": {"orient": "top", "title": None},
        },
        "order": {"field": "order"},
        "tooltip": [{"field": "row"}, {"field": "part"}, {"field": "parameters", "format": ".3f"}],
    }
    return _chart(values, "Parameters of each model", 17 * len(lines) + 5, mark="bar", encoding=encoding)


def training_curves(curves: Mapping[str, Curve]) -> Spec:
    """Validation perplexity against steps, logarithmic, a line per row."""
    values = [
        {"row": row, "step": step, "perplexity": value}
        for row, points in curves.items()
        for step, value in points
        if 0 < value < math.inf
    ]
    quantity = {"type": "quantitative", "title": "validation perplexity"}
    legend = {"orient": "bottom", "title": None}
    encoding = {
        "x": {"field": "step", "type": "quantitative", "title": "steps"},
        "y": {"field": "perplexity", **quantity, "scale": {"type": "log", "nice": False}},
        "color": {"field": "row", "scale": {"scheme": "tableau20"}, "legend": legend},
        "tooltip": [{"field": "row"}, {"field": "step"}, {"field": "perplexity", "format": ".2f"}],
    }
    mark = {"type": "line", "point": {"size": 22}}
    return _chart(values, "Validation perplexity during training", HEIGHT, mark=mark, encoding=encoding)


def as_svg(spec: Mapping[str, Any]) -> str:
    """A chart as an SVG image for a page in light or dark colors."""
    from vl_convert import vegalite_to_svg

    svg: str = vegalite_to_svg({**spec, "width": 460, "autosize": "pad"})
    begin = svg.index(">") + 1
    ink = "<style>svg{color:#1f2329}@media (prefers-color-scheme:dark){svg{color:#e4e7eb}}</style>"
    return svg[:begin] + ink + svg[begin:]
