"""The table of seeded changes matches the code; `tests.mutants` itself is run by hand."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests import mutants
from tests.mutants import REPOSITORY, Mutant, mutated, read_mutants

MUTANTS = read_mutants()


def test_there_are_sixty_or_more_in_all_packages() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60
    for package in ("shared_embeddings", "nmt", "lm"):
        assert sum(mutant.file.startswith(f"{package}/") for mutant in MUTANTS) >= 12
    assert sum(bool(mutant.explained) for mutant in MUTANTS) <= 5


def test_every_snippet_is_in_its_file_once_and_python_after_the_change() -> None:
    for mutant in MUTANTS:
        changed = mutated((REPOSITORY / mutant.file).read_text(encoding="utf-8"), mutant)
        assert mutant.new != mutant.old
        ast.parse(changed)


def test_the_tests_are_there_and_of_the_package_that_is_changed() -> None:
    for mutant in MUTANTS:
        package = mutant.file.split("/")[0]
        assert mutant.tests and mutant.why
        for test in mutant.tests:
            path, _, name = test.partition("::")
            assert path.startswith(f"tests/{package}/"), mutant.name
            text = (REPOSITORY / path).read_text(encoding="utf-8")
            function = name.partition("[")[0]
            assert not name or f"def {function}(" in text, (mutant.name, name)


def test_a_snippet_that_is_gone_is_named() -> None:
    gone = Mutant("gone", "lm/train/optim.py", "no such line", "", ("tests/lm/test_optim.py",), "nothing")
    with pytest.raises(ValueError, match="gone: lm/train/optim.py has the snippet 0 times"):
        mutated("some text", gone)


@pytest.mark.parametrize(
    ("status", "outcome"), [(0, "missed"), (1, "caught"), (None, "timed out"), (4, "broken")]
)
def test_only_tests_that_ran_and_failed_count_and_the_file_comes_back(
    status: int | None, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code.py").write_text("a = 1\n")
    seen = []

    def run_tests(folder: Path, tests: tuple[str, ...], seconds: float) -> int | None:
        seen.append((folder / "code.py").read_text())
        return status

    monkeypatch.setattr(mutants, "run_tests", run_tests)
    mutant = Mutant("one", "code.py", "a = 1", "a = 2", ("tests",), "wrong number")
    assert mutants.try_mutant(tmp_path, mutant, 1.0).startswith(outcome)
    assert seen == ["a = 2\n"] and (tmp_path / "code.py").read_text() == "a = 1\n"
