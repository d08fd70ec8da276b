"""``python -m recipes smoke``: all steps of every recipe with ``--smoke``, in a temporary folder."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from recipes.common.recipe import RECIPES, recipe_names
from recipes.common.results import FILE, SMOKE_FOLDER, read_results
from recipes.common.rows import Row, read_rows
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
REAL_RUN_VARIABLES = ("AVERAGE", "DATA_DIR", "TORCHRUN")


class Outcome(NamedTuple):
    """The outcome of a recipe.

    Attributes:
        recipe: name of the recipe.
        rows: the trained rows in order; empty for a recipe without rows.
        seconds: duration.
        fault: the failure on several lines; None on success.
    """

    recipe: str
    rows: list[str]
    seconds: float
    fault: str | None


def rows_to_run(recipe: Path) -> list[str]:
    """Return the rows to train and evaluate, in order.

    These are the first row that compresses an embedding from scratch (or the first row), and the first
    fitted and the first distilled row, each after its teacher; rows whose teacher is run anyway come first.

    Raises:
        UserError: a row is invalid.
    """
    rows = dict(sorted(read_rows(recipe).items()))
    chosen = [name for name, row in rows.items() if _compresses_from_scratch(row)] or [*rows]
    chosen = chosen[:1]
    for way in STARTS:
        starting = [row for row in rows.values() if getattr(row, way)]
        for row in sorted(starting, key=lambda row: row.teacher not in chosen)[:1]:
            chosen += [str(row.teacher), row.name]
    return list(dict.fromkeys(chosen))


def _compresses_from_scratch(row: Row) -> bool:
    """Return whether a row has no plain table and no teacher."""
    return row.embedding["method"] != "standard" and row.teacher is None


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
    """Run all steps of a recipe until a script fails.

    Args:
        recipe: folder of the recipe.
        runs: empty folder for runs and logs.
    """
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
    """Run one script; return its last output if it failed."""
    name = " ".join([Path(command[0]).name, *command[1:]])
    log = runs / f"{Path(command[0]).name}.log"
    try:
        with log.open("w") as file:
            status = _wait_for(command, file, environment_of(runs))
    except OSError as error:
        return f"{name}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"{name} did not finish in {LONGEST_SECONDS} seconds"
    if status == 0:
        return None
    last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join([f"{name} failed with status {status}:", *last])


def environment_of(runs: Path) -> dict[str, str]:
    """Return the environment of a script: this Python, CPU only, without user overrides."""
    own = {key: value for key, value in os.environ.items() if key not in REAL_RUN_VARIABLES}
    fixed = {"RUNS": str(runs), "VIRTUAL_ENV": sys.prefix, "CUDA_VISIBLE_DEVICES": ""}
    return {"OMP_NUM_THREADS": "1", **own, **fixed}


def _wait_for(command: Sequence[str], output: IO[str], environment: Mapping[str, str]) -> int:
    """Run a script in a process group, which is killed with this process, and return its status."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            return process.wait(LONGEST_SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def misplaced(home: Path, rows: Sequence[str]) -> str | None:
    """Describe files or results in the wrong place; None if there are none.

    Args:
        home: folder of the recipe's runs.
        rows: the evaluated rows.
    """
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
    """Return the folders of the named recipes, or of all.

    Raises:
        UserError: a recipe does not exist.
    """
    known = recipe_names(folder)
    for name in names:
        if name not in known:
            raise UserError(f"no recipe {name!r}; there are: {', '.join(known)}")
    return [folder / name for name in names or known]


def longest_first(recipes: Sequence[Path]) -> list[Path]:
    """Return recipes by their number of steps, so that processes that share them end at about the same time.

    Raises:
        UserError: a row is invalid.
    """

    def steps(recipe: Path) -> float:
        # A script for everything has many steps.
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
