"""How good a model is on a text for validation, before it is compressed and after.

Language models have a perplexity, translation models a BLEU; each host measures its own, see
`compression_hosts.TrainedModel.quality`.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

# How pieces of words are marked in the texts of translation models.
SUBWORDS = ("none", "bpe", "sentencepiece")


@dataclasses.dataclass(frozen=True)
class Validation:
    """What a model is measured on: one text for language models, two sides for translation models.

    Attributes:
        text: for a language model, or None.
        source: what a translation model is to translate, in its own tokens, or None.
        target: a translation of every line of the source, as it should read once `subwords` are joined; None
            without a source.
        subwords: the marks of the pieces of words in what the model writes; they are joined before it is
            compared. "none" leaves its tokens as they are: the target, too, is in tokens then.
    """

    text: Path | None = None
    source: Path | None = None
    target: Path | None = None
    subwords: str = "none"

    def __post_init__(self) -> None:
        """Refuse what says nothing, or contradicts itself."""
        if (self.source is None) != (self.target is None):
            given, missing = ("source", "target") if self.target is None else ("target", "source")
            raise ValueError(f"--validation-{given} is given without --validation-{missing}; give both")
        if (self.text is None) == (self.source is None):
            raise ValueError(
                "a model is measured on --validation, or on --validation-source and --validation-target; "
                "give what fits the model"
            )
        if self.subwords not in SUBWORDS:
            raise ValueError(f"unknown subwords '{self.subwords}'; choose one of {', '.join(SUBWORDS)}")
        if self.source is None and self.subwords != "none":
            raise ValueError("--validation-subwords has an effect on translations only; leave it out")

    def one_text(self) -> Path:
        """The text for a language model.

        Raises:
            ValueError: there are two sides instead, or there is no such text, or nothing in it.
        """
        if self.text is None:
            raise ValueError(
                "--validation-source and --validation-target are for translation models, but this is a "
                "language model; give --validation"
            )
        _check_file("--validation", self.text)
        return self.text

    def two_sides(self) -> tuple[Path, Path]:
        """The source and the target for a translation model.

        Raises:
            ValueError: there is one text instead, or there is no such file, or nothing in it.
        """
        if self.source is None or self.target is None:
            raise ValueError(
                "--validation is for language models, but this model translates; give --validation-source "
                "and --validation-target"
            )
        _check_file("--validation-source", self.source)
        _check_file("--validation-target", self.target)
        return self.source, self.target


@dataclasses.dataclass(frozen=True)
class Quality:
    """What a model was measured to be.

    Attributes:
        measure: "perplexity" (the less, the better) or "BLEU" (from 0 to 100, the more, the better).
        value: the number.
        how: what it depends on, such as the context of a perplexity or the signature of sacreBLEU.
    """

    measure: str
    value: float
    how: str


@dataclasses.dataclass(frozen=True)
class QualityReport:
    """The same measure of the model that was read and of the one that was written.

    Attributes:
        measure, how: as in `Quality`.
        before, after: the numbers.
    """

    measure: str
    how: str
    before: float
    after: float


def checked(quality: Quality) -> Quality:
    """The quality of a model that is to be compressed; ValueError where it is no finite number."""
    if not math.isfinite(quality.value):
        raise ValueError(
            f"the {quality.measure} of the model is {quality.value} before it is compressed: its training "
            "diverged; take another model"
        )
    return quality


def compared(before: Quality, after: Quality) -> QualityReport:
    """Two measurements of one kind."""
    return QualityReport(before.measure, before.how, before.value, after.value)


def _check_file(option: str, path: Path) -> None:
    """Raise ValueError unless there is a file with something in it, or a folder."""
    if not path.exists():
        raise ValueError(f"{option} {path}: no such file; check the path")
    if path.is_file() and path.stat().st_size == 0:
        raise ValueError(f"{option} {path}: is empty; give a text")
