"""ROUGE-1, ROUGE-2 and ROUGE-L (Lin, 2004), computed like ROUGE-1.5.5: ``onmt_rouge``.

rouge-score compares one candidate with one reference. This module adds what published evaluations use:

- Several references: matches and n-grams are summed over the references of a text (model average, ``-f A``).
- The score is the mean over texts; F1 is computed per text.
- DUC 2004, task 1 (``-b 75 -m -n 2 -a``): candidates, not references, are truncated to 75 bytes before
  tokenization.
- Porter's original stemmer for tokens of more than three characters, after WordNet's irregular forms.
- Tokens: ``ascii`` as in ROUGE-1.5.5, ``unicode`` for other scripts that separate words, ``characters`` for
  scripts that do not.
"""

from __future__ import annotations

import argparse
import json
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from nltk.stem.porter import PorterStemmer
from numpy.typing import NDArray
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenize import tokenize as ascii_tokens
from tqdm import tqdm

from shared_embeddings.utils.command_line import Parser, positive
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.paths import existing_file
from shared_embeddings.utils.reading import read_lines

TOKENS = ("ascii", "unicode", "characters")


def tokenize(text: str, kind: str, stem: Callable[[str], str] | None = None) -> list[str]:
    """Split a text into tokens; `kind` is one of `TOKENS`, `stem` applies to ``ascii`` only."""
    if kind == "ascii":
        return list(ascii_tokens(text, None if stem is None else SimpleNamespace(stem=stem)))
    lowered = unicodedata.normalize("NFC", text.lower())
    # Unicode's categories of letters, combining marks and numbers.
    letters = (letter if unicodedata.category(letter)[0] in "LMN" else " " for letter in lowered)
    words = "".join(letters).split()
    return list("".join(words)) if kind == "characters" else words


def read_exceptions(paths: Iterable[Path]) -> dict[str, str]:
    """Read base forms by irregular form from WordNet's ``.exc`` files, which ROUGE-1.5.5 includes."""
    exceptions = {}
    for path in paths:
        for number, line in enumerate(read_lines(path), 1):
            forms = line.split()
            if len(forms) < 2:
                raise UserError(f"{path}: line {number} is {line!r}; expected an irregular form and its base")
            exceptions[forms[0]] = forms[1]
    return exceptions


# The metrics, and the number of tokens per unit.
METRICS = {"rouge1": 1, "rouge2": 2, "rougeL": 1}
MEASURES = ("precision", "recall", "f1")
RESAMPLES = 1000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class RougeSettings:
    """Settings of a score."""

    measure: str = "f1"  # the one of `MEASURES` to report
    cut_bytes: int | None = None  # truncate candidates to this many bytes of UTF-8
    tokens: str = "ascii"  # one of `TOKENS`
    stemming: bool = True  # stem English words; only with ascii
    seed: int = 1  # of the bootstrap

    def __post_init__(self) -> None:
        if self.stemming and self.tokens != "ascii":
            raise UserError(f"stemming supports tokens: ascii only, not {self.tokens}; add --no_stem")


PRESETS = {"duc2004": RougeSettings("recall", cut_bytes=75), "f1": RougeSettings()}


@dataclass(frozen=True)
class RougeScore:
    """A mean over texts and its confidence interval, from 0 to 100."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class RougeReport:
    """Scores and their settings."""

    settings: RougeSettings
    texts: int  # their number
    references: int  # largest number of references of a text
    exceptions: int  # number of irregular forms of the stemmer
    scores: dict[str, dict[str, RougeScore]]  # by metric, then by measure

    @property
    def signature(self) -> str:
        """The settings in one line, like sacreBLEU's."""
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
        """The scores of the selected measure, one per line, and the signature."""
        measure, lines = self.settings.measure, []
        for metric, scores in self.scores.items():
            score = scores[measure]
            interval = f"{CONFIDENCE:.0%} interval {score.low:.2f} to {score.high:.2f}"
            lines.append(f"{metric} {measure} {score.mean:.2f} ({interval})")
        return "\n".join([*lines, self.signature])

    def as_json(self) -> dict[str, Any]:
        """Return all scores, the settings and the signature as JSON values."""
        return {"signature": self.signature, **asdict(self), "confidence": CONFIDENCE}


def score_texts(
    candidates: Sequence[str],
    references: Sequence[Sequence[str]],
    settings: RougeSettings,
    exceptions: Mapping[str, str] | None = None,
) -> RougeReport:
    """Score one candidate per text against its references, lists with one reference per candidate.

    An empty candidate scores 0. Empty references are ignored if a text has another one. `exceptions` are
    irregular forms for the stemmer.
    """
    if not candidates or not references:
        raise UserError(f"nothing to score: there are no {'references' if candidates else 'candidates'}")
    for number, stream in enumerate(references, 1):
        if len(stream) != len(candidates):
            raise UserError(
                f"{len(candidates)} candidates, but {len(stream)} lines in file {number} of the references; "
                "each must have one line per text"
            )
    grouped = [[reference for reference in of_text if reference] for of_text in zip(*references)]
    if [] in grouped:
        raise UserError(f"line {grouped.index([]) + 1} is empty in all reference files; add a reference")
    irregular, porter = exceptions or {}, PorterStemmer(PorterStemmer.ORIGINAL_ALGORITHM)

    def stem(word: str) -> str:
        return irregular.get(word) or str(porter.stem(word))

    scorer = RougeScorer(list(METRICS), tokenizer=SimpleNamespace(tokenize=list))  # of lists of tokens
    measured = []
    for candidate, its_references in tqdm(zip(candidates, grouped), total=len(grouped), disable=None):
        if settings.cut_bytes is not None:  # without an incomplete character at the end
            candidate = candidate.encode()[: settings.cut_bytes].decode(errors="ignore")
        tokens = [
            tokenize(text, settings.tokens, stem if settings.stemming else None)
            for text in (candidate, *its_references)
        ]
        measured.append(_measure(scorer, tokens[0], tokens[1:]))
    scores = _summarize(np.array(measured), settings.seed)
    return RougeReport(settings, len(grouped), max(map(len, grouped)), len(irregular), scores)


def _measure(scorer: RougeScorer, candidate: list[str], references: list[list[str]]) -> NDArray[np.float64]:
    """Return precision, recall and F1 of one text, ``(metrics, measures)``, summed over references."""
    rows = []
    pairs = [(len(reference), scorer.score(reference, candidate)) for reference in references]
    for metric, width in METRICS.items():
        wanted = matches = 0
        for size, score in pairs:
            units = max(0, size - width + 1)
            wanted += units
            # rouge-score returns ratios; recall times the reference's units is the number of matches.
            matches += round(score[metric].recall * units)
        written = max(0, len(candidate) - width + 1) * len(references)
        precision = matches / written if written else 0.0
        recall = matches / wanted if wanted else 0.0
        f1 = 2 * precision * recall / (precision + recall) if matches else 0.0
        rows.append((precision, recall, f1))
    return np.array(rows)


def _summarize(measured: NDArray[np.float64], seed: int) -> dict[str, dict[str, RougeScore]]:
    """Return the means over ``(texts, metrics, measures)`` with bootstrap percentile intervals."""
    generator = np.random.default_rng(seed)
    texts = len(measured)
    means = np.array([measured[generator.integers(texts, size=texts)].mean(axis=0) for _ in range(RESAMPLES)])
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(means, [tail, 100 - tail], axis=0)
    table = 100 * np.stack([measured.mean(axis=0), low, high], axis=-1)
    return {
        metric: {measure: RougeScore(*map(float, table[i, j])) for j, measure in enumerate(MEASURES)}
        for i, metric in enumerate(METRICS)
    }


def main(arguments: Sequence[str]) -> None:
    """Run ``onmt_rouge``."""
    about = "ROUGE-1, ROUGE-2 and ROUGE-L of summaries, one text per line"
    parser = Parser("onmt_rouge", description=about)
    add = parser.add_argument
    file: dict[str, Any] = {"type": existing_file, "metavar": "FILE"}
    add("--candidates", "-candidates", required=True, help="texts to score", **file)
    text = "one reference per text; empty lines are ignored if a text has another reference"
    add("--references", "-references", nargs="+", required=True, help=text, **file)
    text = "f1; or duc2004: recall of the first 75 bytes (default: %(default)s)"
    add("--preset", "-preset", choices=PRESETS, default="f1", help=text)
    text = "WordNet's lists of irregular forms (*.exc), which ROUGE-1.5.5 uses for stemming"
    add("--exceptions", "-exceptions", nargs="+", default=[], help=text, **file)
    add("--json", "-json", action="store_true", help="print all measures and settings as JSON")
    preset = parser.add_argument_group("overrides of the preset", argument_default=argparse.SUPPRESS)
    add = preset.add_argument
    add(
        "--bytes",
        "-bytes",
        dest="cut_bytes",
        type=positive,
        metavar="N",
        help="truncate candidates to N bytes",
    )
    text = "ascii (as ROUGE-1.5.5), or unicode or characters for other languages"
    add("--tokens", "-tokens", choices=TOKENS, help=text)
    add("--no_stem", "-no_stem", dest="stemming", action="store_false", help="do not stem")
    add("--seed", "-seed", type=int, metavar="N", help="seed of the bootstrap")
    options = parser.parse_args(arguments)
    overrides = ("cut_bytes", "tokens", "stemming", "seed")
    changed = {name: getattr(options, name) for name in overrides if name in options}
    settings = replace(PRESETS[options.preset], **changed)
    if options.exceptions and not settings.stemming:
        raise UserError("exceptions: have no effect with no_stem; remove one of them")
    candidates, *references = (
        [line.strip() for line in read_lines(path)] for path in (options.candidates, *options.references)
    )
    report = score_texts(candidates, references, settings, read_exceptions(options.exceptions))
    print(json.dumps(report.as_json(), indent=2) if options.json else report)
