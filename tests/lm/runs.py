"""Small corpora and settings that training runs take a second with."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from lm.data.corpus import prepare
from lm.train import command as train
from lm.train.config import parse
from lm.train.distributed import Group

WORDS = 20


def small_corpus(folder: Path, seed: int = 7) -> Path:
    """A corpus of sentences in which a word is mostly followed by the next one of the alphabet."""
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
    """Settings of a run of 20 steps on a small corpus; a change to None leaves a key out."""
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
    """Changes for `settings` that take all randomness out of steps."""
    names = ("embedding_dropout", "input_dropout", "hidden_dropout", "output_dropout", "weight_drop")
    return dict.fromkeys(names, 0.0) | {"random_bptt": False, **changes}


def run(values: dict[str, Any]) -> None:
    """Train in this process."""
    train.train(parse(values), Group(torch.device("cpu")))


def log_lines(save: Path) -> list[str]:
    """What the log says of steps and validations, without speeds and times."""
    lines = (save / "train.log").read_text(encoding="utf-8").splitlines()
    return [line.partition(" | ")[0] for line in lines if line.startswith("step ")]
