"""The classes of words at one level, from a class file or from given indices, for UnClE."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from shared_embeddings.classes.word_classes import WordClasses
from shared_embeddings.options import OptionError, require

Source = str | tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Level:
    """One level of classes: how many there are, and the class ``(V,)`` of every word."""

    num_classes: int
    assignment: np.ndarray


def level_of_ids(num_embeddings: int, source: Source, num_classes: int | None) -> Level:
    """The level of a class file of the same vocabulary, or of given class indices.

    Raises:
        OptionError: the class file cannot be read or has another vocabulary, or a class is out of range.
    """
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


def level_of_words(words: Sequence[str], source: Source, num_classes: int | None) -> Level:
    """The level of given class indices, or of a class file, in which words are looked up by name.

    Raises:
        OptionError: as in `level_of_ids`, or the class file lacks most of the words.
    """
    if not isinstance(source, str):
        return level_of_ids(len(words), source, num_classes)
    with _naming_the_option(source):
        resolved = _loaded(source, num_classes).for_vocabulary(words)
    return Level(resolved.num_classes, resolved.classes)


def _loaded(path: str, num_classes: int | None) -> WordClasses:
    """The class file `path`, which must have `num_classes` classes unless that is None."""
    with _naming_the_option(path):
        loaded = WordClasses.load(path)
    require(
        num_classes in (None, loaded.num_classes),
        f"option 'num_classes' is {num_classes}, but {path} has {loaded.num_classes} classes; remove it",
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
    """The option `classes` in plain types; values that are neither files nor indices are returned unchanged.

    Raises:
        OptionError: class indices are not whole numbers.
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
        # A message with all values would be as long as the vocabulary.
        raise OptionError(
            "uncle: option 'classes' contains something other than one whole number for each word; give a "
            "class file, or a list of class indices for each level"
        )
    return indices.tolist()
