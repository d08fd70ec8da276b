"""ROUGE-1, ROUGE-2 and ROUGE-L (Lin, 2004) as the program ROUGE-1.5.5 counts them.

rouge-score matches one candidate with one reference. What the published evaluations do around that is here:

- **Several references.** Matches and n-grams are summed over the references of a text before they are
  divided: the program's model average, its default (``-f A``). The jackknife over references of Lin (2004),
  which makes human and automatic summaries comparable, is not taken.
- **The mean.** Each text weighs the same; F1 is that of each text, not of the mean precision and recall.
- **DUC 2004, task 1** (``-b 75 -m -n 2 -a``). Candidates are cut to 75 bytes before they are tokenized;
  references, which have no more in that task, are left alone. A character that the cut would break goes.
- **Tokens and stems**: see `nmt.summarization.rouge_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rouge_score.rouge_scorer import RougeScorer
from tqdm import tqdm

from nmt.summarization.rouge_tokens import TOKENS, Stemmer, cut, tokenize
from shared_embeddings.errors import UserError

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
        tokens: one of `nmt.summarization.rouge_tokens.TOKENS`.
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
