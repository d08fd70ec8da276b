"""``python -m recipes smoke``: all steps of every recipe with ``--smoke``, in a temporary folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from recipes.common.recipe import Recipe, find_recipe, recipe_names
from recipes.common.results import FILE, SMOKE_FOLDER, read_results
from recipes.common.smoke import SMOKE
from shared_embeddings.utils.command_line import Parser

# Script of recipes with a single step.
WHOLE = "run.sh"
# Timeout of a script, generous for busy machines.
LONGEST_SECONDS = 1800
LAST_LINES = 20
# Environment variables of real runs.
REAL_RUN_VARIABLES = ("DATA_DIR", "TORCHRUN")


def rows_to_run(recipe: Recipe) -> list[str]:
    """Return the rows to train and evaluate, in order.

    These are the first row that compresses an embedding from scratch (or the first row), and the first
    fitted and the first distilled row, each after its teacher; rows whose teacher is run anyway come first.
    """
    rows = dict(sorted(recipe.rows.items()))
    compressed = [
        row.name for row in rows.values() if row.embedding["method"] != "standard" and row.teacher is None
    ]
    chosen = (compressed or [*rows])[:1]
    for start in ("fit", "distill"):
        starting = [row for row in rows.values() if getattr(row, start)]
        for row in sorted(starting, key=lambda row: row.teacher not in chosen)[:1]:
            chosen += [str(row.teacher), row.name]
    return list(dict.fromkeys(chosen))


def commands(recipe: Recipe) -> list[list[str]]:
    """Return the command lines of all steps of a recipe in order; without rows, one per script."""
    if (recipe.folder / WHOLE).is_file():
        return [[WHOLE, SMOKE]]
    rows = [[row] for row in rows_to_run(recipe)] or [[]]
    return [
        ["preprocess.sh", SMOKE],
        *([script, *row, SMOKE] for row in rows for script in ("train.sh", "eval.sh")),
    ]


def run_recipe(recipe: Recipe, runs: Path) -> str | None:
    """Run all steps of a recipe until a script fails; runs and logs go to an empty folder.

    The scripts run with this Python on the CPU, without user overrides. Returns what went wrong: the last
    output of a script, or a misplaced or missing result.
    """
    inherited = {key: value for key, value in os.environ.items() if key not in REAL_RUN_VARIABLES}
    fixed = {"RUNS": str(runs), "VIRTUAL_ENV": sys.prefix, "CUDA_VISIBLE_DEVICES": ""}
    environment = {"OMP_NUM_THREADS": "1", **inherited, **fixed}
    for script, *arguments in commands(recipe):
        name, log = " ".join([script, *arguments]), runs / f"{script}.log"
        try:
            with log.open("w") as file:
                status = subprocess.run(
                    [str(recipe.folder / script), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    timeout=LONGEST_SECONDS,
                ).returncode
        except subprocess.TimeoutExpired:
            return f"{name} did not finish in {LONGEST_SECONDS} seconds"
        if status:
            last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
            return "\n".join([f"{name} failed with status {status}:", *last])
    home = runs / recipe.name
    if beside := sorted(path.name for path in home.glob("*") if path.name != SMOKE_FOLDER):
        return f"wrote {', '.join(beside)} outside of its folder {SMOKE_FOLDER}"
    files = sorted((home / SMOKE_FOLDER).rglob(FILE))
    written = {record["row"] for file in files for record in read_results(file)}
    missing = [row for row in rows_to_run(recipe) if row not in written]
    if missing and recipe.rows and not (recipe.folder / WHOLE).is_file():
        return f"wrote no result of {', '.join(missing)}"
    return None if written else f"wrote no {FILE} to its folder {SMOKE_FOLDER}"


def main(arguments: Sequence[str]) -> None:
    """Run preprocess.sh, train.sh and eval.sh of every recipe with --smoke; exit with 1 if one fails."""
    parser = Parser("python -m recipes smoke", description=main.__doc__)
    parser.add_argument("recipes", nargs="*", help="names of folders (default: all)")
    parser.add_argument("--list", action="store_true", help="only print the names")
    options = parser.parse_args(arguments)
    recipes = [find_recipe(name) for name in options.recipes or recipe_names()]
    if options.list:  # the longest first, so that processes that share them end at the same time
        recipes.sort(key=lambda r: (r.folder / WHOLE).is_file() or len(commands(r)) / 100, reverse=True)
        print("\n".join(recipe.name for recipe in recipes))
        return
    failed = []
    for recipe in recipes:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=f"smoke-{recipe.name}-") as runs:
            fault = run_recipe(recipe, Path(runs))
        state = "failed" if fault else "ok"
        print(f"{recipe.name:<26} {time.monotonic() - started:5.0f} s  {state}", flush=True)
        if fault:
            print("    " + fault.replace("\n", "\n    "), flush=True)
            failed.append(recipe.name)
    if failed:
        print(f'failed: {", ".join(failed)}; make smoke RECIPES="{" ".join(failed)}" runs only these')
        raise SystemExit(1)
