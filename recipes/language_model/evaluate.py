"""Evaluate one row of a recipe for language models on its validation and test texts."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.common.recipe import Recipe, parse_row
from recipes.common.results import write_result
from recipes.common.rows import Row
from recipes.common.tools import read_json, run_module, with_overrides
from recipes.language_model.train import (
    BEST,
    check_options,
    data_folder,
    is_first_process,
    trained_folders,
)
from shared_embeddings.errors import UserError
from shared_embeddings.utils import reading

SPLITS = ("valid", "test")
USAGE = """usage: eval.sh ROW [--smoke] [option of lm_eval ...]

Evaluates ROW on the validation and the test text and writes a line to $RUNS/{recipe}/results.jsonl. Run
train.sh first; use --smoke for both or neither."""
# Options that the script sets.
OWN_OPTIONS = ("data", "model", "output", "split")


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Evaluate the row of the command line."""
    recipe, row, options = parse_row(recipe, USAGE, arguments)
    check_options(options, OWN_OPTIONS)
    if is_first_process():
        print(f"results: {evaluate(recipe, row, options)}")


def evaluate(recipe: Recipe, row: Row, options: Sequence[str]) -> Path:
    """Evaluate a trained row on the validation and the test text; return the results file.

    Args:
        recipe: the recipe.
        row: the trained row.
        options: further command-line options of ``lm_eval``.

    Raises:
        UserError: the data are not prepared, or the row is not trained on them.
    """
    data, run = data_folder(recipe, row), recipe.home / row.name
    checksum = recipe.describe_data(data)["checksum"]
    folders = trained_folders(recipe, row)
    logs = [dict(read_json(folder / "training.json") or {}) for folder in folders]
    if any(log["data_checksum"] != checksum for log in logs):
        raise UserError(
            f"{run}: trained on different data than {data} contains now; move it away and train again"
        )
    found = {split: _measure(folders[-1] / BEST, data, split, row, options, run) for split in SPLITS}
    test = found["test"]
    valid = {f"valid_{name}": value for name, value in _perplexities(found["valid"]).items()}
    return write_result(
        recipe.home,
        row.name,
        config=_config(row, test["config"], logs[0]["options"], options),
        counts=test["counts"],
        metrics={
            **test["metrics"],
            **valid,
            **_training_time(folders[0] / "train.log"),
            "training_seconds": round(sum(log["seconds"] for log in logs), 1),
        },
        data_checksum=checksum,
        device=test["device"],
        peak_memory_mib={
            "training": max(log["peak_memory_mib"] for log in logs),
            "evaluation": test["peak_memory_mib"],
        },
    )


def _config(
    row: Row, trained: dict[str, Any], train_options: Sequence[str], eval_options: Sequence[str]
) -> dict[str, Any]:
    """Return the settings of a row, with training options from its model."""
    names = row.train.keys() | (row.finetune or {}).keys()
    parts = {
        **row.settings(),
        "train": {name: trained[name] for name in sorted(names) if name in trained},
        "train_options": list(train_options),
        "eval_options": list(eval_options),
    }
    return {key: value for key, value in parts.items() if value and key not in ("average", "finetune")}


def _measure(
    model: Path, data: Path, split: str, row: Row, options: Sequence[str], run: Path
) -> dict[str, Any]:
    """Run ``lm_eval`` on one text and return its record."""
    output = run / f"{split}.json"
    arguments = ["-model", str(model), "-data", str(data), "-split", split, "-output", str(output), "-force"]
    run_module("lm.evaluate.command", with_overrides([*arguments, *as_options(row.evaluate)], options))
    return dict(reading.read_json(output))


def _training_time(log: Path) -> dict[str, float]:
    """Return the median of the milliseconds per step in a log of ``lm_train``; empty without any."""
    text = log.read_text(encoding="utf-8") if log.is_file() else ""
    found = [float(number) for number in re.findall(r"([\d.]+) ms per step", text)]
    return {"training_ms": statistics.median(found)} if found else {}


def _perplexities(record: dict[str, Any]) -> dict[str, float]:
    """Return the perplexities of a record of ``lm_eval``, with and without the pointer."""
    return {name: value for name, value in record["metrics"].items() if name.endswith("perplexity")}


def as_options(settings: dict[str, Any]) -> list[str]:
    """Convert settings to command-line options: ``-name value``, mappings as JSON, true as flags."""
    arguments = []
    for name, value in settings.items():
        if value is not False and value is not None:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            arguments += [f"-{name}"] if value is True else [f"-{name}", text]
    return arguments
