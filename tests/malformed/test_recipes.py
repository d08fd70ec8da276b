"""Malformed input to the entry points of recipes: each fails in a line, leaves nothing behind, and ends."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

import recipes.__main__
from recipes.common.tools import run_main
from recipes.quickstart import corpus
from tests.malformed.harness import ABSENT, Case, Command, complaints, option_cases, other_cases

# Options that name files or folders that are read.
READ = ("--settings", "--vectors", "--pairs", "--readme")
FOLDERS = ("--results", "--runs")
FREE = ("--seed", "--grid")
# What comes before the options; those of `ROWS` take a row, and options of other commands.
WITH_OPTIONS: list[list[str]] = [
    ["list"],
    ["table", "quickstart"],
    ["sizes", "multi30k_ende", "--vocabulary", "5"],
    ["coverage"],
    ["report"],
    ["smoke"],
    ["glove_reconstruction", "preprocess", "--smoke"],
    ["glove_reconstruction", "eval"],
    ["glove_reconstruction", "train"],
    ["multi30k_ende", "preprocess"],
    ["wmt14_ende", "preprocess"],
    ["quickstart", "run"],
]
CORPUS = ["--source", "en", "--target", "de", "--output", "none"]
ROWS: list[list[str]] = [
    ["agnews_headline", "train"],
    ["ptb_awd_lstm", "train"],
    ["ptb_awd_lstm", "eval"],
    ["multi30k_ende", "eval"],
    ["wmt14_ende", "train"],
]


class ParsedError(BaseException):
    """The command line is read; the work after it must not run."""


def entry(module: ModuleType = recipes.__main__) -> Callable[[], Any]:
    """An entry point, as scripts call it."""
    return partial(run_main, "recipes", module.main)


def options_of(module: ModuleType, head: list[str]) -> list[argparse.Action]:
    """The options of an entry point, from the parser that its arguments go through."""
    parsers: list[argparse.ArgumentParser] = []

    def stop(self: argparse.ArgumentParser, *_: Any) -> Any:
        parsers.append(self)
        raise ParsedError

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop),
        mock.patch("sys.argv", ["recipes", *head]),
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


@pytest.mark.parametrize("head", [*WITH_OPTIONS, CORPUS], ids=" ".join)
def test_options_of_recipes(head: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = corpus if head == CORPUS else recipes.__main__
    actions = options_of(module, head)
    command = Command(" ".join(head), entry(module), {}, head=head, inputs=READ, folders=FOLDERS, free=FREE)
    named = [action for action in actions if not {*action.option_strings} & {*head}]
    cases = [*option_cases(command, named), *other_cases(command, tmp_path)]
    assert not wrong(command, tmp_path, cases, capsys)


@pytest.mark.parametrize("head", ROWS, ids=" ".join)
def test_rows_of_recipes(head: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = Command(" ".join(head), entry(), {}, head=head)
    rows = ("none", "a\0b", "../train", ABSENT, "x" * 5000, "common", "--no_such_option", "", ".")
    assert not wrong(command, tmp_path, [Case(row[:20], [*head, row]) for row in rows], capsys)


def test_tasks_steps_and_commands_that_are_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Command("recipes", entry(), {})
    heads = (["none"], ["a\0b", "train"], ["../lm", "train"], ["x" * 5000], ["common", "train"], ["--no"])
    heads += (["ptb_awd_lstm"], ["ptb_awd_lstm", "fly"], ["ptb_awd_lstm", ""], ["quickstart", "train"], [""])
    cases = [Case(" ".join(head)[:20], head) for head in heads if head != [""]]
    assert not wrong(command, tmp_path, cases, capsys)
