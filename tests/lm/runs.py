"""Small corpora, models and checkpoints, and the commands run inside this process."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shared_embeddings as se
from lm import cli, models
from lm.checkpoint import save_model
from lm.data.corpus import load_corpus, prepare
from lm.models import Output
from lm.train import command as train
from lm.train.config import parse
from lm.train.loop import Group
from shared_embeddings.cli.main import main

WORDS = 20


def small_corpus(folder: Path, seed: int = 7) -> Path:
    """A corpus of sentences in which most words are followed by the next one in the alphabet."""
    generator = random.Random(seed)

    def sentence() -> str:
        words = [generator.randrange(WORDS)]
        while len(words) < 9:
            words.append((words[-1] + 1) % WORDS if generator.random() < 0.8 else generator.randrange(WORDS))
        return " ".join(chr(ord("a") + word) for word in words)

    sizes = {"train": 60, "valid": 12, "test": 6}
    texts = {}
    for split, size in sizes.items():
        texts[split] = [folder / f"{split}.txt"]
        texts[split][0].write_text("\n".join(sentence() for _ in range(size)) + "\n", encoding="utf-8")
    prepare(texts, folder / "data")
    return folder / "data"


def settings(data: Path, save: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a run of 20 steps on a small corpus; a change to None removes a key."""
    values = {
        "data": str(data),
        "output_dir": str(save),
        "model": "awd_lstm",
        "embedding": {"method": "funnel", "rank": 4},
        "embedding_dim": 8,
        "hidden_dim": 10,
        "num_layers": 2,
        "optimizer": "ntasgd",
        "learning_rate": 3,
        "weight_decay": 1e-6,
        "nonmono": 1,
        "random_bptt": True,
        "batch_size": 4,
        "sequence_length": 12,
        "steps": 20,
        "evaluate_every": 5,
        "valid_batch_size": 2,
        "log_every": 2,
    }
    return {key: value for key, value in {**values, **changes}.items() if value is not None}


def without_dropout(**changes: Any) -> dict[str, Any]:
    """Changes for `settings` that remove all randomness from steps."""
    names = ("embedding_dropout", "input_dropout", "hidden_dropout", "output_dropout", "weight_drop")
    return dict.fromkeys(names, 0.0) | {"random_bptt": False, **changes}


def run(values: dict[str, Any]) -> None:
    """Train in this process."""
    train.train(parse(values), Group(torch.device("cpu")))


def words_of(values: dict[str, Any]) -> list[str]:
    """Settings as arguments of lm_train."""
    return [word for key, value in values.items() for word in (f"-{key}", str(value))]


class StopTraining(Exception):
    """Ends a training where a test says so."""


def log_lines(save: Path) -> list[str]:
    """The log lines of steps and validations, without speeds and times."""
    lines = (save / "train.log").read_text(encoding="utf-8").splitlines()
    return [line.partition(" | ")[0] for line in lines if line.startswith("step ")]


class Ended(NamedTuple):
    """What a command returned and printed."""

    status: int
    out: str
    err: str

    def says(self, *messages: str) -> bool:
        """Whether it failed with one line that has these messages."""
        is_line = self.status == 2 and self.err.count("\n") == 1 and not self.out
        return is_line and all(message in self.err for message in messages)


COMMANDS: dict[str, Callable[[], object]] = {
    "lm_prepare": cli.prepare,
    "lm_train": cli.train,
    "lm_evaluate": cli.evaluate,
    "lm_generate": cli.generate,
    "shared-embeddings": lambda: main(sys.argv[1:]),
}


def ended(call: Callable[[], object], name: str, *arguments: object) -> Ended:
    """Call the function of a command in this process, as a shell would."""
    status: object = 0
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        try:
            status = call()
        except SystemExit as end:
            status = end.code
    return Ended(int(str(status or 0)), out.getvalue(), err.getvalue())


def command(name: str, *arguments: object) -> Ended:
    """Run a command."""
    return ended(COMMANDS[name], name, *arguments)


def tool(*arguments: object) -> Ended:
    """Run ``shared-embeddings``."""
    return command("shared-embeddings", *arguments)


def compress(model: Path, method: str, output: Path, *arguments: object) -> Ended:
    """Run ``shared-embeddings compress``."""
    return tool("compress", "--model", model, "--method", method, "--output", output, *arguments)


SMALL: dict[str, dict[str, Any]] = {
    "awd_lstm": {"embedding_dim": 8, "hidden_dim": 12, "num_layers": 2},
    "transformer_xl": {
        "embedding_dim": 8,
        "num_layers": 2,
        "num_heads": 2,
        "head_dim": 4,
        "feed_forward_dim": 16,
        "memory_length": 6,
    },
}


def write_corpus(folder: Path, words: str = "a b c d e f g") -> Path:
    """A prepared corpus of random lines; returns its folder."""
    draw = random.Random(0)
    folder.mkdir(parents=True)
    for split, lines in (("train", 60), ("valid", 10), ("test", 10)):
        text = "".join(" ".join(draw.choices(words.split(), k=5)) + "\n" for _ in range(lines))
        (folder / f"{split}.txt").write_text(text)
    prepare(
        {split: [folder / f"{split}.txt"] for split in ("train", "valid", "test")}, folder / "data", "drawn"
    )
    return folder / "data"


def write_model(path: Path, data: Path, kind: str = "awd_lstm", method: str = "standard") -> Path:
    """A checkpoint of an untrained model of the words of a corpus; returns its path."""
    torch.manual_seed(3)
    words = load_corpus(data).vocabulary.words
    config = {"model": kind, "embedding": {"method": method}, **SMALL[kind]}
    model = models.build(kind, words, config["embedding"], SMALL[kind])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    save_model(path, model, words, config, None)
    return path


class TinyLSTM(nn.Module):
    """One LSTM layer, whose state does not depend on segment boundaries."""

    def __init__(self, words: int = 11, dim: int = 6, method: str = "standard", **options: object) -> None:
        super().__init__()
        self.embedding = se.build(method, num_embeddings=words, embedding_dim=dim, **options)
        self.lstm = nn.LSTM(dim, self.embedding.score_dim, batch_first=True)
        self.embedding.reset_parameters()
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.8)

    def initial_state(self, batch_size: int) -> tuple[Tensor, ...]:
        zeros = torch.zeros(1, batch_size, self.embedding.score_dim)
        return zeros, zeros.clone()

    def forward(self, ids: Tensor, state: tuple[Tensor, ...]) -> Output:
        hidden, state = self.lstm(self.embedding(ids), state)
        return Output(hidden, tuple(part.detach() for part in state), hidden.new_zeros(()))


def text(length: int, words: int = 11, seed: int = 0) -> Tensor:
    """Random word ids ``(length,)``."""
    return torch.randint(words, (length,), generator=torch.Generator().manual_seed(seed))
