"""The quality of a model on validation data before and after compression.

Each host measures its own models: perplexity for language models, BLEU for translation models.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from shared_embeddings.errors import UserError

# The subword markers in the texts of translation models.
SUBWORDS = ("none", "bpe", "sentencepiece")


@dataclasses.dataclass(frozen=True)
class Validation:
    """Validation data: one text for language models, two sides for translation models.

    Attributes:
        text: the text for a language model, or None.
        source: the text for a translation model, tokenized like its training data, or None.
        target: a reference translation of every line of the source, with `subwords` joined; None without a
            source.
        subwords: the subword markers in the model's output, which is joined before scoring. "none" scores
            tokens, so the target must be tokenized, too.
    """

    text: Path | None = None
    source: Path | None = None
    target: Path | None = None
    subwords: str = "none"

    def __post_init__(self) -> None:
        """Check that the data is complete and consistent."""
        if (self.source is None) != (self.target is None):
            given, missing = ("source", "target") if self.target is None else ("target", "source")
            raise UserError(f"--validation-{given} is given without --validation-{missing}; give both")
        if (self.text is None) == (self.source is None):
            raise UserError(
                "quality is measured on --validation, or on --validation-source and --validation-target; "
                "give those that fit the model"
            )
        if self.subwords not in SUBWORDS:
            raise UserError(f"unknown subwords '{self.subwords}'; choose one of {', '.join(SUBWORDS)}")
        if self.source is None and self.subwords != "none":
            raise UserError("--validation-subwords affects translations only; omit it")

    def one_text(self) -> Path:
        """The text for a language model.

        Raises:
            UserError: two sides were given instead, or the file is missing or empty.
        """
        if self.text is None:
            raise UserError(
                "--validation-source and --validation-target are for translation models, but this is a "
                "language model; give --validation"
            )
        _check_file("--validation", self.text)
        return self.text

    def two_sides(self) -> tuple[Path, Path]:
        """The source and the target for a translation model.

        Raises:
            UserError: one text was given instead, or a file is missing or empty.
        """
        if self.source is None or self.target is None:
            raise UserError(
                "--validation is for language models, but this is a translation model; give "
                "--validation-source and --validation-target"
            )
        _check_file("--validation-source", self.source)
        _check_file("--validation-target", self.target)
        return self.source, self.target


@dataclasses.dataclass(frozen=True)
class Quality:
    """A quality measurement.

    Attributes:
        measure: "perplexity" (lower is better) or "BLEU" (0 to 100, higher is better).
        value: the result.
        how: the conditions, such as the context of a perplexity or the signature of sacreBLEU.
    """

    measure: str
    value: float
    how: str


@dataclasses.dataclass(frozen=True)
class QualityReport:
    """The quality of the input model and of the compressed one.

    Attributes:
        measure, how: as in `Quality`.
        before, after: the results.
    """

    measure: str
    how: str
    before: float
    after: float


def checked(quality: Quality) -> Quality:
    """The quality of a model before compression; UserError if it is not finite."""
    if not math.isfinite(quality.value):
        raise UserError(
            f"the {quality.measure} of the model is {quality.value} before compression: its training "
            "diverged; use another model"
        )
    return quality


def compared(before: Quality, after: Quality) -> QualityReport:
    """Combine two measurements."""
    return QualityReport(before.measure, before.how, before.value, after.value)


def _check_file(option: str, path: Path) -> None:
    """Raise UserError unless the path is a nonempty file or a folder."""
    if not path.exists():
        raise UserError(f"{option} {path}: no such file; check the path")
    if path.is_file() and path.stat().st_size == 0:
        raise UserError(f"{option} {path}: is empty; use another text")
