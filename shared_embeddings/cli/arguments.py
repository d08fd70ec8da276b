"""Helpers of the commands: adding a command, common options, and reading options of a method."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from shared_embeddings.utils.command_line import Parser, decimal_number
from shared_embeddings.utils.options import parse_words
from shared_embeddings.utils.path_options import PathOption
from shared_embeddings.utils.reading import DocumentError, parse_json

Command = Callable[[argparse.Namespace, list[str]], str]


def add(
    commands: argparse._SubParsersAction[Parser],
    name: str,
    title: str,
    run: Command,
    takes_options: bool = False,
) -> argparse.ArgumentParser:
    """Add a command with its function; with `takes_options`, remaining arguments are options of a method."""
    epilog = "Any option of the method follows as --option value, e.g. --rank 64." if takes_options else None
    command = commands.add_parser(name, help=title, description=title, epilog=epilog)
    command.set_defaults(run=run, takes_options=takes_options)
    return command


def add_model(command: argparse._ActionsContainer, required: bool = True) -> None:
    """Add the option ``--model``; it cannot be required in a group of options."""
    settings = {"required": True} if required else {}
    command.add_argument(
        "--model",
        type=PathOption.SOURCE,
        help="a trained model of any host, file or folder",
        **settings,  # type: ignore[arg-type]
    )


def add_flags(command: argparse.ArgumentParser, *names: str) -> None:
    """Add the flags ``--json`` and ``--force``, or one of them."""
    texts = {"json": "print one JSON object", "force": "overwrite existing files"}
    for name in names:
        command.add_argument(f"--{name}", action="store_true", help=texts[name])


def read_options(rest: list[str]) -> dict[str, object]:
    """Options of a method from the rest of a command line: JSON, lists such as 100,200, or plain text."""

    def parse_value(text: str, option: str) -> object:
        for candidate in (text, f"[{text}]" if "," in text else text):
            try:
                return parse_json(candidate, option)
            except DocumentError:
                continue
        return text

    return parse_words(rest, parse_value)


def percentage(text: str) -> float:
    """A fraction from a text such as 1% or 0.01."""
    number, sign, rest = text.partition("%")
    value = decimal_number(number)
    if rest or value is None or not 0.0 <= (value := value / (100 if sign else 1)) <= 1.0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a percentage; write 1% or 0.01")
    return value
