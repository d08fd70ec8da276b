"""``python -m recipes.smoke``: every recipe goes its whole way with ``--smoke``, in a temporary folder.

A recipe is a folder beside this file that has a README and scripts; a new one is taken along without being
named anywhere.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from recipes.common.config import read_content, row_names
from recipes.common.errors import UserError, run_main
from recipes.common.results import SMOKE_FOLDER
from recipes.common.smoke import SMOKE

RECIPES = Path(__file__).parent
# The scripts that take a row where a recipe has any, in the order in which they are run.
PREPROCESS, ROW_SCRIPTS = "preprocess.sh", ("train.sh", "eval.sh")
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
        row: what was trained; nothing for a recipe that has no rows to choose from.
        seconds: how long it took.
        fault: what went wrong, on several lines; None if all went well.
    """

    recipe: str
    row: str
    seconds: float
    fault: str | None


def recipe_names(folder: Path = RECIPES) -> list[str]:
    """Names of all recipes in `folder`: what has a README and a script."""
    return sorted(
        readme.parent.name for readme in folder.glob("*/README.md") if list(readme.parent.glob("*.sh"))
    )


def representative_row(recipe: Path) -> str | None:
    """The first row that compresses an embedding and starts from no other row.

    Where there is none, it is the first one; None for a recipe without rows to choose from.

    Raises:
        UserError: a row that cannot be read.
    """
    configs = recipe / "configs"
    names = row_names(configs)
    for name in names:
        content = read_content(configs / f"{name}.yaml")
        starts = "distill" in content or "fit" in content
        if not starts and content["embedding"]["method"] != "standard":
            return name
    return names[0] if names else None


def commands(recipe: Path, row: str | None) -> list[list[str]]:
    """The command lines of a recipe's whole way, in order."""
    if (recipe / WHOLE).is_file():
        return [[str(recipe / WHOLE), SMOKE]]
    rows = [] if row is None else [row]
    return [
        [str(recipe / PREPROCESS), SMOKE],
        *([str(recipe / script), *rows, SMOKE] for script in ROW_SCRIPTS),
    ]


def run_recipe(recipe: Path, runs: Path) -> Outcome:
    """Go the whole way of a recipe, up to the first script that fails.

    Args:
        recipe: its folder.
        runs: empty folder that it writes to; a log of each script stays there.
    """
    started = time.monotonic()
    row: str | None = None
    try:
        row = None if (recipe / WHOLE).is_file() else representative_row(recipe)
        faults = (_run(command, runs) for command in commands(recipe, row))
        fault = next((fault for fault in faults if fault), None) or misplaced(runs / recipe.name)
    except UserError as error:
        fault = str(error)
    return Outcome(recipe.name, row or "", time.monotonic() - started, fault)


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


def misplaced(home: Path) -> str | None:
    """What is wrong with the place of a recipe's files, or None.

    Args:
        home: folder of everything that the recipe has written.
    """
    beside = sorted(path.name for path in home.glob("*") if path.name != SMOKE_FOLDER)
    if beside:
        return f"wrote {', '.join(beside)} beside its folder {SMOKE_FOLDER}, where real runs lie"
    if not list((home / SMOKE_FOLDER).rglob("results.json")):
        return f"wrote no results.json below its folder {SMOKE_FOLDER}"
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
    line = f"{outcome.recipe:<26} {outcome.seconds:5.0f} s  {state:<6}  {outcome.row}".rstrip()
    return line if outcome.fault is None else f"{line}\n    " + outcome.fault.replace("\n", "\n    ")


def main(arguments: Sequence[str]) -> None:
    """Run preprocess.sh, train.sh and eval.sh of every recipe with --smoke; exit with 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m recipes.smoke", description=main.__doc__)
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
