"""ROUGE-1, ROUGE-2 and ROUGE-L (Lin, 2004), computed like ROUGE-1.5.5: ``onmt_rouge``."""

from __future__ import annotations

import argparse
import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from nltk.stem.porter import PorterStemmer
from numpy.typing import NDArray
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenize import tokenize as ascii_tokens
from tqdm import tqdm

from shared_embeddings.errors import UserError
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.path_options import PathOption

TOKENS = ("ascii", "unicode", "characters")
# Letters, the marks that belong to them, and numbers: the first letter of their Unicode category.
WORD_CATEGORIES = "LMN"


class Stemmer:
    """Porter's algorithm as published in 1980, after a list of irregular forms.

    Args:
        exceptions: base forms by irregular form, as `read_exceptions` reads them.
    """

    def __init__(self, exceptions: Mapping[str, str]) -> None:
        self.exceptions = exceptions
        self.porter = PorterStemmer(PorterStemmer.ORIGINAL_ALGORITHM)

    def stem(self, word: str) -> str:
        """The stem of a word in lower case."""
        return self.exceptions.get(word) or str(self.porter.stem(word))


def cut(text: str, size: int) -> str:
    """The first `size` bytes of a text in UTF-8, without a character that the cut breaks."""
    return text.encode()[:size].decode(errors="ignore")


def tokenize(text: str, kind: str, stemmer: Stemmer | None = None) -> list[str]:
    """The tokens of a text; `kind` is one of `TOKENS`."""
    if kind == "ascii":
        return list(ascii_tokens(text, stemmer))
    lowered = unicodedata.normalize("NFC", text.lower())
    kept = (letter if unicodedata.category(letter)[0] in WORD_CATEGORIES else " " for letter in lowered)
    words = "".join(kept).split()
    return list("".join(words)) if kind == "characters" else words


def read_exceptions(paths: Iterable[Path]) -> dict[str, str]:
    """Base forms by irregular form, from WordNet's ``.exc`` files; a later line replaces an earlier one.

    ROUGE-1.5.5 has them in ``data/WordNet-2.0-Exceptions``.

    Raises:
        UserError: a file is not there or not UTF-8, or a line is not an irregular form and its base.
    """
    exceptions = {}
    for path in paths:
        for number, line in enumerate(read_texts(path), 1):
            forms = line.split()
            if len(forms) < 2:
                raise UserError(f"{path}: line {number} is {line!r}; expected an irregular form and its base")
            exceptions[forms[0]] = forms[1]
    return exceptions


def read_texts(path: Path) -> list[str]:
    """One text a line; whitespace at both ends of a line is not part of it.

    Raises:
        UserError: the file is not there or not UTF-8.
    """
    try:
        lines = path.read_bytes().decode("utf-8").removeprefix("\ufeff").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}; convert it") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    if not lines[-1]:
        lines.pop()
    return [line.strip() for line in lines]


# Each metric, and how many tokens make one of its units.
METRICS = {"rouge1": 1, "rouge2": 2, "rougeL": 1}
MEASURES = ("precision", "recall", "f1")
RESAMPLES = 1000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Settings:
    """What a score depends on, beside the texts.

    Attributes:
        measure: the one that is told: ``recall`` or ``f1``.
        cut_bytes: candidates are cut to so many bytes of UTF-8; ``None``: not at all.
        tokens: one of `nmt.summarization.rouge.TOKENS`.
        stemming: English suffixes are taken off; with ``ascii`` only.
        seed: of the bootstrap.
    """

    measure: str = "f1"
    cut_bytes: int | None = None
    tokens: str = "ascii"
    stemming: bool = True
    seed: int = 1

    def __post_init__(self) -> None:
        """Reject what does not fit together.

        Raises:
            UserError: names the setting.
        """
        if self.measure not in MEASURES:
            raise UserError(f"measure is {self.measure!r}; it must be one of {', '.join(MEASURES)}")
        if self.tokens not in TOKENS:
            raise UserError(f"tokens is {self.tokens!r}; it must be one of {', '.join(TOKENS)}")
        if self.cut_bytes is not None and self.cut_bytes < 1:
            raise UserError(f"bytes is {self.cut_bytes}; it must be at least 1")
        if self.seed < 0:
            raise UserError(f"seed is {self.seed}; it must be at least 0")
        if self.stemming and self.tokens != "ascii":
            raise UserError(f"stemming is for English; with tokens {self.tokens}, turn it off")


PRESETS = {"duc2004": Settings("recall", cut_bytes=75), "f1": Settings()}


@dataclass(frozen=True)
class Score:
    """A mean over texts and its interval, all from 0 to 100."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} ({CONFIDENCE:.0%} interval {self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Report:
    """Scores with everything that they depend on.

    Attributes:
        settings: as given.
        texts: how many.
        references: the largest number that a text has.
        exceptions: number of irregular forms that the stemmer knew.
        scores: by metric, then by measure.
    """

    settings: Settings
    texts: int
    references: int
    exceptions: int
    scores: dict[str, dict[str, Score]]

    @property
    def signature(self) -> str:
        """The settings in one line, in the manner of sacreBLEU's."""
        settings = self.settings
        stem = f"porter+{self.exceptions}" if self.exceptions else "porter"
        parts = {
            "texts": self.texts,
            "refs": self.references,
            "measure": settings.measure,
            "bytes": settings.cut_bytes or "all",
            "tokens": settings.tokens,
            "stem": stem if settings.stemming else "no",
            "multi": "average",
            "bootstrap": RESAMPLES,
            "seed": settings.seed,
            "rouge-score": metadata.version("rouge-score"),
        }
        return "|".join(f"{name}:{value}" for name, value in parts.items())

    def __str__(self) -> str:
        """The scores of the chosen measure, a line each, and the signature."""
        measure = self.settings.measure
        lines = [f"{metric} {measure} {told[measure]}" for metric, told in self.scores.items()]
        return "\n".join([*lines, self.signature])

    def as_json(self) -> dict[str, Any]:
        """All scores, the settings and the signature as JSON values."""
        return {"signature": self.signature, **asdict(self), "confidence": CONFIDENCE}


class _Tokenized:
    """For rouge-score: texts that are lists of tokens already."""

    def tokenize(self, tokens: list[str]) -> list[str]:
        """The tokens as they are."""
        return tokens


def score_texts(
    candidates: Sequence[str],
    references: Sequence[Sequence[str]],
    settings: Settings,
    exceptions: Mapping[str, str] | None = None,
) -> Report:
    """Score one candidate per text against its references.

    An empty candidate scores 0. An empty reference counts as none, as long as the text has another one.

    Args:
        candidates: a text each.
        references: streams of as many references; the i-th of each belongs to the i-th candidate.
        settings: one of `PRESETS`, or others.
        exceptions: irregular forms for the stemmer.

    Raises:
        UserError: nothing to score, streams of another length, or a text without any reference.
    """
    grouped = _group(candidates, references)
    stemmer = Stemmer(exceptions or {}) if settings.stemming else None
    scorer = RougeScorer(list(METRICS), tokenizer=_Tokenized())
    measured = []
    for candidate, its_references in tqdm(zip(candidates, grouped), total=len(grouped), disable=None):
        text = candidate if settings.cut_bytes is None else cut(candidate, settings.cut_bytes)
        tokens = [tokenize(each, settings.tokens, stemmer) for each in (text, *its_references)]
        measured.append(_measure(scorer, tokens[0], tokens[1:]))
    scores = _summarize(np.array(measured), settings.seed)
    return Report(settings, len(grouped), max(map(len, grouped)), len(exceptions or {}), scores)


def _group(candidates: Sequence[str], references: Sequence[Sequence[str]]) -> list[list[str]]:
    """The references of each candidate, empty ones left out."""
    if not candidates:
        raise UserError("nothing to score: there are no candidates")
    if not references:
        raise UserError("nothing to score against: there are no references")
    for number, stream in enumerate(references, 1):
        if len(stream) != len(candidates):
            raise UserError(
                f"{len(candidates)} candidates, but {len(stream)} lines in file {number} of the references; "
                "each must have one line per text"
            )
    grouped = [[each for each in of_text if each] for of_text in zip(*references)]
    for number, of_text in enumerate(grouped, 1):
        if not of_text:
            raise UserError(f"line {number} is empty in all files of references; a text needs one at least")
    return grouped


def _measure(scorer: RougeScorer, candidate: list[str], references: list[list[str]]) -> NDArray[np.float64]:
    """Precision, recall and F1 of one text in each metric, (metrics, measures), from sums over references."""
    rows = []
    pairs = [(reference, scorer.score(reference, candidate)) for reference in references]
    for metric, width in METRICS.items():
        wanted = [_units(reference, width) for reference in references]
        given = _units(candidate, width) * len(references)
        # rouge-score tells ratios; recall times the reference's units is the number of matches.
        matches = sum(round(found[metric].recall * _units(reference, width)) for reference, found in pairs)
        precision = matches / given if given else 0.0
        recall = matches / sum(wanted) if sum(wanted) else 0.0
        f1 = 2 * precision * recall / (precision + recall) if matches else 0.0
        rows.append((precision, recall, f1))
    return np.array(rows)


def _units(tokens: list[str], width: int) -> int:
    """How many n-grams of `width` tokens there are."""
    return max(0, len(tokens) - width + 1)


def _summarize(measured: NDArray[np.float64], seed: int) -> dict[str, dict[str, Score]]:
    """Means over texts with bootstrap percentile intervals, of (texts, metrics, measures)."""
    generator = np.random.default_rng(seed)
    texts = len(measured)
    means = np.array([measured[generator.integers(texts, size=texts)].mean(axis=0) for _ in range(RESAMPLES)])
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(means, [tail, 100 - tail], axis=0)
    table = 100 * np.stack([measured.mean(axis=0), low, high], axis=-1)
    return {
        metric: {measure: Score(*map(float, table[i, j])) for j, measure in enumerate(MEASURES)}
        for i, metric in enumerate(METRICS)
    }


def make_parser() -> Parser:
    """The options; one that is not given has no attribute where the preset decides."""
    parser = Parser("onmt_rouge", description="ROUGE-1, ROUGE-2 and ROUGE-L of summaries, one text a line")
    add = parser.add_argument
    add(
        "--candidates",
        "-candidates",
        type=PathOption.FILE,
        required=True,
        metavar="FILE",
        help="what to score",
    )
    add(
        "--references",
        "-references",
        type=PathOption.FILE,
        nargs="+",
        required=True,
        metavar="FILE",
        help="one reference per text in each file; an empty line where a text has fewer",
    )
    add(
        "--preset",
        "-preset",
        choices=PRESETS,
        default="f1",
        help="f1; or duc2004: recall of the first 75 bytes (default: %(default)s)",
    )
    add(
        "--exceptions",
        "-exceptions",
        type=PathOption.FILE,
        nargs="+",
        default=[],
        metavar="FILE",
        help="WordNet's lists of irregular forms (*.exc), as ROUGE-1.5.5 uses for stemming",
    )
    add("--json", "-json", action="store_true", help="print all measures and settings as JSON")
    preset = parser.add_argument_group("in place of the preset's", argument_default=argparse.SUPPRESS)
    add = preset.add_argument
    add("--bytes", "-bytes", dest="cut_bytes", type=int, metavar="N", help="cut candidates to so many bytes")
    add("--tokens", "-tokens", choices=TOKENS, help="ascii as ROUGE-1.5.5, or for other languages")
    add("--no_stem", "-no_stem", dest="stemming", action="store_false", help="leave English suffixes on")
    add("--seed", "-seed", type=int, metavar="N", help="of the bootstrap")
    return parser


def main(arguments: Sequence[str]) -> None:
    """Run ``onmt_rouge``."""
    options = make_parser().parse_args(arguments)
    overrides = ("cut_bytes", "tokens", "stemming", "seed")
    changed = {name: getattr(options, name) for name in overrides if name in options}
    settings = replace(PRESETS[options.preset], **changed)
    candidates = read_texts(options.candidates)
    references = [read_texts(path) for path in options.references]
    report = score_texts(candidates, references, settings, read_exceptions(options.exceptions))
    print(json.dumps(report.as_json(), indent=2) if options.json else report)
