"""Tables of n-grams in few bits: their codes, their bits of a number, and the picture of the curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.common.plot import finish, new_figure, numbered_style, quality_axis
from recipes.common.results import Record, is_baseline

SERIES = (
    "fp32",
    "rounded in groups",
    "FP8, one scale",
    "trellis",
    "trellis, calibrated",
    "spectral, calibrated",
)


def series(record: Record) -> str:
    """Return what codes the table of a row has, one of `SERIES`; a dash without a table."""
    fit, embedding = record["config"].get("fit"), record["config"]["embedding"]
    if fit is None:
        return "–" if is_baseline(record["row"]) else "fp32"
    if fit.get("fp8"):
        return "FP8, one scale"
    codec = embedding.get("codec", "trellis")
    return "rounded in groups" if codec == "uniform" else codec + ", calibrated" * bool(fit.get("calibrate"))


def table_bits(record: Record) -> float:
    """Return the bits of the table, all counted."""
    counts = record["counts"]
    is_fp8 = (record["config"].get("fit") or {}).get("fp8")
    return float(8 * counts["dense_ngrams"] + 32 if is_fp8 else counts["ngram_bits"])


def bits_of_a_number(record: Record) -> float:
    """Return the bits of a number of the table, all counted."""
    return table_bits(record) / float(record["counts"]["dense_ngrams"])


def ngram_plot(records: Sequence[Record], path: Path, quality: str, title: str) -> None:
    """Draw perplexities at the bits of a number of the table as PNG, a panel for each corpus.

    A line is at the perplexity of the model whose table is coded; titles have that without a table.
    """
    from matplotlib.ticker import NullLocator

    corpora = list(dict.fromkeys(record["row"].partition("_")[0] for record in records))
    figure, panels = new_figure(len(corpora), title, shared=False)
    for axes, corpus in zip(panels, corpora, strict=True):
        rows = [record for record in records if record["row"].startswith(f"{corpus}_")]
        coded = [record for record in rows if record["config"].get("fit")]
        starts = {record["config"]["fit"]["teacher"] for record in coded}
        for record in (record for record in rows if record["row"] in starts):
            score = record["metrics"][quality]
            axes.axhline(score, color="#8c8c8c", linestyle="--", linewidth=0.9, zorder=0)
            right: Any = {"ha": "right", "va": "top", "transform": axes.get_yaxis_transform()}
            axes.text(0.99, score, f"fp32: {score:.2f}", fontsize=8, **right)
        for name in SERIES[1:]:
            points = sorted((bits_of_a_number(r), r["metrics"][quality]) for r in coded if series(r) == name)
            look = numbered_style(SERIES.index(name))
            axes.plot(*zip(*points), color=look["color"], linewidth=1, zorder=1)
            for bits, score in points:
                axes.scatter(bits, score, s=30, **look, label=name, zorder=2)
                axes.text(bits, score, f"{bits:.2g}: {score:.2f}", fontsize=7, color=look["color"])
        axes.set_xscale("log", base=2)
        axes.set_xticks([0.5, 1, 2, 3, 4, 8], ["0.5", "1", "2", "3", "4", "8"])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("bits of a number of the table, all counted")
        plain = [record["metrics"][quality] for record in rows if is_baseline(record["row"])]
        without = ", ".join(f"{score:.2f}" for score in plain)
        axes.set_title(f"{corpus}, without a table {without}", fontsize=10)
        axes.grid(alpha=0.3, linewidth=0.6)
        quality_axis(axes, quality)
    finish(figure, panels, path, {name: numbered_style(SERIES.index(name)) for name in SERIES[1:]})
