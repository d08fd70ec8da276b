"""Semantic classes of words for UnClE: clusters of word vectors, their file, and words that came later.

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
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shared_embeddings.files import can_be_made, replacing
from shared_embeddings.skipgram import Path, train_word_vectors

if TYPE_CHECKING:
    from torch import Tensor

    from shared_embeddings.methods.uncle import UncleEmbedding

_FORMAT = 1
_BAR = 40


@dataclasses.dataclass(frozen=True, eq=False)
class WordClasses:
    """The words of a vocabulary, each with its semantic class (section 4.2).

    Attributes:
        words: the V words, in the order of their ids.
        classes: ``(V,)`` integers from 0 to K - 1.
        centres: ``(K, d)`` the centre of every class among the word vectors.
        vectors: ``(V, d)`` the word vectors; all zeros for a word that never occurred.
        settings: what the classes were made with, for the record.

    Raises:
        ValueError: the parts do not fit together.
    """

    words: tuple[str, ...] = dataclasses.field(repr=False)
    classes: np.ndarray = dataclasses.field(repr=False)
    centres: np.ndarray = dataclasses.field(repr=False)
    vectors: np.ndarray = dataclasses.field(repr=False)
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_words(self.words)
        if self.classes.dtype.kind not in "iu" or self.classes.shape != (len(self.words),):
            raise ValueError(f"classes must be one whole number for each of the {len(self.words)} words")
        shapes = self.centres.shape, self.vectors.shape
        if len(shapes[0]) != 2 or shapes[1] != (len(self.words), shapes[0][1]) or not shapes[0][0]:
            raise ValueError(
                f"centres {shapes[0]} and vectors {shapes[1]} do not fit {len(self.words)} words; "
                "they must be (K, d) and (V, d)"
            )
        if not (np.isfinite(self.centres).all() and np.isfinite(self.vectors).all()):
            raise ValueError("centres or vectors hold numbers that are not finite")
        if int(self.classes.min()) < 0 or int(self.classes.max()) >= self.num_classes:
            raise ValueError(f"classes must be from 0 to {self.num_classes - 1}")

    @property
    def num_classes(self) -> int:
        """K, the number of classes; some may hold no word."""
        return len(self.centres)

    @property
    def vocabulary_hash(self) -> str:
        """SHA-256 of the words in their order."""
        return hashlib.sha256(_encoded(self.words)).hexdigest()

    def sizes(self) -> np.ndarray:
        """``(K,)`` the number of words of every class."""
        return np.bincount(self.classes, minlength=self.num_classes)

    def check_vocabulary(self, words: Sequence[str]) -> None:
        """Raise ValueError, naming the first difference, unless `words` are these words in this order."""
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
        """Those of `words` that have no class here."""
        known = frozenset(self.words)
        return [word for word in words if word not in known]

    def for_vocabulary(self, words: Sequence[str]) -> WordClasses:
        """The same classes for a model's vocabulary, in the order of its ids.

        A word that has no class, such as a marker or a filler that the model adds, is treated as one that
        never occurred: its vector is zero, its class the one with the centre nearest to zero.

        Raises:
            ValueError: fewer than half of the words have a class, or a word comes twice.
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
        classes = np.where(known, self.classes[rows], class_of_unseen(self.centres))
        return WordClasses(tuple(words), classes, self.centres, vectors, self.settings)

    def save(self, path: Path) -> None:
        """Write a .npz file, complete or not at all; it holds numbers and text only."""
        arrays: dict[str, Any] = {
            "format": np.array(_FORMAT),
            "words": np.frombuffer(_encoded(self.words), dtype=np.uint8),
            "vocabulary_hash": np.array(self.vocabulary_hash),
            "classes": self.classes,
            "centres": self.centres,
            "vectors": self.vectors,
            "settings": np.array(json.dumps(dict(self.settings))),
        }
        with replacing(pathlib.Path(path)) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> WordClasses:
        """Read a file that `save` wrote, without running code from it.

        Raises:
            ValueError: names the file, and says why it cannot be read.
        """
        if not os.path.isfile(path):
            raise ValueError(f"classes {path}: no such file; make it with 'shared-embeddings classes'")
        try:
            with open(path, "rb") as file:
                return cls._read(file)
        except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            lines = str(error).strip("'\" \n").splitlines()
            reason = lines[0] if lines else type(error).__name__
            raise ValueError(
                f"classes {path}: cannot be read ({reason[:120]}); it is cut short, or no class file: make "
                "it with 'shared-embeddings classes'"
            ) from None

    @classmethod
    def _read(cls, file: IO[bytes]) -> WordClasses:
        """The classes of an open file."""
        if not zipfile.is_zipfile(file):
            raise ValueError("not a .npz file")
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            if int(arrays["format"]) != _FORMAT:
                raise ValueError(f"of format {int(arrays['format'])}, this version reads {_FORMAT}")
            found = cls(
                tuple(arrays["words"].tobytes().decode("utf-8").split("\n")),
                arrays["classes"],
                arrays["centres"],
                arrays["vectors"],
                json.loads(str(arrays["settings"])),
            )
            if found.vocabulary_hash != str(arrays["vocabulary_hash"]):
                raise ValueError("the words are not those that it was made with")
        return found


class Clusters(NamedTuple):
    """The cluster ``(V,)`` of every vector, and the centres ``(K, d)``."""

    classes: np.ndarray
    centres: np.ndarray


def cluster(vectors: np.ndarray, num_classes: int, seed: int = 0) -> Clusters:
    """Group word vectors by k-means (section 4.2), by direction: all are first scaled to length one.

    The length of a skip-gram vector follows the word's frequency; with it, k-means puts most frequent words
    into classes of their own. Vectors that are all zero belong to words that never occurred: they do not move
    the centres, and go to the class of `class_of_unseen`.

    Args:
        vectors: ``(V, d)``.
        num_classes: K.
        seed: of the first centres.

    Raises:
        ValueError: more classes than different vectors, an impossible seed, or numbers that are not finite.
        ImportError: scikit-learn is not installed.
    """
    _check_settings(num_classes, seed)
    if not np.isfinite(vectors).all():
        raise ValueError("word vectors hold numbers that are not finite; train them anew")
    seen = vectors.any(axis=1)
    directions = vectors[seen] / np.linalg.norm(vectors[seen], axis=1, keepdims=True)
    different = len(np.unique(directions, axis=0))
    if num_classes > different:
        raise ValueError(
            f"num_classes is {num_classes}, but only {different} words with different vectors are there to "
            "group; lower it, or give more text"
        )
    fitted = _kmeans()(n_clusters=num_classes, n_init=1, random_state=seed).fit(directions)
    classes = np.full(len(vectors), class_of_unseen(fitted.cluster_centers_), dtype=np.int64)
    classes[seen] = fitted.labels_
    return Clusters(classes, fitted.cluster_centers_)


def class_of_unseen(centres: np.ndarray) -> int:
    """The class of a word that never occurred: the one whose centre ``(K, d)`` is nearest to zero.

    A centre of vectors of length one is short where these differ most, so this is the most mixed class.
    """
    return int(np.linalg.norm(centres, axis=1).argmin())


def read_vocabulary(path: Path) -> tuple[str, ...]:
    """Read the words of a vocabulary file, one per line in the order of their ids, with or without counts.

    A count is a number behind a tab or a space, as ``onmt_build_vocab`` writes it.

    Raises:
        ValueError: the file is missing, empty or not UTF-8, or a line is no word (its number is named).
    """
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            lines = file.read().removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"vocabulary {path}: is not UTF-8 ({error.reason}); convert it") from None
    except OSError as error:
        raise ValueError(f"vocabulary {path}: cannot be read ({error.strerror}); check the path") from None
    if lines == [""]:
        raise ValueError(f"vocabulary {path}: is empty; wanted one word per line")
    first_line: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        word = _without_count(line.rstrip("\r"))
        if not word:
            raise ValueError(f"vocabulary {path}: line {number} holds no word; remove it")
        if word in first_line:
            raise ValueError(
                f"vocabulary {path}: line {number} repeats {word!r} of line {first_line[word]}; remove one"
            )
        first_line[word] = number
    return tuple(first_line)


def make_classes(
    texts: Sequence[Path],
    vocab_file: Path,
    num_classes: int,
    output: Path,
    dim: int = 100,
    window: int = 5,
    epochs: int = 5,
    seed: int = 0,
    figure: Path | None = None,
) -> str:
    """Make the class file of a vocabulary from tokenised texts.

    Args:
        texts, dim, window, seed: as in `train_word_vectors`.
        epochs: likewise. On the Penn Treebank (900,000 words) 5 leave 280 of 1000 classes with a single word,
            20 leave 43.
        vocab_file: as in `read_vocabulary`.
        num_classes: K; the paper suggests a little less than a tenth of the words (A.4).
        output: the .npz file to write.
        figure: a PNG file for the sizes of the classes (Figure 2).

    Returns:
        What was made, in words and as a histogram.

    Raises:
        ValueError: as in the functions that this calls.
        ImportError: gensim, scikit-learn or (for a figure) matplotlib is not installed.
    """
    words = read_vocabulary(vocab_file)
    _check_before_work(len(words), num_classes, seed, [*texts, vocab_file], output, figure)
    vectors = train_word_vectors(texts, words, dim, window, epochs, seed)
    settings = {
        "texts": [os.path.basename(text) for text in texts],
        "vocabulary": os.path.basename(vocab_file),
        **{"num_classes": num_classes, "dim": dim, "window": window, "epochs": epochs, "seed": seed},
    }
    made = WordClasses(words, *cluster(vectors, num_classes, seed), vectors, settings)
    return _write(made, output, figure)


def regroup(classes: Path, num_classes: int, output: Path, seed: int = 0, figure: Path | None = None) -> str:
    """Make another number of classes from the word vectors of a class file, without the texts.

    The file is the one that `make_classes` would make with that number and the settings of `classes`, if
    `seed` is also the one of these.

    Args:
        classes: the file that the vectors are taken from.
        num_classes, output, figure: as in `make_classes`.
        seed: of the first centres.

    Returns:
        What was made, in words and as a histogram.

    Raises:
        ValueError, ImportError: as in the functions that this calls.
    """
    known = WordClasses.load(classes)
    _check_before_work(len(known.words), num_classes, seed, [], output, figure)
    clusters = cluster(known.vectors, num_classes, seed)
    settings = {**known.settings, "num_classes": num_classes, "seed": seed}
    return _write(WordClasses(known.words, *clusters, known.vectors, settings), output, figure)


def _check_settings(num_classes: int, seed: int) -> None:
    """Raise ValueError for a number of classes, or a seed, that cannot be."""
    if num_classes < 1:
        raise ValueError(f"num_classes is {num_classes}, but it must be at least 1; raise it")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}, but it must be at least 0 and below 2**32; choose another number")


def _check_before_work(
    words: int, num_classes: int, seed: int, inputs: Sequence[Path], output: Path, figure: Path | None
) -> None:
    """Raise at once what would otherwise be raised in the end."""
    _kmeans()
    _check_targets(output, figure, inputs)
    if figure is not None:
        _figure()
    _check_settings(num_classes, seed)
    if num_classes > words:
        raise ValueError(f"num_classes is {num_classes}, more than the {words} words; lower it")


def _write(made: WordClasses, output: Path, figure: Path | None) -> str:
    """Write a class file and its figure, and tell what it holds."""
    made.save(output)
    lines = [describe_sizes(made)]
    unseen = int((~made.vectors.any(axis=1)).sum())
    if unseen:
        lines.append(
            f"words that never occur in the texts: {unseen:,}, in class {class_of_unseen(made.centres)}"
        )
    if figure is not None:
        draw_sizes(made, figure)
        lines.append(f"figure: {figure}")
    return "\n".join([*lines, f"classes: {output}"])


def describe_sizes(word_classes: WordClasses) -> str:
    """The histogram of the class sizes as text: how many classes have how many words."""
    sizes = word_classes.sizes()
    lines = [
        f"{len(word_classes.words):,} words in {len(sizes):,} classes: smallest {sizes.min():,}, "
        f"median {int(np.median(sizes)):,}, largest {sizes.max():,} words"
    ]
    # Sizes 0, 1, 2-3, 4-7, ...: class sizes are long-tailed.
    bins = np.bincount([int(size).bit_length() for size in sizes])
    for power, count in enumerate(bins):
        low, high = (1 << power) >> 1, max((1 << power) - 1, 0)
        label = f"{low:,}" if high == low else f"{low:,}-{high:,}"
        bar = "#" * int(np.ceil(_BAR * count / bins.max()))
        if count or power:
            lines.append(f"{label:>15} words  {count:>7,} classes  {bar}".rstrip())
    return "\n".join(lines)


def draw_sizes(word_classes: WordClasses, path: Path) -> None:
    """Draw the class sizes, largest first (Figure 2), into a PNG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    sizes = np.sort(word_classes.sizes())[::-1]
    figure = _figure()(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.bar(np.arange(len(sizes)), sizes, width=1.0)
    axes.set_xlabel("class, by size")
    axes.set_ylabel("words")
    axes.set_title(f"{len(word_classes.words):,} words in {len(sizes):,} classes")
    with replacing(pathlib.Path(path)) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def out_of_vocabulary_row(embedding: UncleEmbedding, word_classes: WordClasses, vector: np.ndarray) -> Tensor:
    """The row ``(D,)`` of a word that the model does not know, from its word vector (A.5).

    Its class is the one with the nearest centre by cosine, among those that hold words; its unique part is a
    mix of the unique parts of that class's words, each weighted by its cosine to the new word (negative ones
    count as zero), all weights adding up to one.

    Args:
        embedding: a trained `uncle` embedding with one level of classes.
        word_classes: the classes that it was built with, see `WordClasses.for_vocabulary`.
        vector: ``(d,)`` the word's vector among those that the classes were made from.

    Raises:
        ValueError: the classes are not the embedding's, or the vector has another width or no direction.
    """
    import torch

    if embedding.classes.size(1) != 1:
        raise ValueError("rows of unknown words need an embedding with one level of classes")
    own = embedding.classes[:, 0].cpu().numpy().astype(np.int64)
    if not np.array_equal(own, word_classes.classes):
        raise ValueError(
            "these are not the classes of the embedding; give those that it was built with, in the order of "
            "its vocabulary (WordClasses.for_vocabulary)"
        )
    direction = np.asarray(vector, dtype=np.float64)
    if direction.shape != word_classes.centres.shape[1:]:
        raise ValueError(
            f"the word's vector has shape {direction.shape}, but the vectors of the classes have "
            f"{word_classes.centres.shape[1]} dimensions"
        )
    if not np.isfinite(direction).all() or not direction.any():
        raise ValueError("the word's vector is zero or not finite, so that it is near no class")
    usable = np.arange(len(own)) != (-1 if embedding.padding_idx is None else embedding.padding_idx)
    to_centres = _cosines(word_classes.centres, direction)
    to_centres[np.setdiff1d(np.arange(word_classes.num_classes), own[usable])] = -np.inf
    nearest = int(to_centres.argmax())
    members = np.flatnonzero((own == nearest) & usable)
    weights = np.maximum(_cosines(word_classes.vectors[members], direction), 0.0)
    weights = weights / weights.sum() if weights.any() else np.full(len(members), 1.0 / len(members))
    unique = embedding.unique.detach()
    mix = torch.as_tensor(weights, dtype=unique.dtype, device=unique.device)
    chosen = unique.index_select(0, torch.as_tensor(members, device=unique.device))
    return torch.cat((mix @ chosen, embedding.class_tables[0].detach()[nearest]))


def _cosines(vectors: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """``(n,)`` the cosines of `vectors` ``(n, d)`` with one vector; 0 for vectors that are all zero."""
    products = vectors.astype(np.float64) @ direction
    norms = np.linalg.norm(vectors.astype(np.float64), axis=1) * np.linalg.norm(direction)
    return np.divide(products, norms, out=np.zeros_like(products), where=norms > 0)


def _kmeans() -> Any:
    """scikit-learn's k-means."""
    try:
        from sklearn.cluster import KMeans  # type: ignore[import-untyped]
    except ImportError:
        raise ImportError(
            "clustering needs scikit-learn, which is not installed; pip install 'shared-embeddings[classes]'"
        ) from None
    return KMeans


def _figure() -> Any:
    """matplotlib's figure."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("a figure needs matplotlib, which is not installed; install it") from None
    return Figure


def _check_targets(output: Path, figure: Path | None, inputs: Sequence[Path]) -> None:
    """Raise ValueError unless files of these names can be written, and are none that are read."""
    taken = {os.path.realpath(path) for path in inputs}
    for path in (output,) if figure is None else (output, figure):
        if os.path.isdir(path) or not can_be_made(path):
            raise ValueError(f"output {path}: cannot be written; give a file in a folder that can")
        if os.path.realpath(path) in taken:
            raise ValueError(f"output {path}: is another file of this command; name a new one")
        taken.add(os.path.realpath(path))


def _without_count(line: str) -> str:
    """The word of a line of a vocabulary file."""
    for separator in ("\t", " "):
        word, found, count = line.rpartition(separator)
        if found and count.isdigit():
            return word
    return line


def _check_words(words: Sequence[str]) -> None:
    """Raise ValueError unless there are words, all different and on one line each."""
    if not words:
        raise ValueError("there is no word")
    if len(set(words)) < len(words):
        seen: set[str] = set()
        repeated = next(word for word in words if word in seen or seen.add(word))  # type: ignore[func-returns-value]
        raise ValueError(f"the word {repeated!r} comes twice; every word needs one id")
    broken = next((word for word in words if not word or "\n" in word), None)
    if broken is not None:
        raise ValueError(f"{broken!r} is no word: it is empty or goes over lines")


def _encoded(words: Sequence[str]) -> bytes:
    """The words as they are stored and hashed."""
    return "\n".join(words).encode("utf-8")
