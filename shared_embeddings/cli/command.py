"""Parts of all subcommands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from shared_embeddings.utils.paths import model_path

Commands = Any  # argparse's action of subparsers, which has no public name
Run = Callable[[argparse.Namespace, list[str]], str]


def add_command(
    commands: Commands, name: str, title: str, run: Run, example: str, takes_options: bool = False
) -> argparse.ArgumentParser:
    """Add a command with its function and the arguments of an example.

    With `takes_options`, remaining arguments are options of a method.
    """
    epilog = f"example: shared-embeddings {name} {example}"
    if takes_options:
        epilog = f"Any option of the method follows as --option value, e.g. --rank 64; {epilog}"
    command = commands.add_parser(name, help=title, description=title, epilog=epilog)
    command.set_defaults(run=run, takes_options=takes_options)
    return command


def add_model(command: argparse._ActionsContainer, required: bool = True) -> None:
    """Add the option ``--model``; it cannot be required in a group of options."""
    command.add_argument(
        "--model",
        required=required,
        type=model_path,
        help="a trained model of any host, file or folder, or its id on the Hugging Face Hub",
    )


def add_flags(command: argparse.ArgumentParser, *names: str) -> None:
    """Add the flags ``--json`` and ``--force``, or one of them."""
    texts = {"json": "print one JSON object", "force": "overwrite existing files"}
    for name in names:
        command.add_argument(f"--{name}", action="store_true", help=texts[name])
