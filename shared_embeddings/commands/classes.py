"""The command `classes`: semantic classes of words."""

from __future__ import annotations

import argparse
from pathlib import Path

from shared_embeddings.commands.arguments import Parser, add


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    command = add(commands, "classes", "group the words of a vocabulary into semantic classes", _classes)
    command.add_argument("--text", required=True, nargs="+", type=Path, help="tokenised text files")
    command.add_argument("--vocab", required=True, type=Path, help="vocabulary, one word a line")
    command.add_argument("--num-classes", required=True, type=int, help="a bit less than a tenth of V")
    command.add_argument("--output", required=True, type=Path, help="the .npz file to write")
    command.add_argument("--dim", type=int, default=100, help="width of the word vectors (default: 100)")
    command.add_argument("--window", type=int, default=5, help="words of context each side (default: 5)")
    command.add_argument("--epochs", type=int, default=5, help="passes over the text (default: 5)")
    command.add_argument("--seed", type=int, default=0, help="(default: 0)")
    command.add_argument("--figure", type=Path, help="draw the sizes of the classes into this PNG file")


def _classes(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.classes import make_classes

    return make_classes(
        known.text,
        known.vocab,
        known.num_classes,
        known.output,
        dim=known.dim,
        window=known.window,
        epochs=known.epochs,
        seed=known.seed,
        figure=known.figure,
    )
