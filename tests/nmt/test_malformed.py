"""Checkpoints of onmt_train with parts that are damaged or of another type: one line of every command."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nmt import cli
from nmt.checkpoint.files import allow_checkpoint_types
from shared_embeddings.cli.main import main as shared_embeddings
from tests.altered import Odd, alter, told
from tests.nmt.conftest import Host, Trained

pytestmark = pytest.mark.usefixtures("installed_host")

STANDARD = {"method": "standard"}
OPTIONS = (
    "embedding",
    "hidden_size",
    "dec_layers",
    "heads",
    "encoder_type",
    "share_embeddings",
    "model_task",
    "dropout",
)
RESUME = ("data", "random", "numpy", "torch", "early_stopping")


def odd_parts(good: Path, path: Path) -> Iterator[tuple[str, Path]]:
    """Checkpoints with a part of another type, by what it is."""
    content = torch.load(good, weights_only=True)
    for part in ("model", "vocab", "opt", "generator", "optim", "resume"):
        for kind, value in Odd.VALUES.items():
            yield f"{part}: {kind}", alter(good, lambda c: c.update({part: value}), path)  # noqa: B023
    for kind, state in Odd.tensors(content["model"]).items():
        yield f"tensor: {kind}", alter(good, lambda c: c.update(model=state), path)  # noqa: B023
    for side in ("src", "tgt", "data_task", "decoder_start_token", "src_feats"):
        for kind, value in Odd.VALUES.items():
            yield f"words {side}: {kind}", alter(good, lambda c: c["vocab"].update({side: value}), path)  # noqa: B023
    for kind, value in {**Odd.VALUES, "a list of one": [content]}.items():
        torch.save(value, path)
        yield f"whole: {kind}", path


def odd_options(good: Path, path: Path) -> Iterator[tuple[str, Path]]:
    """Checkpoints with an option of another type, by what it is."""
    for name in OPTIONS:
        for kind, value in Odd.VALUES.items():
            yield f"option {name}: {kind}", alter(good, lambda c: setattr(c["opt"], name, value), path)  # noqa: B023
    yield "no options", alter(good, lambda c: c.update(opt=Namespace()), path)


def odd_runs(good: Path, path: Path) -> Iterator[tuple[str, Path]]:
    """Checkpoints with something wrong in how training goes on."""
    content = torch.load(good, weights_only=True)
    for name in content["optim"]:
        for kind, value in Odd.VALUES.items():
            yield f"optim {name}: {kind}", alter(good, lambda c: c["optim"].update({name: value}), path)  # noqa: B023
    for name in content["resume"][0]:
        for kind, value in Odd.VALUES.items():
            yield f"resume {name}: {kind}", alter(good, lambda c: c["resume"][0].update({name: value}), path)  # noqa: B023
    wider = {"step": torch.tensor(6.0), **{name: torch.zeros(3, 3) for name in ("exp_avg", "exp_avg_sq")}}
    state = {**content["optim"]["optimizer"], "state": {0: wider}}
    yield "optim: another shape", alter(good, lambda c: c["optim"].update(optimizer=state), path)


def outcome(command: str, arguments: list[object], capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """The exit status of a command, or the error that escapes it, and what it printed on stderr."""
    capsys.readouterr()
    status: object = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [command, *map(str, arguments)])
        try:
            if command == "shared-embeddings":
                status = shared_embeddings([str(one) for one in arguments])
            else:
                getattr(cli, command.removeprefix("onmt_"))()
        except SystemExit as end:
            status = end.code
        except Exception as error:
            status = repr(error)
    return status, capsys.readouterr().err


def training(host: Host, model: Path, folder: Path) -> list[object]:
    """Arguments that resume training for a step."""
    config = host.config("odd", embedding=None, train_steps=7, save_model=str(folder / "save"))
    return ["-config", config, "-train_from", model]


USES: dict[str, tuple[str, Callable[[Host, Path, Path], list[object]]]] = {
    "translate": (
        "onmt_translate",
        lambda host, model, folder: [
            *("-model", model, "-src", host.folder / "test.src", "-output", folder / "out"),
            *("-max_length", 3, "-beam_size", 1),
        ],
    ),
    "train": ("onmt_train", training),
    "release": ("onmt_release_model", lambda _, model, folder: ["-model", model, "-output", folder / "out"]),
    "average": (
        "onmt_average_models",
        lambda _, model, folder: ["-models", model, "-output", folder / "out"],
    ),
    "compress": (
        "shared-embeddings",
        lambda _, model, folder: [
            *("compress", "--model", model, "--method", "funnel", "--rank", 2, "--output", folder / "out"),
            *("--fit-steps", 2),
        ],
    ),
    "trim": (
        "shared-embeddings",
        lambda host, model, folder: [
            *("trim", "--model", model, "--text", host.folder / "test.src", "--output", folder / "out")
        ],
    ),
    "similarity": (
        "shared-embeddings",
        lambda host, model, _: ["similarity", "--model", model, "--pairs", host.write("pairs", ["w1 w2 3"])],
    ),
}


# What may be there, or does not matter to whom: no model is built from a release or a mean.
MAY_BE = (
    *("generator: None", "generator: an empty mapping", "optim: None", "resume: None"),
    *("words data_task: a string", "words decoder_start_token: a string"),
    *(f"option share_embeddings: {kind}" for kind in Odd.VALUES),
    *("option dropout: a list", "resume early_stopping: None"),
    *("optim training_step: a number", "optim decay_step: a number"),
)
WHOLE = {("release", odd_parts), ("similarity", odd_options), ("train", odd_runs)}
UNBUILT = ("tensor: longer", "tensor: one axis", "tensor: empty", "tensor: left", "model: an empty mapping")


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_parts_of_another_type(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], use: str
) -> None:
    allow_checkpoint_types()
    host, good = trained(embedding=STANDARD)
    command, arguments = USES[use]
    failures = []
    tables = [odd_parts] + [odd_options] * (use not in ("release", "average")) + [odd_runs] * (use == "train")
    for table in tables:
        # All read through one function: every case goes to the quickest command, a fifth to each other one.
        is_whole = (use, table) in WHOLE
        for number, (kind, model) in enumerate(table(good, tmp_path / "odd.pt")):
            if kind in MAY_BE or (use in ("release", "average") and kind.startswith(UNBUILT)):
                continue
            if not is_whole and number % 5 != list(USES).index(use) % 5:
                continue
            status, error = outcome(command, arguments(host, model, tmp_path), capsys)
            for written in (tmp_path / "out", *tmp_path.glob("save*")):
                written.unlink(missing_ok=True)
            if status != 2 or not told(error, command, model):
                failures.append(f"{kind}: {status} {error[-300:]}")
    assert not failures, "\n".join(failures)
