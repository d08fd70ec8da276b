"""Pictures: quality against stored bytes, where a method has one color and marker."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import shared_embeddings as se
from recipes.common.results import Record, embedding_bits, find_measure, is_baseline
from shared_embeddings.utils.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLAIN = "plain table"
STAGES = ("trained from scratch", "fitted to a trained table", "fitted, then finetuned")
_COLORS = (
    *("#333333", "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#a0674b", "#e377c2", "#a8a820"),
    *("#17becf", "#4d5fd0", "#c2185b", "#00997a", "#d4a017", "#7f9c1f"),
)
_MARKERS = "osD^vPX*<>phd8"
# In inches.
_WIDTH, _HEIGHT, _DPI = 4.2, 4.9, 130


def style(method: str) -> dict[str, Any]:
    """Return the ``color`` and the ``marker`` of a method or of `PLAIN`, by its place in the registry."""
    return numbered_style(legend_order(method))


def numbered_style(index: int) -> dict[str, Any]:
    """Return the style of a place in a list."""
    return {"color": _COLORS[index % len(_COLORS)], "marker": _MARKERS[index % len(_MARKERS)]}


def legend_order(method: str) -> int:
    """Return the place of a method in legends: that in the registry, behind the plain table."""
    return [PLAIN, *(name for name in se.methods() if name != "standard")].index(method)


def shown_method(record: Mapping[str, Any]) -> str:
    """Return the method of a row in pictures; uniform codes without calibration are a rounded plain table."""
    embedding = record["config"].get("embedding") or {"method": "standard"}
    is_rounded = embedding["method"] == "quantized" and embedding.get("codec") == "uniform"
    is_rounded &= not (record["config"].get("fit") or {}).get("calibrate")
    return PLAIN if is_rounded or embedding["method"] == "standard" else str(embedding["method"])


def stage(record: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> str:
    """Return which of `STAGES` a row belongs to, given the records of its recipe by row.

    Rounding a table that was trained from scratch changes nothing.
    """
    config = record["config"]
    fit = config.get("fit") or {}
    if config.get("distill") or "recover_steps" in fit:
        return STAGES[2]
    teacher = others.get(fit.get("teacher", ""))
    is_rounded = teacher is not None and shown_method(teacher) == shown_method(record)
    return STAGES[0] if is_rounded or not fit else STAGES[1]


def format_name(record: Mapping[str, Any]) -> str:
    """Return how the numbers of a row are stored, such as fp32, int8 or 3 bits."""
    embedding = record["config"].get("embedding") or {}
    store = (record["config"].get("fit") or {}).get("store")
    if store or "bits" not in embedding:
        return str(store or "fp32")
    bits = embedding["bits"]
    return f"int{bits:g}" if bits in (4, 8) else f"{bits:g} bits"


def place(record: Mapping[str, Any], quality: str) -> tuple[float, float]:
    """Return where a row is: the bytes of its embedding, and its quality."""
    return embedding_bits(record["counts"]) / 8, record["metrics"][quality]


def quality_size_plot(results: Sequence[Record], path: Path, quality: str, title: str) -> None:
    """Draw quality against the bytes of the embedding as PNG, a panel for each of `STAGES` with rows.

    A method has one point at each size, its best row. The plain table in 32 and fewer bits is in every panel,
    with a dashed line at the quality of each table that others are fitted to. The metric is BLEU or
    perplexity.
    """
    by_name = {record["row"]: record for record in results}
    by_stage = {name: [record for record in results if stage(record, by_name) == name] for name in STAGES}
    rounded = [record for record in results if shown_method(record) == PLAIN and record["config"].get("fit")]
    # Without rounded rows, the tables that others are compared with.
    baselines = [record for record in results if is_baseline(record["row"])]
    plain = [*teachers(rounded, by_name), *rounded] or baselines
    best = min((record["metrics"][quality] for record in plain), default=math.inf)
    # Higher perplexities are only named.
    limit = 1.6 * best if quality == "perplexity" else math.inf
    # Second trainings of the plain table with the same outcome.
    copies = [
        record
        for record in results
        if record not in plain and shown_method(record) == PLAIN
        for other in plain
        if embedding_bits(record["counts"]) == embedding_bits(other["counts"])
        and math.isclose(record["metrics"][quality], other["metrics"][quality], rel_tol=0.005)
    ]
    used = [name for name in STAGES if by_stage[name]]
    figure, panels = new_figure(len(used), title)
    for axes, name in zip(panels, used, strict=True):
        wholes = [*teachers(by_stage[name], by_name), *(row for row in plain if not row["config"].get("fit"))]
        shown = {record["row"]: record for record in [*plain, *wholes, *by_stage[name]]}
        points = [p for p in best_of_each_size([*shown.values()], quality, plain) if p not in copies]
        # Rows above the limit would squeeze all others together; a corner says what they reach.
        above = sorted((p for p in points if p["metrics"][quality] > limit), key=lambda p: str(p["row"]))
        lines = [
            f"{shown_method(row)}, {bytes_text(place(row, quality)[0])}: {row['metrics'][quality]:.0f}"
            for row in above
        ]
        text = "\n".join(["off the scale:", *lines] if lines else [])
        axes.text(0.97, 0.97, text, transform=axes.transAxes, ha="right", va="top", fontsize=8)
        points = [record for record in points if record not in above]
        on_line = [record for record in points if record in plain or not _note(record)]
        draw_lines(axes, on_line, quality)
        draw_points(axes, points, quality, _note, [record for record in points if record not in on_line])
        for record in points:
            if record in wholes and shown_method(record) == PLAIN:
                axes.axhline(
                    record["metrics"][quality], color="#8c8c8c", linestyle="--", linewidth=0.9, zorder=0
                )
        axes.set_title(name if len(used) > 1 else "", fontsize=10)
    quality_axis(panels[0], quality)
    finish(figure, panels, path)


def teachers(records: Iterable[Record], by_name: Mapping[str, Record]) -> list[Record]:
    """Return the rows that others start from, each once."""
    starts = (record["config"].get("distill") or record["config"].get("fit") or {} for record in records)
    names = dict.fromkeys(start.get("teacher") for start in starts)
    return [by_name[name] for name in names if name and name in by_name]


def best_of_each_size(results: Sequence[Record], quality: str, keep: Sequence[Record] = ()) -> list[Record]:
    """Return the best row of each method at each size, unless a smaller one is better; sizes within an eighth
    are one. All rows of `keep` stay.
    """
    sign = -1 if quality == "bleu" else 1
    best: dict[tuple[str, float], Record] = {}
    smallest: dict[str, float] = {}  # of the current group of sizes
    others = [record for record in results if record not in keep]
    for record in sorted(others, key=lambda record: place(record, quality)[0]):
        size, score = place(record, quality)
        method = shown_method(record)
        if size > 1.125 * smallest.get(method, 0.0):
            smallest[method] = size
        key = method, smallest[method]
        if key not in best or sign * score <= sign * best[key]["metrics"][quality]:
            best[key] = record
    least: dict[str, float] = {}  # the best score of smaller rows
    for method, size in sorted(best):
        score = sign * best[method, size]["metrics"][quality]
        if score < least.get(method, math.inf):
            least[method] = score
        else:
            del best[method, size]
    return [*best.values(), *(record for record in results if record in keep)]


def _note(record: Record) -> str:
    """Return the label of a point whose method and size are ambiguous."""
    start = record["config"].get("fit") or {}
    method = shown_method(record)
    if method != PLAIN:
        return f"{method} {format_name(record)}" if start.get("store") else ""
    is_series = start or record["row"].endswith("_fp32")
    return format_name(record) if is_series else record["row"].removeprefix("small_").replace("_", " ")


def draw_lines(axes: Axes, results: Sequence[Record], quality: str) -> None:
    """Connect the points of each method."""
    for method in dict.fromkeys(map(shown_method, results)):
        points = sorted(place(record, quality) for record in results if shown_method(record) == method)
        axes.plot(*zip(*points, strict=True), color=style(method)["color"], linewidth=1, zorder=1)


def draw_points(
    axes: Axes,
    results: Sequence[Record],
    quality: str,
    note: Callable[[Record], str],
    hollow: Sequence[Record] = (),
) -> None:
    """Draw rows as points of their methods' styles with labels; sizes are on a logarithmic axis.

    The markers of `hollow` rows are not filled, and a `note` may be empty.
    """
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    halo = [withStroke(linewidth=2, foreground="white")]
    for record in results:
        method = shown_method(record)
        color, marker = style(method).values()
        face = "white" if record in hollow else color
        x, y = place(record, quality)
        axes.scatter(x, y, s=34, marker=marker, facecolors=face, edgecolors=color, label=method, zorder=2)
        if text := note(record):
            axes.text(x, y, text, fontsize=8, path_effects=halo, zorder=1.5)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(bytes_text))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.12, y=0.08)
    axes.set_xlabel("bytes of the stored embedding")
    axes.grid(alpha=0.3, linewidth=0.6)


def bytes_text(size: float, _position: int | None = None) -> str:
    """Format a number of bytes such as 500 kB or 2 MB."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= 0.9995 * unit:
            return f"{round(size / unit, 1 if size < 10 * unit else 0):g} {name}"
    return f"{size:.0f} B"


def quality_axis(axes: Axes, quality: str) -> None:
    """Set title and scale of the axis of a measure; perplexities are logarithmic."""
    from matplotlib.ticker import AutoLocator, FuncFormatter, NullLocator

    if quality == "perplexity":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(AutoLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    measure = find_measure(quality)
    assert measure is not None
    axes.set_ylabel(measure.title + ("" if measure.higher_is_better else " (lower is better)"))


def new_figure(
    panels: int, title: str, shared: bool = True, columns: int | None = None
) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels in rows of so many columns, or side by side, maybe with `shared` axes."""
    # Not pyplot: it would choose a window system and keep every figure alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = columns or panels
    rows = -(-panels // columns)
    size = max(columns, 1.45) * _WIDTH, rows * _HEIGHT
    figure = Figure(figsize=size, dpi=_DPI, layout=ConstrainedLayoutEngine(wspace=0.06))
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    return figure, list(figure.subplots(rows, columns, sharex=shared, sharey=shared, squeeze=False).flat)


def finish(
    figure: Figure, panels: Sequence[Axes], path: Path, styles: Mapping[str, dict[str, Any]] | None = None
) -> None:
    """Add one legend of all methods below the panels, separate labels, and write the figure as PNG.

    Other names than those of methods have `styles`, in the order of the legend.
    """
    from adjustText import adjust_text
    from matplotlib.lines import Line2D

    labels = {label for axes in panels for label in axes.get_legend_handles_labels()[1]}
    known = styles or {name: style(name) for name in sorted(labels, key=legend_order)}
    names = [name for name in known if name in labels]
    points = [Line2D([], [], **known[name], linestyle="none") for name in names]
    columns = min(len(names), 2 + int(2 * figure.get_figwidth() / _WIDTH))
    where: Any = {"loc": "outside lower center", "ncols": columns, "fontsize": 9, "frameon": False}
    figure.legend(points, names, handletextpad=0.2, **where)
    for axes in panels:
        lowest = min(
            (np.asarray(collection.get_offsets())[:, 1].min() for collection in axes.collections), default=0
        )
        if axes.get_yscale() == "linear" and lowest >= 0:
            axes.set_ylim(bottom=max(0, axes.get_ylim()[0]))
    figure.draw_without_rendering()  # from now on places in the data have places in the picture
    figure.set_layout_engine("none")
    for axes in panels:
        texts = [text for text in axes.texts if text.get_transform() == axes.transData]
        if texts:
            places = [np.asarray(points.get_offsets())[0] for points in axes.collections]
            corner = [text for text in axes.texts if text not in texts]
            options: Any = {"objects": corner or None, "expand": (1.5, 2.0), "iter_lim": 500}
            leader = {"arrowstyle": "-", "color": "#8c8c8c", "linewidth": 0.6}
            adjust_text(texts, *zip(*places), ax=axes, arrowprops=leader, **options)
    write_png(figure, path)


def write_png(figure: Figure, path: Path) -> None:
    """Write a figure; a file there is replaced only once the new one is complete."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})
