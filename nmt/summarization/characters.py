"""Character-level text: ``onmt_characters`` and ``onmt_character_vocab``.

A character is a Unicode code point; a space is the token ``<sp>``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from nmt.data.corpora import clean_line
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import replacing, write_text
from shared_embeddings.utils.path_options import PathOption

SPACE = "<sp>"


def split_text(text: str) -> str:
    """Return the characters of a text separated by spaces; spaces of the text become `SPACE`."""
    return " ".join(SPACE if character == " " else character for character in text)


def join_characters(tokens: str) -> str:
    """Invert `split_text`; longer tokens, such as ``<unk>``, are copied."""
    return "".join(" " if token == SPACE else token for token in tokens.split(" "))


COMMANDS: dict[str, tuple[Callable[[str], str], str]] = {
    "split": (split_text, "turn each line of text into its characters"),
    "join": (join_characters, "turn each line of characters into text"),
}


def convert_file(source: Path, target: Path, convert: Callable[[str], str]) -> None:
    """Convert a text line by line and write the result atomically.

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


def clean_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text with normalized whitespace, with a progress bar.

    Raises:
        UserError: the file is missing, or a line is not UTF-8.
    """
    if not path.is_file():
        raise UserError(f"no such file: {path}")
    with path.open("rb") as file, tqdm(desc=path.name, unit=" lines", mininterval=1, disable=None) as bar:
        for number, line in enumerate(file, 1):
            try:
                yield clean_line(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}: line {number} is not UTF-8 ({error.reason}); convert the file"
                ) from error
            bar.update()


def count_tokens(paths: Iterable[Path]) -> Counter[str]:
    """Count the tokens in files of space-separated tokens.

    Raises:
        UserError: a file cannot be read.
    """
    counts: Counter[str] = Counter()
    for path in paths:
        for line in clean_lines(path):
            counts.update(line.split())
    return counts


def count_characters(paths: Iterable[Path]) -> Counter[str]:
    """Count the characters in files written by ``onmt_characters split``.

    Raises:
        UserError: a file cannot be read or has a token of several characters.
    """
    counts = count_tokens(paths)
    longer = sorted(token for token in counts if len(token) > 1 and token != SPACE)
    if longer:
        raise UserError(
            f"target: {longer[0]!r} is not a single character; split the text with `onmt_characters "
            "split` first"
        )
    return counts


def vocabulary_text(counts: Counter[str]) -> str:
    """Return a vocabulary file of OpenNMT: token, tab, count; most frequent first, then by code points."""
    entries = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    return "".join(f"{token}\t{count}\n" for token, count in entries)


def vocabulary_main(arguments: Sequence[str]) -> None:
    """Run ``onmt_character_vocab``."""
    parser = Parser(
        "onmt_character_vocab",
        description="Build one vocabulary for a source in subwords and a target in characters, for "
        "share_vocab: true; onmt_train omits rare tokens with src_words_min_frequency and src_vocab_size",
    )
    for side, kind in (("source", "text in subwords"), ("target", "text in characters")):
        parser.add_argument(
            f"-{side}", f"--{side}", type=PathOption.FILE, nargs="+", required=True, metavar="FILE", help=kind
        )
    parser.add_argument(
        "-output", "--output", type=PathOption.OUTPUT, required=True, help="vocabulary file to write"
    )
    options = parser.parse_args(arguments)
    counts = count_characters(options.target) + count_tokens(options.source)
    if not counts:
        raise UserError("source and target are empty; give files with text")
    write_text(options.output, vocabulary_text(counts))
