"""The pictures of the report, as SVG that is the same for the same input and follows light and dark pages."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from recipes.common.plot import draw_quality_size, label_rows, place
from recipes.report.lines import Line
from recipes.report.measures import Measure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Inches; narrow, so that letters can still be read on a phone.
WIDTH, HEIGHT = 4.8, 3.6
BAR_HEIGHT = 0.26
# Drawn in this color, and replaced by that of the text of a light or a dark page.
_INK = "#1f2329"
_STYLE = "<style>svg{color:#1f2329}@media (prefers-color-scheme:dark){svg{color:#e4e7eb}}</style>"
# Told apart by people who see few colors, and on light and dark ground; of Okabe and Ito, made darker.
COLOURS = ["#0a7cc0", "#d9660a", "#0f9d76", "#b8578f", "#b38f00", "#4a9fd0", "#c0392b", "#7a6fd0", "#7f7f7f"]
_SETTINGS: dict[str, Any] = {
    "svg.hashsalt": "report",
    "svg.fonttype": "path",
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _INK,
    "grid.alpha": 0.2,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def draw(paint: Callable[[Axes], None], height: float = HEIGHT) -> str:
    """An SVG of one pair of axes.

    Args:
        paint: draws on them.
        height: in inches.
    """
    # Not pyplot: it would choose a window system and keep every figure alive.
    from cycler import cycler
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    settings: Any = {**_SETTINGS, "axes.prop_cycle": cycler(color=COLOURS)}
    with rc_context(settings):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        paint(figure.add_subplot())
        buffer = io.StringIO()
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = svg.replace(_INK, "currentColor")
    begin = svg.index(">") + 1
    return svg[:begin] + _STYLE + svg[begin:]


def quality_size(lines: Sequence[Line], key: str, measure: Measure) -> str:
    """Quality against size: a marker per method, a label per row where there is room.

    Args:
        lines: with counts and with this measure.
        key: of the measure.
        measure: what it is called.
    """
    records = [line.as_record() for line in lines]

    def paint(axes: Axes) -> None:
        draw_quality_size(axes, records, key)
        axes.figure.legend(loc="outside lower left", ncols=3, fontsize=8, handletextpad=0.2)
        axes.set_ylabel(measure.title + ("" if measure.higher_is_better else " (lower is better)"))
        for line, record in zip(lines, records, strict=True):
            spread = line.measured[key]
            if spread.deviation is not None:
                axes.errorbar(
                    *place(record, key),
                    yerr=spread.deviation,
                    color=_INK,
                    capsize=2,
                    linewidth=0.8,
                    zorder=1,
                )
        named = [record for record in records if record["row"]]
        named.sort(key=lambda record: record["metrics"][key], reverse=measure.higher_is_better)
        label_rows(axes, named, key)

    return draw(paint)


def parts(counts: Mapping[str, Any]) -> dict[str, float]:
    """Parameters of the embedding, of what only the output layer has, and of the rest."""
    rest = counts.get("rest", 0)
    total = counts.get("total", counts["embedding"] + rest)
    output = counts.get("output", 0)
    return {"embedding": max(total - rest - output, 0), "output only": output, "rest": rest}


def parameter_bars(lines: Sequence[Line]) -> str:
    """A bar for each line with counts: embedding, output and rest in millions."""

    def paint(axes: Axes) -> None:
        names = [line.row for line in lines]
        found = [parts(line.counts) for line in lines]
        left = [0.0] * len(lines)
        for index, part in enumerate(("embedding", "output only", "rest")):
            sizes = [each[part] / 1e6 for each in found]
            if any(sizes):
                axes.barh(names, sizes, left=left, label=part, height=0.7, color=COLOURS[(0, 1, 8)[index]])
                left = [before + size for before, size in zip(left, sizes, strict=True)]
        axes.invert_yaxis()
        axes.tick_params(axis="y", labelsize=8, length=0)
        axes.set_xlabel("parameters in millions")
        axes.grid(axis="x")
        axes.figure.legend(loc="outside upper left", ncols=3, fontsize=8)

    return draw(paint, height=1.0 + BAR_HEIGHT * len(lines))


def training_curves(curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Validation perplexity against steps, logarithmic, a line per row.

    Args:
        curves: (step, perplexity) by the name of the row.
    """

    from matplotlib.ticker import FuncFormatter

    def paint(axes: Axes) -> None:
        styles = ("-", "--", ":", "-.")
        for index, (row, points) in enumerate(curves.items()):
            shown = [(step, value) for step, value in points if 0 < value < math.inf]
            axes.plot(
                [step for step, _ in shown],
                [value for _, value in shown],
                styles[index // len(COLOURS) % len(styles)],
                label=row,
                linewidth=1.4,
            )
        axes.set_yscale("log")
        for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            set_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("steps")
        axes.set_ylabel("validation perplexity")
        axes.grid(which="both")
        axes.figure.legend(loc="outside lower left", ncols=2, fontsize=7)

    return draw(paint, height=HEIGHT + 0.16 * math.ceil(len(curves) / 2))
