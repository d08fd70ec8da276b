"""Generate and score the headlines of one row of a headline recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nmt.summarization.headlines import join_characters, rerank, stop_words
from nmt.summarization.rouge import METRICS, PRESETS, Settings, score_texts
from recipes.common.recipe import Recipe, parse_row
from recipes.common.rows import Row
from recipes.common.table import controls_length
from recipes.common.tools import option_value, read_lines, with_overrides, write_lines
from recipes.translation.train import read_trained, translate, write_evaluation

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

    def scores(settings: Settings) -> dict[str, Any]:
        found = score_texts(headlines, references, settings).as_json()
        means = {metric: measures[settings.measure] for metric, measures in found["scores"].items()}
        return {**means, "signature": found["signature"]}

    recall = replace(PRESETS["duc2004"], cut_bytes=length)
    off = [abs(len(headline) - length) for headline in headlines]
    return {
        "f1": scores(PRESETS["f1"]),
        "recall": scores(recall),
        "within": 100 * sum(each <= TOLERANCE * length for each in off) / len(off),
        "difference": sum(off) / len(off),
    }


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
