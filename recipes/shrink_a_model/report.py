"""The table of the results and the picture of quality against stored bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.common.plot import draw_points, finish, new_figure
from recipes.common.results import Record, read_results
from recipes.common.table import Column, describe_options, markdown_table, not_run, update_readme
from recipes.shrink_a_model.grid import ORIGINAL, ShrinkRow

MARKER, PICTURE = "results", "quality_size.png"
# Panels of the picture, by metric.
PANELS = {
    "top10": "nearest 10 neighbors as in the original",
    "found": "headlines whose description is nearest",
}


def write_report(rows: Mapping[str, ShrinkRow], results: Path, readme: Path) -> None:
    """Put the results of the rows into a README, and draw the picture beside it.

    Raises:
        UserError: there are no results, or the README lacks the markers.
    """
    found = {record["row"]: record for record in read_results(results)}
    records = [found.get(name) or not_run(name, _config(row)) for name, row in rows.items()]
    update_readme(readme, MARKER, table(records))
    draw([record for record in records if record["metrics"]], readme.with_name(PICTURE))
    print(f"wrote the results into {readme}")


def _config(row: ShrinkRow) -> dict[str, Any]:
    """The settings that the table shows of a row without results."""
    return {"trim": row.trim, "embedding": row.embedding or {"method": "standard"}}


def table(records: Sequence[Record]) -> str:
    """The Markdown table of all rows."""
    original = next((one for one in records if one["row"] == ORIGINAL and one["counts"]), None)
    columns = [
        Column("row", lambda r: r["row"], always=True),
        Column("table", _table),
        Column("words", lambda r: f"{r['counts']['words']:,}"),
        Column("folder, MB", lambda r: f"{r['counts']['folder_bytes'] / 1e6:.1f}"),
        Column("table, MB", lambda r: f"{r['counts']['stored_bits'] / 8e6:.2f}"),
        Column("table smaller", lambda r: _smaller(r, original)),
        *(Column(f"rho {name}", _rho(key)) for key, name in _sets(records).items()),
        Column("headlines found", _percent("found")),
        Column("nearest as before", _percent("top1")),
        Column("10 nearest as before", _percent("top10")),
        Column("correlation", lambda r: f"{r['metrics']['correlation']:.4f}"),
        Column("speed", lambda r: f"{r['metrics']['speed']:.2f}x"),
        Column("ONNX, MB", _onnx(lambda found: f"{found['bytes'] / 1e6:.1f}")),
        Column("ONNX, difference", _onnx(lambda found: f"{found['difference']:.0e}")),
        Column("ONNX, speed", _onnx(lambda found: f"{found['speed']:.2f}x")),
    ]
    return markdown_table(records, columns)


def _table(record: Record) -> str:
    """Method and options of the table."""
    options = describe_options(record)
    method = str(record["config"]["embedding"]["method"])
    return "plain" if method == "standard" else f"{method}, {options}"


def _smaller(record: Record, original: Record | None) -> str:
    """How many times fewer bytes the table takes than in the original."""
    if original is None:
        raise KeyError(ORIGINAL)
    return f"{original['counts']['stored_bits'] / record['counts']['stored_bits']:.1f}x"


def _sets(records: Sequence[Record]) -> dict[str, str]:
    """The sets of word pairs with shorter names."""
    names = next((list(record["metrics"]["rho"]) for record in records if record["metrics"]), [])
    return {name: name.removeprefix("EN-").removesuffix("-ALL") for name in names}


def _rho(name: str) -> Callable[[Record], str]:
    """Rho of one set."""

    def describe(record: Record) -> str:
        rho = record["metrics"]["rho"][name]
        return "undefined" if rho is None else f"{rho:.3f}"

    return describe


def _percent(metric: str) -> Callable[[Record], str]:
    """A fraction in percent."""
    return lambda record: f"{100 * record['metrics'][metric]:.1f} %"


def _onnx(describe: Callable[[dict[str, float]], str]) -> Callable[[Record], str]:
    """What ONNX Runtime did with a model."""

    def value(record: Record) -> str:
        found = record["metrics"]["onnx"]
        return "–" if found is None else describe(found)

    return value


def draw(records: Sequence[Record], path: Path) -> None:
    """Draw quality against the bytes of the table, a panel per metric, as PNG.

    Args:
        records: measured rows.
        path: the picture; replaced only once the new one is complete.
    """
    shown = [{**one, "metrics": {key: 100 * one["metrics"][key] for key in PANELS}} for one in records]
    figure, panels = new_figure(len(PANELS), "A sentence encoder with a smaller table", shared=False)
    for axes, (metric, title) in zip(panels, PANELS.items(), strict=True):
        draw_points(axes, shown, metric, lambda record: record["row"].replace("_", " "))
        axes.set_ylabel(f"{title} (%)")
    finish(figure, panels, path)
