"""Train one row of the table."""

from __future__ import annotations

from collections.abc import Sequence

from recipes.common.errors import run_main
from recipes.common.training import checkpoints_to_average, fit_row, train_row
from recipes.multi30k_ende import rows

USAGE = """usage: train.sh CONFIG [--smoke] [option of onmt_train ...]

Trains CONFIG in $RUNS/multi30k_ende/CONFIG, going on from the newest complete checkpoint if there is one, and
averages the last checkpoints ($AVERAGE of them, if set). Run preprocess.sh first, and train.sh for the row
that a distilled or fitted one starts from; a fitted one takes no options. With --smoke, all of it goes on in
$RUNS/multi30k_ende/smoke, with a tiny network and a few steps, on what preprocess.sh --smoke has made."""


def main(arguments: Sequence[str]) -> None:
    """Train the row that the command line names."""
    recipe, row, options = rows.parse(USAGE, arguments)
    data, run = recipe.training_data(), recipe.home / row.name
    if row.fit is not None:
        teacher = rows.teacher_model(recipe, row, row.fit["teacher"])
        fit_row(row, run, data, teacher, recipe.data / "vocabulary", options)
        return
    train_row(rows.with_teacher(recipe, row), run, data, options, checkpoints_to_average(row.average))


if __name__ == "__main__":
    raise SystemExit(run_main("train", main))
