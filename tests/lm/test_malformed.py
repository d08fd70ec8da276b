"""Damaged checkpoints and malformed input: every command of language models fails with one line."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Union
from unittest import mock

import pytest
import torch
import yaml

import lm.evaluate.generate
from lm import cli
from lm.checkpoint import read_checkpoint
from lm.train.config import all_groups
from shared_embeddings.utils.errors import UserError
from tests.commands.harness import (
    DEEP,
    Case,
    Command,
    actions_of,
    arguments_of,
    failure_of,
    option_cases,
    other_cases,
)
from tests.helpers import Odd, alter, flip, names_file, offsets
from tests.lm import runs
from tests.lm.runs import SMALL, run, settings, small_corpus, write_corpus, write_model

STANDARD = {"method": "standard"}
TINY: dict[str, Any] = {"embedding": STANDARD, "steps": 2, "evaluate_every": 1}
# Irrelevant parts: the training state for readers of the model, and settings for those with their own.
NO_MATTER = {
    **dict.fromkeys(
        ("eval", "generate", "distil", "compress", "trim", "similarity"), ("training: a mapping",)
    ),
    "start": ("training: a mapping", "hidden_dim", "num_layers", "model: a string"),
    "resume": ("hidden_dim", "num_layers", "model: a string"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, and a run of a few steps on it."""
    folder = tmp_path_factory.mktemp("malformed")
    run(settings(small_corpus(folder), folder / "run", **TINY))
    (folder / "words.txt").write_text("a b c\n")
    (folder / "pairs.txt").write_text("a b 1\nb c 2\n")
    return folder


def odd_models(home: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Invalid checkpoints, by a description of the error."""
    good, path = home / "run/last.pt", folder / "odd.pt"
    content = torch.load(good, weights_only=True)
    for part in ("config", "words", "model", "training"):
        for kind, value in Odd.VALUES.items():
            if (part, kind) not in (("training", "None"), ("training", "an empty mapping")):
                yield f"{part}: {kind}", alter(good, lambda c: c.update({part: value}), path)  # noqa: B023
    for kind, state in Odd.tensors(content["model"]).items():
        yield f"tensor: {kind}", alter(good, lambda c: c.update(model=state), path)  # noqa: B023
    for key in ("model", "embedding", "hidden_dim", "num_layers"):
        for kind, value in Odd.VALUES.items():
            yield f"{key}: {kind}", alter(good, lambda c: c["config"].update({key: value}), path)  # noqa: B023
    for kind, value in {"a list": [content], "a tensor": torch.zeros(3), "None": None}.items():
        torch.save(value, path)
        yield f"whole: {kind}", path


def outcome(name: str, arguments: list[object]) -> tuple[object, str]:
    """The exit status of a command, or its uncaught error, and its stderr."""
    try:
        ended = runs.command(name, *arguments)
    except Exception as error:
        return repr(error), ""
    return ended.status, ended.err


def training(home: Path, folder: Path, **changes: Any) -> list[object]:
    """Arguments of lm_train."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(settings(home / "data", folder / "save", **{**TINY, **changes})))
    return ["-config", file]


def start(home: Path, model: Path, folder: Path) -> list[object]:
    return training(home, folder, init_from=str(model))


def distil(home: Path, model: Path, folder: Path) -> list[object]:
    given = {"teacher": str(model), "embedding_start": "fit"}
    return training(home, folder, embedding_distillation=given)


def resume(home: Path, model: Path, folder: Path) -> list[object]:
    (folder / "save").mkdir(exist_ok=True)
    target = folder / "save/last.pt"
    target.unlink(missing_ok=True)
    target.hardlink_to(model)
    (folder / "save/best.pt").write_bytes((home / "run/best.pt").read_bytes())
    return training(home, folder)


USES: dict[str, tuple[str, Callable[[Path, Path, Path], list[object]]]] = {
    "eval": ("lm_evaluate", lambda home, model, _: ["-model", model, "-data", home / "data"]),
    "generate": ("lm_generate", lambda home, model, _: ["-model", model, "-length", 2]),
    "start": ("lm_train", start),
    "distil": ("lm_train", distil),
    "resume": ("lm_train", resume),
    "compress": (
        "shared-embeddings",
        lambda home, model, folder: [
            *("compress", "--model", model, "--method", "funnel", "--rank", 2, "--output", folder / "out.pt"),
            *("--fit-steps", 2),
        ],
    ),
    "trim": (
        "shared-embeddings",
        lambda home, model, folder: [
            *("trim", "--model", model, "--text", home / "words.txt", "--output", folder / "out.pt")
        ],
    ),
    "similarity": (
        "shared-embeddings",
        lambda home, model, _: ["similarity", "--model", model, "--pairs", home / "pairs.txt"],
    ),
}


@pytest.mark.slow_except("generate")
@pytest.mark.parametrize("use", USES)
def test_every_command_reports_damage(home: Path, tmp_path: Path, use: str) -> None:
    name, arguments = USES[use]
    failures = []
    for kind, model in odd_models(home, tmp_path):
        if kind.startswith(NO_MATTER[use]):
            continue
        status, error = outcome(name, arguments(home, model, tmp_path))
        named = tmp_path / "save/last.pt" if use == "resume" else model
        if status != 2 or not names_file(error, name, named):
            failures.append(f"{kind}: {status} {error[-300:]}")
    assert not failures, "\n".join(failures)
    assert not (tmp_path / "out.pt").exists()


def odd_runs(home: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Checkpoints with an invalid training state."""
    good, path = home / "run/last.pt", folder / "odd.pt"
    training = torch.load(good, weights_only=True)["training"]
    for part in training:
        for kind, value in Odd.VALUES.items():
            if (part, kind) not in HARMLESS:
                change = {part: value}
                yield f"{part}: {kind}", alter(good, lambda c: c["training"].update(change), path)  # noqa: B023
    for part in training["processes"][0]:
        for kind, value in Odd.VALUES.items():
            change = {part: value}
            yield (
                f"process {part}: {kind}",
                alter(good, lambda c: c["training"]["processes"][0].update(change), path),  # noqa: B023
            )
    yield "empty", alter(good, lambda c: c.update(training={}), path)
    wider = {name: torch.zeros(3, 3) for name in ("momentum_buffer", "exp_avg")}
    state = {0: {"step": torch.tensor(2.0), **wider}}
    yield (
        "optimizer: another shape",
        alter(good, lambda c: c["training"]["optimizer"].update(state=state), path),
    )


HARMLESS = {("averages", "None"), ("step", "a number"), ("epoch", "a number"), ("position", "a number")}


@pytest.mark.slow
def test_damaged_runs_cannot_be_resumed(home: Path, tmp_path: Path) -> None:
    failures = []
    for kind, model in odd_runs(home, tmp_path):
        status, error = outcome("lm_train", resume(home, model, tmp_path))
        if status != 2 or not names_file(error, "lm_train", tmp_path / "save/last.pt"):
            failures.append(f"{kind}: {status} {error[-300:]}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("store", [None, "int8", "fp16"])
def test_every_flipped_byte_is_detected(home: Path, tmp_path: Path, store: str | None) -> None:
    """In the last checkpoint of a run, including the optimizer, and in compressed ones."""
    path = tmp_path / "model.pt"
    if store is None:
        path.write_bytes((home / "run/last.pt").read_bytes())
    else:
        asked = ["--rank", 4, "--store", store]
        assert runs.compress(home / "run/last.pt", "projective", path, *asked).status == 0
    found = offsets(path)
    assert len(found) > 7
    for offset in found:
        flip(path, offset)
        with pytest.raises(UserError, match=f"checkpoint {path}: does not match its checksum"):
            read_checkpoint(path)
        flip(path, offset)
    read_checkpoint(path)


@pytest.mark.parametrize("use", USES)
def test_every_command_detects_a_flipped_byte(home: Path, tmp_path: Path, use: str) -> None:
    model = tmp_path / "model.pt"
    model.write_bytes((home / "run/last.pt").read_bytes())
    flip(model, offsets(model)[0])
    name, arguments = USES[use]
    status, error = outcome(name, arguments(home, model, tmp_path))
    named = tmp_path / "save/last.pt" if use == "resume" else model
    assert status == 2 and names_file(error, name, named) and "does not match its checksum" in error


# The smallest valid number of a key of lm_train, if it is not 0 for a fraction and 1 for a count.
LEAST = dict.fromkeys(("warmup_steps", "seed", "nonmono", "memory_length"), 0)
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
    """A corpus and a model that cases must not change."""
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
    splits = ("train", "valid", "test")
    texts = {f"-{split}": [str(folder / f"{split}.txt")] for split in splits}
    made = {"tokens": dict.fromkeys(splits, 9), "unknown": dict.fromkeys(splits, 0), "types": 3}
    return Command(
        "lm_prepare",
        cli.prepare,
        {**texts, "-output": [str(folder / "prepared")]},
        inputs=tuple(texts),
        least={"-max_size": 3, "-seed": 0},
        before=(lambda: mock.patch("lm.data.prepare.prepare", return_value=made),),
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
        "lm_evaluate",
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
        assert not failure_of(command, Case("right", arguments_of(command), status=0), folder, capsys)
    else:
        cases = [*option_cases(command, actions_of(command)), *other_cases(command, folder)]
    found = [line for case in cases if (line := failure_of(command, case, folder, capsys))]
    print(f"{name}: {len(cases)} cases, {len(found)} wrong")
    assert not found, "\n".join(found)
