"""The command `classes`: semantic classes of words."""

from __future__ import annotations

import argparse

from shared_embeddings.cli.arguments import add
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.path_options import PathOption

# Settings of the word vectors, which texts alone need.
_SKIP_GRAM = {
    "dim": "width of the word vectors (with --text; default: 100)",
    "window": "words of context each side (with --text; default: 5)",
    "epochs": "passes over the text (with --text; default: 5)",
}


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    command = add(commands, "classes", "group the words of a vocabulary into semantic classes", _classes)
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", nargs="+", type=PathOption.FILE, help="tokenized text files")
    source.add_argument(
        "--vectors-of",
        type=PathOption.FILE,
        metavar="CLASSES",
        help="take the word vectors of this .npz file of classes",
    )
    command.add_argument("--vocab", type=PathOption.FILE, help="vocabulary, one word a line (with --text)")
    command.add_argument("--num-classes", required=True, type=int, help="a bit less than a tenth of V")
    command.add_argument("--output", required=True, type=PathOption.NEW_FILE, help="the .npz file to write")
    for name, told in _SKIP_GRAM.items():
        command.add_argument(f"--{name}", type=int, help=told)
    command.add_argument("--seed", type=int, default=0, help="(default: 0)")
    command.add_argument(
        "--figure", type=PathOption.NEW_FILE, help="draw the sizes of the classes into this PNG file"
    )
    command.add_argument("--force", action="store_true", help="replace files that are there already")


def _classes(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.classes import make_classes, regroup

    given = {
        name: getattr(known, name) for name in ("vocab", *_SKIP_GRAM) if getattr(known, name) is not None
    }
    if known.vectors_of is not None:
        if given:
            raise ValueError(
                f"--{next(iter(given))} has no effect with --vectors-of: the word vectors are those of "
                f"{known.vectors_of}; leave it out"
            )
        return regroup(
            known.vectors_of, known.num_classes, known.output, known.seed, known.figure, known.force
        )
    if known.vocab is None:
        raise ValueError("--text needs --vocab, the words that get a class")
    vocabulary = given.pop("vocab")
    return make_classes(
        known.text,
        vocabulary,
        known.num_classes,
        known.output,
        seed=known.seed,
        figure=known.figure,
        force=known.force,
        **given,
    )
