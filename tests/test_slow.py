"""The list of slow tests names tests that exist."""

from __future__ import annotations

import ast

import pytest

from tests.conftest import SLOW
from tests.mutants import REPOSITORY


@pytest.mark.parametrize("path", SLOW)
def test_slow_tests_exist(path: str) -> None:
    tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert set(SLOW[path]) <= functions
