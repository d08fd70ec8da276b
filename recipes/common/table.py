"""Tables of results in Markdown, put between two markers of a README.

``python -m recipes.common.table --results runs/RECIPE --readme recipes/RECIPE/README.md`` also draws the
picture of quality against size; with ``--quality perplexity`` it is a table of language models. Every number
comes from a results file; a row without one says "not run".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from recipes.common.config import is_common, read_content
from recipes.common.errors import UserError, run_main
from recipes.common.plot import quality_size_plot
from recipes.common.results import read_results
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.files import write_text
from shared_embeddings.utils.path_options import PathOption

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


def describe_options(record: Record) -> str:
    """The method's options and what the row starts from, as they are written in the configuration."""
    options = {name: value for name, value in _embedding(record).items() if name != "method"}
    parts = [f"{name} {value}" for name, value in options.items()]
    distill = dict(record["config"].get("distill") or {})
    if distill:
        parts.append(f"distilled from {distill.pop('teacher')}")
        parts += [f"{name} {value}" for name, value in distill.items()]
    if record["config"].get("fit"):
        parts.append(f"fitted to {record['config']['fit']['teacher']}, not trained")
    return ", ".join(parts) or "–"


def _difference(metric: str) -> Callable[[Record], str]:
    """What tells a metric minus that of the baseline."""

    def tell(record: Record) -> str:
        return "–" if is_baseline(record["row"]) else f"{record['metrics'][f'{metric}_difference']:+.1f}"

    return tell


def _number(metric: str) -> Callable[[Record], str]:
    """What tells a metric with one decimal."""
    return lambda record: f"{record['metrics'][metric]:.1f}"


def _in_paper(metric: str) -> Callable[[Record], str]:
    """What tells the paper's figure, which is known before a run."""

    def tell(record: Record) -> str:
        paper = record.get("paper") or record["config"].get("paper") or {}
        return str(paper.get(metric, "–"))

    return tell


COLUMNS = {
    "row": Column("config", lambda r: r["row"], always=True),
    "method": Column("method", lambda r: _embedding(r)["method"], always=True),
    "options": Column("options", describe_options, always=True),
    "embedding": Column("embedding parameters", lambda r: _millions(r["counts"]["embedding"])),
    "compression": Column("compression", lambda r: f"{r['counts']['compression']:.1f}x"),
    "total": Column("total parameters", lambda r: _millions(r["counts"]["total"])),
    "bleu": Column("BLEU", _number("bleu")),
    "difference": Column(f"to {BASELINE}", _difference("bleu")),
    "chrf": Column("chrF", _number("chrf")),
    "valid_perplexity": Column("validation perplexity", _number("valid_perplexity")),
    "perplexity": Column("test perplexity", _number("perplexity")),
    "perplexity_difference": Column(f"to {BASELINE}", _difference("perplexity")),
    "pointer_perplexity": Column("with pointer", _number("pointer_perplexity")),
    "paper_perplexity": Column("the paper's", _in_paper("perplexity"), always=True),
    "paper_pointer_perplexity": Column(
        "the paper's with pointer", _in_paper("pointer_perplexity"), always=True
    ),
    "minutes": Column("training minutes", lambda r: f"{r['metrics']['training_seconds'] / 60:.0f}"),
    "speed": Column("tokens/s", lambda r: f"{r['metrics']['tokens_per_second']:.0f}"),
    "date": Column("date", lambda r: r["date"][:10]),
}
_SIZES = ("row", "method", "options", "embedding", "compression", "total")
_COSTS = ("minutes", "speed", "date")
# The columns of a recipe's table, by what its models are judged by.
RECIPE_COLUMNS = {
    "bleu": (*_SIZES, "bleu", "difference", "chrf", *_COSTS),
    "perplexity": (*_SIZES, "valid_perplexity", "perplexity", "perplexity_difference", *_COSTS),
}


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
    """Copies of the records whose metrics hold ``bleu_difference`` or ``perplexity_difference``.

    The difference is to the baseline of the same recipe: ``standard``, for ``small_x`` rather
    ``small_standard``.
    """
    records = list(results)
    completed = []
    for record in records:
        metrics = dict(record["metrics"])
        for metric in RECIPE_COLUMNS.keys() & metrics.keys():
            baseline = _baseline_of(record, [other for other in records if metric in other["metrics"]])
            if baseline is not None:
                metrics[f"{metric}_difference"] = metrics[metric] - baseline["metrics"][metric]
        completed.append({**record, "metrics": metrics})
    return completed


def is_baseline(row: str) -> bool:
    """Whether a row is what others are compared with: ``standard``, or ``small_standard`` for ``small_…``."""
    return row == BASELINE or row.endswith(f"_{BASELINE}")


def _baseline_of(record: Record, others: Sequence[Record]) -> Record | None:
    """The baseline of the same recipe that shares most of the record's name with it, or None."""
    fitting = [
        other
        for other in others
        if other["recipe"] == record["recipe"]
        and is_baseline(other["row"])
        and record["row"].startswith(other["row"].removesuffix(BASELINE))
    ]
    return max(fitting, key=lambda other: len(other["row"]), default=None)


def not_run(recipe: str, row: str, config: dict[str, Any]) -> Record:
    """The record of a configuration that has no results."""
    return {"recipe": recipe, "row": row, "config": config, "counts": {}, "metrics": {}, "data_checksum": ""}


def rows_of(configs: Path, results: Iterable[Record], pattern: str = "*") -> list[Record]:
    """One record per configuration file of a recipe: its results, or that it was not run.

    ``common.yaml`` is no row. The baseline comes first, then the others by name, numbers counted as numbers.

    Args:
        configs: folder of the configuration files.
        results: records of `read_results`.
        pattern: of the rows' names, such as ``small_*``.
    """
    found = {record["row"]: record for record in results}
    records = []
    for path in configs.glob("*.yaml"):
        if not is_common(path) and fnmatchcase(path.stem, pattern):
            config = read_content(path) or {}
            records.append(found.get(path.stem) or not_run(configs.parent.name, path.stem, config))
    return sorted(records, key=_row_order)


def _starts_from_a_row(configs: Path, row: str) -> bool:
    """Whether a row is fitted to another one, or distilled from it."""
    content = read_content(configs / f"{row}.yaml") or {}
    return "distill" in content or "fit" in content


def _row_order(record: Record) -> tuple[bool, list[tuple[int, str]]]:
    """Sorting key: the baseline, then natural order."""
    parts = re.findall(r"\d+|\D+", record["row"])
    return not is_baseline(record["row"]), [(int(p), "") if p.isdigit() else (-1, p) for p in parts]


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


def _columns(names: str) -> list[str]:
    """The columns that a list with commas names."""
    chosen = names.split(",")
    for name in chosen:
        if name not in COLUMNS:
            raise UserError(f"no column {name!r}; there are: {', '.join(COLUMNS)}")
    return chosen


def main(arguments: Sequence[str]) -> None:
    """Put a recipe's table into its README and draw its plot."""
    parser = Parser("python -m recipes.common.table", description=main.__doc__)
    parser.add_argument(
        "--results", type=PathOption.SOURCE, required=True, help="folder of the recipe's results"
    )
    parser.add_argument(
        "--readme", type=PathOption.UPDATED, required=True, help="README with the two markers"
    )
    parser.add_argument("--marker", default="results", help="name of the markers (default: %(default)s)")
    parser.add_argument(
        "--configs", type=PathOption.SOURCE, help="folder of the rows (default: configs beside the README)"
    )
    parser.add_argument(
        "--quality",
        choices=sorted(RECIPE_COLUMNS),
        default="bleu",
        help="what the models are judged by (default: %(default)s)",
    )
    parser.add_argument("--rows", default="*", help="only rows of such names, for instance 'small_*'")
    parser.add_argument("--columns", help="names of columns, with commas (default: those of the quality)")
    parser.add_argument(
        "--plot", type=PathOption.OUTPUT, help="picture (default: quality_size.png beside the README)"
    )
    parser.add_argument("--from-scratch", action="store_true", help="only rows that start from no other row")
    options = parser.parse_args(arguments)
    configs = options.configs or options.readme.parent / "configs"
    if not configs.is_dir():
        raise UserError(f"{configs}: no such folder; name the folder of the rows with --configs")
    records = rows_of(configs, read_results(options.results), options.rows)
    if options.from_scratch:
        records = [record for record in records if not _starts_from_a_row(configs, record["row"])]
    if not records:
        raise UserError(f"{configs}: no row is called {options.rows}; see --rows")
    columns = _columns(options.columns) if options.columns else RECIPE_COLUMNS[options.quality]
    update_readme(options.readme, options.marker, markdown_table(records, columns))
    measured = [record for record in records if record["metrics"]]
    if measured:
        picture = options.plot or options.readme.parent / "quality_size.png"
        quality_size_plot(measured, picture, options.quality)
    print(f"{options.readme}: {len(measured)} of {len(records)} rows measured")


if __name__ == "__main__":
    raise SystemExit(run_main("table", main))
