"""Loops over cases inside one test: cases cost no set-up each, and a failure names those that fail."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

SEED = 20201119
Test = Callable[..., None]


def in_turn(names: str, values: Sequence[Any]) -> Callable[[Test], Test]:
    """Call a test once for every value, in the manner of ``pytest.mark.parametrize`` but as a single test.

    Fixtures are set up once, so this suits tests that do not change them. Every value starts from the same
    random state.

    Args:
        names: parameters of the test, separated by commas.
        values: one value each, or one tuple each where there are several names.
    """
    parameters = [name.strip() for name in names.split(",")]

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def loop(**fixtures: Any) -> None:
            def check(value: Any) -> None:
                given = dict(zip(parameters, value if len(parameters) > 1 else (value,), strict=True))
                test(**given, **fixtures)

            check_each(check, values)

        return _with_parameters(loop, test, drop=parameters)

    return decorate


def in_turn_by(group: str, groups: Sequence[Any], name: str) -> Callable[[Test], Test]:
    """One test per group, each a loop over the values of its group.

    Args:
        group: the name of the parameter that stands for a group.
        groups: a ``pytest.param`` with a list of values for each group.
        name: the parameter of the test that takes a value.
    """

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def loop(**given: Any) -> None:
            values = given.pop(group)
            check_each(lambda value: test(**{name: value}, **given), values)

        return pytest.mark.parametrize(group, groups)(_with_parameters(loop, test, [name], [group]))

    return decorate


def check_each(check: Callable[[Any], object], values: Sequence[Any]) -> None:
    """Call `check` with every value.

    Raises:
        AssertionError: names the values that failed; its cause is the first failure.
    """
    assert values, "no cases"
    failures: dict[str, BaseException] = {}
    for value in values:
        torch.manual_seed(SEED)
        try:
            check(value)
        except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
            failures[_label(value)] = error
    if failures:
        first = next(iter(failures.values()))
        raise AssertionError(f"{len(failures)} of {len(values)} fail: {'; '.join(failures)}") from first


def _with_parameters(loop: Test, test: Test, drop: Sequence[str], add: Sequence[str] = ()) -> Test:
    """Make pytest see the parameters of `test`, less those dropped, plus those added."""
    signature = inspect.signature(test)
    missing = [name for name in drop if name not in signature.parameters]
    assert not missing, f"{test.__name__} takes no {missing}"
    kept = [parameter for name, parameter in signature.parameters.items() if name not in drop]
    added = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in add]
    loop.__signature__ = signature.replace(parameters=[*added, *kept])  # type: ignore[attr-defined]
    return loop


def _label(value: Any) -> str:
    """A short name of a value: its attribute ``name`` or ``__name__``, or its text."""
    return str(getattr(value, "name", getattr(value, "__name__", value)))[:100]
