"""Malformed input to OpenNMT's commands: each fails with one line, leaves no files, and terminates."""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from nmt import cli
from nmt.options import RANGES, known_names
from shared_embeddings.utils.command_line import finite_number
from tests.malformed.harness import (
    Case,
    Command,
    actions_of,
    arguments_of,
    check_cases,
    option_cases,
    other_cases,
)
from tests.nmt.conftest import MODEL, Host

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


def commands(host: Host) -> dict[str, Callable[[], Command]]:
    """Valid uses of all commands, by name; the inputs of a command are written when it is asked for."""
    folder = host.folder
    model, source, output = ([str(folder / name)] for name in ("model_step_1.pt", "test.src", "output"))

    def server() -> Command:
        path = folder / "server.json"
        models = [{"id": 1, "model": "model_step_1.pt"}]
        path.write_text(json.dumps({"models_root": str(folder), "models": models}))
        return Command(
            "onmt_server",
            cli.server,
            {"--model_config": [str(path)], "--port": ["0"]},
            least={"--port": 0},
            inputs=("--model_config",),
            documents=("--model_config",),
            before=(lambda: mock.patch("nmt.server.Server.serve"),),
        )

    return {
        "train": lambda: Command(
            "onmt_train",
            cli.train,
            {"-config": [str(host.config("new"))]},
            inputs=("-config", "--src_vocab", "--train_from", "--src_subword_model"),
            documents=("-config",),
            mappings=(*MAPPINGS, "--data"),
            before=(
                lambda: mock.patch("nmt.train.ranks.train"),
                lambda: mock.patch("onmt.utils.logging.init_logger"),  # its lines are not errors
            ),
        ),
        "translate": lambda: Command(
            "onmt_translate",
            cli.translate,
            {"-model": model, "-src": source, "-output": output},
            inputs=("-model", "-src", "--tgt", "--config", "--desired_lengths", "--src_subword_model"),
            outputs=("-output",),
            documents=("--config",),
            before=(lambda: mock.patch("onmt.bin.translate.translate", _write_lines),),
        ),
        "build_vocab": lambda: Command(
            "onmt_build_vocab",
            cli.build_vocab,
            {
                "-config": [str(host.config("model"))],
                "-src_vocab": [str(folder / "new_vocabulary")],
                "-save_data": [str(folder / "samples")],
                "-overwrite": [],
            },
            inputs=("-config",),
            outputs=("-src_vocab",),
            documents=("-config",),
            mappings=("--data",),
            before=(lambda: mock.patch("onmt.bin.build_vocab.build_vocab_main", _write_words),),
        ),
        "average": lambda: Command(
            "onmt_average_models",
            cli.average_models,
            {"-models": model * 2, "-output": [str(folder / "mean.pt")]},
            inputs=("-models",),
            outputs=("-output",),
        ),
        "release": lambda: Command(
            "onmt_release_model",
            cli.release_model,
            {"--model": model, "--output": [str(folder / "released.pt")]},
            inputs=("--model",),
            outputs=("--output",),
        ),
        "server": server,
        "rerank": lambda: Command(
            "onmt_rerank",
            cli.rerank,
            {"-source": source, "-hypotheses": source, "-n_best": ["1"], "-output": output},
            inputs=("-source", "-hypotheses"),
            outputs=("-output",),
        ),
        "characters": lambda: Command(
            "onmt_characters",
            cli.characters,
            {"-input": source, "-output": output},
            head=["split"],
            inputs=("-input",),
            outputs=("-output",),
        ),
        "character_vocab": lambda: Command(
            "onmt_character_vocab",
            cli.character_vocab,
            {
                "-source": source,
                "-target": [str(host.write("characters", ["a b <sp> c"]))],
                "-output": output,
            },
            inputs=("-source", "-target"),
            outputs=("-output",),
        ),
        "rouge": lambda: Command(
            "onmt_rouge",
            cli.rouge,
            {"--candidates": source, "--references": source},
            inputs=("--candidates", "--references", "--exceptions"),
            least={"-seed": 0, "--seed": 0},
        ),
    }


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


NAMES = "train translate build_vocab average release server rerank characters character_vocab rouge".split()


@pytest.mark.slow_except("characters")
@pytest.mark.parametrize("name", NAMES)
def test_malformed_input_is_one_line(name: str, host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    command = commands(host)[name]()
    actions = actions_of(command)
    for path in ("output", "new_vocabulary", "mean.pt", "released.pt"):
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
