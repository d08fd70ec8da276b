"""``python -m recipes.smoke``: every recipe goes its whole way with ``--smoke``, in a temporary folder.

A recipe is a folder beside this file that has a README and scripts; a new one is taken along without being
named anywhere.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from recipes.common.config import read_content, row_names
from recipes.common.errors import UserError, run_main
from recipes.common.results import SMOKE_FOLDER
from recipes.common.smoke import SMOKE
from shared_embeddings.utils.command_line import Parser

RECIPES = Path(__file__).parent
# The scripts that take a row where a recipe has any, in the order in which they are run.
PREPROCESS, ROW_SCRIPTS = "preprocess.sh", ("train.sh", "eval.sh")
# Ways in which a row starts from another one that is trained.
STARTS = ("fit", "distill")
# Of recipes that do everything at once.
WHOLE = "run.sh"
# So that a script that does not end is told, too, even on a busy machine.
LONGEST_SECONDS = 1800
TOLD_LINES = 20
# Variables that mean real data or real trainings.
OTHERS_SETTINGS = ("AVERAGE", "DATA_DIR", "TORCHRUN")


class Outcome(NamedTuple):
    """How a recipe's way ended.

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


def recipe_names(folder: Path = RECIPES) -> list[str]:
    """Names of all recipes in `folder`: what has a README and a script."""
    return sorted(
        readme.parent.name for readme in folder.glob("*/README.md") if list(readme.parent.glob("*.sh"))
    )


def rows_to_run(recipe: Path) -> list[str]:
    """The rows that are trained and evaluated, in order; none for a recipe without rows to choose from.

    They are the first one that compresses an embedding and starts from no other row, or the first one where
    there is none; then the first of each way to start from a trained row, behind that row.

    Raises:
        UserError: a row that cannot be read.
    """
    configs = recipe / "configs"
    contents = {name: read_content(configs / f"{name}.yaml") for name in row_names(configs)}
    rows = [name for name, content in contents.items() if _compresses_from_scratch(content)] or [*contents]
    rows = rows[:1]
    for way in STARTS:
        for name in [name for name, content in contents.items() if way in content][:1]:
            rows += [contents[name][way]["teacher"], name]
    return list(dict.fromkeys(rows))


def _compresses_from_scratch(content: Mapping[str, Any]) -> bool:
    """Whether a row has another embedding than a plain table, and starts from no other row."""
    return content["embedding"]["method"] != "standard" and not any(way in content for way in STARTS)


def commands(recipe: Path, rows: Sequence[str]) -> list[list[str]]:
    """The command lines of a recipe's whole way, in order; without rows, each script is called once."""
    if (recipe / WHOLE).is_file():
        return [[str(recipe / WHOLE), SMOKE]]
    chosen_rows = [[row] for row in rows] or [[]]
    return [
        [str(recipe / PREPROCESS), SMOKE],
        *([str(recipe / script), *row, SMOKE] for row in chosen_rows for script in ROW_SCRIPTS),
    ]


def run_recipe(recipe: Path, runs: Path) -> Outcome:
    """Go the whole way of a recipe, up to the first script that fails.

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
    """Run one script; returns what it said last if it failed."""
    told = " ".join([Path(command[0]).name, *command[1:]])
    log = runs / f"{Path(command[0]).name}.log"
    try:
        with log.open("w") as file:
            status = _wait_for(command, file, environment_of(runs))
    except OSError as error:
        return f"{told}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"{told} did not end in {LONGEST_SECONDS} seconds"
    if status == 0:
        return None
    last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TOLD_LINES:]
    return "\n".join([f"{told} ended with status {status}:", *last])


def environment_of(runs: Path) -> dict[str, str]:
    """Environment variables of a script: this Python's, the CPU alone, nobody's own texts and settings."""
    own = {key: value for key, value in os.environ.items() if key not in OTHERS_SETTINGS}
    fixed = {"RUNS": str(runs), "VIRTUAL_ENV": sys.prefix, "CUDA_VISIBLE_DEVICES": ""}
    return {"OMP_NUM_THREADS": "1", **own, **fixed}


def _wait_for(command: Sequence[str], output: IO[str], environment: Mapping[str, str]) -> int:
    """Run a script to its end and return its status; it does not outlive us, nor do programs that it runs."""
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
        return f"wrote {', '.join(beside)} beside its folder {SMOKE_FOLDER}, where real runs lie"
    for folder in [f"{SMOKE_FOLDER}/{row}" for row in rows] or [SMOKE_FOLDER]:
        if not list((home / folder).rglob("results.json")):
            return f"wrote no results.json below its folder {folder}"
    return None


def chosen(names: Sequence[str], folder: Path = RECIPES) -> list[Path]:
    """Folders of the recipes that are named; of all if none is.

    Raises:
        UserError: a recipe that there is not.
    """
    known = recipe_names(folder)
    for name in names:
        if name not in known:
            raise UserError(f"no recipe {name!r}; there are: {', '.join(known)}")
    return [folder / name for name in names or known]


def tell(outcome: Outcome) -> str:
    """A line about a recipe, and below it what went wrong."""
    state = "ok" if outcome.fault is None else "failed"
    line = f"{outcome.recipe:<26} {outcome.seconds:5.0f} s  {state:<6}  {', '.join(outcome.rows)}".rstrip()
    return line if outcome.fault is None else f"{line}\n    " + outcome.fault.replace("\n", "\n    ")


def main(arguments: Sequence[str]) -> None:
    """Run preprocess.sh, train.sh and eval.sh of every recipe with --smoke; exit with 1 if one fails."""
    parser = Parser("python -m recipes.smoke", description=main.__doc__)
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
        print(tell(outcome), flush=True)
        if outcome.fault is not None:
            failed.append(outcome.recipe)
    if failed:
        print(f'failed: {", ".join(failed)}; make smoke RECIPES="{" ".join(failed)}" runs these alone')
        raise SystemExit(1)


if __name__ == "__main__":
    raise SystemExit(run_main("smoke", main))
