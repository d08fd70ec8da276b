"""Options of the commands, and their errors."""

from __future__ import annotations

import dataclasses
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from torch._dynamo.exc import BackendCompilerFailed

from lm import cli
from lm.train.config import all_groups, from_arguments, help_text, parse
from shared_embeddings import OptionError
from shared_embeddings.utils import command_line
from shared_embeddings.utils.errors import UserError
from tests.lm.runs import Ended, ended, write_corpus, write_model

GIVEN = {
    "data": "d",
    "output_dir": "s",
    "embedding": {"method": "funnel", "rank": 4},
    "learning_rate": 1,
    "steps": 10,
}


def test_keys_reach_their_groups() -> None:
    chosen = {"optimizer": "ntasgd", "nonmono": 3, "schedule": "step", "decay_epochs": [2]}
    config = parse({**GIVEN, **chosen, "hidden_dim": 7})
    assert config.training.steps == 10 and config.training.embedding == {"method": "funnel", "rank": 4}
    assert config.model.hidden_dim == 7
    assert config.optimizer.nonmono == 3 and config.optimizer.learning_rate == 1.0
    assert config.schedule.decay_epochs == (2.0,)


def test_the_readme_has_a_command_that_parses() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").replace("\\\n", "")
    (command,) = (line for line in readme.splitlines() if line.startswith("lm_train "))
    config = parse(from_arguments(shlex.split(command)[1:]))
    assert config.training.embedding == {"method": "funnel", "rank": 100}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": "adam", "betas": [0.8, 0.9], "schedule": "plateau", "max_grad_norm": None},
        {"model": "transformer_xl", "schedule": "cosine", "steps": None, "epochs": 2},
        {"model": "lstm", "schedule": "step", "decay_epochs": [1, 2.5]},
    ],
)
def test_flat_settings_survive_yaml(changes: dict[str, Any]) -> None:
    config = parse({**GIVEN, **changes})
    again = parse(yaml.safe_load(yaml.safe_dump(config.flat())))
    assert again == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batchsize": 3}, ["unknown key 'batchsize'", "Did you mean 'batch_size'"]),
        ({"nonmono": 3}, ["'nonmono'", "no effect", "optimizer sgd", "optimizer ntasgd"]),
        ({"decay_factor": 3}, ["'decay_factor'", "no effect", "schedule constant", "step", "plateau"]),
        ({"model": "awd_lstn"}, ["awd_lstn", "Did you mean 'awd_lstm'"]),
        ({"batch_size": "many"}, ["batch_size", "many", "int"]),
        ({"max_grad_norm": 0}, ["max_grad_norm", "null"]),
        ({"batch_size": 10, "grad_accum_steps": 4}, ["grad_accum_steps", "divide"]),
        ({"epochs": 2}, ["epochs", "steps", "exactly one"]),
        ({"schedule": "step"}, ["decay_epochs", "missing"]),
    ],
)
def test_invalid_keys_fail_by_name(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises((UserError, OptionError)) as error_line:
        parse({**GIVEN, **changes})
    for word in words:
        assert word in str(error_line.value)


def test_keys_are_unambiguous() -> None:
    groups = {
        title: {field.name for field in dataclasses.fields(options)}
        for title, options in all_groups().items()
    }
    for title, names in groups.items():
        for other, other_names in groups.items():
            if title.split()[0] != other.split()[0]:
                assert not names & other_names, (title, other)


def test_help_explains_every_key_with_its_default() -> None:
    lines = help_text().splitlines()
    for title, options in all_groups().items():
        begin = lines.index(f"{title}:")
        for field in dataclasses.fields(options):
            entry = next(line for line in lines[begin:] if line.startswith(f"  {field.name} ("))
            assert "): " in entry, f"{title}: {field.name} has no meaning"
    assert "  nonmono (5): averaging starts" in help_text()
    assert "  learning_rate (required): base learning rate." in help_text()


# Files and arguments


def test_arguments_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("learning_rate: 1e-3\nsteps: 5\nembedding: {method: standard}\n", encoding="utf-8")
    settings = from_arguments(
        ["-config", str(path), "-steps", "7", "--embedding", "{method: funnel, rank: 64}", "-seed=-1"]
    )
    assert settings == {
        "learning_rate": 0.001,
        "steps": 7,
        "embedding": {"method": "funnel", "rank": 64},
        "seed": -1,
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 0.001), ("1E5", 1e5), ("1.2e-6", 1.2e-6), ("30", 30), ("1.", 1.0), ("1e\u0663", "1e\u0663")],
)
def test_numbers_of_yaml(text: str, value: object) -> None:
    assert from_arguments(["-x", text]) == {"x": value}


def test_a_file_that_is_no_mapping_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("- 1\n")
    with pytest.raises(UserError, match="config.yaml"):
        from_arguments(["-config", str(path)])


def failing(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> Ended:
    """Run a command whose work ends with an error."""

    def main(arguments: list[str]) -> None:
        raise error

    module = ModuleType("lm.failing")
    module.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return ended(
        lambda: command_line.run("lm_fail", f"{module.__name__}:main", explain=cli._explain),
        "lm_fail",
    )


def test_a_missing_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other errors are those of all commands."""
    error = BackendCompilerFailed(print, RuntimeError("No C++ compiler found"), None)
    message = "compile: torch cannot compile here (No C++ compiler found); install"
    assert failing(error, monkeypatch).says(message)
    with pytest.raises(RuntimeError, match="shapes"):
        failing(RuntimeError("shapes do not fit"), monkeypatch)


@pytest.mark.slow
def test_closed_pipe_ends_a_command_quietly(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus"))
    command = [sys.executable, "-m", "lm.generation", "-model", str(model), "-length", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE
