"""The method in docs/adding_a_method.md works everywhere once it is registered."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = "tests.shared_embeddings.documented_method"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(*command: str) -> str:
    """The output of a Python process that must succeed."""
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def command(*arguments: str) -> str:
    """The output of `shared-embeddings` with the method."""
    code = f"import sys, {PLUGIN}; from shared_embeddings.cli.main import main; sys.exit(main(sys.argv[1:]))"
    return run("-c", code, *arguments)


@pytest.mark.slow
def test_commands_find_the_method() -> None:
    sizes = ["--vocab-size", "1000", "--dim", "32"]
    listed = command("methods")
    assert "hashed: the sum of two rows" in listed
    assert "  buckets: a whole number (required)\n      B, the number of rows of the table.\n" in listed
    assert "| `hashed` | Weinberger et al. (2009) |" in command("methods", "--format", "markdown")
    counted = json.loads(command("params", "--method", "hashed", *sizes, "--buckets", "50", "--json"))
    assert counted["total"] == 50 * 32
    found = json.loads(command("suggest", *sizes, "--budget", "3200", "--json"))["suggestions"]
    assert {"buckets": 100} in [one["options"] for one in found if one["method"] == "hashed"]


@pytest.mark.slow
def test_compress_finds_options_for_a_target(tmp_path: Path) -> None:
    words = [f"w{number} {number % 7} {number % 5}" for number in range(40)]
    (tmp_path / "table.vec").write_text("\n".join(["40 2", *words]) + "\n")
    asked = ["--model", str(tmp_path / "table.vec"), "--output", str(tmp_path / "small")]
    report = command("compress", *asked, "--method", "hashed", "--target-ratio", "2", "--fit-steps", "5")
    assert "hashed, buckets:" in report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tests", "least"),
    [
        (["tests/shared_embeddings", "-k", "hashed"], 60),
        (["tests/lm/test_compression.py", "-k", "hashed"], 1),
        (["tests/nmt/test_training.py::test_train_save_load_translate", "-k", "hashed"], 1),
        (["tests/benchmarks/test_layers.py", "-k", "measured"], 2),
    ],
    ids=["library", "lm", "nmt", "benchmarks"],
)
def test_contract_tests_run_unchanged(tests: list[str], least: int) -> None:
    chosen = ["-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:cacheprovider", *tests]
    passed = re.search(r"(\d+) passed", run(*chosen))
    assert passed is not None and int(passed[1]) >= least
