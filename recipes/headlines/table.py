"""The table of a headline recipe: a line for each row and each desired length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from recipes.common.recipe import Recipe
from recipes.common.results import Record
from recipes.common.table import Column, markdown_table
from recipes.headlines.evaluate import controls_length

PREFIX = "length_"
ROUGE = {"rouge1": "R-1", "rouge2": "R-2", "rougeL": "R-L"}


def by_length(record: Record) -> list[Record]:
    """The record once for each length that it was evaluated at, shortest first; as it is without any."""
    lengths = sorted(int(name.removeprefix(PREFIX)) for name in record["metrics"] if name.startswith(PREFIX))
    return [
        {
            **record,
            "metrics": {**record["metrics"], **record["metrics"][f"{PREFIX}{length}"], "length": length},
        }
        for length in lengths
    ] or [record]


def columns(with_paper: bool) -> list[str | Column]:
    """The columns; those of the paper's figures come last and only `with_paper`."""
    scores = [
        Column(f"{title} {measure}", _rouge(measure, metric))
        for measure in ("recall", "f1")
        for metric, title in ROUGE.items()
    ]
    paper = [Column(f"the paper's {title}", _paper(metric), always=True) for metric, title in ROUGE.items()]
    return [
        "row",
        "embedding",
        "smaller",
        Column("length", lambda record: str(record["metrics"]["length"])),
        *scores,
        Column("within 10 %", lambda record: f"{record['metrics']['within']:.0f} %"),
        Column("mean difference", lambda record: f"{record['metrics']['difference']:.1f}"),
        "minutes",
        "date",
        *(paper if with_paper else []),
    ]


def _rouge(measure: str, metric: str) -> Callable[[Record], str]:
    """The mean of a metric."""
    return lambda record: f"{record['metrics'][measure][metric]['mean']:.1f}"


def _paper(metric: str) -> Callable[[Record], str]:
    """The paper's figure, which is known before a run."""
    return lambda record: f"{record['paper'][metric]:.2f}"


def headline_table(recipe: Recipe, records: Sequence[Record]) -> str:
    """The Markdown table of a headline recipe, rows without length control first."""
    ordered = sorted(records, key=lambda record: controls_length(recipe.rows[record["row"]]))
    with_paper = any(record.get("paper") for record in ordered)
    lines = [line for record in ordered for line in by_length(record)]
    return markdown_table(lines, columns(with_paper))
