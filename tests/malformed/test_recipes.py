"""Malformed input to the entry points of recipes: each fails in a line, leaves nothing behind, and ends."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from recipes.common.errors import run_main
from tests.malformed.harness import ABSENT, Case, Command, complaints, option_cases, other_cases

# Options that name files or folders that are read.
READ = ("--settings", "--grid", "--vectors", "--pairs", "--readme")
FOLDERS = ("--results", "--runs")
FREE = ("--seed",)
# What comes before the options, by module; those of `ROWS` take a row, and options of other commands.
WITH_OPTIONS: dict[str, list[str]] = {
    "recipes.common.comparison": ["--results", "none", "--readme", "none"],
    "recipes.common.headline_table": ["--results", "none", "--readme", "none"],
    "recipes.common.sizes": ["none", "--vocabulary", "5"],
    "recipes.common.table": ["--results", "none", "--readme", "none"],
    "recipes.glove_reconstruction.preprocess": ["--smoke"],
    "recipes.glove_reconstruction.report": [],
    "recipes.glove_reconstruction.train": [],
    "recipes.multi30k_ende.preprocess": [],
    "recipes.published.coverage": [],
    "recipes.published.preprocess": ["wmt14_ende"],
    "recipes.quickstart.corpus": ["--source", "en", "--target", "de", "--output", "none"],
    "recipes.quickstart.run": [],
    "recipes.report.__main__": [],
    "recipes.smoke": [],
}
ROWS: dict[str, list[str]] = {
    "recipes.common.headline_runs": ["train", "agnews_headline"],
    "recipes.common.model_runs": ["train", "ptb_awd_lstm"],
    "recipes.multi30k_ende.evaluate": [],
    "recipes.multi30k_ende.train": [],
    "recipes.published.evaluate": ["wmt14_ende"],
    "recipes.published.train": ["wmt14_ende"],
}


class ParsedError(BaseException):
    """The command line is read; the work after it must not run."""


def entry(module: str) -> Callable[[], Any]:
    """A recipe's entry point, as its script calls it."""
    return partial(run_main, module, importlib.import_module(module).main)


def options_of(module: str, head: list[str]) -> list[argparse.Action]:
    """The options of an entry point, from the parser that its arguments go through."""
    parsers: list[argparse.ArgumentParser] = []

    def stop(self: argparse.ArgumentParser, *_: Any) -> Any:
        parsers.append(self)
        raise ParsedError

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop),
        mock.patch("sys.argv", [module, *head]),
        pytest.raises(ParsedError),
    ):
        entry(module)()
    return [action for action in parsers[0]._actions if action.option_strings and action.dest != "help"]


def wrong(command: Command, folder: Path, cases: list[Case], capsys: pytest.CaptureFixture[str]) -> str:
    """What is wrong with how a command takes cases."""
    found = [line for case in cases if (line := complaints(command, case, folder, capsys))]
    print(f"{command.name}: {len(cases)} cases, {len(found)} wrong")
    return "\n".join(found)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let recipes write below a folder of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))


@pytest.mark.parametrize("module", WITH_OPTIONS)
def test_options_of_recipes(module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = WITH_OPTIONS[module]
    actions = options_of(module, head)
    command = Command(module, entry(module), {}, head=head, inputs=READ, folders=FOLDERS, free=FREE)
    named = [action for action in actions if not {*action.option_strings} & {*head}]
    cases = [*option_cases(command, named), *other_cases(command, tmp_path)]
    assert not wrong(command, tmp_path, cases, capsys)


@pytest.mark.parametrize("module", ROWS)
def test_rows_of_recipes(module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = ROWS[module]
    command = Command(module, entry(module), {}, head=head)
    rows = ("none", "a\0b", "../train", ABSENT, "x" * 5000, "common", "--no_such_option", "", ".")
    assert not wrong(command, tmp_path, [Case(row[:20], [*head, row]) for row in rows], capsys)
