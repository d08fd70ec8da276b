"""Training and evaluating one row of a recipe for language models.

``python -m recipes.common.model_runs train RECIPE ROW [option of lm_train ...]``, and likewise ``evaluate``,
is what the recipes' scripts call. Under torchrun every process runs the same line; the first keeps the books.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.common.config import distillation_options, row_names, write_yaml
from recipes.common.errors import UserError, run_main
from recipes.common.fitting import fit_model
from recipes.common.model_rows import RECIPES, ModelRow, Recipe, read_model_row, with_own_files
from recipes.common.model_smoke import SmokeModelRecipe, smoke_model_row
from recipes.common.results import write_results
from recipes.common.smoke import SMOKE
from recipes.common.tools import run_module, with_overrides
from recipes.common.training import Segment, peak_memory_of_children, read_json
from shared_embeddings.utils import reading
from shared_embeddings.utils.files import locked, remove_leftovers, write_text

LAST, BEST = "last.pt", "best.pt"
SPLITS = ("valid", "test")
USAGE = """usage: {script} ROW [--smoke] [option of {command} ...]

{what}
Everything is in $RUNS/{recipe}/ROW; with --smoke, which takes a tiny network and what preprocess.sh --smoke
has made, in $RUNS/{recipe}/smoke/ROW. ROW is one of: {rows}"""
# Options that the scripts set themselves: with others, a result would not be that of its row.
OWN_OPTIONS = {
    "train": ("config", "data", "embedding", "output_dir"),
    "evaluate": ("data", "model", "output", "split"),
}
WHAT = {
    "train": "Trains ROW, going on where it was stopped. Run preprocess.sh first.",
    "evaluate": "Measures ROW on the validation and the test text, writes results.json. Run train.sh first.",
}


def train_model(recipe: Recipe, row: ModelRow, options: Sequence[str]) -> None:
    """Train a row, and a second time from its best model where it says so.

    Args:
        recipe: whose row it is.
        row: what to train.
        options: further options of ``lm_train`` for the first training, as on its command line.

    Raises:
        UserError: the data are not prepared, the row that this one starts from is not trained, another
            process trains this row, or training failed.
    """
    checksum = _prepared(recipe, row)["checksum"]
    run = recipe.home / row.name
    if row.fit is not None:
        _fit(recipe, row, run, options, checksum)
        return
    _train_stage(recipe, row, run, {**row.train, **_distillation(recipe, row)}, options, checksum)
    if row.finetune is not None:
        settings = {**row.finetune, "init_from": str(run / BEST)}
        _train_stage(recipe, row, run / "finetune", settings, (), checksum)


def _distillation(recipe: Recipe, row: ModelRow) -> dict[str, Any]:
    """The option of the first training that a distilled row adds; nothing for others."""
    if row.distill is None:
        return {}
    return distillation_options(row.distill, _teacher_model(recipe, row, row.distill["teacher"]))


def _teacher_model(recipe: Recipe, row: ModelRow, name: str) -> Path:
    """The trained model of the row `name`, which `row` starts from."""
    try:
        folders = _trained_folders(recipe, read_model_row(recipe, name))
    except UserError as error:
        raise UserError(f"{row.name} starts from {name}; {error}") from error
    return folders[-1] / BEST


def _fit(recipe: Recipe, row: ModelRow, run: Path, options: Sequence[str], checksum: str) -> None:
    """Fit the embedding of a row that is not trained; its time and memory go into ``training.json``."""
    assert row.fit is not None
    if options:
        raise UserError(f"{row.name} is only fitted, not trained: {options[0]} has no effect; leave it out")
    if not is_first_process():
        return
    teacher = _teacher_model(recipe, row, row.fit["teacher"])
    with locked(run / "lock"):
        segment: Segment = {"started": time.time(), "ended": None}
        _write_books(run, [segment], checksum, options)
        embedding = with_own_files(recipe, row.embedding)
        counts = recipe.home / row.data / "vocabulary.tsv"
        seed, steps = row.train.get("seed", 0), row.fit.get("fit_steps")
        fit_model(teacher, embedding, counts, seed, run / BEST, steps)
        segment["ended"] = time.time()
        _write_books(run, [segment], checksum, options)


def _trained_folders(recipe: Recipe, row: ModelRow) -> list[Path]:
    """The folder of each training of a row; the last has its model.

    Raises:
        UserError: the row is not trained to the end.
    """
    run = recipe.home / row.name
    folders = [run] if row.finetune is None else [run, run / "finetune"]
    books = [read_json(folder / "training.json") for folder in folders]
    is_there = (folders[-1] / BEST).exists() and all(books)
    if not is_there or any(_is_cut_short(part) for part in books if part is not None):
        raise UserError(f"{run}: not trained to the end; run {recipe.command('train.sh', row.name)}")
    return folders


def _train_stage(
    recipe: Recipe,
    row: ModelRow,
    folder: Path,
    settings: dict[str, Any],
    options: Sequence[str],
    checksum: str,
) -> None:
    """Run ``lm_train`` in `folder`; its time and memory go into ``training.json`` there."""
    data = str(recipe.home / row.data)
    own = {"data": data, "output_dir": str(folder), "embedding": with_own_files(recipe, row.embedding)}
    write_text(folder / "settings.yaml", write_yaml({**own, **settings}))
    arguments = ["-config", str(folder / "settings.yaml"), *options]
    if not is_first_process():
        run_module("lm.train.command", arguments)
        return
    with locked(folder / "lock") as lock:
        books = read_json(folder / "training.json") or {"segments": []}
        before = _time_of(folder / LAST)
        segments = lasting_segments(books["segments"], before)
        segment: Segment = {"started": time.time(), "ended": None}
        _write_books(folder, [*segments, segment], checksum, options)
        run_module("lm.train.command", arguments, keep_open=[lock])
        remove_leftovers(folder / "settings.yaml", folder / "training.json")  # of processes that were killed
        segment["ended"] = time.time()
        # A run that was finished before has not trained.
        done = segments if _time_of(folder / LAST) == before else [*segments, segment]
        _write_books(folder, done, checksum, options)


def lasting_segments(segments: Sequence[Segment], saved: float | None) -> list[Segment]:
    """The stretches of training that led to what was last saved at `saved`: a killed one ended with that."""
    if saved is None:
        return []
    ended = [{**part, "ended": saved if part["ended"] is None else part["ended"]} for part in segments]
    return [part for part in ended if part["started"] < part["ended"]]


def _write_books(folder: Path, segments: list[Segment], checksum: str, options: Sequence[str]) -> None:
    """Note what has been trained so far; seconds are those of the stretches that are over."""
    seconds = sum(part["ended"] - part["started"] for part in segments if part["ended"] is not None)
    before = read_json(folder / "training.json") or {}
    content = {
        "segments": segments,
        "data_checksum": checksum,
        "options": list(options),
        "seconds": round(seconds, 1),
        "peak_memory_mib": max(peak_memory_of_children(), before.get("peak_memory_mib", 0.0)),
    }
    write_text(folder / "training.json", json.dumps(content, indent=2) + "\n")


def _time_of(path: Path) -> float | None:
    """When a file was last written; None when it is absent."""
    return path.stat().st_mtime if path.exists() else None


def evaluate_model(recipe: Recipe, row: ModelRow, options: Sequence[str]) -> Path:
    """Measure a trained row on the validation and the test text; returns the results file.

    Args:
        recipe: whose row it is.
        row: what was trained.
        options: further options of ``lm_eval``, as on its command line.

    Raises:
        UserError: the row is not trained, or not on these data, or they are not prepared.
    """
    data, run = recipe.home / row.data, recipe.home / row.name
    description = _prepared(recipe, row)
    folders = _trained_folders(recipe, row)
    model = folders[-1] / BEST
    books = [dict(read_json(folder / "training.json") or {}) for folder in folders]
    if any(book["data_checksum"] != description["checksum"] for book in books):
        raise UserError(f"{run}: trained on other data than {data} holds now; move it away, train again")
    found = {split: _measure(model, data, split, row.evaluate, options, run) for split in SPLITS}
    test = found["test"]
    config = _told_from_home(recipe, {**test["config"], "embedding": row.embedding})
    config.pop("embedding_distillation", None)  # `distill` tells the same without a path
    starts = {"distill": row.distill, "fit": row.fit}
    write_results(
        run / "results.json",
        recipe=recipe.name,
        row=row.name,
        config={
            **config,
            **{way: start for way, start in starts.items() if start is not None},
            "train_options": books[0]["options"],
            "eval_options": list(options),
        },
        counts=test["counts"],
        metrics={
            **test["metrics"],
            **{f"valid_{name}": value for name, value in _perplexities(found["valid"]).items()},
            "training_seconds": round(sum(book["seconds"] for book in books), 1),
        },
        data_checksum=description["checksum"],
        paper=row.paper,
        device=test["device"],
        peak_memory_mib={
            "training": max(book["peak_memory_mib"] for book in books),
            "evaluation": test["peak_memory_mib"],
        },
    )
    return run / "results.json"


def _told_from_home(recipe: Recipe, config: dict[str, Any]) -> dict[str, Any]:
    """A configuration whose folders are told from the recipe's home on, so that results can be handed on."""
    home = f"{recipe.home}{os.sep}"
    return {
        key: value.replace(home, "") if isinstance(value, str) else value for key, value in config.items()
    }


def _is_cut_short(books: dict[str, Any]) -> bool:
    """Whether the last stretch of a training was not brought to its end."""
    return any(segment["ended"] is None for segment in books["segments"])


def _measure(
    model: Path, data: Path, split: str, settings: dict[str, Any], options: Sequence[str], run: Path
) -> dict[str, Any]:
    """What ``lm_eval`` finds on one text."""
    output = run / f"{split}.json"
    arguments = ["-model", str(model), "-data", str(data), "-split", split, "-output", str(output), "-force"]
    run_module("lm.evaluate.command", with_overrides([*arguments, *as_options(settings)], options))
    return dict(reading.read_json(output))


def _perplexities(record: dict[str, Any]) -> dict[str, float]:
    """The perplexities of a record of ``lm_eval``, without and with the pointer."""
    return {name: value for name, value in record["metrics"].items() if name.endswith("perplexity")}


def as_options(settings: dict[str, Any]) -> list[str]:
    """Settings as a command line gives them: ``-name value``, mappings as YAML, what is true as a flag."""
    arguments = []
    for name, value in settings.items():
        if value is not False and value is not None:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            arguments += [f"-{name}"] if value is True else [f"-{name}", text]
    return arguments


def is_first_process() -> bool:
    """Whether this is the only process, or the first of those that torchrun has started."""
    return int(os.environ.get("RANK", 0)) == 0


def _prepared(recipe: Recipe, row: ModelRow) -> dict[str, Any]:
    """What ``lm_prepare`` says of the data of a row."""
    data = recipe.home / row.data
    description = read_json(data / "data.json")
    if not isinstance(description, dict) or "checksum" not in description:
        raise UserError(f"{data}: no prepared data; run {recipe.command('preprocess.sh')}")
    return description


def _check_options(options: Sequence[str], own: Sequence[str]) -> None:
    """Raise `UserError` for an option of the command line that the script sets itself."""
    for option in options:
        name = option.lstrip("-").partition("=")[0]
        if option.startswith("-") and name in own:
            raise UserError(f"-{name} is what the row and $RUNS decide; leave it out")


def main(arguments: Sequence[str]) -> None:
    """Train or evaluate the row that the command line names."""
    task, name, *rest = arguments
    recipe = Recipe(RECIPES / name)
    wants_help = any(argument in ("-h", "--help") for argument in rest[:1])
    if wants_help or not rest:
        script, command = {"train": ("train.sh", "lm_train"), "evaluate": ("eval.sh", "lm_eval")}[task]
        print(
            USAGE.format(
                script=script,
                command=command,
                what=WHAT[task],
                recipe=name,
                rows=", ".join(row_names(recipe.configs)),
            ),
            file=sys.stdout if wants_help else sys.stderr,
        )
        raise SystemExit(0 if wants_help else 2)
    row, options = read_model_row(recipe, rest[0]), rest[1:]
    _check_options(options, OWN_OPTIONS[task])
    if SMOKE in options:
        recipe, row = SmokeModelRecipe(recipe.folder), smoke_model_row(row)
        options.remove(SMOKE)
    if task == "train":
        train_model(recipe, row, options)
    elif is_first_process():
        print(f"results: {evaluate_model(recipe, row, options)}")


if __name__ == "__main__":
    raise SystemExit(run_main("recipe", main))
