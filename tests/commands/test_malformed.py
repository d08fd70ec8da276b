"""Malformed input to every command and recipe fails with one line, leaves no files, and terminates."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from argparse import Namespace
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
from nmt.options import RANGES, known_names
from recipes.common.tools import run_main
from recipes.quickstart import corpus
from shared_embeddings.cli.main import main
from shared_embeddings.utils.command_line import finite_number
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
from tests.nmt.conftest import MODEL, Host

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
        "correlation": {**model, **output},
        "cosines": {**model, "--words": ["a", "b"]},
        "similarity": {"--vectors": [str(folder / "vectors.txt")], "--pairs": [str(folder / "pairs.txt")]},
        "trim": {**model, **text, **output},
    }
    least = {"--seed": 0, "--keep-first": 0}
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


NAMES = "methods params suggest classes compress correlation cosines similarity trim".split()


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


MAPPINGS = ("--embedding", "--src_embedding", "--output_embedding", "--embedding_distillation")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """A corpus and a trained model that cases must not change."""
    host = Host(tmp_path_factory.mktemp("host"))
    host.train("model", train_steps=1, save_checkpoint_steps=1)
    logging.getLogger("onmt").handlers.clear()
    return host


def _write_lines(opt: Namespace) -> None:
    """Stand-in for translation: writes a line per source line."""
    lines = Path(opt.src).read_text().splitlines()
    Path(opt.output).write_text("x\n" * len(lines) * opt.n_best)


def _write_words(opt: Namespace) -> None:
    """Stand-in for counting words."""
    for path in filter(None, (opt.src_vocab, None if opt.share_vocab else opt.tgt_vocab)):
        Path(path).write_text("a\t1\n")


def command_of(name: str, host: Host) -> Command:
    """A valid use of a command of OpenNMT, with its inputs."""
    folder = host.folder
    model, source, output = ([str(folder / name)] for name in ("model_step_1.pt", "test.src", "output"))
    served = {"models_root": str(folder), "models": [{"id": 1, "model": "model_step_1.pt"}]}
    options: dict[str, dict[str, list[str]]] = {
        "train": {"-config": [str(host.config("new"))]},
        "translate": {"-model": model, "-src": source, "-output": output},
        "build_vocab": {
            "-config": [str(host.config("model"))],
            "-src_vocab": [str(folder / "new_vocabulary")],
            "-save_data": [str(folder / "samples")],
            "-overwrite": [],
        },
        "average_models": {"-models": model * 2, "-output": output},
        "release_model": {"--model": model, "--output": output},
        "server": {"--model_config": [str(host.write("server.json", [json.dumps(served)]))], "--port": ["0"]},
        "rerank": {"-source": source, "-hypotheses": source, "-n_best": ["1"], "-output": output},
        "characters": {"-input": source, "-output": output},
        "character_vocab": {
            "-source": source,
            "-target": [str(host.write("characters", ["a b <sp> c"]))],
            "-output": output,
        },
        "rouge": {"--candidates": source, "--references": source},
    }
    # What the parsers of OpenNMT-py do not say.
    upstream: dict[str, dict[str, Any]] = {
        "train": {
            "inputs": ("-config", "--src_vocab", "--train_from", "--src_subword_model"),
            "documents": ("-config",),
            "mappings": (*MAPPINGS, "--data"),
            "before": (
                partial(mock.patch, "nmt.train.ranks.train"),
                partial(mock.patch, "onmt.utils.logging.init_logger"),  # its lines are not errors
            ),
        },
        "translate": {
            "inputs": ("-model", "-src", "--tgt", "--config", "--desired_lengths", "--src_subword_model"),
            "outputs": ("-output",),
            "documents": ("--config",),
            "before": (partial(mock.patch, "onmt.bin.translate.translate", _write_lines),),
        },
        "build_vocab": {
            "inputs": ("-config",),
            "outputs": ("-src_vocab",),
            "documents": ("-config",),
            "mappings": ("--data",),
            "before": (partial(mock.patch, "onmt.bin.build_vocab.build_vocab_main", _write_words),),
        },
        "server": {
            "inputs": ("--model_config",),
            "documents": ("--model_config",),
            "before": (partial(mock.patch, "nmt.server.Server.serve"),),
        },
    }
    head = ["split"] if name == "characters" else []
    least = {"--port": 0, "-seed": 0, "--seed": 0} if name in ("server", "rouge") else {}
    given = upstream.get(name, {})
    return Command(f"onmt_{name}", getattr(cli, name), options[name], head=head, least=least, **given)


def number_cases(command: Command, actions: list[Any]) -> Iterator[Case]:
    """Numbers inside and outside their ranges, and unknown names."""
    known = known_names()
    for action in actions:
        name = max(action.option_strings, key=len)
        if action.dest in known:
            yield Case(f"{name} unknown", arguments_of(command, {name: ["no_such_name"]}))
        if action.dest not in RANGES or action.choices:
            continue
        allowed = RANGES[action.dest]
        wrong = [allowed.least if allowed.above else allowed.least - 3, allowed.most + 1]
        for number in wrong:
            text = str(float(number) if action.type in (float, finite_number) else int(number))
            yield Case(f"{name} {text}", arguments_of(command, {name: [text]}))
        usual = MODEL.get(action.dest, action.default) if command.name == "onmt_train" else action.default
        if usual is not None:
            texts = [str(value) for value in (usual if isinstance(usual, list) else [usual])]
            yield Case(f"{name} {texts}", arguments_of(command, {name: texts}), status=0)


def typed_cases(command: Command, host: Host, actions: list[Any]) -> Iterator[Case]:
    """Values of the wrong type in the configuration file."""
    path = host.folder / "typed.yaml"
    usual = (host.folder / "new.yaml").read_text()
    for action in actions:
        if action.dest not in RANGES or action.dest in MODEL:
            continue
        for value in ("{a: 1}", "[[1]]"):
            content = f"{usual}{action.dest}: {value}\n".encode()
            arguments = arguments_of(command, {"-config": [str(path)]})
            yield Case(f"{action.dest}: {value}", arguments, document=content, written=path)


OPENNMT = "train translate build_vocab average_models release_model server rerank characters".split()
OPENNMT += ["character_vocab", "rouge"]


@pytest.mark.slow_except("characters")
@pytest.mark.parametrize("name", OPENNMT)
def test_malformed_input_to_opennmt_is_one_line(
    name: str, host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    command = command_of(name, host)
    actions = actions_of(command)
    for path in ("output", "new_vocabulary"):
        (host.folder / path).unlink(missing_ok=True)
    command.ranged = [
        option for action in actions for option in action.option_strings if action.dest in RANGES
    ]
    cases = [*option_cases(command, actions), *other_cases(command, host.folder)]
    if name in ("train", "translate", "build_vocab"):
        cases += number_cases(command, actions)
    if name == "train":
        cases += typed_cases(command, host, actions)
    check_cases(command, host.folder, cases, capsys)
