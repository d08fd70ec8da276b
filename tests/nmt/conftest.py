"""A small parallel corpus and OpenNMT's commands run inside this process."""

from __future__ import annotations

import logging
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

os.environ.setdefault("OMP_NUM_THREADS", "1")

from nmt import cli  # noqa: E402

WORDS = {f"w{number}": f"v{number}" for number in range(40)}
FUNNEL = {"method": "funnel", "rank": 4}
SECONDS = 600  # for processes of their own

MODEL: dict[str, Any] = {
    "encoder_type": "transformer",
    "decoder_type": "transformer",
    "position_encoding": True,
    "enc_layers": 1,
    "dec_layers": 1,
    "heads": 2,
    "hidden_size": 16,
    "word_vec_size": 16,
    "transformer_ff": 32,
    "dropout": [0.1],
    "attention_dropout": [0.0],
    "share_vocab": True,
    "share_embeddings": True,
    "share_decoder_embeddings": True,
    "optim": "adam",
    "learning_rate": 0.01,
    "batch_size": 16,
    "batch_type": "sents",
    "bucket_size": 64,
    "num_workers": 0,
    "train_steps": 6,
    "save_checkpoint_steps": 3,
    "valid_steps": 100,
    "report_every": 2,
    "seed": 7,
    "param_init": 0.0,
    "param_init_glorot": True,
}


class Host:
    """A folder with a corpus, its vocabulary and the models trained in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        generator = random.Random(5)
        names = sorted(WORDS)
        for split, size in (("train", 90), ("valid", 10), ("test", 7)):
            lines = [[generator.choice(names) for _ in range(generator.randint(1, 7))] for _ in range(size)]
            self.write(f"{split}.src", [" ".join(line) for line in lines])
            self.write(f"{split}.tgt", [" ".join(WORDS[word] for word in line) for line in lines])
        counts = [f"{word}\t9" for pair in WORDS.items() for word in pair]
        self.write("vocab", counts)

    def write(self, name: str, lines: list[str]) -> Path:
        path = self.folder / name
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    def config(self, name: str, **options: Any) -> Path:
        """Write the configuration of a model called ``name``; ``None`` removes an option."""
        settings = {
            **MODEL,
            "data": {"corpus": self.corpus("train"), "valid": self.corpus("valid")},
            "src_vocab": str(self.folder / "vocab"),
            "save_model": str(self.folder / name),
            **options,
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in settings.items() if value is not None}))
        return path

    def corpus(self, split: str) -> dict[str, Any]:
        """Return the settings of a corpus."""
        src, tgt = (str(self.folder / f"{split}.{side}") for side in ("src", "tgt"))
        return {"path_src": src, "path_tgt": tgt, "weight": 1}

    def language_model(self) -> dict[str, Any]:
        """Return the options of a language model, which is trained on the sources."""
        splits = ("train", "valid")
        data = {split: {"path_src": str(self.folder / f"{split}.src"), "weight": 1} for split in splits}
        kind = dict.fromkeys(("encoder_type", "decoder_type"), "transformer_lm")
        return {"model_task": "lm", **kind, "share_embeddings": None, "data": data}

    def train(self, name: str, *arguments: object, **options: Any) -> Path:
        """Train a model and return its last checkpoint."""
        run("onmt_train -config", self.config(name, **options), *arguments)
        steps = options.get("train_steps", MODEL["train_steps"])
        return self.folder / f"{name}_step_{steps}.pt"

    def translate(self, model: Path | list[Path], *arguments: object, source: str = "test.src") -> list[str]:
        """Translate a file and return the lines."""
        models = model if isinstance(model, list) else [model]
        output = self.folder / "translation"
        output.unlink(missing_ok=True)
        search = {"-beam_size": "2", "-max_length": "9", "-max_length_ratio": "0"}
        usual = [text for name, value in search.items() if name not in arguments for text in (name, value)]
        files = ("-src", self.folder / source, "-output", output)
        run("onmt_translate -model", *models, *files, *usual, *arguments)
        return output.read_text(encoding="utf-8").split("\n")[:-1]


def run(command: str, *arguments: object) -> None:
    """Run a command, with its first options if it has any, inside this process."""
    name, *first = command.split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [name, *first, *map(str, arguments)])
        status = getattr(cli, name.removeprefix("onmt_"))()
    if status:
        raise SystemExit(status)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A fresh folder with a corpus."""
    return Host(tmp_path)


Trained = Callable[..., tuple[Host, Path]]
ErrorLine = Callable[..., str]
Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Models trained once for all tests, by their options."""
    models: dict[str, tuple[Host, Path]] = {}

    def get(**options: Any) -> tuple[Host, Path]:
        key = repr(sorted(options.items()))
        if key not in models:
            fresh = Host(tmp_path_factory.mktemp("host"))
            models[key] = fresh, fresh.train("model", **options)
            # Log messages of training would appear in the output of the first test.
            logging.getLogger("onmt").handlers.clear()
        return models[key]

    return get


@pytest.fixture
def error_line(capsys: pytest.CaptureFixture[str]) -> ErrorLine:
    """Run a command that must fail with one line and exit code 2; returns the line."""

    def expect(command: str, *arguments: object) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            run(command, *arguments)
        error = capsys.readouterr().err
        assert stop.value.code == 2, error
        lines = [line for line in error.splitlines() if line.startswith(command.split()[0])]
        assert len(lines) == 1, error
        assert "Traceback" not in error
        return lines[0]

    return expect


def weights(path: str | Path) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint by name."""
    from nmt.checkpoints import read_weights

    _, body, head = read_weights(str(path))
    return {**body, **{f"generator.{name}": tensor for name, tensor in head.items()}}


def built(path: str | Path) -> Any:
    """The model of a checkpoint."""
    from nmt.models import build_from_checkpoint

    return build_from_checkpoint(str(path))[0]


def nearest(table: torch.Tensor, rank: int = 4) -> torch.Tensor:
    """The best approximation of a table at a rank."""
    left, values, right = torch.linalg.svd(table.detach().double(), full_matrices=False)
    return ((left[:, :rank] * values[:rank]) @ right[:rank]).float()


def free_port() -> int:
    """An unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
