"""Pictures of quality against stored bytes; every method has one color and marker in all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shared_embeddings as se
from recipes.common.results import embedding_bits
from recipes.common.table import is_baseline
from shared_embeddings.utils.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROUNDED = "plain, rounded"
# After the method of rows that were trained from scratch, and are only stored in fewer bits.
FROM_SCRATCH = "\nfrom scratch, rounded"
MARKERS = "osD^vP*X<>dphH8"
COLORS = (
    *("#222222", "#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#1ba3a3", "#c71585"),
    *("#9a6324", "#808000", "#000075", "#469990", "#a9a9a9", "#7cb518", "#b56576"),
)
# Of a label, in points from its marker: to the right or left of it, above or below.
LABEL_PLACES = (((5, 4), "left"), ((5, -10), "left"), ((-5, 4), "right"), ((-5, -10), "right"))
# In points.
MARKER_RADIUS = 3
# The panels of `stages_plot`, and the endings of their rows.
PANELS = {"right after the fit": ("_fitted",), "trained on": ("_finetuned", "_distilled")}
TITLES = {"bleu": "BLEU", "perplexity": "test perplexity"}


def quality_size_plot(results: Sequence[dict[str, Any]], path: str | Path, quality: str = "bleu") -> None:
    """Draw quality against the bytes of the embedding as PNG: a marker per method, labels of rows.

    Args:
        results: records of `recipes.common.results.read_results`.
        path: the picture; replaced only once the new one is complete.
        quality: the metric, out of `TITLES`.
    """
    # Not pyplot: it would choose a window system and keep every figure alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw_quality_size(axes, results, quality)
    axes.set_ylabel(TITLES[quality])
    axes.legend(fontsize=8)
    best_first = sorted(results, key=lambda record: record["metrics"][quality], reverse=quality == "bleu")
    label_rows(axes, best_first, quality)
    with replacing(Path(path)) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})


def stages_plot(results: Sequence[dict[str, Any]], path: str | Path, quality: str = "bleu") -> None:
    """Draw quality against bytes for one trained model, right after the fit and trained on, as PNG.

    A method has one point at each size, its best row.

    Args:
        results: records of rows with and without the endings of `comparison.STAGES`.
        path: the picture; replaced only once the new one is complete.
        quality: the metric, out of `TITLES`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(9.6, 4.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    whole = next((record for record in results if is_baseline(record["row"])), None)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (title, endings) in zip(panels, PANELS.items(), strict=True):
        shown = _best_of_each_size([one for one in results if one["row"].endswith(endings)], quality)
        draw_quality_size(axes, shown, quality)
        for method in {shown_method(record) for record in shown}:
            points = sorted(place(record, quality) for record in shown if shown_method(record) == method)
            color = style(method.removesuffix(FROM_SCRATCH))["color"]
            axes.plot(*zip(*points, strict=True), color=color, linewidth=0.8, zorder=1)
        if whole is not None:
            axes.axhline(whole["metrics"][quality], color="#888888", linestyle="--", linewidth=1, zorder=0)
        axes.set_title(title, fontsize=10)
    if quality == "perplexity":
        panels[0].set_yscale("log")
        panels[0].yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0)))
        panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panels[0].yaxis.set_minor_formatter(NullFormatter())
    else:
        panels[0].set_ylim(bottom=-1)
    panels[0].set_ylabel(f"{TITLES[quality]} (dashed: not compressed)")
    handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(handles.values(), handles, loc="outside right upper", fontsize=8)
    with replacing(Path(path)) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})


def _best_of_each_size(results: Sequence[dict[str, Any]], quality: str) -> list[dict[str, Any]]:
    """The best row of each method at each size; sizes within an eighth are one."""
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for record in results:
        size, score = place(record, quality)
        key = shown_method(record), round(6 * math.log2(size))
        is_better = max if quality == "bleu" else min
        if key not in best or is_better(score, best[key]["metrics"][quality]) == score:
            best[key] = record
    return list(best.values())


def draw_quality_size(axes: Axes, results: Sequence[dict[str, Any]], quality: str) -> None:
    """Draw quality against the bytes of the embedding on `axes`, for pictures of any kind.

    Args:
        axes: empty; they get neither a legend nor a label for the quality, nor names of rows.
        results: as for `quality_size_plot`.
        quality: the metric.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    by_method: dict[str, list[tuple[float, float]]] = {}
    for record in results:
        by_method.setdefault(shown_method(record), []).append(place(record, quality))
    for method, points in sorted(by_method.items()):
        axes.scatter(*zip(*points, strict=True), label=method, **style(method))
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(_megabytes))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.15, y=0.12)
    axes.set_xlabel("stored embedding (input and output), MB")
    axes.grid(alpha=0.3)


def label_rows(axes: Axes, results: Sequence[dict[str, Any]], quality: str) -> None:
    """Write the names of rows beside their markers, where they cover neither names nor markers and stay in.

    Args:
        axes: complete but for this.
        results: what `draw_quality_size` has drawn, those first that are to be named above all.
        quality: the metric.
    """
    from matplotlib.transforms import Bbox

    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # from now on places in the data have places in the picture
    radius = MARKER_RADIUS * figure.dpi / 72
    centers = axes.transData.transform([place(record, quality) for record in results])
    taken = [Bbox.from_extents(x - radius, y - radius, x + radius, y + radius) for x, y in centers]
    for record in results:
        for offset, side in LABEL_PLACES:
            label = axes.annotate(
                record["row"],
                place(record, quality),
                xytext=offset,
                textcoords="offset points",
                ha=side,
                fontsize=8,
            )
            box = label.get_window_extent()
            is_inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1
            if is_inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            label.remove()


def place(record: Mapping[str, Any], quality: str) -> tuple[float, float]:
    """Where a row is: the bytes of its embedding, and its quality."""
    return embedding_bits(record["counts"]) / 8, record["metrics"][quality]


def shown_method(record: Mapping[str, Any]) -> str:
    """The method of a row, as pictures name it: plain tables that are rounded are a method of their own."""
    embedding = record["config"].get("embedding") or {"method": "standard"}
    is_uniform = embedding["method"] == "quantized" and embedding.get("codec") == "uniform"
    is_packed = bool((record["config"].get("fit") or {}).get("store"))
    if is_uniform or is_packed and embedding["method"] == "standard":
        return ROUNDED
    return embedding["method"] + (FROM_SCRATCH if is_packed else "")


def style(method: str) -> dict[str, Any]:
    """The color and the marker of a method; hollow for rows trained from scratch."""
    number = [ROUNDED, *se.methods()].index(method.removesuffix(FROM_SCRATCH))
    color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
    if method.endswith(FROM_SCRATCH):
        return {"facecolors": "none", "edgecolors": color, "marker": marker}
    return {"color": color, "marker": marker}


def _megabytes(size: float, _: int) -> str:
    return f"{size / 1e6:g}"
