"""``python -m recipes run`` and ``smoke``: rows of a recipe beside each other, all steps of every recipe."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from recipes.common.recipe import Recipe, find_recipe, recipe_names
from recipes.common.results import FILE, SMOKE_FOLDER, find_result, read_results
from recipes.common.tools import SMOKE, SMOKE_HELP, matching, python_path
from shared_embeddings.utils.command_line import Parser, positive
from shared_embeddings.utils.errors import UserError

# Script of recipes with a single step.
WHOLE = "run.sh"
# Timeout of a script, generous for busy machines.
LONGEST_SECONDS = 1800


def run_rows(recipe: Recipe, rows: Sequence[str], count: int, seconds: float) -> list[str]:
    """Run the steps of rows, `count` at a time, until the time is over; return the rows that have no result.

    Every row is a pair of processes, ``train`` and ``eval``, as if started by hand; a row waits for its
    teacher. The output of a process goes to ``STEP.output`` in the row's folder. Trainings that are stopped
    save their state and resume next time.
    """
    started, waiting, failed = time.monotonic(), list(rows), set[str]()
    running: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:7.0f} s  {text}", flush=True)

    def start(row: str, step: str) -> None:
        command = [sys.executable, "-m", "recipes", recipe.name, step, row, *[SMOKE] * recipe.is_smoke]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": python_path()}
        output = recipe.home / row / f"{step}.output"
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("ab") as file:
            # Its own group: an interrupt of the terminal is passed on once, at the end.
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        running[row] = step, process

    try:
        while (waiting or running) and time.monotonic() - started < seconds:
            unfinished = (*waiting, *failed, *running)
            ready = [row for row in waiting if recipe.rows[row].teacher not in unfinished]
            for row in ready[: count - len(running)]:
                waiting.remove(row)
                start(row, "train")
                say(f"{row}: training")
            if not running:
                break  # the teachers of those that wait failed
            for row, (step, process) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[row]
                if process.returncode:
                    failed.add(row)
                    output = recipe.home / row / f"{step}.output"
                    last = ["", *output.read_text("utf-8", errors="replace").strip().splitlines()][-1]
                    say(f"{row}: {step} failed: {last} (all of it: {output})")
                elif step == "train":
                    start(row, "eval")
                else:
                    metrics = (find_result(recipe.home, row) or {"metrics": {}})["metrics"]
                    scores = [f"{key} {metrics[key]:.1f}" for key in ("bleu", "perplexity") if key in metrics]
                    say(f"{row}: {', '.join(scores) or 'done'}")
            time.sleep(0.2)
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            try:
                process.wait(60.0)  # it saves its state
            except subprocess.TimeoutExpired:
                process.kill()
    return [row for row in rows if find_result(recipe.home, row) is None]


def run(arguments: Sequence[str]) -> None:
    """Train and evaluate rows of a recipe, several at a time; again to resume."""
    parser = Parser("python -m recipes run", description=run.__doc__)
    parser.add_argument("task", help="a recipe whose data are prepared")
    parser.add_argument("rows", nargs="+", metavar="ROW", help="a name, or a pattern such as 'small_*'")
    parser.add_argument("--jobs", type=positive, default=1, help="rows at a time (default: 1)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time")
    parser.add_argument(SMOKE, action="store_true", help=SMOKE_HELP)
    options = parser.parse_args(arguments)
    recipe = find_recipe(options.task)
    recipe = recipe.smoke() if options.smoke else recipe
    names: list[str] = []
    for name in matching(recipe.rows, options.rows, "row"):
        chain = [name]
        while (teacher := recipe.rows[chain[-1]].teacher) is not None:
            chain.append(teacher)
        names += reversed(chain)  # teachers come first
    rows = [name for name in dict.fromkeys(names) if find_result(recipe.home, name) is None]
    missing = run_rows(recipe, rows, options.jobs, 60 * options.minutes)
    print(f"{len(rows) - len(missing)} of {len(rows)} rows done; results: {recipe.home / FILE}")
    if missing:
        raise UserError(f"no result of {', '.join(missing)}; run the same command again to resume")


def rows_to_run(recipe: Recipe) -> list[str]:
    """Return the rows that `smoke` trains and evaluates, in order.

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
    steps = [[script, *row, SMOKE] for row in rows for script in ("train.sh", "eval.sh")]
    return [["preprocess.sh", SMOKE], *steps]


def run_recipe(recipe: Recipe, runs: Path) -> str | None:
    """Run all steps of a recipe until a script fails; runs and logs go to an empty folder.

    The scripts run with this Python on the CPU, without user overrides. Returns what went wrong: the last
    output of a script, or a misplaced or missing result.
    """
    inherited = {key: value for key, value in os.environ.items() if key not in ("DATA_DIR", "TORCHRUN")}
    fixed = {"RUNS": str(runs), "VIRTUAL_ENV": sys.prefix, "CUDA_VISIBLE_DEVICES": ""}
    environment = {"OMP_NUM_THREADS": "1", **inherited, **fixed}
    for script, *arguments in commands(recipe):
        name, log = " ".join([script, *arguments]), runs / f"{script}.log"
        command = [str(recipe.folder / script), *arguments]
        try:
            with log.open("w") as file:
                status = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    timeout=LONGEST_SECONDS,
                ).returncode
        except subprocess.TimeoutExpired:
            return f"{name} did not finish in {LONGEST_SECONDS} seconds"
        if status:
            last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
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


def smoke(arguments: Sequence[str]) -> None:
    """Run preprocess.sh, train.sh and eval.sh of every recipe with --smoke; exit with 1 if one fails."""
    parser = Parser("python -m recipes smoke", description=smoke.__doc__)
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
