"""Malformed input to ``shared-embeddings``: each fails with one line, leaves nothing behind, and ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shared_embeddings as se
from shared_embeddings.classes import make_classes
from shared_embeddings.cli.main import main as cli
from tests.lm.command_line import write_corpus, write_model
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

WRONG = ("x", "nan", "1e999", "-3", "9" * 400, "[1]", '{"a": 1}', DEEP, '{"a": 1, "a": 2}', "null")
SIZES = {"--vocab-size": ["100"], "--dim": ["8"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and the other inputs of the commands, which no case may change."""
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
        "similarity": {"--vectors": [str(folder / "vectors.txt")], "--pairs": [str(folder / "pairs.txt")]},
        "trim": {**model, **text, **output},
    }
    read = ["vectors", "vectors-of", "pairs", "text", "vocab", "token-counts", "keep", "source-text"]
    read += ["target-text", "validation", "validation-source", "validation-target"]
    return Command(
        f"shared-embeddings {name}",
        cli,
        options[name],
        head=[name],
        least={"--seed": 0, "--keep-first": 0},
        inputs=[f"--{option}" for option in read],
        folders=("--model",),
        outputs=("--report", "--figure", *(("--output",) if name in ("classes", "compress", "trim") else ())),
    )


def method_cases(command: Command) -> Iterator[Case]:
    """Values of the wrong type or out of range, for every option of every method."""
    for method in se.methods():
        for field in dataclasses.fields(se.options(method)):
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


NAMES = ("methods", "params", "suggest", "classes", "compress", "correlation", "similarity", "trim")


@pytest.mark.slow_except("suggest")
@pytest.mark.parametrize("name", NAMES)
def test_malformed_input_is_one_line(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = of(name, folder)
    actions = actions_of(command)
    for path in ("output", "output.report"):
        (folder / path).unlink(missing_ok=True) if not (folder / path).is_dir() else _empty(folder / path)
    cases = [*option_cases(command, actions), *other_cases(command, folder)]
    if name in ("params", "suggest"):
        cases += size_cases(command)
    if name == "params":
        cases += method_cases(command)
    found = [line for case in cases if (line := complaints(command, case, folder, capsys))]
    print(f"{name}: {len(cases)} cases, {len(found)} wrong")
    assert not found, "\n".join(found)


def _empty(folder: Path) -> None:
    """Remove a folder of files."""
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
