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

# How far a length may be from the desired one, as a share of that.
TOLERANCE = 0.1
USAGE = """usage: eval.sh ROW [--smoke] [option of onmt_translate ...]

Writes headlines of the test set with the averaged model of ROW, scores them with ROUGE and writes a line to
$RUNS/{recipe}/results.jsonl. A model with length control writes headlines of each length in data.yaml. Run
train.sh ROW first; with --smoke, both."""


def evaluate(recipe: Recipe, row: Row, options: list[str]) -> None:
    """Write and score headlines of every length; a model without length control writes them once.

    Raises:
        UserError: the row is not trained, or not on these data, or they are not prepared.
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
    """Whether a row's model takes a desired length."""
    return bool(set(row.train.get("decoder_positions") or ()) & set(LENGTH_DEPENDENT))


def write_headlines(recipe: Recipe, row: Row, options: list[str], name: str) -> tuple[list[str], float]:
    """One headline per text of the test set in the file ``NAME.headlines``, and the tokens per second.

    Of ``n_best`` hypotheses, if there are several, the one with most content words of the source is taken.
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
    """ROUGE, and how close the lengths come to the wanted one.

    Returns:
        ``f1``: of whole headlines; ``recall``: of their first `length` bytes, as in DUC 2004; each holds its
        ``signature`` and for each metric ``mean``, ``low`` and ``high`` (0 to 100). ``within``: share of the
        headlines, in percent, whose number of characters is at most `TOLERANCE` off; ``difference``: how many
        characters they are off in the mean.
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
    """The chosen measure of a report."""
    found = report.as_json()
    scores = {metric: measures[report.settings.measure] for metric, measures in found["scores"].items()}
    return {**scores, "signature": found["signature"]}


def describe(scores: dict[str, Any]) -> str:
    """Scores of one length on a line."""
    parts = [
        f"{measure} " + "/".join(f"{scores[measure][name]['mean']:.1f}" for name in METRICS)
        for measure in ("recall", "f1")
    ]
    return f"ROUGE-1/2/L {', '.join(parts)}; {scores['within']:.0f} % of the lengths within {TOLERANCE:.0%}"


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Evaluate the row that the command line names."""
    evaluate(*parse_row(recipe, USAGE, arguments))


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
