"""``python -m recipes run``: trains and evaluates many rows of a recipe, some beside each other.

Every row is a pair of processes, ``train`` and ``eval``, as if started by hand; a row waits for its teacher.
Small models leave most of a GPU, and all but one core of a CPU, to others.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from recipes.common.recipe import Recipe, find_recipe
from recipes.common.results import FILE, find_result
from recipes.common.smoke import SMOKE, SMOKE_HELP
from recipes.common.tools import matching, python_path
from shared_embeddings.utils.command_line import Parser, positive
from shared_embeddings.utils.errors import UserError

QUALITIES = ("bleu", "perplexity")
# Seconds after which a process that was told to stop, and saves its state, is killed.
_GRACE = 60.0


def run_rows(recipe: Recipe, rows: Sequence[str], count: int, seconds: float) -> list[str]:
    """Run the steps of rows, `count` at a time, until the time is over; return the rows that have no result.

    The output of a process goes to ``STEP.output`` in the row's folder. Trainings that are stopped save their
    state and resume next time.
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
            running[row] = (
                step,
                subprocess.Popen(
                    command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                ),
            )

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
                    numbers = [f"{name} {metrics[name]:.1f}" for name in QUALITIES if name in metrics]
                    say(f"{row}: {', '.join(numbers) or 'done'}")
            time.sleep(0.2)
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
    return [row for row in rows if find_result(recipe.home, row) is None]


def main(arguments: Sequence[str]) -> None:
    """Train and evaluate rows of a recipe, several at a time; again to resume."""
    parser = Parser("python -m recipes run", description=main.__doc__)
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
