"""One vocabulary for a source in subwords and a target in characters: ``onmt_character_vocab``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from nmt.summarization.characters import SPACE
from nmt.summarization.commands import clean_lines
from shared_embeddings.errors import UserError
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.files import write_text
from shared_embeddings.utils.path_options import PathOption


def count_tokens(paths: Iterable[Path]) -> Counter[str]:
    """Return how often each token occurs in files whose tokens are separated by spaces.

    Raises:
        UserError: a file cannot be read.
    """
    counts: Counter[str] = Counter()
    for path in paths:
        for line in clean_lines(path):
            counts.update(line.split())
    return counts


def count_characters(paths: Iterable[Path]) -> Counter[str]:
    """Return how often each character occurs in files that ``onmt_characters split`` wrote.

    Raises:
        UserError: a file cannot be read, or holds a token of several characters.
    """
    counts = count_tokens(paths)
    longer = sorted(token for token in counts if len(token) > 1 and token != SPACE)
    if longer:
        raise UserError(
            f"target: {longer[0]!r} is no character; split the text with `onmt_characters split` first"
        )
    return counts


def vocabulary_text(counts: Counter[str]) -> str:
    """Return a vocabulary file of OpenNMT: token, tab, count; most frequent first, then by code points."""
    entries = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    return "".join(f"{token}\t{count}\n" for token, count in entries)


def main(arguments: Sequence[str]) -> None:
    """Run ``onmt_character_vocab``."""
    parser = Parser(
        "onmt_character_vocab",
        description="Make one vocabulary for a source in subwords and a target in characters, for "
        "share_vocab: true; rare tokens are left out by the options of onmt_train "
        "(src_words_min_frequency, src_vocab_size)",
    )
    for side, kind in (("source", "text in subwords"), ("target", "text in characters")):
        parser.add_argument(
            f"-{side}", f"--{side}", type=PathOption.FILE, nargs="+", required=True, metavar="FILE", help=kind
        )
    parser.add_argument(
        "-output", "--output", type=PathOption.OUTPUT, required=True, help="vocabulary to write"
    )
    options = parser.parse_args(arguments)
    counts = count_characters(options.target) + count_tokens(options.source)
    if not counts:
        raise UserError("source and target have no text")
    write_text(options.output, vocabulary_text(counts))
