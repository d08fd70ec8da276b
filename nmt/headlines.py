"""Headlines: character-level text, and reranking by content words.

The commands are ``onmt_characters``, ``onmt_character_vocab`` and ``onmt_rerank``. A character is a Unicode
code point; a space is the token ``<sp>``. Takase & Okazaki (2019) and section 3.3 of the ALONE paper select
the hypothesis with the most content words of the source. Words are lowercased and not stemmed; each counts
once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nmt.corpora import count_lines, read_lines
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import write_lines, write_text
from shared_embeddings.utils.paths import existing_file, output_path

# Characters

SPACE = "<sp>"


def split_text(text: str) -> str:
    """Return the characters of a text separated by spaces; spaces of the text become `SPACE`."""
    return " ".join(SPACE if character == " " else character for character in text)


def join_characters(tokens: str) -> str:
    """Invert `split_text`; longer tokens, such as ``<unk>``, are copied."""
    return "".join(" " if token == SPACE else token for token in tokens.split(" "))


# The conversions of ``onmt_characters`` and their descriptions.
COMMANDS: dict[str, tuple[Callable[[str], str], str]] = {
    "split": (split_text, "turn each line of text into its characters"),
    "join": (join_characters, "turn each line of characters into text"),
}


def convert_file(source: Path, target: Path, convert: Callable[[str], str]) -> None:
    """Convert a text line by line and write the result atomically."""
    write_lines(target, map(convert, clean_lines(source)))


def characters_main(arguments: Sequence[str]) -> None:
    """Run ``onmt_characters split`` or ``onmt_characters join``."""
    about = "Text as characters, and characters as text"
    parser = Parser("onmt_characters", "split -input train.txt -output train.characters", description=about)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, text) in COMMANDS.items():
        add = commands.add_parser(name, help=text, description=text).add_argument
        add("-input", "--input", type=existing_file, required=True, help="UTF-8 text")
        add("-output", "--output", type=output_path, required=True, help="file to write")
    options = parser.parse_args(arguments)
    convert_file(options.input, options.output, COMMANDS[options.command][0])


def clean_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text with normalized whitespace, with a progress bar."""
    yield from tqdm(read_lines(path), desc=path.name, unit=" lines", mininterval=1, disable=None)


def count_tokens(paths: Iterable[Path]) -> Counter[str]:
    """Count the tokens in files of space-separated tokens."""
    counts: Counter[str] = Counter()
    for path in paths:
        for line in clean_lines(path):
            counts.update(line.split())
    return counts


def count_characters(paths: Iterable[Path]) -> Counter[str]:
    """Count the characters in files written by ``onmt_characters split``."""
    counts = count_tokens(paths)
    longer = sorted(token for token in counts if len(token) > 1 and token != SPACE)
    if longer:
        raise UserError(f"target: {longer[0]!r} is not a character; use `onmt_characters split` first")
    return counts


def vocabulary_text(counts: Counter[str]) -> str:
    """Return a vocabulary file of OpenNMT: token, tab, count; most frequent first, then by code points."""
    entries = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    return "".join(f"{token}\t{count}\n" for token, count in entries)


def vocabulary_main(arguments: Sequence[str]) -> None:
    """Run ``onmt_character_vocab``."""
    parser = Parser(
        "onmt_character_vocab",
        "-source train.pieces -target train.characters -output vocab.txt",
        description="Build one vocabulary for a source in subwords and a target in characters, for "
        "share_vocab: true; onmt_train omits rare tokens with src_words_min_frequency and src_vocab_size",
    )
    add = parser.add_argument
    files: dict[str, Any] = {"type": existing_file, "nargs": "+", "required": True, "metavar": "FILE"}
    add("-source", "--source", help="text in subwords", **files)
    add("-target", "--target", help="text in characters", **files)
    add("-output", "--output", type=output_path, required=True, help="vocabulary file to write")
    options = parser.parse_args(arguments)
    counts = count_characters(options.target) + count_tokens(options.source)
    if not counts:
        raise UserError("source and target are empty; give files with text")
    write_text(options.output, vocabulary_text(counts))


# Reranking

# Letters and digits of any script, joined by periods, dashes and apostrophes.
WORD = re.compile(r"[^\W_]+(?:['’.-][^\W_]+)*")


def stop_words(language: str) -> frozenset[str]:
    """Return spaCy's stop words of a language, given its code."""
    try:
        found = import_module(f"spacy.lang.{language}.stop_words").STOP_WORDS
    except ImportError:
        raise UserError(
            f"language: spaCy has no stop words for {language!r}; use a code such as en"
        ) from None
    return frozenset(word for entry in found for word in WORD.findall(entry.lower()))


def content_words(text: str, ignored: frozenset[str]) -> set[str]:
    """Return the distinct lowercased words of a text except `ignored`."""
    return set(WORD.findall(text.lower())) - ignored


def best_hypothesis(source: str, hypotheses: Sequence[str], ignored: frozenset[str]) -> str:
    """Return the hypothesis with the most content words of the source; ties go to the first one."""
    wanted = content_words(source, ignored)
    return max(hypotheses, key=lambda hypothesis: len(wanted & content_words(hypothesis, ignored)))


def rerank(sources: Path, hypotheses: Path, n_best: int, ignored: frozenset[str]) -> Iterator[str]:
    """Yield the selected one of `n_best` hypotheses for each line of the source; both are plain text."""
    found, wanted = count_lines(str(hypotheses)), n_best * count_lines(str(sources))
    if found != wanted:
        raise UserError(
            f"hypotheses: {hypotheses} has {found} lines, expected {wanted}: {n_best} (n_best) for each line "
            f"of {sources}"
        )
    candidates = clean_lines(hypotheses)
    for source in clean_lines(sources):
        yield best_hypothesis(source, list(islice(candidates, n_best)), ignored)


def rerank_main(arguments: Sequence[str]) -> None:
    """Run ``onmt_rerank``."""
    parser = Parser(
        "onmt_rerank",
        "-source test.txt -hypotheses out.txt -n_best 5 -output best.txt",
        description="Keep the hypothesis with the most content words of the source; texts contain words, "
        "not subwords or characters",
    )
    add = parser.add_argument
    add("-source", "--source", type=existing_file, required=True, help="plain text")
    text = "n_best lines per line of the source"
    add("-hypotheses", "--hypotheses", type=existing_file, required=True, help=text)
    add("-n_best", "--n_best", type=int, required=True, help="the value given to onmt_translate")
    add("-output", "--output", type=output_path, required=True, help="selected hypotheses")
    add("-language", "--language", default="en", help="language of the stop words (default: en)")
    options = parser.parse_args(arguments)
    if options.n_best < 1:
        raise UserError(f"n_best: {options.n_best} is too small; expected at least 1")
    ignored = stop_words(options.language)
    write_lines(options.output, rerank(options.source, options.hypotheses, options.n_best, ignored))
