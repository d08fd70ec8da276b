"""``python -m recipes smoke``: all steps of every recipe with ``--smoke``, in a temporary folder."""

from __future__ import annotations

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
from shared_embeddings.errors import UserError
from shared_embeddings.utils.command_line import Parser

# The scripts that take a row where a recipe has any, in the order in which they are run.
PREPROCESS, ROW_SCRIPTS = "preprocess.sh", ("train.sh", "eval.sh")
# Ways in which a row starts from another one that is trained.
STARTS = ("fit", "distill")
# Of recipes that do everything at once.
WHOLE = "run.sh"
# So that a script that does not end is reported, too, even on a busy machine.
LONGEST_SECONDS = 1800
LAST_LINES = 20
# Variables that concern real data or real trainings.
OTHERS_SETTINGS = ("AVERAGE", "DATA_DIR", "TORCHRUN")


class Outcome(NamedTuple):
    """How a recipe ended.

    Attributes:
        recipe: its name.
        rows: what was trained, in order; nothing for a recipe that has no rows to choose from.
        seconds: how long it took.
        fault: what went wrong, on several lines; None if all went well.
    """

    recipe: str
    rows: list[str]
    seconds: float
    fault: str | None


def rows_to_run(recipe: Path) -> list[str]:
    """The rows that are trained and evaluated, in order; none for a recipe without rows to choose from.

    They are the first one that compresses an embedding and starts from no other row, or the first one if
    there is none; then the first of each way to start from a trained row, after that row.

    Raises:
        UserError: a row that cannot be read.
    """
    rows = dict(sorted(read_rows(recipe).items()))
    chosen = [name for name, row in rows.items() if _compresses_from_scratch(row)] or [*rows]
    chosen = chosen[:1]
    for way in STARTS:
        for row in [row for row in rows.values() if getattr(row, way)][:1]:
            chosen += [str(row.teacher), row.name]
    return list(dict.fromkeys(chosen))


def _compresses_from_scratch(row: Row) -> bool:
    """Whether a row has another embedding than a plain table, and starts from no other row."""
    return row.embedding["method"] != "standard" and row.teacher is None


def commands(recipe: Path, rows: Sequence[str]) -> list[list[str]]:
    """The command lines of all steps of a recipe, in order; without rows, each script is called once."""
    if (recipe / WHOLE).is_file():
        return [[str(recipe / WHOLE), SMOKE]]
    chosen_rows = [[row] for row in rows] or [[]]
    return [
        [str(recipe / PREPROCESS), SMOKE],
        *([str(recipe / script), *row, SMOKE] for row in chosen_rows for script in ROW_SCRIPTS),
    ]


def run_recipe(recipe: Path, runs: Path) -> Outcome:
    """Run all steps of a recipe, up to the first script that fails.

    Args:
        recipe: its folder.
        runs: empty folder that it writes to; a log of each script stays there.
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
    """Run one script; returns its last output if it failed."""
    name = " ".join([Path(command[0]).name, *command[1:]])
    log = runs / f"{Path(command[0]).name}.log"
    try:
        with log.open("w") as file:
            status = _wait_for(command, file, environment_of(runs))
    except OSError as error:
        return f"{name}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"{name} did not end in {LONGEST_SECONDS} seconds"
    if status == 0:
        return None
    last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join([f"{name} ended with status {status}:", *last])


def environment_of(runs: Path) -> dict[str, str]:
    """Environment variables of a script: this Python, the CPU alone, no texts and settings of the user."""
    own = {key: value for key, value in os.environ.items() if key not in OTHERS_SETTINGS}
    fixed = {"RUNS": str(runs), "VIRTUAL_ENV": sys.prefix, "CUDA_VISIBLE_DEVICES": ""}
    return {"OMP_NUM_THREADS": "1", **own, **fixed}


def _wait_for(command: Sequence[str], output: IO[str], environment: Mapping[str, str]) -> int:
    """Run a script and return its status; neither it nor programs that it runs outlive this process."""
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
    """What is wrong with the place of a recipe's files, or None.

    Args:
        home: folder of everything that the recipe has written.
        rows: which rows it has evaluated; empty where there are none to choose from.
    """
    beside = sorted(path.name for path in home.glob("*") if path.name != SMOKE_FOLDER)
    if beside:
        return f"wrote {', '.join(beside)} beside its folder {SMOKE_FOLDER}, where real runs are"
    files = sorted((home / SMOKE_FOLDER).rglob(FILE))
    if not files:
        return f"wrote no {FILE} below its folder {SMOKE_FOLDER}"
    found = {record["row"] for record in read_results(files[0])}
    missing = [row for row in rows if row not in found]
    return f"wrote no result of {', '.join(missing)}" if missing else None


def chosen(names: Sequence[str], folder: Path = RECIPES) -> list[Path]:
    """Folders of the recipes that are named; of all if none is.

    Raises:
        UserError: there is no recipe of a name.
    """
    known = recipe_names(folder)
    for name in names:
        if name not in known:
            raise UserError(f"no recipe {name!r}; there are: {', '.join(known)}")
    return [folder / name for name in names or known]


def describe(outcome: Outcome) -> str:
    """A line about a recipe, and below it what went wrong."""
    state = "ok" if outcome.fault is None else "failed"
    line = f"{outcome.recipe:<26} {outcome.seconds:5.0f} s  {state:<6}  {', '.join(outcome.rows)}".rstrip()
    return line if outcome.fault is None else f"{line}\n    " + outcome.fault.replace("\n", "\n    ")


def main(arguments: Sequence[str]) -> None:
    """Run preprocess.sh, train.sh and eval.sh of every recipe with --smoke; exit with 1 if one fails."""
    parser = Parser("python -m recipes smoke", description=main.__doc__)
    parser.add_argument("recipes", nargs="*", help="names of folders (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names alone")
    options = parser.parse_args(arguments)
    recipes = chosen(options.recipes)
    if options.list:
        print("\n".join(recipe.name for recipe in recipes))
        return
    failed = []
    for recipe in recipes:
        with tempfile.TemporaryDirectory(prefix=f"smoke-{recipe.name}-") as runs:
            outcome = run_recipe(recipe, Path(runs))
        print(describe(outcome), flush=True)
        if outcome.fault is not None:
            failed.append(outcome.recipe)
    if failed:
        print(f'failed: {", ".join(failed)}; make smoke RECIPES="{" ".join(failed)}" runs these alone')
        raise SystemExit(1)
