"""Malformed input to the commands of language models: each fails with one line and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Union
from unittest import mock

import pytest
import yaml

import lm.evaluate.generate
from lm import cli
from lm.train.config import all_groups
from tests.lm.runs import SMALL, write_corpus, write_model
from tests.malformed.harness import (
    DEEP,
    Case,
    Command,
    actions_of,
    arguments_of,
    complaints,
    option_cases,
    other_cases,
)

# The smallest valid number of a key of lm_train, if it is not 0 for a fraction and 1 for a count.
LEAST = {
    "warmup_steps": 0,
    "patience": 0,
    "seed": 0,
    "nonmono": 0,
    "memory_length": 0,
}
VAST = ("embedding_dim", "hidden_dim", "num_layers", "num_heads", "head_dim", "feed_forward_dim")
KINDS = ("model", "optimizer", "schedule")
CHOICES: dict[str, dict[str, Any]] = {
    "model awd_lstm": {"model": "awd_lstm", **SMALL["awd_lstm"]},
    "model transformer_xl": {"model": "transformer_xl", **SMALL["transformer_xl"]},
    "optimizer adam": {"optimizer": "adam"},
    "optimizer ntasgd": {"optimizer": "ntasgd"},
    "schedule cosine": {"schedule": "cosine"},
    "schedule step": {"schedule": "step", "decay_epochs": [1]},
    "schedule plateau": {"schedule": "plateau"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus and a model that no case may change."""
    folder = tmp_path_factory.mktemp("lm") / "home"
    write_model(folder / "model.pt", write_corpus(folder))
    settings = {
        "data": str(folder / "data"),
        "output_dir": str(folder / "run"),
        "embedding": {"method": "funnel", "rank": 4},
        "steps": 2,
        "learning_rate": 0.1,
        "device": "cpu",
        **SMALL["awd_lstm"],
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


def prepare(folder: Path) -> Command:
    texts = {f"-{split}": [str(folder / f"{split}.txt")] for split in ("train", "valid", "test")}
    return Command(
        "lm_prepare",
        cli.prepare,
        {**texts, "-output": [str(folder / "prepared")]},
        inputs=tuple(texts),
        least={"-max_size": 3, "-seed": 0},
        before=(
            lambda: mock.patch("lm.data.prepare.prepare"),
            lambda: mock.patch("lm.data.prepare.describe"),
        ),
    )


def train(folder: Path) -> Command:
    return Command(
        "lm_train",
        cli.train,
        {"-config": [str(folder / "config.yaml")]},
        inputs=("-config",),
        documents=("-config",),
        mappings=("-embedding", "-embedding_distillation"),
        before=(lambda: mock.patch("lm.train.command._run"),),
    )


def evaluate(folder: Path) -> Command:
    return Command(
        "lm_eval",
        cli.evaluate,
        {"-model": [str(folder / "model.pt")], "-data": [str(folder / "test.txt")]},
        inputs=("-model", "-reference"),
        folders=("-data",),
        outputs=("-output",),
        least={"-context_length": 0},
        mappings=("-pointer",),
    )


def generate(folder: Path) -> Command:
    write = lm.evaluate.generate.generate
    return Command(
        "lm_generate",
        cli.generate,
        {"-model": [str(folder / "model.pt")], "-length": ["2"]},
        inputs=("-model",),
        least={"-temperature": 0},
        free=("-seed",),
        before=(
            lambda: mock.patch("lm.evaluate.generate.generate", lambda *given: islice(write(*given), 2)),
        ),
    )


def key_cases(command: Command) -> Iterator[Case]:
    """Values of the wrong type or out of range, for every key of lm_train."""
    for title, options in all_groups().items():
        chosen = [text for name, value in CHOICES.get(title, {}).items() for text in (f"-{name}", str(value))]
        if title not in CHOICES and title != "training":
            continue
        hints = typing.get_type_hints(options)
        for field in dataclasses.fields(options):
            for text in _wrong(field.name, hints[field.name]):
                rest = _without(chosen, field.name)
                arguments = [*arguments_of(command), *rest, f"-{field.name}", text]
                yield Case(f"{title}: {field.name}: {text[:30]}", arguments)
            yield Case(f"{field.name} twice", [*arguments_of(command), *[f"-{field.name}", "1"] * 2])


def _without(arguments: list[str], name: str) -> list[str]:
    """Remove a key from arguments."""
    return [
        text
        for key, value in zip(arguments[::2], arguments[1::2], strict=True)
        if key != f"-{name}"
        for text in (key, value)
    ]


def _wrong(name: str, hint: Any) -> Iterator[str]:
    """Invalid values of a key with a type."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    yield from ("{a: 1, a: 2}", "{5: 1}", DEEP[:150], '"\\0"')
    if bool not in kinds:
        yield "true"
    if types.NoneType not in kinds:
        yield "null"
    if int in kinds:
        yield from ("x", "1.5", "[1]", "{a: 1}", ".nan", "9" * 30, str(LEAST.get(name, 1) - 1))
        yield str(2**63)
        if name in VAST:
            yield str(2**31 - 1)  # more memory or time than any machine has
    elif float in kinds:
        yield from ("x", "[1]", ".nan", ".inf", "-.inf", "-1", "1e999")
    elif name in KINDS or any(typing.get_origin(kind) is Literal for kind in kinds):
        yield from ("none_such", "[x]", "5")
    elif kinds[0] is bool:
        yield from ("5", "maybe", "[true]")
    elif kinds[0] is str or typing.get_origin(kinds[0]) is not None:
        yield from ("5", "[[5]]", "[{a: 1}]")


COMMANDS = {make.__name__: make for make in (prepare, train, evaluate, generate)}


@pytest.mark.slow_except("generate")
@pytest.mark.parametrize("name", COMMANDS)
def test_malformed_input_is_one_line(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = COMMANDS[name](folder)
    if name == "train":
        cases = [*key_cases(command), *other_cases(command, folder)]
        assert not complaints(command, Case("right", arguments_of(command), status=0), folder, capsys)
    else:
        cases = [*option_cases(command, actions_of(command)), *other_cases(command, folder)]
    found = [line for case in cases if (line := complaints(command, case, folder, capsys))]
    print(f"{name}: {len(cases)} cases, {len(found)} wrong")
    assert not found, "\n".join(found)
