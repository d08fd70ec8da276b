"""Loops inside tests name what fails, and run everything."""

from __future__ import annotations

import pytest
import torch

from tests.loops import in_turn


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
