"""Reranking n-best lists by the content words of the source: ``onmt_rerank``.

Takase & Okazaki (2019) and section 3.3 of the ALONE paper select the hypothesis with the most content words
of the source. Words are lowercased and not stemmed; each counts once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path

from nmt.data.corpora import count_lines
from nmt.summarization.characters import clean_lines
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import replacing
from shared_embeddings.utils.path_options import PathOption

# Letters and digits of any script, joined by periods, dashes and apostrophes.
WORD = re.compile(r"[^\W_]+(?:['’.-][^\W_]+)*")


def stop_words(language: str) -> frozenset[str]:
    """Return spaCy's stop words of a language.

    Args:
        language: spaCy's code, such as ``en``.

    Raises:
        UserError: spaCy has no list for it.
    """
    try:
        found = import_module(f"spacy.lang.{language}.stop_words").STOP_WORDS
    except ImportError:
        raise UserError(
            f"language: spaCy has no stop words for {language!r}; expected a code such as en"
        ) from None
    return frozenset(word for entry in found for word in WORD.findall(entry.lower()))


def content_words(text: str, ignored: frozenset[str]) -> set[str]:
    """Return the distinct lowercased words of a text except `ignored`."""
    return set(WORD.findall(text.lower())) - ignored


def best_hypothesis(source: str, hypotheses: Sequence[str], ignored: frozenset[str]) -> str:
    """Return the hypothesis with the most content words of the source; ties go to the model's better one.

    Args:
        source: a line of plain text.
        hypotheses: at least one, the model's best first.
        ignored: stop words.
    """
    wanted = content_words(source, ignored)
    return max(hypotheses, key=lambda hypothesis: len(wanted & content_words(hypothesis, ignored)))


def rerank(sources: Path, hypotheses: Path, n_best: int, ignored: frozenset[str]) -> Iterator[str]:
    """Yield the selected hypothesis for each line of the source.

    Args:
        sources: plain text.
        hypotheses: plain text, ``n_best`` lines for each line of the source.
        n_best: at least 1.
        ignored: stop words.

    Raises:
        UserError: a file cannot be read, or the line counts do not match.
    """
    for path in (sources, hypotheses):
        if not path.is_file():
            raise UserError(f"no such file: {path}")
    found, wanted = count_lines(str(hypotheses)), n_best * count_lines(str(sources))
    if found != wanted:
        raise UserError(
            f"hypotheses: {hypotheses} has {found} lines, expected {wanted}: {n_best} (n_best) per line "
            f"of {sources}"
        )
    candidates = clean_lines(hypotheses)
    for source in clean_lines(sources):
        yield best_hypothesis(source, list(islice(candidates, n_best)), ignored)


def main(arguments: Sequence[str]) -> None:
    """Run ``onmt_rerank``."""
    parser = Parser(
        "onmt_rerank",
        description="Keep the hypothesis with the most content words of the source; texts contain words, "
        "not subwords or characters",
    )
    parser.add_argument("-source", "--source", type=PathOption.FILE, required=True, help="plain text")
    parser.add_argument(
        "-hypotheses",
        "--hypotheses",
        type=PathOption.FILE,
        required=True,
        help="n_best lines per line of the source",
    )
    parser.add_argument(
        "-n_best", "--n_best", type=int, required=True, help="the value given to onmt_translate"
    )
    parser.add_argument(
        "-output", "--output", type=PathOption.OUTPUT, required=True, help="selected hypotheses"
    )
    parser.add_argument(
        "-language", "--language", default="en", help="language of the stop words (default: en)"
    )
    options = parser.parse_args(arguments)
    if options.n_best < 1:
        raise UserError(f"n_best: {options.n_best} is too small; expected at least 1")
    ignored = stop_words(options.language)
    chosen = rerank(options.source, options.hypotheses, options.n_best, ignored)
    with replacing(options.output) as fresh, fresh.open("w", encoding="utf-8", newline="") as file:
        file.writelines(f"{line}\n" for line in chosen)
