"""The charts of the report, as Vega-Lite specifications; `currentColor` follows light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

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
from recipes.report.lines import Line, Measure

Spec = dict[str, Any]
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

    Args:
        lines: with counts and with this measure.
        key: of the measure.
        measure: what it is called.
    """
    records = {line.row: line.as_record() for line in lines}
    points = [_point(line, records, key, measure) for line in lines]
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


def _point(line: Line, records: Mapping[str, Any], key: str, measure: Measure) -> Spec:
    """What a chart knows about a row."""
    size, quality = place(records[line.row], key)
    spread = line.measured[key]
    point = {
        "row": line.row,
        "method": shown_method(records[line.row]),
        "options": describe_options({"config": line.config}),
        "stage": stage(records[line.row], records),
        "bytes": size,
        "size": bytes_text(size),
        "quality": round(quality, 4),
        "score": f"{spread.describe(measure.decimals)} {measure.title}",
    }
    if spread.deviation is not None:
        point |= {"low": quality - spread.deviation, "high": quality + spread.deviation}
    return point


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


def parts(counts: Mapping[str, Any]) -> dict[str, float]:
    """Parameters of the embedding, of what only the output layer has, and of the rest."""
    rest = counts.get("rest", 0)
    total = counts.get("total", counts["embedding"] + rest)
    output = counts.get("output", 0)
    return {"embedding": max(total - rest - output, 0), "output only": output, "rest": rest}


def parameter_bars(lines: Sequence[Line]) -> Spec:
    """A bar for each line with counts: embedding, output and rest in millions."""
    values = [
        {"row": line.row, "part": part, "order": number, "parameters": count / 1e6}
        for line in lines
        for number, (part, count) in enumerate(parts(line.counts).items())
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
    """Validation perplexity against steps, logarithmic, a line per row.

    Args:
        curves: (step, perplexity) by the name of the row.
    """
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
