"""Translate and score the test sets of one published row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recipes.common.bleu import corpus_scores
from recipes.common.config import Row
from recipes.common.corpus import read_lines, write_lines
from recipes.common.errors import run_main
from recipes.common.evaluation import read_trained, translate, write_evaluation
from recipes.common.recipe import Recipe
from recipes.published.pieces import joiner
from recipes.published.rows import complete_row, data_folder
from recipes.published.smoke import parse

USAGE = """usage: eval.sh CONFIG [--smoke] [option of onmt_translate ...]

Translates every test set of CONFIG with its averaged model, makes text of the pieces again, scores it with
sacreBLEU and writes $RUNS/{name}/CONFIG/results.json. Run train.sh CONFIG first; with --smoke, both."""


def main(arguments: Sequence[str]) -> None:
    """Evaluate the row that the command line names."""
    name, *rest = arguments
    recipe, row, options = parse(Recipe(name), USAGE.format(name=name), rest)
    evaluate(recipe, complete_row(recipe, row), options)


def evaluate(recipe: Recipe, row: Row, options: list[str]) -> None:
    """Score a row; ``bleu`` and ``chrf`` are those of its first test set, the others stand below their names.

    Raises:
        UserError: the row is not trained, or not on these data, or they are not prepared.
    """
    run, folder = recipe.home / row.name, data_folder(recipe, row)
    trained = read_trained(recipe, row, folder)
    source, target = trained.data["source"], trained.data["target"]
    join = joiner(trained.data["kind"], target)
    metrics: dict[str, Any] = {}
    for test in (row.data or {})["tests"]:
        speed = translate(row, run, folder / f"{test}.{source}", options, f"{test}.pieces")
        lines = [join(line) for line in read_lines(run / f"{test}.pieces")]
        write_lines(run / f"{test}.translation", lines)
        scores = corpus_scores(lines, read_lines(recipe.data / "text" / f"{test}.{target}"))
        metrics = metrics or {**scores, "tokens_per_second": speed}
        metrics[test] = {**scores, "tokens_per_second": speed}
        print(
            f"{row.name}, {test}: BLEU {scores['bleu']:.1f}, chrF {scores['chrf']:.1f}, {speed:.0f} tokens/s"
        )
    write_evaluation(recipe.name, row, run, trained, metrics, options)


if __name__ == "__main__":
    raise SystemExit(run_main("evaluate", main))
