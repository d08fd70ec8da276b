"""Generate and score the headlines of one row of a headline recipe, and the table of its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nmt.summarization.characters import join_characters
from nmt.summarization.length_control import LENGTH_DEPENDENT
from nmt.summarization.rerank import rerank, stop_words
from nmt.summarization.rouge import METRICS, PRESETS, Report, score_texts
from recipes.common.corpus import read_lines, write_lines
from recipes.common.recipe import Recipe, parse_row
from recipes.common.results import Record
from recipes.common.rows import Row
from recipes.common.table import Column, markdown_table
from recipes.common.tools import option_value, with_overrides
from recipes.translation.evaluate import read_trained, translate, write_evaluation

# Tolerated relative deviation from the desired length.
TOLERANCE = 0.1
USAGE = """usage: eval.sh ROW [--smoke] [option of onmt_translate ...]

Generates headlines of the test set with the averaged model of ROW, scores them with ROUGE and writes a line
to $RUNS/{recipe}/results.jsonl. Models with length control generate headlines of each length in data.yaml.
Run train.sh ROW first; use --smoke for both or neither."""


def evaluate(recipe: Recipe, row: Row, options: list[str]) -> None:
    """Generate and score headlines of every length; without length control, they are generated once.

    Raises:
        UserError: the data are not prepared, or the row is not trained on them.
    """
    trained = read_trained(recipe, row)
    references = [read_lines(recipe.data / name) for name in trained.data["references"]]
    metrics: dict[str, Any] = {}
    speeds = []
    controlled = controls_length(row)
    for length in trained.data["lengths"]:
        if controlled:
            asked = with_overrides(["-desired_length", str(length)], options)
            headlines, speed = write_headlines(recipe, row, asked, f"test.{length}")
            speeds.append(speed)
        elif not speeds:
            headlines, speed = write_headlines(recipe, row, options, "test")
            speeds.append(speed)
        metrics[f"length_{length}"] = score_headlines(headlines, references, length)
        print(f"{row.name} at {length}: {describe(metrics[f'length_{length}'])}", flush=True)
    metrics["tokens_per_second"] = sum(speeds) / len(speeds)
    write_evaluation(recipe, row, trained, metrics, options)


def controls_length(row: Row) -> bool:
    """Return whether a row's model has length control."""
    return bool(set(row.train.get("decoder_positions") or ()) & set(LENGTH_DEPENDENT))


def write_headlines(recipe: Recipe, row: Row, options: list[str], name: str) -> tuple[list[str], float]:
    """Write one headline per test text to ``NAME.headlines``; return them and the tokens per second.

    Of ``n_best`` hypotheses, the one with the most content words of the source is selected.
    """
    run, texts = recipe.home / row.name, recipe.data / "text" / "test.source"
    speed = translate(row, run, recipe.data / "test.source", options, f"{name}.characters")
    lines = [join_characters(line) for line in read_lines(run / f"{name}.characters")]
    n_best = int(option_value(options, "n_best") or row.translate.get("n_best", 1))
    if n_best > 1:
        write_lines(run / f"{name}.n_best", lines)
        lines = list(rerank(texts, run / f"{name}.n_best", n_best, stop_words("en")))
    write_lines(run / f"{name}.headlines", lines)
    return lines, speed


def score_headlines(headlines: list[str], references: list[list[str]], length: int) -> dict[str, Any]:
    """Compute ROUGE and the deviation from the desired length.

    Returns:
        ``f1`` of whole headlines and ``recall`` of their first `length` bytes, as in DUC 2004, each with its
        ``signature`` and for each metric ``mean``, ``low`` and ``high`` (0 to 100); ``within``: percentage of
        headlines whose length deviates by at most `TOLERANCE`; ``difference``: mean deviation in characters.
    """
    recall = replace(PRESETS["duc2004"], cut_bytes=length)
    off = [abs(len(headline) - length) for headline in headlines]
    return {
        "f1": _scores(score_texts(headlines, references, PRESETS["f1"])),
        "recall": _scores(score_texts(headlines, references, recall)),
        "within": 100 * sum(each <= TOLERANCE * length for each in off) / len(off),
        "difference": sum(off) / len(off),
    }


def _scores(report: Report) -> dict[str, Any]:
    """Return the selected measure of a report."""
    found = report.as_json()
    scores = {metric: measures[report.settings.measure] for metric, measures in found["scores"].items()}
    return {**scores, "signature": found["signature"]}


def describe(scores: dict[str, Any]) -> str:
    """Format the scores of one length in one line."""
    parts = [
        f"{measure} " + "/".join(f"{scores[measure][name]['mean']:.1f}" for name in METRICS)
        for measure in ("recall", "f1")
    ]
    return f"ROUGE-1/2/L {', '.join(parts)}; {scores['within']:.0f} % of the lengths within {TOLERANCE:.0%}"


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Evaluate the row of the command line."""
    evaluate(*parse_row(recipe, USAGE, arguments))


PREFIX = "length_"
ROUGE = {"rouge1": "R-1", "rouge2": "R-2", "rougeL": "R-L"}


def by_length(record: Record) -> list[Record]:
    """Split a record by length, shortest first; without lengths, return it unchanged."""
    lengths = sorted(int(name.removeprefix(PREFIX)) for name in record["metrics"] if name.startswith(PREFIX))
    return [
        {
            **record,
            "metrics": {**record["metrics"], **record["metrics"][f"{PREFIX}{length}"], "length": length},
        }
        for length in lengths
    ] or [record]


def columns(with_paper: bool) -> list[str | Column]:
    """Return the columns; `with_paper` adds the paper's figures."""
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
    """Return a column function for the mean of a metric."""
    return lambda record: f"{record['metrics'][measure][metric]['mean']:.1f}"


def _paper(metric: str) -> Callable[[Record], str]:
    """Return a column function for the paper's figure."""
    return lambda record: f"{record['paper'][metric]:.2f}"


def headline_table(recipe: Recipe, records: Sequence[Record]) -> str:
    """Return the Markdown table of a headline recipe, rows without length control first."""
    ordered = sorted(records, key=lambda record: controls_length(recipe.rows[record["row"]]))
    with_paper = any(record.get("paper") for record in ordered)
    lines = [line for record in ordered for line in by_length(record)]
    return markdown_table(lines, columns(with_paper))
