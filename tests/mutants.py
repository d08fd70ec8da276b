"""Seeded changes of the code that its tests must catch; run by hand: ``python -m tests.mutants``.

``mutants.yaml`` holds the changes: a file, a snippet that occurs in it once, its replacement, and tests of
the same package that should fail then. Each change is made separately, in a temporary copy of the code.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix(".yaml")
# What the tests of the three packages import or read.
COPIED = ("lm", "nmt", "recipes", "shared_embeddings", "tests", "README.md", "pyproject.toml")
WANTED = 55
SECONDS = 300
# Exit status of pytest if tests failed.
TESTS_FAILED = 1


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        name: name in the table.
        file: the changed file, relative to the repository.
        old, new: the snippet and its replacement.
        tests: pytest ids of the tests that should fail.
        why: what the change breaks.
        explained: why no test can catch it, if none does.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str
    explained: str = ""


def read_mutants() -> list[Mutant]:
    """Read the table of changes."""
    rows = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def mutated(text: str, mutant: Mutant) -> str:
    """Apply the change to the content of the mutant's file.

    Raises:
        ValueError: the snippet does not occur exactly once.
    """
    found = text.count(mutant.old)
    if found != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} has the snippet {found} times; update {TABLE.name}")
    return text.replace(mutant.old, mutant.new)


def copy_of_the_code(folder: Path) -> None:
    """Copy what the tests need into `folder`."""
    for name in COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)


def run_tests(folder: Path, tests: Sequence[str], seconds: float) -> int | None:
    """Run tests on the code in `folder`; returns pytest's exit status, or None after a timeout."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    return done.returncode


def try_mutant(folder: Path, mutant: Mutant, seconds: float) -> str:
    """Make one change in the copy, run its tests, and revert it.

    Returns:
        "caught", "timed out" (which counts as caught), "missed", or "broken" if no test ran.
    """
    path = folder / mutant.file
    original = path.read_text(encoding="utf-8")
    path.write_text(mutated(original, mutant), encoding="utf-8")
    try:
        status = run_tests(folder, mutant.tests, seconds)
    finally:
        path.write_text(original, encoding="utf-8")
    if status is None:
        return "timed out"
    return {0: "missed", TESTS_FAILED: "caught"}.get(status, f"broken (pytest's exit status {status})")


def outcomes(folder: Path, mutants: Sequence[Mutant], seconds: float) -> Iterator[str]:
    """Try each mutant; yields and prints the outcomes."""
    for number, mutant in enumerate(mutants, 1):
        started = time.perf_counter()
        outcome = try_mutant(folder, mutant, seconds)
        took = time.perf_counter() - started
        note = f" ({mutant.explained})" if outcome == "missed" and mutant.explained else ""
        print(f"{number:2} {mutant.name}: {outcome}{note}, {took:.0f} s", flush=True)
        yield outcome


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the mutants; the exit status is 0 only if the tests catch enough of them."""
    parser = argparse.ArgumentParser("python -m tests.mutants", description=main.__doc__)
    parser.add_argument("--list", action="store_true", help="print names and descriptions without trying any")
    parser.add_argument("--only", metavar="NAME", nargs="+", default=[], help="try only these")
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help="time limit per mutant (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    mutants = [mutant for mutant in read_mutants() if not options.only or mutant.name in options.only]
    if options.list or not mutants:
        print("\n".join(f"{mutant.name} ({mutant.file}): {mutant.why}" for mutant in mutants))
        return 0 if mutants else 1
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        copy_of_the_code(folder)
        try:
            for mutant in mutants:
                mutated((folder / mutant.file).read_text(encoding="utf-8"), mutant)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 1
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        if status := run_tests(folder, tests, len(mutants) * options.seconds):
            print(f"the tests fail without a change (exit status {status}); fix them first", file=sys.stderr)
            return 1
        found = list(outcomes(folder, mutants, options.seconds))
    caught = sum(outcome in ("caught", "timed out") for outcome in found)
    print(f"{caught} of {len(found)} caught, {found.count('timed out')} of them by a timeout")
    return 0 if caught >= min(WANTED, len(found)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
