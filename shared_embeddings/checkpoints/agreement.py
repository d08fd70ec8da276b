"""Whether a compressed model still works: how much of what it predicted it still predicts.

Compared are the words that both models find most probable after the same words. What the original was unsure
of counts less: the share is a mean with its probabilities as weights.

Measured on an English-German Transformer on Multi30k with a table of 4,120 x 128 (`structured` at a quarter,
an eighth and a sixteenth of the bytes, `funnel` at a quarter): of the BLEU were kept 0.93, 0.78, 0.59 and
0.01; the share on real text was 0.92, 0.86, 0.73 and 0.09, without a text 0.87, 0.76, 0.63 and 0.10. The
relative error of the table, 0.16, 0.24, 0.36 and 0.68, does not tell: `group_reduce` at half the bytes had
0.58 and no BLEU left, but 0.73 and 0.99 of the perplexity for a language model on the Penn Treebank, where
the share was 0.99. Hence `USABLE_SHARE`.

Where there is no text, the model makes one up. Random hidden states with the mean and the covariance of the
rows of the table are no replacement: models that kept 0.85 and 0.97 of their predictions agreed on 0.97 and
1.00 of those.

Axes: ``n`` predictions, ``S`` width of the hidden states, ``V`` vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shared_embeddings.checkpoints.quality import Quality, QualityReport, Validation, checked, compared
from shared_embeddings.checkpoints.token_counts import lines_of

# Predictions that are compared, about: the standard error of the share is below 0.016.
PREDICTIONS = 1_000
# Below this share a model is said to need training.
USABLE_SHARE = 0.85
# Lines of the texts that are read; many, so that short ones are enough.
_LINES = 400
# Hidden states that are scored at a time.
_ROWS = 64


class Predictions(NamedTuple):
    """What a model finds most probable.

    Attributes:
        words: ``(n,)`` their ids.
        probabilities: ``(n,)`` how probable it finds them.
    """

    words: Tensor
    probabilities: Tensor

    @classmethod
    def of(cls, hidden: Tensor, scores: Callable[[Tensor], Tensor]) -> Predictions:
        """The best words for hidden states ``(n, S)``, some at a time.

        Args:
            hidden: what is scored.
            scores: gives those of all words, ``(n, V)``.

        Raises:
            ValueError: scores are no numbers.
        """
        found = [scores(rows).float().softmax(dim=-1).max(dim=-1) for rows in hidden.split(_ROWS)]
        probabilities = torch.cat([best.values for best in found])
        if probabilities.isnan().any():
            raise ValueError("the scores of the model are no numbers")
        return cls(torch.cat([best.indices for best in found]), probabilities)


@dataclasses.dataclass(frozen=True)
class Probe:
    """What a model is asked, before it is compressed and after.

    Attributes:
        how: what it reads, such as "1,000 tokens of valid.txt".
        predict: gives what the model, as it is now, predicts; the same places every time.
    """

    how: str
    predict: Callable[[], Predictions]


@dataclasses.dataclass(frozen=True)
class Kept:
    """How much of a model was kept.

    Attributes:
        share: 1 for all, None where it could not be measured.
        of: what is measured: "predictions", "BLEU" or "probability of a word".
        how: what it is measured on, or why it is not.
        needs_training: whether the model has not been shown to be of use as it is.
    """

    share: float | None
    of: str
    how: str
    needs_training: bool

    @classmethod
    def measured(cls, share: float, of: str, how: str) -> Kept:
        """A share, judged; what is no number is nothing."""
        found = 0.0 if math.isnan(share) else share
        return cls(found, of, how, found < USABLE_SHARE)

    def described(self) -> str:
        """The one line that is printed last."""
        if self.share is None:
            return f"warning: it was not shown that this model still works ({self.how}); measure it on a text"
        line = f"kept {math.floor(100 * self.share)} % of the {self.of} of the original ({self.how})"
        if self.needs_training:
            return f"warning: {line}: this model has to be trained before it is of use"
        return line


class Measured(Protocol):
    """The part of `compression_hosts.TrainedModel` that is needed here."""

    def quality(self, validation: Validation) -> Quality:
        """How good the model is; ValueError where that cannot be measured."""

    def probe(self, texts: Sequence[Path] | None, seed: int) -> Probe:
        """What the model predicts; ValueError where it cannot be asked."""


class Comparison:
    """What a model is now, to be compared with what it is later: its quality, else its predictions.

    Args:
        model: is changed in between.
        validation: what its quality is measured on, or None.
        texts: what it predicts the words of; None for what it makes up itself.
        seed: of the sample.

    Raises:
        ValueError: the quality cannot be measured.
    """

    def __init__(
        self, model: Measured, validation: Validation | None, texts: Sequence[Path] | None, seed: int
    ) -> None:
        self._model, self._validation = model, validation
        self._quality = None if validation is None else checked(model.quality(validation))
        self._probe: Probe | None = None
        self._reason = ""
        if self._quality is not None and self._quality.value > 0:  # a BLEU of 0 cannot get worse
            return
        try:
            self._probe = model.probe(texts, seed)
            self._predictions = self._probe.predict()
        except ValueError as error:
            self._reason = str(error)

    def result(self) -> tuple[QualityReport | None, Kept]:
        """The quality before and now, where there is a text for that, and how much of the model was kept."""
        if self._quality is None or self._validation is None:
            return None, self._kept_predictions()
        quality = compared(self._quality, self._model.quality(self._validation))
        return quality, kept_quality(quality) if self._quality.value > 0 else self._kept_predictions()

    def _kept_predictions(self) -> Kept:
        """How much of what was predicted still is."""
        if self._reason or self._probe is None:
            return Kept(None, "predictions", self._reason, needs_training=True)
        try:
            share = agreement(self._predictions, self._probe.predict())
        except ValueError as error:
            return Kept(None, "predictions", str(error), needs_training=True)
        return Kept.measured(share, "predictions", self._probe.how)


def agreement(before: Predictions, after: Predictions) -> float:
    """``sum_i p_i [a_i = b_i] / sum_i p_i`` over the words a and b of both, with the probabilities p of
    `before`.
    """
    weights = before.probabilities.double()
    return float(weights[before.words == after.words].sum() / weights.sum())


def kept_quality(quality: QualityReport) -> Kept:
    """How much of a quality above 0 was kept: of the BLEU, or of the geometric mean of the probabilities of
    the words, which is the perplexity inverted.
    """
    if quality.measure == "perplexity":
        return Kept.measured(quality.before / quality.after, "probability of a word", quality.how)
    return Kept.measured(quality.after / quality.before, quality.measure, quality.how)


def sampled_lines(texts: Sequence[Path], seed: int, number: int = _LINES) -> list[str]:
    """Lines of texts that are not empty, each as likely as any other, in a random order.

    One text is in memory at a time (Vitter, "Random sampling with a reservoir", 1985, algorithm R).

    Raises:
        ValueError: a text is not UTF-8.
        OSError: a text cannot be read.
    """
    draw = random.Random(seed)
    kept: list[str] = []
    for place, line in enumerate(_filled_lines(texts)):
        if place < number:
            kept.append(line)
        elif (chosen := draw.randrange(place + 1)) < number:
            kept[chosen] = line
    draw.shuffle(kept)
    return kept


def _filled_lines(texts: Sequence[Path]) -> Iterator[str]:
    """The lines of all texts that have a word."""
    for path in texts:
        yield from (line for line in lines_of(path) if line.strip())


def names_of(texts: Sequence[Path]) -> str:
    """The names of texts for a line of output."""
    first = texts[0].name
    return first if len(texts) == 1 else f"{first} and {len(texts) - 1} more"
