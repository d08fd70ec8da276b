"""Running the commands in this process, and small checkpoints for them."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lm import cli, models
from lm.checkpoint import save_model
from lm.data.corpus import load_corpus, prepare

COMMANDS = {"lm_eval": cli.evaluate, "lm_generate": cli.generate}
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


def run(command: str, *arguments: object) -> int:
    """Exit status of a command, called as the shell would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [command, *map(str, arguments)])
        try:
            COMMANDS[command]()
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def one_line(captured: str, command: str) -> str:
    """What a command printed on stderr, which must be one line of its own."""
    assert captured.startswith(f"{command}: ") and captured.count("\n") == 1
    return captured


def write_corpus(folder: Path, words: str = "a b c d e f g", seed: int = 0) -> Path:
    """A prepared corpus of random lines; gives its folder."""
    draw = random.Random(seed)
    folder.mkdir(parents=True)
    for split, lines in (("train", 60), ("valid", 10), ("test", 10)):
        text = "".join(" ".join(draw.choices(words.split(), k=5)) + "\n" for _ in range(lines))
        (folder / f"{split}.txt").write_text(text)
    prepare(
        {split: [folder / f"{split}.txt"] for split in ("train", "valid", "test")}, folder / "data", "drawn"
    )
    return folder / "data"


def write_model(path: Path, data: Path, kind: str = "awd_lstm", method: str = "standard") -> Path:
    """A checkpoint of an untrained model of the words of a corpus; gives its path."""
    torch.manual_seed(3)
    words = load_corpus(data).vocabulary.words
    config = {"model": kind, "embedding": {"method": method}, **SMALL[kind]}
    model = models.build(kind, words, config["embedding"], SMALL[kind])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    save_model(path, model, words, config, None)
    return path
