"""Translate and score the test set with one trained row."""

from __future__ import annotations

from collections.abc import Sequence

from recipes.common.errors import run_main
from recipes.common.evaluation import evaluate_row
from recipes.multi30k_ende import rows

USAGE = """usage: eval.sh CONFIG [--smoke] [option of onmt_translate ...]

Translates test_2016_flickr with the averaged model of CONFIG, undoes subwords and tokenisation, scores with
sacreBLEU and writes $RUNS/multi30k_ende/CONFIG/results.json. Run train.sh CONFIG first; with --smoke,
both."""


def main(arguments: Sequence[str]) -> None:
    """Evaluate the row that the command line names."""
    recipe, row, options = rows.parse(USAGE, arguments)
    evaluate_row(recipe, row, options)


if __name__ == "__main__":
    raise SystemExit(run_main("evaluate", main))
