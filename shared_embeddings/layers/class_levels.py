"""Where an `uncle` embedding has the classes of its words from: files, indices, chance, or a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from shared_embeddings.classes import WordClasses
from shared_embeddings.options import STORED, OptionError, require

if TYPE_CHECKING:
    from shared_embeddings.methods.uncle import UncleOptions


Classes = str | tuple[int, ...] | tuple[str | tuple[int, ...], ...] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Level:
    """One level of classes: how many there are, and the class ``(V,)`` of every word."""

    num_classes: int
    assignment: np.ndarray


def class_levels(num_embeddings: int, options: UncleOptions) -> list[Level]:
    """The classes of all V words in every level, from wherever the options say.

    Raises:
        OptionError: a class file that cannot be read or is of another vocabulary, classes that cannot be.
    """
    if options.random_classes:
        random = np.random.default_rng(options.seed)
        counts = _counts(options)
        return [Level(count, random.integers(count, size=num_embeddings)) for count in counts]
    if options.classes == STORED:
        # Any valid assignment will do until the right one is loaded.
        return [Level(count, np.arange(num_embeddings) % count) for count in _counts(options)]
    return [_given_level(num_embeddings, *given) for given in zip(options.sources(), _counts(options))]


def levels_for_vocabulary(words: Sequence[str], options: UncleOptions) -> list[Level]:
    """The given classes in every level, those of class files by word rather than by position.

    Raises:
        OptionError: as in `class_levels`, or a class file that hardly knows the words.
    """
    levels = []
    for source, count in zip(options.sources(), _counts(options)):
        if isinstance(source, str):
            with _naming_the_option(source):
                resolved = _loaded(source, count).for_vocabulary(words)
            levels.append(Level(resolved.num_classes, resolved.classes))
        else:
            levels.append(_given_level(len(words), source, count))
    return levels


def _counts(options: UncleOptions) -> tuple[Any, ...]:
    """The option `num_classes` for every level; None where it is left out."""
    given = options.num_classes
    return given if isinstance(given, tuple) else (given,) * options.levels()


def _given_level(num_embeddings: int, source: str | Sequence[int], num_classes: int | None) -> Level:
    """The level of a class file, or of given class indices."""
    if isinstance(source, str):
        loaded = _loaded(source, num_classes)
        assignment, known, named = loaded.classes, loaded.num_classes, f"the class file {source}"
    else:
        assignment, known = np.asarray(source), num_classes or max(source) + 1
        named = "option 'classes'"
    require(
        len(assignment) == num_embeddings,
        f"{named} has {len(assignment)} words, but the vocabulary has {num_embeddings}; make the classes of "
        "this vocabulary",
    )
    wrong = assignment[(assignment < 0) | (assignment >= known)]
    require(
        wrong.size == 0,
        f"{named} has a class {wrong[0] if wrong.size else ''}, but classes are from 0 to {known - 1}; "
        "change it or 'num_classes'",
    )
    return Level(known, assignment)


def _loaded(path: str, num_classes: int | None) -> WordClasses:
    """The class file `path`, which has `num_classes` classes where that is not None."""
    with _naming_the_option(path):
        loaded = WordClasses.load(path)
    require(
        num_classes in (None, loaded.num_classes),
        f"option 'num_classes' is {num_classes}, but {path} has {loaded.num_classes} classes; leave it out",
    )
    return loaded


@contextlib.contextmanager
def _naming_the_option(path: str) -> Iterator[None]:
    """Turn a ValueError about a class file into an `OptionError`."""
    try:
        yield
    except ValueError as error:
        named = str(error) if path in str(error) else f"{path}: {error}"
        raise OptionError(f"option 'classes': {named}") from None


def plain_classes(value: Any) -> object:
    """The option `classes` in plain types; what is neither files nor indices stays as it is.

    Raises:
        OptionError: something else stands where class indices should.
    """
    levels = (str, os.PathLike, list, tuple, np.ndarray, Tensor)
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], levels):
        return [_plain_level(level) for level in value]
    return _plain_level(value)


def _plain_level(value: Any) -> object:
    """A class file as text, or class indices as a list of numbers."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if not isinstance(value, (list, tuple, np.ndarray, Tensor)):
        return value
    try:
        indices = np.asarray(value.tolist() if isinstance(value, Tensor) else value)
    except ValueError:
        indices = np.zeros(1)
    if indices.size and (indices.dtype.kind not in "iu" or indices.ndim != 1):
        # A message that showed all values would be as long as the vocabulary.
        raise OptionError(
            "uncle: option 'classes' holds something other than one whole number for each word; give a class "
            "file, or a list of class indices for each level"
        )
    return indices.tolist()
