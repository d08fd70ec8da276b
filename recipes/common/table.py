"""Tables of results in Markdown, put between two markers of a README.

Every number comes from a results file; a row without one says "not run".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from recipes.common.results import Record, embedding_bits, natural, times_smaller
from recipes.common.rows import Row
from shared_embeddings.errors import UserError
from shared_embeddings.utils.files import write_text

NOT_RUN = "not run"
BASELINE = "standard"


class Column(NamedTuple):
    """A column: its title, what it shows of a record, and whether it is known before a run."""

    title: str
    value: Callable[[Record], str]
    always: bool = False


def _millions(count: float) -> str:
    """A count of parameters, short enough for a table."""
    return f"{count / 1e6:.2f} M" if count >= 1e6 else f"{count / 1e3:.1f} k"


def _stored(record: Record) -> str:
    """The bytes that the embedding takes in a file, in kB or MB."""
    size = embedding_bits(record["counts"]) / 8
    return f"{size / 1e6:.2f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"


def _embedding(record: Record) -> Record:
    """The ``embedding:`` of a record's configuration; the plain table when it has none."""
    return record["config"].get("embedding") or {"method": BASELINE}


def describe_options(record: Record) -> str:
    """The method's options and what the row starts from, as they are written in ``rows.yaml``."""
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
    """A column's metric minus that of the row's baseline."""
    return lambda record: (
        "–" if is_baseline(record["row"]) else f"{record['metrics'][f'{metric}_difference']:+.1f}"
    )


def _number(metric: str) -> Callable[[Record], str]:
    """A metric with one decimal."""
    return lambda record: f"{record['metrics'][metric]:.1f}"


def _training_ms(record: Record) -> str:
    """The time of a training step with one decimal; fitted rows have none."""
    return "–" if record["config"].get("fit") else _number("training_ms")(record)


def _in_paper(metric: str) -> Callable[[Record], str]:
    """The paper's figure, which is known before a run."""
    return lambda record: str((record.get("paper") or {}).get(metric, "–"))


COLUMNS = {
    "row": Column("config", lambda r: r["row"], always=True),
    "method": Column("method", lambda r: _embedding(r)["method"], always=True),
    "options": Column("options", describe_options, always=True),
    "embedding": Column("embedding parameters", lambda r: _millions(r["counts"]["embedding"])),
    "stored": Column("stored", _stored),
    "smaller": Column("times smaller", lambda r: f"{times_smaller(r['counts']):.1f}x"),
    "total": Column("total parameters", lambda r: _millions(r["counts"]["total"])),
    "bleu": Column("BLEU", _number("bleu")),
    "difference": Column("difference", _difference("bleu")),
    "chrf": Column("chrF", _number("chrf")),
    "valid_perplexity": Column("validation perplexity", _number("valid_perplexity")),
    "perplexity": Column("test perplexity", _number("perplexity")),
    "perplexity_difference": Column("difference", _difference("perplexity")),
    "pointer_perplexity": Column("with pointer", _number("pointer_perplexity")),
    "paper_perplexity": Column("the paper's", _in_paper("perplexity"), always=True),
    "paper_pointer_perplexity": Column(
        "the paper's with pointer", _in_paper("pointer_perplexity"), always=True
    ),
    "training_ms": Column("training, ms per batch", _training_ms),
    "inference_ms": Column("inference, ms per batch", _number("inference_ms")),
    "paper_training_ms": Column("the paper's training, ms per batch", _in_paper("training_ms"), always=True),
    "paper_inference_ms": Column(
        "the paper's inference, ms per batch", _in_paper("inference_ms"), always=True
    ),
    "minutes": Column("training minutes", lambda r: f"{r['metrics']['training_seconds'] / 60:.0f}"),
    "speed": Column("tokens/s", lambda r: f"{r['metrics']['tokens_per_second']:.0f}"),
    "date": Column("date", lambda r: r["date"][:10]),
}
_SIZES = ("row", "method", "options", "embedding", "stored", "smaller", "total")
_COSTS = ("minutes", "speed", "date")
# The columns of a recipe's table, by what its models are judged by.
RECIPE_COLUMNS = {
    "bleu": (*_SIZES, "bleu", "difference", "chrf", *_COSTS),
    "perplexity": (*_SIZES, "valid_perplexity", "perplexity", "perplexity_difference", *_COSTS),
}


def markdown_table(results: Iterable[Record], columns: Sequence[str | Column]) -> str:
    """A Markdown table, one row per record; ends in a newline.

    A record without metrics (`not_run`) says "not run" in every cell that needs a run, and so does any cell
    whose value is missing from its record.

    Args:
        results: records of `read_results` or `not_run`, in the order of the table.
        columns: names out of `COLUMNS`, or other columns.
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
    """Copies of the records whose metrics have ``bleu_difference`` or ``perplexity_difference``.

    The difference is to the trained row that a row starts from; to ``standard``, or ``small_standard`` for
    ``small_x``, if it starts from none.
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
    """The row that a record starts from, else the baseline whose name shares most with its own, or None."""
    config = record["config"]
    teacher = (config.get("fit") or config.get("distill") or {}).get("teacher")
    if teacher is not None:
        return next((other for other in others if other["row"] == teacher), None)
    fitting = [
        other
        for other in others
        if is_baseline(other["row"]) and record["row"].startswith(other["row"].removesuffix(BASELINE))
    ]
    return max(fitting, key=lambda other: len(other["row"]), default=None)


def not_run(row: str, config: dict[str, Any]) -> Record:
    """The record of a row that has no results."""
    return {"row": row, "config": config, "counts": {}, "metrics": {}, "data_checksum": ""}


def records_of(rows: Mapping[str, Row], results: Iterable[Record], pattern: str = "*") -> list[Record]:
    """One record per row of a recipe, with its paper's figures: its results, or that it was not run.

    The baseline comes first, then the others by name, numbers counted as numbers.

    Args:
        rows: by name.
        results: records of `read_results`.
        pattern: of the rows' names, such as ``small_*``.
    """
    found = {record["row"]: record for record in results}
    records = [
        {**(found.get(name) or not_run(name, row.settings())), "paper": row.paper}
        for name, row in rows.items()
        if fnmatchcase(name, pattern)
    ]
    return sorted(records, key=lambda record: (not is_baseline(record["row"]), natural(record["row"])))


def update_readme(readme: str | Path, marker: str, text: str) -> None:
    """Replace the text between ``<!-- BEGIN marker -->`` and ``<!-- END marker -->``, and nothing else.

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


def chosen_columns(names: str) -> list[str]:
    """The columns in a list with commas.

    Raises:
        UserError: there is no such column.
    """
    chosen = names.split(",")
    for name in chosen:
        if name not in COLUMNS:
            raise UserError(f"no column {name!r}; there are: {', '.join(COLUMNS)}")
    return chosen
