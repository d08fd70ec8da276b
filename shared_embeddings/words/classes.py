"""Semantic word classes: clusters of word vectors, and their files (UnClE, section 4.2).

Axes: ``V`` vocabulary, ``K`` classes, ``d`` width of the word vectors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from shared_embeddings.utils.errors import UserError, first_line, require
from shared_embeddings.utils.files import AnyPath, replacing
from shared_embeddings.utils.paths import check_outputs
from shared_embeddings.utils.reading import read_lines
from shared_embeddings.words.token_counts import split_count

_FORMAT = 1
# gensim truncates longer sentences.
_LONGEST_SENTENCE = 10_000


@dataclasses.dataclass(frozen=True, eq=False)
class WordClasses:
    """The words of a vocabulary with their semantic classes (section 4.2).

    Raises:
        UserError: a word is repeated, or the parts do not fit together.
    """

    words: tuple[str, ...] = dataclasses.field(repr=False)  # the V words in id order
    classes: np.ndarray = dataclasses.field(repr=False)  # ``(V,)`` integers from 0 to K - 1
    # ``(K, d)`` the class centers in the space of the word vectors.
    centers: np.ndarray = dataclasses.field(repr=False)
    # ``(V, d)`` the word vectors; all zeros for a word that never occurred.
    vectors: np.ndarray = dataclasses.field(repr=False)
    # How the classes were made, for reference.
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        number = len(self.words)
        for word, count in Counter(self.words).items():
            if count > 1:
                raise UserError(f"the word {word!r} is repeated; every word needs one id")
        shapes = self.classes.shape, self.centers.shape, self.vectors.shape
        if shapes != (
            (number,),
            (self.num_classes, self.vectors.shape[-1]),
            (number, self.centers.shape[-1]),
        ):
            raise UserError(
                f"classes {shapes[0]}, centers {shapes[1]} and vectors {shapes[2]} do not fit {number} words "
                "(they must be (V,), (K, d) and (V, d))"
            )
        is_whole = self.classes.dtype.kind in "iu"
        if not is_whole or not np.isin(self.classes, np.arange(self.num_classes)).all():
            raise UserError(f"classes must be whole numbers from 0 to {self.num_classes - 1}")

    @property
    def num_classes(self) -> int:
        """K, the number of classes; some may be empty."""
        return len(self.centers)

    @property
    def vocabulary_hash(self) -> str:
        """SHA-256 of the words in order."""
        return hashlib.sha256("\n".join(self.words).encode("utf-8")).hexdigest()

    def sizes(self) -> np.ndarray:
        return np.bincount(self.classes, minlength=self.num_classes)

    def for_vocabulary(self, words: Sequence[str]) -> WordClasses:
        """Return the same classes for a model's vocabulary, in the order of its ids.

        A word without a class, such as a special token that the model adds, is treated as a word that never
        occurred: its vector is zero, its class the one of `class_of_unseen`.

        Raises:
            UserError: fewer than half of the words have a class, or a word is repeated.
        """
        places = {word: place for place, word in enumerate(self.words)}
        rows = np.array([places.get(word, -1) for word in words], dtype=np.int64)
        known = rows >= 0
        if 2 * known.sum() < len(words):
            raise UserError(
                f"{(~known).sum()} of the {len(words)} words of the vocabulary have no class; make the "
                "classes of this vocabulary"
            )
        vectors = np.where(known[:, None], self.vectors[rows], np.zeros((), self.vectors.dtype))
        classes = np.where(known, self.classes[rows], class_of_unseen(self.centers))
        return WordClasses(tuple(words), classes, self.centers, vectors, self.settings)

    def save(self, path: AnyPath) -> None:
        """Write an .npz file of numbers and text."""
        arrays: dict[str, Any] = {
            "format": np.array(_FORMAT),
            "words": np.frombuffer("\n".join(self.words).encode("utf-8"), dtype=np.uint8),
            "vocabulary_hash": np.array(self.vocabulary_hash),
            "classes": self.classes,
            "centers": self.centers,
            "vectors": self.vectors,
            "settings": np.array(json.dumps(dict(self.settings))),
        }
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: AnyPath) -> WordClasses:
        """Read a file that `save` wrote, without running code from it; UserError if it cannot be read."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                if int(arrays["format"]) != _FORMAT:
                    raise UserError(f"format {int(arrays['format'])}, but this version reads {_FORMAT}")
                classes = cls(
                    tuple(arrays["words"].tobytes().decode("utf-8").split("\n")),
                    arrays["classes"],
                    arrays["centers"],
                    arrays["vectors"],
                    dict(json.loads(str(arrays["settings"]))),
                )
                if classes.vocabulary_hash != str(arrays["vocabulary_hash"]):
                    raise UserError("the words do not match their checksum")
                return classes
        except Exception as error:  # numpy raises many kinds for other files
            raise UserError(
                f"classes {path}: cannot be read ({first_line(error)}); truncated, or not a class file: make "
                "one with 'shared-embeddings classes'"
            ) from None


def class_of_unseen(centers: np.ndarray) -> int:
    """Return the class for words that never occurred: the one whose center ``(K, d)`` is nearest to zero.

    The center of unit vectors is short if they point in different directions: this is the most diverse class.
    """
    return int(np.linalg.norm(centers, axis=1).argmin())


def cluster(vectors: np.ndarray, num_classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Cluster word vectors with k-means (section 4.2), after scaling each of them to unit length.

    The length of a skip-gram vector depends on the word's frequency; without scaling, k-means puts most
    frequent words into separate classes. All-zero vectors belong to words that never occurred: they are
    excluded from the clustering and assigned to the class of `class_of_unseen`.

    Args:
        vectors: ``(V, d)``.
        num_classes: K.
        seed: for the initial centers.

    Returns:
        The cluster ``(V,)`` of every vector, and the centers ``(K, d)``.

    Raises:
        UserError: more classes than distinct vectors, an invalid seed, or vectors that are not finite.
        ImportError: scikit-learn is not installed.
    """
    _check_settings(seed, num_classes=num_classes)
    if not np.isfinite(vectors).all():
        raise UserError("word vectors contain NaN or infinity; train them again")
    seen = vectors.any(axis=1)
    directions = vectors[seen] / np.linalg.norm(vectors[seen], axis=1, keepdims=True)
    different = len(np.unique(directions, axis=0))
    if num_classes > different:
        raise UserError(
            f"num_classes is {num_classes}, but only {different} words have distinct vectors; lower it, or "
            "provide more text"
        )
    kmeans = require("sklearn.cluster").KMeans(n_clusters=num_classes, n_init=1, random_state=seed)
    fitted = kmeans.fit(directions)
    classes = np.full(len(vectors), class_of_unseen(fitted.cluster_centers_), dtype=np.int64)
    classes[seen] = fitted.labels_
    return classes, fitted.cluster_centers_


def read_vocabulary(path: AnyPath) -> tuple[str, ...]:
    """Read the words of a vocabulary file, one per line in the order of their ids, with or without counts.

    A count is a number after a tab or a space, as ``onmt_build_vocab`` writes it.

    Raises:
        UserError: the file is empty or not UTF-8, repeats a word, or has a line without a word.
    """
    lines = list(read_lines(path))
    if not any(lines):
        raise UserError(f"vocabulary {path}: is empty; wanted one word per line")
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        entry = split_count(line)
        word = line if entry is None else entry[0]
        if not word or word.startswith("\t"):
            raise UserError(f"vocabulary {path}: line {number} has no word; remove it")
        if word in line_of:
            raise UserError(
                f"vocabulary {path}: line {number} repeats {word!r} of line {line_of[word]}; remove one"
            )
        line_of[word] = number
    return tuple(line_of)


def make_classes(
    texts: Sequence[AnyPath],
    vocab_file: AnyPath,
    num_classes: int,
    output: AnyPath,
    dim: int = 100,
    window: int = 5,
    epochs: int = 5,
    seed: int = 0,
    figure: AnyPath | None = None,
    force: bool = False,
) -> str:
    """Make the class file of a vocabulary from tokenized texts.

    Args:
        texts, dim, window, seed: as in `train_word_vectors`; `vocab_file` as in `read_vocabulary`.
        epochs: passes over the texts. On the Penn Treebank (900,000 words), 280 of 1000 classes have a single
            word after 5 epochs, 43 after 20.
        num_classes: K; the paper suggests slightly less than a tenth of the words (A.4).
        figure: the PNG file to write, a plot of the class sizes (Figure 2).
        force: replace existing files.

    Returns:
        A summary with a histogram of the class sizes.

    Raises:
        UserError: as in the functions called, or an output exists.
        ImportError: gensim, scikit-learn or (for a figure) matplotlib is not installed.
    """
    words = read_vocabulary(vocab_file)
    settings = {
        "texts": [os.path.basename(text) for text in texts],
        "vocabulary": os.path.basename(vocab_file),
        **{"num_classes": num_classes, "dim": dim, "window": window, "epochs": epochs, "seed": seed},
    }
    _check_outputs(output, figure, [*texts, vocab_file], force)
    _check_settings(seed, num_classes=num_classes)
    if num_classes > len(words):
        raise UserError(f"num_classes is {num_classes}, more than the {len(words)} words; lower it")
    vectors = train_word_vectors(texts, words, dim, window, epochs, seed)
    classes = WordClasses(words, *cluster(vectors, num_classes, seed), vectors, settings)
    return _write(classes, output, figure)


def regroup(
    classes: AnyPath,
    num_classes: int,
    output: AnyPath,
    seed: int = 0,
    figure: AnyPath | None = None,
    force: bool = False,
) -> str:
    """Make a different number of classes from the word vectors of a class file, without the texts.

    The result equals that of `make_classes` with this number, the same `seed` and the settings of `classes`.
    """
    before = WordClasses.load(classes)
    _check_outputs(output, figure, [classes], force)
    settings = {**before.settings, "num_classes": num_classes, "seed": seed}
    clusters = cluster(before.vectors, num_classes, seed)
    return _write(WordClasses(before.words, *clusters, before.vectors, settings), output, figure)


def _check_outputs(output: AnyPath, figure: AnyPath | None, inputs: Sequence[AnyPath], force: bool) -> None:
    """Check the outputs, and that the libraries are installed, before the long work."""
    require("sklearn.cluster")
    if figure is not None:
        require("matplotlib.figure")
    check_outputs([Path(path) for path in (output, figure) if path is not None], map(Path, inputs), force)


def _check_settings(seed: int, **counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"{name} is {value}, but it must be at least 1; raise it")
    if not 0 <= seed < 2**32:
        raise UserError(f"seed is {seed}, but it must be at least 0 and below 2**32; choose another number")


def _write(classes: WordClasses, output: AnyPath, figure: AnyPath | None) -> str:
    """Write a class file and its figure, and return the summary."""
    lines = [describe_sizes(classes)]
    if unseen := int((~classes.vectors.any(axis=1)).sum()):
        number = class_of_unseen(classes.centers)
        lines.append(f"words that do not occur in the texts: {unseen:,}, in class {number}")
    if figure is not None:  # the class sizes, largest first (Figure 2)
        sizes = np.sort(classes.sizes())[::-1]
        plot = require("matplotlib.figure").Figure(figsize=(6, 3.5), layout="constrained")
        axes = plot.add_subplot()
        axes.bar(np.arange(len(sizes)), sizes, width=1.0)
        axes.set_xlabel("class, by size")
        axes.set_ylabel("words")
        axes.set_title(f"{len(classes.words):,} words in {len(sizes):,} classes")
        with replacing(figure) as temporary:
            plot.savefig(temporary, format="png", dpi=150)
        lines.append(f"figure: {figure}")
    classes.save(output)
    return "\n".join([*lines, f"classes: {output}"])


def describe_sizes(word_classes: WordClasses) -> str:
    """Return a text histogram of the class sizes."""
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
        bar = "#" * int(np.ceil(40 * count / bins.max()))
        if count or power:
            lines.append(f"{label:>15} words  {count:>7,} classes  {bar}".rstrip())
    return "\n".join(lines)


def train_word_vectors(
    texts: Sequence[AnyPath],
    vocabulary: Sequence[str],
    dim: int = 100,
    window: int = 5,
    epochs: int = 5,
    seed: int = 0,
) -> np.ndarray:
    """Train skip-gram vectors (Mikolov et al., 2013) for the words of a vocabulary.

    Training is deterministic (one worker). Tokens outside the vocabulary are skipped, as word2vec skips rare
    words. Texts have one sentence per line and whitespace between tokens (words, or subwords as the model
    uses them).

    Returns:
        ``(V, dim)`` float32; all zeros for a word that never occurs.

    Raises:
        UserError: a text is not UTF-8, no word of the vocabulary occurs, or a setting is below 1.
        ImportError: gensim is not installed.
    """
    _check_settings(seed, dim=dim, window=window, epochs=epochs)
    sentences = _Sentences(texts, frozenset(vocabulary))
    counts: Counter[str] = Counter()
    number = 0
    for words in sentences:
        counts.update(words)
        number += 1
    if not counts:
        raise UserError("no word of the vocabulary occurs in the texts; tokenize the texts as the vocabulary")
    model = require("gensim.models").Word2Vec(
        vector_size=dim, window=window, sg=1, min_count=1, workers=1, seed=seed, epochs=epochs
    )
    # In vocabulary order, so that ties between counts are always broken the same way.
    model.build_vocab_from_freq({word: counts[word] for word in vocabulary if word in counts})
    # Shown on a terminal only.
    with tqdm(total=number * epochs, desc="word vectors", unit=" sentences", disable=None) as bar:
        sentences.bar = bar
        model.train(sentences, total_examples=number, epochs=epochs)
    vectors = np.zeros((len(vocabulary), dim), dtype=np.float32)
    for position, word in enumerate(vocabulary):
        if word in counts:
            vectors[position] = model.wv[word]
    return vectors


@dataclasses.dataclass
class _Sentences:
    """The sentences of text files as lists of in-vocabulary words; can be iterated many times."""

    texts: Sequence[AnyPath]
    vocabulary: frozenset[str]
    bar: Any = None

    def __iter__(self) -> Iterator[list[str]]:
        for text in self.texts:
            for line in read_lines(text):
                words = [word for word in line.split() if word in self.vocabulary]
                for start in range(0, len(words), _LONGEST_SENTENCE):
                    if self.bar is not None:
                        self.bar.update()
                    yield words[start : start + _LONGEST_SENTENCE]
