"""Malformed input to every command and recipe fails with one line, leaves no files, and terminates."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest

import recipes.__main__
import shared_embeddings as se
from nmt import cli
from recipes.common.tools import run_main
from recipes.quickstart import corpus
from shared_embeddings.cli.main import main
from shared_embeddings.utils.files import remove
from shared_embeddings.words.classes import make_classes
from tests.commands.harness import (
    ABSENT,
    DEEP,
    Case,
    Command,
    actions_of,
    arguments_of,
    check_cases,
    option_cases,
    other_cases,
)
from tests.lm.runs import write_corpus, write_model
from tests.nmt.conftest import Host

WRONG = ("x", "nan", "1e999", "-3", "9" * 400, "[1]", '{"a": 1}', DEEP, '{"a": 1, "a": 2}', "null")
SIZES = {"--vocab-size": ["100"], "--dim": ["8"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and the other inputs of the commands, which cases must not change."""
    folder = tmp_path_factory.mktemp("library") / "home"
    write_model(folder / "model.pt", write_corpus(folder))
    words = list("abcdefg")
    lines = [f"{word} {' '.join(map(str, row))}" for word, row in zip(words, np.eye(7, 4))]
    (folder / "vectors.txt").write_text("\n".join(lines) + "\n")
    (folder / "pairs.txt").write_text("a b 3\nb c 2\nc d 1\n")
    (folder / "counts.txt").write_text("".join(f"{word}\t3\n" for word in words))
    (folder / "vocabulary.txt").write_text("\n".join(words) + "\n")
    make_classes([folder / "train.txt"], folder / "vocabulary.txt", 2, folder / "made.npz", dim=4, epochs=1)
    return folder


def of(name: str, folder: Path) -> Command:
    """A valid use of a subcommand."""
    model, output = {"--model": [str(folder / "model.pt")]}, {"--output": [str(folder / "output")]}
    text = {"--text": [str(folder / "train.txt")]}
    options: dict[str, dict[str, list[str]]] = {
        "methods": {},
        "params": {"--method": ["funnel"], **SIZES, "--rank": ["2"]},
        "suggest": {**SIZES, "--budget": ["400"]},
        "classes": {
            **text,
            "--vocab": [str(folder / "vocabulary.txt")],
            "--num-classes": ["2"],
            "--dim": ["4"],
            "--epochs": ["1"],
            **output,
        },
        "compress": {**model, "--method": ["funnel"], **output, "--rank": ["2"], "--fit-steps": ["1"]},
        "similarity": {"--vectors": [str(folder / "vectors.txt")], "--pairs": [str(folder / "pairs.txt")]},
        "trim": {**model, **text, **output},
    }
    least = {"--seed": 0}
    return Command(f"shared-embeddings {name}", main, options[name], head=[name], least=least)


def method_cases(command: Command) -> Iterator[Case]:
    """Values of the wrong type or out of range, for every option of every method."""
    for method in se.methods():
        for field in dataclasses.fields(se.get_method_config(method)):
            for text in WRONG:
                kind = str(field.type)
                if (text == "null" and "None" in kind) or (text == "[1]" and "tuple" in kind):
                    continue
                if "str" in kind and text in ("x", "nan", DEEP, '{"a": 1, "a": 2}'):
                    continue
                if "Mapping" in kind and text == '{"a": 1}':
                    continue
                name = f"--{field.name.replace('_', '-')}"
                base = {"--method": [method], "--rank": None, name: [text]}
                yield Case(f"{method} {name} {text[:20]}", arguments_of(command, base))


def size_cases(command: Command) -> Iterator[Case]:
    """Impossible sizes of an embedding."""
    for name in SIZES:
        for text in ("0", "-1", "9" * 30, str(2**63 - 1)):
            yield Case(f"{name} {text}", arguments_of(command, {name: [text]}))


NAMES = "methods params suggest classes compress similarity trim".split()


@pytest.mark.slow_except("suggest")
@pytest.mark.parametrize("name", NAMES)
def test_malformed_input_is_one_line(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = of(name, folder)
    actions = actions_of(command)
    for path in ("output", "output.report"):
        remove(folder / path)
    cases = [*option_cases(command, actions), *other_cases(command, folder)]
    if name in ("params", "suggest"):
        cases += size_cases(command)
    if name == "params":
        cases += method_cases(command)
    check_cases(command, folder, cases, capsys)


# Options that name files or folders that are read.
READ = ("--settings", "--vectors", "--pairs", "--readme")
FOLDERS = ("--results", "--runs")
FREE = ("--seed", "--grid")
# The arguments before the options; those of `ROWS` take a row, and options of other commands.
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
    """The command line is parsed; the work after it must not run."""


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
    check_cases(command, tmp_path, cases, capsys)


@pytest.mark.parametrize("head", ROWS, ids=" ".join)
def test_rows_of_recipes(head: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = Command(" ".join(head), entry(), {}, head=head)
    rows = ("none", "a\0b", "../train", ABSENT, "x" * 5000, "common", "--no_such_option", "", ".")
    check_cases(command, tmp_path, [Case(row[:20], [*head, row]) for row in rows], capsys)


def test_unknown_tasks_steps_and_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = Command("recipes", entry(), {})
    heads = (["none"], ["a\0b", "train"], ["../lm", "train"], ["x" * 5000], ["common", "train"], ["--no"])
    heads += (["ptb_awd_lstm"], ["ptb_awd_lstm", "fly"], ["ptb_awd_lstm", ""], ["quickstart", "train"], [""])
    cases = [Case(" ".join(head)[:20], head) for head in heads if head != [""]]
    check_cases(command, tmp_path, cases, capsys)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """A corpus and a trained model that cases must not change."""
    host = Host(tmp_path_factory.mktemp("host"))
    host.train("model", train_steps=1, save_checkpoint_steps=1)
    logging.getLogger("onmt").handlers.clear()
    return host


def command_of(name: str, host: Host) -> Command:
    """A valid use of a command of ours for OpenNMT, with its inputs."""
    model, source, output = ([str(host.folder / name)] for name in ("model_step_1.pt", "test.src", "output"))
    options: dict[str, dict[str, list[str]]] = {
        "average_models": {"-models": model * 2, "-output": output},
        "release_model": {"--model": model, "--output": output},
        "rerank": {"-source": source, "-hypotheses": source, "-n_best": ["1"], "-output": output},
        "characters": {"-input": source, "-output": output},
        "character_vocab": {
            "-source": source,
            "-target": [str(host.write("characters", ["a b <sp> c"]))],
            "-output": output,
        },
        "rouge": {"--candidates": source, "--references": source},
    }
    head = ["split"] if name == "characters" else []
    least = {"-seed": 0, "--seed": 0} if name == "rouge" else {}
    return Command(f"onmt_{name}", getattr(cli, name), options[name], head=head, least=least)


@pytest.mark.slow_except("characters")
@pytest.mark.parametrize(
    "name", ["average_models", "release_model", "rerank", "characters", "character_vocab", "rouge"]
)
def test_malformed_input_to_opennmt_is_one_line(
    name: str, host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    command = command_of(name, host)
    (host.folder / "output").unlink(missing_ok=True)
    actions = actions_of(command)
    check_cases(
        command, host.folder, [*option_cases(command, actions), *other_cases(command, host.folder)], capsys
    )
