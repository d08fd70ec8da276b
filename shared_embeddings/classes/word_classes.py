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
from typing import IO, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from shared_embeddings.errors import UserError
from shared_embeddings.utils.files import UNREADABLE, check_archive, replacing
from shared_embeddings.utils.reading import parse_json

Path = str | os.PathLike[str]
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
        UserError: the parts are inconsistent.
    """

    words: tuple[str, ...] = dataclasses.field(repr=False)
    classes: np.ndarray = dataclasses.field(repr=False)
    centers: np.ndarray = dataclasses.field(repr=False)
    vectors: np.ndarray = dataclasses.field(repr=False)
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_words(self.words)
        if not isinstance(self.settings, Mapping):
            raise UserError(f"settings must be a mapping, not {self.settings!r:.40}")
        if self.classes.dtype.kind not in "iu" or self.classes.shape != (len(self.words),):
            raise UserError(f"classes must be one whole number for each of the {len(self.words)} words")
        shapes = self.centers.shape, self.vectors.shape
        if len(shapes[0]) != 2 or shapes[1] != (len(self.words), shapes[0][1]) or not shapes[0][0]:
            raise UserError(
                f"centers {shapes[0]} and vectors {shapes[1]} do not fit {len(self.words)} words; "
                "they must be (K, d) and (V, d)"
            )
        if self.centers.dtype.kind != "f" or self.vectors.dtype.kind != "f":
            raise UserError(
                f"centers ({self.centers.dtype}) and vectors ({self.vectors.dtype}) must be of "
                "floating-point numbers"
            )
        if not (np.isfinite(self.centers).all() and np.isfinite(self.vectors).all()):
            raise UserError("centers or vectors have values that are not finite")
        if int(self.classes.min()) < 0 or int(self.classes.max()) >= self.num_classes:
            raise UserError(f"classes must be from 0 to {self.num_classes - 1}")

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
        """Raise UserError with the first difference unless `words` equals these words in this order."""
        if len(words) != len(self.words):
            raise UserError(
                f"the class file has {len(self.words)} words, but the vocabulary has {len(words)}; make the "
                "classes of this vocabulary"
            )
        for position, (own, other) in enumerate(zip(self.words, words)):
            if own != other:
                raise UserError(
                    f"the class file has another vocabulary: word {position} is {own!r} there and {other!r} "
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
            UserError: fewer than half of the words have a class, or a word is repeated.
        """
        missing = len(self.missing(words))
        if 2 * missing > len(words):
            raise UserError(
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
            UserError: the file cannot be read; the message has its name and the reason.
        """
        if not os.path.isfile(path):
            raise UserError(f"classes {path}: no such file; make it with 'shared-embeddings classes'")
        try:
            check_archive(path)
            with open(path, "rb") as file:
                return cls._read(file)
        except (*UNREADABLE, NotImplementedError, SyntaxError, zlib.error) as error:
            lines = str(error).strip("'\" \n").splitlines()
            reason = lines[0] if lines else type(error).__name__
            raise UserError(
                f"classes {path}: cannot be read ({reason[:120]}); truncated, or not a class file: make one "
                "with 'shared-embeddings classes'"
            ) from None

    @classmethod
    def _read(cls, file: IO[bytes]) -> WordClasses:
        """Read the classes from an open file."""
        if not zipfile.is_zipfile(file):
            raise UserError("not a .npz file")
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            if int(arrays["format"]) != _FORMAT:
                raise UserError(f"format {int(arrays['format'])}, but this version reads {_FORMAT}")
            found = cls(
                tuple(arrays["words"].tobytes().decode("utf-8").split("\n")),
                arrays["classes"],
                arrays["centers"],
                arrays["vectors"],
                parse_json(str(arrays["settings"]), "settings"),
            )
            if found.vocabulary_hash != str(arrays["vocabulary_hash"]):
                raise UserError("the words do not match their checksum")
        return found


def class_of_unseen(centers: np.ndarray) -> int:
    """The class for words that never occurred: the one whose center ``(K, d)`` is nearest to zero.

    The center of unit vectors is short if they point in different directions: this is the most diverse class.
    """
    return int(np.linalg.norm(centers, axis=1).argmin())


def _check_words(words: Sequence[str]) -> None:
    """Raise UserError unless there are words, all distinct and on one line each."""
    if not words:
        raise UserError("there are no words")
    if len(set(words)) < len(words):
        seen: set[str] = set()
        repeated = next(word for word in words if word in seen or seen.add(word))  # type: ignore[func-returns-value]
        raise UserError(f"the word {repeated!r} is repeated; every word needs one id")
    broken = next((word for word in words if not word or "\n" in word), None)
    if broken is not None:
        raise UserError(f"{broken!r} is not a word: it is empty or spans lines")


def _encoded(words: Sequence[str]) -> bytes:
    """The words in the form that is stored and hashed."""
    return "\n".join(words).encode("utf-8")


class ClassEmbedding(Protocol):
    """The tensors of an `uncle` embedding, see `UncleEmbedding`."""

    padding_idx: int | None
    unique: nn.Parameter
    class_tables: nn.ParameterList
    classes: Tensor


def out_of_vocabulary_row(embedding: ClassEmbedding, word_classes: WordClasses, vector: np.ndarray) -> Tensor:
    """The row ``(D,)`` of an out-of-vocabulary word, computed from its word vector (A.5).

    Its class is the non-empty one whose center has the highest cosine similarity. Its unique part is the
    weighted mean of the unique parts of that class's words; the weights are their cosine similarities to the
    new word, clipped at zero and normalized to sum to one.

    Args:
        embedding: a trained `uncle` embedding with one level of classes.
        word_classes: the classes it was built with, see `WordClasses.for_vocabulary`.
        vector: ``(d,)`` the word's vector, from the same space as the vectors of the classes.

    Raises:
        UserError: the classes are not the embedding's, or the vector has the wrong width or is zero.
    """
    if embedding.classes.size(1) != 1:
        raise UserError("rows of unknown words require an embedding with one level of classes")
    own = embedding.classes[:, 0].cpu().numpy().astype(np.int64)
    if not np.array_equal(own, word_classes.classes):
        raise UserError(
            "these are not the classes of the embedding; pass the classes it was built with, in the order of "
            "its vocabulary (WordClasses.for_vocabulary)"
        )
    direction = np.asarray(vector, dtype=np.float64)
    if direction.shape != word_classes.centers.shape[1:]:
        raise UserError(
            f"the word's vector has shape {direction.shape}, but the vectors of the classes have "
            f"{word_classes.centers.shape[1]} dimensions"
        )
    if not np.isfinite(direction).all() or not direction.any():
        raise UserError("the word's vector is zero or not finite; pass a vector that has a direction")
    usable = np.arange(len(own)) != (-1 if embedding.padding_idx is None else embedding.padding_idx)
    to_centers = _cosines(word_classes.centers, direction)
    to_centers[np.setdiff1d(np.arange(word_classes.num_classes), own[usable])] = -np.inf
    nearest = int(to_centers.argmax())
    members = np.flatnonzero((own == nearest) & usable)
    weights = np.maximum(_cosines(word_classes.vectors[members], direction), 0.0)
    weights = weights / weights.sum() if weights.any() else np.full(len(members), 1.0 / len(members))
    unique = embedding.unique.detach()
    mix = torch.as_tensor(weights, dtype=unique.dtype, device=unique.device)
    chosen = unique.index_select(0, torch.as_tensor(members, device=unique.device))
    return torch.cat((mix @ chosen, embedding.class_tables[0].detach()[nearest]))


def _cosines(vectors: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """``(n,)`` cosine similarities of `vectors` ``(n, d)`` with one vector; 0 for all-zero vectors."""
    products = vectors.astype(np.float64) @ direction
    norms = np.linalg.norm(vectors.astype(np.float64), axis=1) * np.linalg.norm(direction)
    return np.divide(products, norms, out=np.zeros_like(products), where=norms > 0)
