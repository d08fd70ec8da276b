"""A picture of quality against size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared_embeddings.utils.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "osD^vP*X<>"
# Of a label, in points from its marker: to the right or left of it, above or below.
LABEL_PLACES = (((5, 4), "left"), ((5, -10), "left"), ((-5, 4), "right"), ((-5, -10), "right"))
# In points.
MARKER_RADIUS = 3
TITLES = {"bleu": "BLEU", "perplexity": "test perplexity"}


def quality_size_plot(results: Sequence[dict[str, Any]], path: str | Path, quality: str = "bleu") -> None:
    """Draw quality against embedding parameters as PNG: logarithmic, a marker per method, labels of rows.

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


def draw_quality_size(axes: Axes, results: Sequence[dict[str, Any]], quality: str) -> None:
    """Draw quality against embedding parameters on `axes`, for pictures of any kind.

    Args:
        axes: empty; they get neither a legend nor a label for the quality, nor names of rows.
        results: as for `quality_size_plot`.
        quality: the metric.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    by_method: dict[str, list[tuple[float, float]]] = {}
    for record in results:
        method = (record["config"].get("embedding") or {"method": "standard"})["method"]
        by_method.setdefault(method, []).append(_place(record, quality))
    for index, (method, points) in enumerate(sorted(by_method.items())):
        axes.scatter(*zip(*points, strict=True), marker=MARKERS[index % len(MARKERS)], label=method)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size / 1000:,.0f}k"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.15, y=0.12)
    axes.set_xlabel("embedding parameters (input and output)")
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
    centers = axes.transData.transform([_place(record, quality) for record in results])
    taken = [Bbox.from_extents(x - radius, y - radius, x + radius, y + radius) for x, y in centers]
    for record in results:
        for offset, side in LABEL_PLACES:
            label = axes.annotate(
                record["row"],
                _place(record, quality),
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


def _place(record: dict[str, Any], quality: str) -> tuple[float, float]:
    """Where a row is: its embedding parameters, and its quality."""
    return record["counts"]["embedding"], record["metrics"][quality]
