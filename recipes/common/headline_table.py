"""The table of a headline recipe: a line for each row and each length that was asked for.

``python -m recipes.common.headline_table --results runs/RECIPE --readme recipes/RECIPE/README.md`` puts it
between the markers of the README.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from recipes.common.config import read_row
from recipes.common.errors import UserError, run_main
from recipes.common.headline_runs import controls_length
from recipes.common.results import read_results
from recipes.common.table import Column, Record, markdown_table, rows_of, update_readme
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.path_options import PathOption

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
        "compression",
        Column("length", lambda record: str(record["metrics"]["length"])),
        *scores,
        Column("within 10 %", lambda record: f"{record['metrics']['within']:.0f} %"),
        Column("mean difference", lambda record: f"{record['metrics']['difference']:.1f}"),
        "minutes",
        "date",
        *(paper if with_paper else []),
    ]


def _rouge(measure: str, metric: str) -> Callable[[Record], str]:
    """What tells the mean of a metric."""
    return lambda record: f"{record['metrics'][measure][metric]['mean']:.1f}"


def _paper(metric: str) -> Callable[[Record], str]:
    """What tells the paper's figure, which is known before a run."""
    return lambda record: f"{(record.get('paper') or record['config']['paper'])[metric]:.2f}"


def main(arguments: Sequence[str]) -> None:
    """Put the table of a headline recipe into its README."""
    parser = Parser("python -m recipes.common.headline_table", description=main.__doc__)
    parser.add_argument(
        "--results", type=PathOption.SOURCE, required=True, help="folder of the recipe's results"
    )
    parser.add_argument(
        "--readme", type=PathOption.UPDATED, required=True, help="README with the markers called results"
    )
    options = parser.parse_args(arguments)
    configs = options.readme.parent / "configs"
    if not configs.is_dir():
        raise UserError(f"{configs}: no such folder; the README of a recipe lies beside it")
    found = read_results(options.results) if options.results.is_dir() else []
    records = rows_of(configs, found)
    # The rows without length control come first.
    records.sort(key=lambda record: controls_length(read_row(configs, record["row"])))
    with_paper = any(record["config"].get("paper") for record in records)
    lines = [line for record in records for line in by_length(record)]
    update_readme(options.readme, "results", markdown_table(lines, columns(with_paper)))
    measured = sum(bool(record["metrics"]) for record in records)
    print(f"{options.readme}: {measured} of {len(records)} rows measured")


if __name__ == "__main__":
    raise SystemExit(run_main("headline_table", main))
