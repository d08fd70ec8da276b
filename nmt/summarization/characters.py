"""Text as characters, and characters as text: ``onmt_characters``.

A character is a code point of Unicode, of any script; a space is the token ``<sp>``, which no character is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from nmt.summarization.commands import clean_lines
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.files import replacing
from shared_embeddings.utils.path_options import PathOption

SPACE = "<sp>"


def split_text(text: str) -> str:
    """Return the characters of a text, separated by spaces, with `SPACE` for its own."""
    return " ".join(SPACE if character == " " else character for character in text)


def join_characters(tokens: str) -> str:
    """Return the text of characters that are separated by spaces; the inverse of `split_text`.

    Tokens of several characters, such as ``<unk>`` or a subword that a decoder chose, stay as they are.
    """
    return "".join(" " if token == SPACE else token for token in tokens.split(" "))


COMMANDS: dict[str, tuple[Callable[[str], str], str]] = {
    "split": (split_text, "turn each line of text into its characters"),
    "join": (join_characters, "turn each line of characters into text"),
}


def convert_file(source: Path, target: Path, convert: Callable[[str], str]) -> None:
    """Convert a text line by line into another file, which appears when it is complete.

    Raises:
        UserError: the text cannot be read.
    """
    with replacing(target) as fresh, fresh.open("w", encoding="utf-8", newline="") as file:
        file.writelines(f"{convert(line)}\n" for line in clean_lines(source))


def main(arguments: Sequence[str]) -> None:
    """Run ``onmt_characters split`` or ``onmt_characters join``."""
    parser = Parser("onmt_characters", description="Text as characters, and characters as text")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("-input", "--input", type=PathOption.FILE, required=True, help="UTF-8 text")
        command.add_argument(
            "-output", "--output", type=PathOption.OUTPUT, required=True, help="file to write"
        )
    options = parser.parse_args(arguments)
    convert_file(options.input, options.output, COMMANDS[options.command][0])
