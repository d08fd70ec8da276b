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
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nmt.corpora import read_lines
from shared_embeddings.utils.command_line import Parser, positive
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import write_lines
from shared_embeddings.utils.paths import existing_file, output_path

# Characters

SPACE = "<sp>"


def split_text(text: str) -> str:
    """Return the characters of a text separated by spaces; spaces of the text become `SPACE`."""
    return " ".join(SPACE if character == " " else character for character in text)


def join_characters(tokens: str) -> str:
    """Invert `split_text`; longer tokens, such as ``<unk>``, are copied."""
    return "".join(" " if token == SPACE else token for token in tokens.split(" "))


def convert_file(source: Path, target: Path, convert: Callable[[str], str]) -> None:
    """Convert a text with normalized whitespace line by line."""
    lines = tqdm(read_lines(source), desc=source.name, unit=" lines", mininterval=1, disable=None)
    write_lines(target, map(convert, lines))


def characters_main(arguments: Sequence[str]) -> None:
    """Run ``onmt_characters split`` or ``onmt_characters join``."""
    parser = Parser("onmt_characters", description="Text as characters, and characters as text")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("split", "turn each line of text into its characters"),
        ("join", "turn each line of characters into text"),
    ):
        add = commands.add_parser(name, help=text, description=text).add_argument
        add("-input", "--input", type=existing_file, required=True, help="UTF-8 text")
        add("-output", "--output", type=output_path, required=True, help="file to write")
    options = parser.parse_args(arguments)
    convert_file(options.input, options.output, split_text if options.command == "split" else join_characters)


def write_character_vocabulary(sources: Iterable[Path], targets: Iterable[Path], output: Path) -> None:
    """Write a vocabulary file of OpenNMT: token, tab, count; most frequent first, then by code points.

    Sources are texts in subwords, targets those that ``onmt_characters split`` wrote.
    """
    characters: Counter[str] = Counter()
    for path in targets:
        for line in read_lines(path):
            characters.update(line.split())
    longer = sorted(token for token in characters if len(token) > 1 and token != SPACE)
    if longer:
        raise UserError(f"target: {longer[0]!r} is not a character; use `onmt_characters split` first")
    counts = Counter(characters)
    for path in sources:
        for line in read_lines(path):
            counts.update(line.split())
    if not counts:
        raise UserError("source and target are empty; give files with text")
    entries = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    write_lines(output, (f"{token}\t{count}" for token, count in entries))


def vocabulary_main(arguments: Sequence[str]) -> None:
    """Run ``onmt_character_vocab``."""
    parser = Parser(
        "onmt_character_vocab",
        description="Build one vocabulary for a source in subwords and a target in characters, for "
        "share_vocab: true; onmt_train omits rare tokens with src_words_min_frequency and src_vocab_size",
    )
    add = parser.add_argument
    files: dict[str, Any] = {"type": existing_file, "nargs": "+", "required": True, "metavar": "FILE"}
    add("-source", "--source", help="text in subwords", **files)
    add("-target", "--target", help="text in characters", **files)
    add("-output", "--output", type=output_path, required=True, help="vocabulary file to write")
    options = parser.parse_args(arguments)
    write_character_vocabulary(options.source, options.target, options.output)


# Reranking

# Letters and digits of any script, joined by periods, dashes and apostrophes.
WORD = re.compile(r"[^\W_]+(?:['’.-][^\W_]+)*")


def stop_words(language: str) -> frozenset[str]:
    """Return spaCy's stop words of a language, given its code."""
    try:
        listed = import_module(f"spacy.lang.{language}.stop_words").STOP_WORDS
    except ImportError:
        raise UserError(
            f"language: spaCy has no stop words for {language!r}; use a code such as en"
        ) from None
    return frozenset(word for entry in listed for word in WORD.findall(entry.lower()))


def content_words(text: str, ignored: frozenset[str]) -> set[str]:
    """Return the distinct lowercased words of a text except `ignored`."""
    return set(WORD.findall(text.lower())) - ignored


def rerank(sources: Path, hypotheses: Path, n_best: int, ignored: frozenset[str]) -> Iterator[str]:
    """Yield the hypothesis with the most content words of each line of the source; ties go to the first one.

    Both files are plain text, the hypotheses with `n_best` lines for each line; stop words are ignored.
    """
    texts, candidates = list(read_lines(sources)), list(read_lines(hypotheses))
    if len(candidates) != n_best * len(texts):
        raise UserError(
            f"hypotheses: {hypotheses} has {len(candidates)} lines, expected {n_best * len(texts)}: {n_best} "
            f"(n_best) for each line of {sources}"
        )
    for number, text in enumerate(tqdm(texts, desc=sources.name, unit=" lines", mininterval=1, disable=None)):
        wanted = content_words(text, ignored)
        common = [
            len(wanted & content_words(candidate, ignored))
            for candidate in candidates[n_best * number : n_best * (number + 1)]
        ]
        yield candidates[n_best * number + common.index(max(common))]


def rerank_main(arguments: Sequence[str]) -> None:
    """Run ``onmt_rerank``."""
    parser = Parser(
        "onmt_rerank",
        description="Keep the hypothesis with the most content words of the source; texts contain words, "
        "not subwords or characters",
    )
    add = parser.add_argument
    add("-source", "--source", type=existing_file, required=True, help="plain text")
    text = "n_best lines per line of the source"
    add("-hypotheses", "--hypotheses", type=existing_file, required=True, help=text)
    add("-n_best", "--n_best", type=positive, required=True, help="the value given to onmt_translate")
    add("-output", "--output", type=output_path, required=True, help="selected hypotheses")
    add("-language", "--language", default="en", help="language of the stop words (default: en)")
    options = parser.parse_args(arguments)
    ignored = stop_words(options.language)
    write_lines(options.output, rerank(options.source, options.hypotheses, options.n_best, ignored))
