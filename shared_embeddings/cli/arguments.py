"""Helpers of the commands: adding a command, and reading options of a method from a command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from shared_embeddings.utils.command_line import Parser, decimal_number
from shared_embeddings.utils.options import parse_words
from shared_embeddings.utils.reading import DocumentError, parse_json

OPTIONS_FOLLOW = "Any option of the method follows as --option value, e.g. --rank 64."
Command = Callable[[argparse.Namespace, list[str]], str]


def add(
    commands: argparse._SubParsersAction[Parser],
    name: str,
    title: str,
    run: Command,
    takes_options: bool = False,
) -> argparse.ArgumentParser:
    """Add a command with its function; with `takes_options`, remaining arguments are options of a method."""
    command = commands.add_parser(name, help=title, description=title)
    command.set_defaults(run=run, takes_options=takes_options)
    return command


def read_options(rest: list[str]) -> dict[str, object]:
    """Options of a method from the rest of a command line, see `parse_words`; values are JSON or text."""
    return parse_words(rest, _read_value)


def percentage(text: str) -> float:
    """A fraction from a text such as 1% or 0.01."""
    number, sign, rest = text.partition("%")
    value = decimal_number(number)
    if rest or value is None or not 0.0 <= (value := value / (100 if sign else 1)) <= 1.0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a percentage; write 1% or 0.01")
    return value


def _read_value(text: str, where: str) -> object:
    """A value from the command line: JSON, a list of numbers such as 100,200, or plain text."""
    for candidate in (text, f"[{text}]" if "," in text else text):
        try:
            return parse_json(candidate, where)
        except DocumentError:
            continue
    return text
