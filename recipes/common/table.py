"""Tables of results in Markdown, put between two markers of a README.

``python -m recipes.common.table --results runs/RECIPE --readme recipes/RECIPE/README.md`` also draws the
picture of quality against size. Every number comes from a results file; a row without one says "not run".
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from recipes.common.errors import UserError, run_main
from recipes.common.plot import quality_size_plot
from recipes.common.results import read_results
from shared_embeddings.files import write_text

NOT_RUN = "not run"
BASELINE = "standard"
Record = dict[str, Any]


class Column(NamedTuple):
    """A column: its title, what it shows of a record, and whether it is known before a run."""

    title: str
    value: Callable[[Record], str]
    always: bool = False


def _millions(count: float) -> str:
    """A count of parameters, short enough for a table."""
    return f"{count / 1e6:.2f} M" if count >= 1e6 else f"{count / 1e3:.1f} k"


def _embedding(record: Record) -> Record:
    """The ``embedding:`` of a record's configuration; the plain table when it has none."""
    return record["config"].get("embedding") or {"method": BASELINE}


def _options(record: Record) -> str:
    """The method's options and what the row starts from, as they are written in the configuration."""
    options = {name: value for name, value in _embedding(record).items() if name != "method"}
    parts = [f"{name} {value}" for name, value in options.items()]
    distill = dict(record["config"].get("distill") or {})
    if distill:
        parts.append(f"distilled from {distill.pop('teacher')}")
        parts += [f"{name} {value}" for name, value in distill.items()]
    return ", ".join(parts) or "–"


def _difference(record: Record) -> str:
    """BLEU minus that of the baseline."""
    return f"{record['metrics']['bleu_difference']:+.1f}" if record["row"] != BASELINE else "–"


COLUMNS = {
    "row": Column("config", lambda r: r["row"], always=True),
    "method": Column("method", lambda r: _embedding(r)["method"], always=True),
    "options": Column("options", _options, always=True),
    "embedding": Column("embedding parameters", lambda r: _millions(r["counts"]["embedding"])),
    "compression": Column("compression", lambda r: f"{r['counts']['compression']:.1f}x"),
    "total": Column("total parameters", lambda r: _millions(r["counts"]["total"])),
    "bleu": Column("BLEU", lambda r: f"{r['metrics']['bleu']:.1f}"),
    "difference": Column(f"to {BASELINE}", _difference),
    "chrf": Column("chrF", lambda r: f"{r['metrics']['chrf']:.1f}"),
    "minutes": Column("training minutes", lambda r: f"{r['metrics']['training_seconds'] / 60:.0f}"),
    "speed": Column("tokens/s", lambda r: f"{r['metrics']['tokens_per_second']:.0f}"),
    "date": Column("date", lambda r: r["date"][:10]),
}
RECIPE_COLUMNS = tuple(name for name in COLUMNS if name != "row")


def markdown_table(results: Iterable[Record], columns: Sequence[str | Column]) -> str:
    """A Markdown table, one row per record; ends in a newline.

    A record without metrics, as `not_run` makes it, says "not run" wherever a run would tell, and so does any
    cell whose value is missing from its record.

    Args:
        results: records of `read_results` or `not_run`, in the order of the table.
        columns: names out of `COLUMNS`, or columns of one's own.
    """
    chosen = [COLUMNS[column] if isinstance(column, str) else column for column in columns]
    lines = [
        "| " + " | ".join(column.title for column in chosen) + " |",
        "| " + " | ".join("---" for _ in chosen) + " |",
    ]
    for record in with_differences(results):
        lines.append("| " + " | ".join(_cell(column, record) for column in chosen) + " |")
    return "\n".join(lines) + "\n"


def _cell(column: Column, record: Record) -> str:
    """The text of one cell, safe inside a Markdown table."""
    if not (column.always or record["metrics"]):
        return NOT_RUN
    try:
        text = column.value(record)
    except (KeyError, TypeError):
        return NOT_RUN
    return text.replace("|", "\\|").replace("\n", " ")


def with_differences(results: Iterable[Record]) -> list[Record]:
    """Copies of the records whose metrics hold ``bleu_difference``, to the baseline of the same recipe."""
    records = list(results)
    scored = [record for record in records if "bleu" in record["metrics"]]
    baselines = {
        record["recipe"]: record["metrics"]["bleu"] for record in scored if record["row"] == BASELINE
    }
    completed = []
    for record in records:
        metrics = dict(record["metrics"])
        if "bleu" in metrics and record["recipe"] in baselines:
            metrics["bleu_difference"] = metrics["bleu"] - baselines[record["recipe"]]
        completed.append({**record, "metrics": metrics})
    return completed


def not_run(recipe: str, row: str, config: dict[str, Any]) -> Record:
    """The record of a configuration that has no results."""
    return {"recipe": recipe, "row": row, "config": config, "counts": {}, "metrics": {}, "data_checksum": ""}


def rows_of(configs: Path, results: Iterable[Record]) -> list[Record]:
    """One record per configuration file of a recipe: its results, or that it was not run.

    ``common.yaml`` is no row. The baseline comes first, then the others by name, numbers counted as numbers.
    """
    found = {record["row"]: record for record in results}
    records = []
    for path in configs.glob("*.yaml"):
        if path.stem != "common":
            config = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
            records.append(found.get(path.stem) or not_run(configs.parent.name, path.stem, config))
    return sorted(records, key=_row_order)


def _row_order(record: Record) -> tuple[bool, list[tuple[int, str]]]:
    """Sorting key: the baseline, then natural order."""
    parts = re.findall(r"\d+|\D+", record["row"])
    return record["row"] != BASELINE, [(int(p), "") if p.isdigit() else (-1, p) for p in parts]


def update_readme(readme: str | Path, marker: str, text: str) -> None:
    """Replace what stands between ``<!-- BEGIN marker -->`` and ``<!-- END marker -->``, and nothing else.

    Raises:
        UserError: no such file, or its markers are missing, repeated or in the wrong order.
    """
    path = Path(readme)
    begin, end = f"<!-- BEGIN {marker} -->", f"<!-- END {marker} -->"
    try:
        old = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    if old.count(begin) != 1 or old.count(end) != 1 or old.index(begin) > old.index(end):
        raise UserError(f"{path}: it must hold the lines {begin} and {end}, once each and in this order")
    head, rest = old.split(begin)
    tail = rest.split(end)[1]
    write_text(path, f"{head}{begin}\n{text.rstrip()}\n{end}{tail}")


def main(arguments: Sequence[str]) -> None:
    """Put a recipe's table into its README and draw its plot."""
    parser = argparse.ArgumentParser(prog="recipes.common.table", description=main.__doc__)
    parser.add_argument("--results", type=Path, required=True, help="folder of the recipe's results")
    parser.add_argument("--readme", type=Path, required=True, help="README with the two markers")
    parser.add_argument("--marker", default="results", help="name of the markers (default: %(default)s)")
    parser.add_argument(
        "--configs", type=Path, help="folder of the rows (default: configs beside the README)"
    )
    parser.add_argument("--plot", type=Path, help="picture (default: quality_size.png beside the README)")
    options = parser.parse_args(arguments)
    configs = options.configs or options.readme.parent / "configs"
    if not configs.is_dir():
        raise UserError(f"{configs}: no such folder; name the folder of the rows with --configs")
    records = rows_of(configs, read_results(options.results))
    update_readme(options.readme, options.marker, markdown_table(records, RECIPE_COLUMNS))
    measured = [record for record in records if record["metrics"]]
    if measured:
        quality_size_plot(measured, options.plot or options.readme.parent / "quality_size.png")
    print(f"{options.readme}: {len(measured)} of {len(records)} rows measured")


if __name__ == "__main__":
    raise SystemExit(run_main("table", main))
