"""Loops inside tests, and the table of seeded changes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from tests import mutants
from tests.helpers import in_turn
from tests.mutants import REPOSITORY, Mutant, mutated, read_mutants


@pytest.mark.parametrize("fails", [[], [2], [1, 3]], ids=str)
def test_a_failure_names_all_values_that_fail_and_has_the_first_as_its_cause(fails: list[int]) -> None:
    seen = []

    @in_turn("value", [1, 2, 3])
    @in_turn("letter, other", [("a", "b")])
    def check(value: int, letter: str, other: str) -> None:
        seen.append((value, letter + other, torch.rand(1).item()))
        assert value not in fails

    if fails:
        with pytest.raises(AssertionError, match=f"{len(fails)} of 3 fail: {'; '.join(map(str, fails))}$"):
            check()
    else:
        check()
    assert [value for value, *_ in seen] == [1, 2, 3]
    assert len({tuple(rest) for _, *rest in seen}) == 1, "every value starts from the same random state"


def test_an_exception_that_was_expected_counts() -> None:
    @in_turn("value", [1])
    def check(value: int) -> None:
        with pytest.raises(ValueError):
            int(str(value))

    with pytest.raises(AssertionError, match="1 of 1 fail: 1") as failure:
        check()
    assert "DID NOT RAISE" in str(failure.value.__cause__)


def test_a_loop_without_values_fails() -> None:
    @in_turn("value", [])
    def check(value: int) -> None:
        raise AssertionError("never called")

    with pytest.raises(AssertionError, match="no cases"):
        check()


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
    gone = Mutant("gone", "lm/train/optim.py", "no such line", "", ("tests/lm/test_models.py",), "nothing")
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
