"""The content of a recipe's ``data.yaml``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from recipes.common.errors import UserError
from recipes.translation.sources import FORMATS, Texts
from shared_embeddings.utils.reading import read_yaml

KINDS = ("bpe", "sentencepiece")
MODELS = ("bpe", "unigram")
Content = TypeVar("Content")


@dataclass(frozen=True)
class Pieces:
    """One way to split the text, with its vocabulary: a folder of prepared data.

    Attributes:
        kind: ``bpe`` (subword-nmt, on Moses tokens) or ``sentencepiece`` (on plain text).
        size: merges of ``bpe``; words of the model's vocabulary, its markers included, of ``sentencepiece``.
        model: ``bpe`` or ``unigram``, for ``sentencepiece``.
        shared_vocabulary: one vocabulary for both languages.
        classes: numbers of semantic classes to make, for UnClE.
    """

    kind: str
    size: int
    model: str = "unigram"
    shared_vocabulary: bool = True
    classes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Settings:
    """All of ``data.yaml``.

    Attributes:
        source: source language.
        target: target language.
        shard: pairs that are worked on at a time; an interrupted run resumes from the last complete shard.
        max_words: longest sentence of the training text, in words.
        max_ratio: how many times longer one side may be than the other.
        sentences: sentences that SentencePiece learns from, spread evenly over the training text.
        corpora: texts of training.
        tests: texts of validation and test.
        pieces: ways to split the text, by name.
    """

    source: str
    target: str
    shard: int
    max_words: int
    max_ratio: float
    sentences: int
    corpora: tuple[Texts, ...]
    tests: tuple[Texts, ...]
    pieces: dict[str, Pieces]

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target."""
        return self.source, self.target


def read_settings(path: Path) -> Settings:
    """Read ``data.yaml``.

    Raises:
        UserError: absent, not YAML, or with a setting that is missing, unknown or impossible.
    """
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: it must hold {', '.join(field.name for field in fields(Settings))}")
    for name, kind in (("corpora", list), ("tests", list), ("pieces", dict)):
        if not isinstance(content.get(name), kind) or not content[name]:
            raise UserError(
                f"{path}: {name} is {content.get(name)!r}; wanted a {kind.__name__} with something in it"
            )
    parts = {
        "corpora": tuple(_fill(path, Texts, each) for each in content["corpora"]),
        "tests": tuple(_fill(path, Texts, each) for each in content["tests"]),
        "pieces": {name: _fill(path, Pieces, each) for name, each in content["pieces"].items()},
    }
    settings = _fill(path, Settings, {**content, **parts})
    for name in ("shard", "max_words", "sentences"):
        _check_number(f"{path}: {name}", getattr(settings, name))
    if type(settings.max_ratio) not in (int, float) or settings.max_ratio < 1:
        raise UserError(f"{path}: max_ratio is {settings.max_ratio!r}; wanted a number of at least 1")
    for texts in (*settings.corpora, *settings.tests):
        if texts.format not in FORMATS:
            raise UserError(
                f"{path}: {texts.name}: format is {texts.format!r}; wanted {' or '.join(FORMATS)}"
            )
    for name, pieces in settings.pieces.items():
        if pieces.kind not in KINDS:
            raise UserError(f"{path}: {name}: kind is {pieces.kind!r}; wanted {' or '.join(KINDS)}")
        if pieces.model not in MODELS:
            raise UserError(f"{path}: {name}: model is {pieces.model!r}; wanted {' or '.join(MODELS)}")
        _check_number(f"{path}: {name}: size", pieces.size)
        if not isinstance(pieces.classes, tuple):
            raise UserError(f"{path}: {name}: classes is {pieces.classes!r}; wanted a list of numbers")
        for number in pieces.classes:
            _check_number(f"{path}: {name}: classes", number)
    return settings


def _check_number(where: str, number: Any) -> None:
    """Check that a number is a whole number of at least 1.

    Raises:
        UserError: says `where` it is.
    """
    if type(number) is not int or number < 1:
        raise UserError(f"{where} is {number!r}; wanted a whole number of at least 1")


def _fill(path: Path, kind: type[Content], given: Any) -> Content:
    """A dataclass of `kind` from a mapping.

    Raises:
        UserError: `given` is no mapping, or has keys too many or too few.
    """
    if not isinstance(given, dict):
        raise UserError(f"{path}: {given!r} must be a mapping, see {kind.__name__} in {__name__}")
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    unknown = [str(key) for key in given if key not in known]
    if unknown:
        raise UserError(f"{path}: unknown key {unknown[0]!r}; it may be one of {', '.join(sorted(known))}")
    try:
        return kind(**{key: tuple(each) if isinstance(each, list) else each for key, each in given.items()})
    except TypeError as error:
        raise UserError(f"{path}: {error}") from error
