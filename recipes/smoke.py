"""``python -m recipes smoke``: all steps of every recipe with ``--smoke``, in a temporary folder."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from recipes.common.recipe import RECIPES, find_recipe, read_rows, recipe_names
from recipes.common.results import FILE, SMOKE_FOLDER, read_results
from recipes.common.smoke import SMOKE
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError

# The scripts in order; ROW_SCRIPTS take a row.
PREPROCESS, ROW_SCRIPTS = "preprocess.sh", ("train.sh", "eval.sh")
# Settings of rows that start from another trained row.
STARTS = ("fit", "distill")
# Script of recipes with a single step.
WHOLE = "run.sh"
# Timeout of a script, generous for busy machines.
LONGEST_SECONDS = 1800
LAST_LINES = 20
# Environment variables of real runs.
REAL_RUN_VARIABLES = ("DATA_DIR", "TORCHRUN")


class Outcome(NamedTuple):
    """The outcome of a recipe: the trained rows in order, the duration, and the failure, if any."""

    recipe: str
    rows: list[str]
    seconds: float
    fault: str | None


def rows_to_run(recipe: Path) -> list[str]:
    """Return the rows to train and evaluate, in order.

    These are the first row that compresses an embedding from scratch (or the first row), and the first
    fitted and the first distilled row, each after its teacher; rows whose teacher is run anyway come first.
    """
    rows = dict(sorted(read_rows(recipe).items()))
    compressed = [
        row for row in rows.values() if row.embedding["method"] != "standard" and row.teacher is None
    ]
    chosen = ([row.name for row in compressed] or [*rows])[:1]
    for way in STARTS:
        starting = [row for row in rows.values() if getattr(row, way)]
        for row in sorted(starting, key=lambda row: row.teacher not in chosen)[:1]:
            chosen += [str(row.teacher), row.name]
    return list(dict.fromkeys(chosen))


def commands(recipe: Path, rows: Sequence[str]) -> list[list[str]]:
    """Return the command lines of all steps of a recipe in order; without rows, one per script."""
    if (recipe / WHOLE).is_file():
        return [[str(recipe / WHOLE), SMOKE]]
    chosen_rows = [[row] for row in rows] or [[]]
    return [
        [str(recipe / PREPROCESS), SMOKE],
        *([str(recipe / script), *row, SMOKE] for row in chosen_rows for script in ROW_SCRIPTS),
    ]


def run_recipe(recipe: Path, runs: Path) -> Outcome:
    """Run all steps of a recipe until a script fails; runs and logs go to an empty folder."""
    started = time.monotonic()
    rows: list[str] = []
    try:
        rows = [] if (recipe / WHOLE).is_file() else rows_to_run(recipe)
        faults = (_run(command, runs) for command in commands(recipe, rows))
        fault = next((fault for fault in faults if fault), None) or misplaced(runs / recipe.name, rows)
    except UserError as error:
        fault = str(error)
    return Outcome(recipe.name, rows, time.monotonic() - started, fault)


def _run(command: Sequence[str], runs: Path) -> str | None:
    """Run one script with this Python on the CPU, without user overrides; return its last output on failure.

    It runs in a process group, which is killed with this process.
    """
    name = " ".join([Path(command[0]).name, *command[1:]])
    log = runs / f"{Path(command[0]).name}.log"
    own = {key: value for key, value in os.environ.items() if key not in REAL_RUN_VARIABLES}
    fixed = {"RUNS": str(runs), "VIRTUAL_ENV": sys.prefix, "CUDA_VISIBLE_DEVICES": ""}
    environment = {"OMP_NUM_THREADS": "1", **own, **fixed}
    try:
        with (
            log.open("w") as file,
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            ) as process,
        ):
            try:
                status = process.wait(LONGEST_SECONDS)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
    except OSError as error:
        return f"{name}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"{name} did not finish in {LONGEST_SECONDS} seconds"
    if status == 0:
        return None
    last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join([f"{name} failed with status {status}:", *last])


def misplaced(home: Path, rows: Sequence[str]) -> str | None:
    """Describe files beside those of --smoke, and evaluated rows without results; None if there are none."""
    beside = sorted(path.name for path in home.glob("*") if path.name != SMOKE_FOLDER)
    if beside:
        return f"wrote {', '.join(beside)} outside of its folder {SMOKE_FOLDER}"
    files = sorted((home / SMOKE_FOLDER).rglob(FILE))
    if not files:
        return f"wrote no {FILE} to its folder {SMOKE_FOLDER}"
    found = {record["row"] for record in read_results(files[0])}
    missing = [row for row in rows if row not in found]
    return f"wrote no result of {', '.join(missing)}" if missing else None


def chosen(names: Sequence[str], folder: Path = RECIPES) -> list[Path]:
    """Return the folders of the named recipes, or of all."""
    return [find_recipe(name, folder).folder for name in names or recipe_names(folder)]


def longest_first(recipes: Sequence[Path]) -> list[Path]:
    """Return recipes by their number of steps, so that processes that share them end at the same time."""

    def steps(recipe: Path) -> float:  # a script for everything has many
        return math.inf if (recipe / WHOLE).is_file() else len(commands(recipe, rows_to_run(recipe)))

    return sorted(recipes, key=steps, reverse=True)


def describe(outcome: Outcome) -> str:
    """Format an outcome as one line, followed by the failure."""
    state = "ok" if outcome.fault is None else "failed"
    line = f"{outcome.recipe:<26} {outcome.seconds:5.0f} s  {state:<6}  {', '.join(outcome.rows)}".rstrip()
    return line if outcome.fault is None else f"{line}\n    " + outcome.fault.replace("\n", "\n    ")


def main(arguments: Sequence[str]) -> None:
    """Run preprocess.sh, train.sh and eval.sh of every recipe with --smoke; exit with 1 if one fails."""
    parser = Parser("python -m recipes smoke", description=main.__doc__)
    parser.add_argument("recipes", nargs="*", help="names of folders (default: all)")
    parser.add_argument("--list", action="store_true", help="only print the names")
    options = parser.parse_args(arguments)
    recipes = chosen(options.recipes)
    if options.list:
        print("\n".join(recipe.name for recipe in longest_first(recipes)))
        return
    failed = []
    for recipe in recipes:
        with tempfile.TemporaryDirectory(prefix=f"smoke-{recipe.name}-") as runs:
            outcome = run_recipe(recipe, Path(runs))
        print(describe(outcome), flush=True)
        if outcome.fault is not None:
            failed.append(outcome.recipe)
    if failed:
        print(f'failed: {", ".join(failed)}; make smoke RECIPES="{" ".join(failed)}" runs only these')
        raise SystemExit(1)
