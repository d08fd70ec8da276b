"""Words with their semantic classes, and the class file.

Axes: ``V`` vocabulary, ``K`` classes, ``d`` width of the word vectors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np

from shared_embeddings.classes.skipgram import Path
from shared_embeddings.utils.files import UNREADABLE, replacing
from shared_embeddings.utils.reading import parse_json

_FORMAT = 1


@dataclasses.dataclass(frozen=True, eq=False)
class WordClasses:
    """The words of a vocabulary with their semantic classes (section 4.2).

    Attributes:
        words: the V words in id order.
        classes: ``(V,)`` integers from 0 to K - 1.
        centers: ``(K, d)`` the class centers in the space of the word vectors.
        vectors: ``(V, d)`` the word vectors; all zeros for a word that never occurred.
        settings: how the classes were made, for reference.

    Raises:
        ValueError: the parts are inconsistent.
    """

    words: tuple[str, ...] = dataclasses.field(repr=False)
    classes: np.ndarray = dataclasses.field(repr=False)
    centers: np.ndarray = dataclasses.field(repr=False)
    vectors: np.ndarray = dataclasses.field(repr=False)
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_words(self.words)
        if not isinstance(self.settings, Mapping):
            raise ValueError(f"settings must be a mapping, not {self.settings!r:.40}")
        if self.classes.dtype.kind not in "iu" or self.classes.shape != (len(self.words),):
            raise ValueError(f"classes must be one whole number for each of the {len(self.words)} words")
        shapes = self.centers.shape, self.vectors.shape
        if len(shapes[0]) != 2 or shapes[1] != (len(self.words), shapes[0][1]) or not shapes[0][0]:
            raise ValueError(
                f"centers {shapes[0]} and vectors {shapes[1]} do not fit {len(self.words)} words; "
                "they must be (K, d) and (V, d)"
            )
        if self.centers.dtype.kind != "f" or self.vectors.dtype.kind != "f":
            raise ValueError(
                f"centers ({self.centers.dtype}) and vectors ({self.vectors.dtype}) must be of "
                "floating-point numbers"
            )
        if not (np.isfinite(self.centers).all() and np.isfinite(self.vectors).all()):
            raise ValueError("centers or vectors hold numbers that are not finite")
        if int(self.classes.min()) < 0 or int(self.classes.max()) >= self.num_classes:
            raise ValueError(f"classes must be from 0 to {self.num_classes - 1}")

    @property
    def num_classes(self) -> int:
        """K, the number of classes; some may be empty."""
        return len(self.centers)

    @property
    def vocabulary_hash(self) -> str:
        """SHA-256 of the words in order."""
        return hashlib.sha256(_encoded(self.words)).hexdigest()

    def sizes(self) -> np.ndarray:
        """``(K,)`` the number of words in each class."""
        return np.bincount(self.classes, minlength=self.num_classes)

    def check_vocabulary(self, words: Sequence[str]) -> None:
        """Raise ValueError with the first difference unless `words` equals these words in this order."""
        if len(words) != len(self.words):
            raise ValueError(
                f"the classes are of {len(self.words)} words, but the vocabulary has {len(words)}; make the "
                "classes of this vocabulary"
            )
        for position, (own, other) in enumerate(zip(self.words, words)):
            if own != other:
                raise ValueError(
                    f"the classes are of another vocabulary: word {position} is {own!r} there and {other!r} "
                    "here; make the classes of this vocabulary"
                )

    def missing(self, words: Sequence[str]) -> list[str]:
        """The words without a class."""
        known = frozenset(self.words)
        return [word for word in words if word not in known]

    def for_vocabulary(self, words: Sequence[str]) -> WordClasses:
        """The same classes for a model's vocabulary, in the order of its ids.

        A word without a class, such as a special token that the model adds, is treated as a word that never
        occurred: its vector is zero, its class the one of `class_of_unseen`.

        Raises:
            ValueError: fewer than half of the words have a class, or a word is repeated.
        """
        missing = len(self.missing(words))
        if 2 * missing > len(words):
            raise ValueError(
                f"{missing} of the {len(words)} words of the vocabulary have no class; make the classes of "
                "this vocabulary"
            )
        places = {word: place for place, word in enumerate(self.words)}
        rows = np.array([places.get(word, -1) for word in words], dtype=np.int64)
        known = rows >= 0
        vectors = np.where(known[:, None], self.vectors[rows], np.zeros((), self.vectors.dtype))
        classes = np.where(known, self.classes[rows], class_of_unseen(self.centers))
        return WordClasses(tuple(words), classes, self.centers, vectors, self.settings)

    def save(self, path: Path) -> None:
        """Write an .npz file of numbers and text, atomically."""
        arrays: dict[str, Any] = {
            "format": np.array(_FORMAT),
            "words": np.frombuffer(_encoded(self.words), dtype=np.uint8),
            "vocabulary_hash": np.array(self.vocabulary_hash),
            "classes": self.classes,
            "centers": self.centers,
            "vectors": self.vectors,
            "settings": np.array(json.dumps(dict(self.settings))),
        }
        with replacing(pathlib.Path(path)) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> WordClasses:
        """Read a file that `save` wrote, without running code from it.

        Raises:
            ValueError: the file cannot be read; the message has its name and the reason.
        """
        if not os.path.isfile(path):
            raise ValueError(f"classes {path}: no such file; make it with 'shared-embeddings classes'")
        try:
            with open(path, "rb") as file:
                return cls._read(file)
        except (*UNREADABLE, NotImplementedError, SyntaxError, zipfile.BadZipFile, zlib.error) as error:
            lines = str(error).strip("'\" \n").splitlines()
            reason = lines[0] if lines else type(error).__name__
            raise ValueError(
                f"classes {path}: cannot be read ({reason[:120]}); truncated, or not a class file: make one "
                "with 'shared-embeddings classes'"
            ) from None

    @classmethod
    def _read(cls, file: IO[bytes]) -> WordClasses:
        """Read the classes from an open file."""
        if not zipfile.is_zipfile(file):
            raise ValueError("not a .npz file")
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            if int(arrays["format"]) != _FORMAT:
                raise ValueError(f"of format {int(arrays['format'])}, this version reads {_FORMAT}")
            found = cls(
                tuple(arrays["words"].tobytes().decode("utf-8").split("\n")),
                arrays["classes"],
                arrays["centers"],
                arrays["vectors"],
                parse_json(str(arrays["settings"]), "settings"),
            )
            if found.vocabulary_hash != str(arrays["vocabulary_hash"]):
                raise ValueError("the words do not match their checksum")
        return found


def class_of_unseen(centers: np.ndarray) -> int:
    """The class for words that never occurred: the one whose center ``(K, d)`` is nearest to zero.

    The center of unit vectors is short if they point in different directions: this is the most diverse class.
    """
    return int(np.linalg.norm(centers, axis=1).argmin())


def _check_words(words: Sequence[str]) -> None:
    """Raise ValueError unless there are words, all distinct and on one line each."""
    if not words:
        raise ValueError("there are no words")
    if len(set(words)) < len(words):
        seen: set[str] = set()
        repeated = next(word for word in words if word in seen or seen.add(word))  # type: ignore[func-returns-value]
        raise ValueError(f"the word {repeated!r} is repeated; every word needs one id")
    broken = next((word for word in words if not word or "\n" in word), None)
    if broken is not None:
        raise ValueError(f"{broken!r} is not a word: it is empty or spans lines")


def _encoded(words: Sequence[str]) -> bytes:
    """The words in the form that is stored and hashed."""
    return "\n".join(words).encode("utf-8")
