"""A picture of quality against size."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared_embeddings.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "osD^vP*X<>"
TITLES = {"bleu": "BLEU", "perplexity": "test perplexity"}


def quality_size_plot(results: Iterable[dict[str, Any]], path: str | Path, quality: str = "bleu") -> None:
    """Draw quality against embedding parameters as PNG: logarithmic, a marker per method, a label per row.

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
    with replacing(Path(path)) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})


def draw_quality_size(axes: Axes, results: Iterable[dict[str, Any]], quality: str) -> None:
    """Draw quality against embedding parameters on `axes`, for pictures of any kind.

    Args:
        axes: empty; they get neither a legend nor a label for the quality.
        results: as for `quality_size_plot`; a row with an empty name gets no label.
        quality: the metric.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    by_method: dict[str, list[tuple[float, float, str]]] = {}
    for record in results:
        method = (record["config"].get("embedding") or {"method": "standard"})["method"]
        point = (record["counts"]["embedding"], record["metrics"][quality], record["row"])
        by_method.setdefault(method, []).append(point)
    for index, (method, points) in enumerate(sorted(by_method.items())):
        axes.scatter(
            [size for size, _, _ in points],
            [value for _, value, _ in points],
            marker=MARKERS[index % len(MARKERS)],
            label=method,
        )
        for size, value, row in points:
            axes.annotate(row, (size, value), xytext=(5, 4), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size / 1000:,.0f}k"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.15, y=0.12)
    axes.set_xlabel("embedding parameters (input and output)")
    axes.grid(alpha=0.3)
