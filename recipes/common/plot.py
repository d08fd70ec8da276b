"""Pictures: quality against stored bytes, where a method has one color and marker, and training curves."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import shared_embeddings as se
from recipes.common.results import Record, embedding_bits, is_baseline
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLAIN = "plain table"
STAGES = ("trained from scratch", "fitted to a trained table", "fitted, then finetuned")
TITLES = {"bleu": "BLEU", "perplexity": "test perplexity"}
# Colors that stand out on light and on dark ground; markers of matplotlib and of Vega (names, or paths).
_COLORS = (
    *("#333333", "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#a0674b", "#e377c2", "#a8a820"),
    *("#17becf", "#4d5fd0", "#c2185b", "#00997a", "#d4a017", "#7f9c1f"),
)
_CROSS = "M-1,-.6L-.6,-1L0,-.4L.6,-1L1,-.6L.4,0L1,.6L.6,1L0,.4L-.6,1L-1,.6L-.4,0Z"
_STAR = "M0,-1.2L.3,-.4L1.1,-.4L.45,.1L.7,.95L0,.45L-.7,.95L-.45,.1L-1.1,-.4L-.3,-.4Z"
_MARKERS = {
    **{"o": "circle", "s": "square", "D": "diamond", "^": "triangle-up", "v": "triangle-down", "P": "cross"},
    **{"X": _CROSS, "*": _STAR, "<": "triangle-left", ">": "triangle-right"},
    **{"p": "M0,-1L.95,-.3L.6,.8L-.6,.8L-.95,-.3Z", "h": "M0,-1L.87,-.5L.87,.5L0,1L-.87,.5L-.87,-.5Z"},
    **{"d": "M0,-1.1L.65,0L0,1.1L-.65,0Z", "8": "M-.4,-1L.4,-1L1,-.4L1,.4L.4,1L-.4,1L-1,.4L-1,-.4Z"},
}
# Of markers, in points.
_RADIUS = 3.5
_LEADER = {"arrowstyle": "-", "color": "#8c8c8c", "linewidth": 0.6}
_REFERENCE: dict[str, Any] = {"color": "#8c8c8c", "linestyle": "--", "linewidth": 0.9, "zorder": 0}
# In inches.
_WIDTH, _HEIGHT, _DPI = 4.2, 4.9, 130
# Perplexities above this multiple of the plain table's are only named.
HIGHEST = 1.6


class Style(NamedTuple):
    """The color of a method, and its marker in matplotlib and in Vega."""

    color: str
    marker: str
    shape: str


def style(method: str) -> Style:
    """The style of a method or of `PLAIN`, by its place in the registry."""
    return numbered_style(0 if method == PLAIN else 1 + legend_order(method))


def numbered_style(index: int) -> Style:
    """The style of a place in a list."""
    marker = list(_MARKERS)[index % len(_MARKERS)]
    return Style(_COLORS[index % len(_COLORS)], marker, _MARKERS[marker])


def legend_order(method: str) -> int:
    """The place of a method in legends: that in the registry, behind the plain table."""
    others = [name for name in se.methods() if name != "standard"]
    return -1 if method == PLAIN else others.index(method)


def shown_method(record: Mapping[str, Any]) -> str:
    """The method of a row in pictures; uniform codes without calibration are the plain table, rounded."""
    embedding = record["config"].get("embedding") or {"method": "standard"}
    is_rounded = embedding["method"] == "quantized" and embedding.get("codec") == "uniform"
    is_rounded &= not (record["config"].get("fit") or {}).get("calibrate")
    return PLAIN if is_rounded or embedding["method"] == "standard" else str(embedding["method"])


def stage(record: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> str:
    """Which of `STAGES` a row belongs to, given the records of its recipe by row.

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
    """How the numbers of a row are stored, such as fp32, int8 or 3 bits."""
    embedding = record["config"].get("embedding") or {}
    store = (record["config"].get("fit") or {}).get("store")
    if store or "bits" not in embedding:
        return str(store or "fp32")
    bits = embedding["bits"]
    return f"int{bits:g}" if bits in (4, 8) else f"{bits:g} bits"


def place(record: Mapping[str, Any], quality: str) -> tuple[float, float]:
    """Where a row is: the bytes of its embedding, and its quality."""
    return embedding_bits(record["counts"]) / 8, record["metrics"][quality]


def quality_size_plot(results: Sequence[Record], path: Path, quality: str, title: str) -> None:
    """Draw quality against the bytes of the embedding as PNG, a panel for each of `STAGES` with rows.

    A method has one point at each size, its best row. The plain table in 32 and fewer bits is in every panel,
    with a dashed line at the quality of each table that others are fitted to. The metric is one of `TITLES`.
    """
    by_name = {record["row"]: record for record in results}
    by_stage = {name: [one for one in results if stage(one, by_name) == name] for name in STAGES}
    plain = plain_series(by_name)
    best = min((one["metrics"][quality] for one in plain), default=math.inf)
    limit = HIGHEST * best if quality == "perplexity" else math.inf

    def is_copy(record: Record) -> bool:  # a second training of the plain table with the same outcome
        if record in plain or shown_method(record) != PLAIN:
            return False
        size, score = place(record, quality)
        same_size = [place(one, quality)[1] for one in plain if place(one, quality)[0] == size]
        return any(math.isclose(score, other, rel_tol=0.005) for other in same_size)

    used = [name for name in STAGES if by_stage[name]]
    figure, panels = new_figure(len(used), title)
    for axes, name in zip(panels, used, strict=True):
        wholes = [*teachers(by_stage[name], by_name), *(one for one in plain if not one["config"].get("fit"))]
        shown = {one["row"]: one for one in [*plain, *wholes, *by_stage[name]]}
        points = best_of_each_size(list(shown.values()), quality, plain)
        points = [one for one in points if not is_copy(one)]
        # Rows above the limit would squeeze all others together; a corner says what they reach.
        above = sorted((one for one in points if one["metrics"][quality] > limit), key=lambda one: one["row"])
        if above:
            lines = [
                f"{shown_method(one)}, {bytes_text(place(one, quality)[0])}: {one['metrics'][quality]:.0f}"
                for one in above
            ]
            text = "\n".join(["off the scale:", *lines])
            axes.text(0.97, 0.97, text, transform=axes.transAxes, ha="right", va="top", fontsize=8)
        points = [one for one in points if one not in above]
        on_line = [one for one in points if one in plain or not _note(one)]
        draw_lines(axes, on_line, quality)
        draw_points(axes, points, quality, _note, [one for one in points if one not in on_line])
        for one in points:
            if one in wholes and shown_method(one) == PLAIN:
                axes.axhline(one["metrics"][quality], **_REFERENCE)
        axes.set_title(name if len(used) > 1 else "", fontsize=10)
    quality_axis(panels[0], quality)
    finish(figure, panels, path)


def plain_series(by_name: Mapping[str, Record]) -> list[Record]:
    """The plain table in all its formats; without rounded rows, the tables that others are compared with."""
    rounded = [one for one in by_name.values() if shown_method(one) == PLAIN and one["config"].get("fit")]
    if rounded:
        return [*teachers(rounded, by_name), *rounded]
    return [one for name, one in by_name.items() if is_baseline(name)]


def teachers(records: Iterable[Record], by_name: Mapping[str, Record]) -> list[Record]:
    """The rows that others start from, each once."""
    starts = (record["config"].get("distill") or record["config"].get("fit") or {} for record in records)
    names = dict.fromkeys(start.get("teacher") for start in starts)
    return [by_name[name] for name in names if name is not None and name in by_name]


def best_of_each_size(results: Sequence[Record], quality: str, kept: Sequence[Record] = ()) -> list[Record]:
    """The best row of each method at each size, unless a smaller one is better; sizes within an eighth are
    one. All rows of `kept` stay.
    """
    is_better = max if quality == "bleu" else min
    best: dict[tuple[str, float], Record] = {}
    smallest: dict[str, float] = {}  # of the current group of sizes
    others = [record for record in results if record not in kept]
    for record in sorted(others, key=lambda one: place(one, quality)[0]):
        size, score = place(record, quality)
        method = shown_method(record)
        if size > 1.125 * smallest.get(method, 0.0):
            smallest[method] = size
        key = method, smallest[method]
        if key not in best or is_better(score, best[key]["metrics"][quality]) == score:
            best[key] = record
    lasts: dict[str, float] = {}  # of smaller rows
    for method, size in sorted(best):
        score = best[method, size]["metrics"][quality]
        if method in lasts and is_better(score, lasts[method]) == lasts[method]:
            del best[method, size]
        else:
            lasts[method] = score
    return [*best.values(), *(record for record in results if record in kept)]


def _note(record: Record) -> str:
    """The label of a point whose method and size are ambiguous."""
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
        axes.plot(*zip(*points, strict=True), color=style(method).color, linewidth=1, zorder=1)


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
        color, marker, _ = style(method)
        face = "white" if record in hollow else color
        x, y = place(record, quality)
        axes.scatter(x, y, s=34, marker=marker, facecolors=face, edgecolors=color, label=method, zorder=2)
        if text := note(record):
            axes.text(x, y, text, fontsize=8, path_effects=halo, zorder=1.5)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: bytes_text(size)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.12, y=0.08)
    axes.set_xlabel("bytes of the stored embedding")
    axes.grid(alpha=0.3, linewidth=0.6)


def bytes_text(size: float) -> str:
    """A number of bytes such as 500 kB or 2 MB."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= 0.9995 * unit:
            return f"{round(size / unit, 1 if size < 10 * unit else 0):g} {name}"
    return f"{size:.0f} B"


def quality_axis(axes: Axes, quality: str) -> None:
    """Title and scale of the axis of a metric; perplexities are logarithmic."""
    from matplotlib.ticker import AutoLocator, FuncFormatter, NullLocator

    if quality == "perplexity":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(AutoLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel(TITLES[quality] + (" (lower is better)" if quality == "perplexity" else ""))


def new_figure(
    panels: int, title: str, shared: bool = True, columns: int | None = None
) -> tuple[Figure, list[Axes]]:
    """A figure with panels in rows of so many columns, or side by side; `shared`: with the same axes."""
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
    figure: Figure, panels: Sequence[Axes], path: Path, styles: Mapping[str, Style] | None = None
) -> None:
    """Add one legend of all methods below the panels, separate labels, and write the figure as PNG.

    Other names than those of methods have `styles`, in the order of the legend.
    """
    from adjustText import adjust_text
    from matplotlib.lines import Line2D
    from matplotlib.transforms import Bbox

    labels = {label for axes in panels for label in axes.get_legend_handles_labels()[1]}
    known = styles or {name: style(name) for name in sorted(labels, key=legend_order)}
    names = [name for name in known if name in labels]
    points = [
        Line2D([], [], color=known[name].color, marker=known[name].marker, linestyle="none") for name in names
    ]
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
        if not texts:
            continue
        radius = _RADIUS * figure.dpi / 72
        centers = [axes.transData.transform(np.asarray(one.get_offsets())[0]) for one in axes.collections]
        taken = [Bbox.from_extents(x - radius, y - radius, x + radius, y + radius) for x, y in centers]
        taken += [text.get_window_extent() for text in axes.texts if text not in texts]
        taken = [box.transformed(axes.transData.inverted()) for box in taken]
        adjust_text(texts, objects=taken, ax=axes, expand=(1.2, 1.4), iter_lim=500, arrowprops=_LEADER)
    write_png(figure, path)


def write_png(figure: Figure, path: Path) -> None:
    """Write a figure; a file there is replaced only once the new one is complete."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})


# (step, value), the first step first.
Curve = list[tuple[int, float]]
LOSS, PERPLEXITY, BLEU = "training loss", "validation perplexity", "BLEU"
MEASURES = (LOSS, PERPLEXITY, BLEU)
# Lines of logs with a step, with a measure, or with both; a measure without a step belongs to the last one.
_STEP = re.compile(r"\b[Ss]tep +(\d+)")
_IN_LOG = {
    LOSS: re.compile(r"\bepoch \S+ loss ([\w.]+)|\bxent: +([\w.]+)"),
    PERPLEXITY: re.compile(r"\bvalid loss \S+ ppl ([\w.]+)|\bValidation perplexity: ([\w.+]+)"),
    BLEU: re.compile(r"\bBLEU: ([\w.]+)"),
}
_IN_EVENTS = {
    **{"train/loss": LOSS, "progress/xent": LOSS, "valid/perplexity": PERPLEXITY, "valid/ppl": PERPLEXITY},
    "valid/BLEU": BLEU,
}


def read_curves(run: Path) -> dict[str, Curve]:
    """The curves of `MEASURES` with values, from a log, or a folder with ``train.log`` or TensorBoard files.

    A resumed training has some steps twice; the later value counts.
    """
    return {**_of_events(run), **_of_log(run / "train.log" if run.is_dir() else run)}


def validation_curve(run: Path) -> Curve:
    """Validation perplexity by step; empty where there is none."""
    log = _of_log(run / "train.log")
    return (log if PERPLEXITY in log else _of_events(run)).get(PERPLEXITY, [])


def _of_events(folder: Path) -> dict[str, Curve]:
    """The curves in event files of TensorBoard, also those of folders below."""
    folders = sorted({file.parent for file in folder.rglob("*tfevents*")}) if folder.is_dir() else []
    if not folders:
        return {}
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    points: dict[str, dict[int, float]] = {}
    for part in folders:
        events = EventAccumulator(str(part), size_guidance={SCALARS: 0})  # 0: all values, not a sample
        events.Reload()
        for tag in _IN_EVENTS.keys() & events.Tags()[SCALARS]:
            values = {event.step: float(event.value) for event in events.Scalars(tag)}
            points.setdefault(_IN_EVENTS[tag], {}).update(values)
    return {measure: sorted(values.items()) for measure, values in points.items()}


def _of_log(path: Path) -> dict[str, Curve]:
    """The curves in a log; none if it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    points: dict[str, dict[int, float]] = {}
    step = 0
    for line in lines:
        if found := _STEP.search(line):
            step = int(found[1])
        for measure, pattern in _IN_LOG.items():
            if found := pattern.search(line):
                try:
                    value = float(next(filter(None, found.groups())))
                except ValueError:
                    continue
                points.setdefault(measure, {})[step] = value
    return {measure: sorted(values.items()) for measure, values in points.items()}


def plot_runs(runs: Sequence[Path], output: Path) -> None:
    """Draw the curves of runs (see `read_curves`) into one PNG, a panel per measure and a line per run."""
    curves = {}
    for run, name in zip(runs, short_names(runs), strict=True):
        curves[name] = read_curves(run)
        if not curves[name]:
            raise UserError(
                f"{run}: no train.log with steps and no TensorBoard files; name the folder of a run"
            )
    measures = [measure for measure in MEASURES if any(measure in found for found in curves.values())]
    figure, panels = new_figure(len(measures), "", shared=False)
    for axes, measure in zip(panels, measures, strict=True):
        for number, (name, found) in enumerate(curves.items()):
            points = [(step, value) for step, value in found.get(measure, []) if math.isfinite(value)]
            steps, values = [step for step, _ in points], [value for _, value in points]
            marker = "." if len(points) < 40 else ""
            axes.plot(steps, values, color=f"C{number % 10}", marker=marker, linewidth=1.2, label=name)
        if measure == PERPLEXITY:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_title(measure + (" (nats per token)" if measure == LOSS else ""), fontsize=10)
        axes.set_xlabel("steps")
        axes.grid(alpha=0.3, linewidth=0.6, which="both")
    handles, labels = panels[0].get_legend_handles_labels()
    columns = min(len(labels), 2 * len(panels))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)
    write_png(figure, output)


def short_names(paths: Sequence[Path]) -> list[str]:
    """The shortest suffixes of paths that differ."""
    whole = [path.absolute().parts for path in paths]
    length, longest = 1, max(map(len, whole))
    while length < longest and len({parts[-length:] for parts in whole}) < len(whole):
        length += 1
    return [os.path.join(*parts[-length:]) for parts in whole]
