"""Cluster word vectors and write the class file of a vocabulary (UnClE, section 4.2).

Axes: ``V`` vocabulary, ``K`` classes, ``d`` width of the word vectors.
"""

from __future__ import annotations

import os
import pathlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shared_embeddings.checkpoints.token_counts import split_count
from shared_embeddings.classes.word_classes import Path, WordClasses, class_of_unseen
from shared_embeddings.errors import UserError
from shared_embeddings.utils.extras import require
from shared_embeddings.utils.files import replacing, staged
from shared_embeddings.utils.path_options import Given, PathOption, check_paths


class Clusters(NamedTuple):
    """The cluster ``(V,)`` of every vector, and the centers ``(K, d)``."""

    classes: np.ndarray
    centers: np.ndarray


def cluster(vectors: np.ndarray, num_classes: int, seed: int = 0) -> Clusters:
    """Cluster word vectors with k-means (section 4.2), after scaling each of them to unit length.

    The length of a skip-gram vector depends on the word's frequency; without scaling, k-means puts most
    frequent words into separate classes. All-zero vectors belong to words that never occurred: they are
    excluded from the clustering and assigned to the class of `class_of_unseen`.

    Args:
        vectors: ``(V, d)``.
        num_classes: K.
        seed: for the initial centers.

    Raises:
        UserError: more classes than distinct vectors, an invalid seed, or vectors that are not finite.
        ImportError: scikit-learn is not installed.
    """
    _check_settings(num_classes, seed)
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
    fitted = (
        require("sklearn.cluster").KMeans(n_clusters=num_classes, n_init=1, random_state=seed).fit(directions)
    )
    classes = np.full(len(vectors), class_of_unseen(fitted.cluster_centers_), dtype=np.int64)
    classes[seen] = fitted.labels_
    return Clusters(classes, fitted.cluster_centers_)


def read_vocabulary(path: Path) -> tuple[str, ...]:
    """Read the words of a vocabulary file, one per line in the order of their ids, with or without counts.

    A count is a number after a tab or a space, as ``onmt_build_vocab`` writes it.

    Raises:
        UserError: the file is missing, empty or not UTF-8, or has a line without a word.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="\n") as file:
            lines = file.read().removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"vocabulary {path}: is not UTF-8 ({error.reason}); convert it") from None
    except OSError as error:
        raise UserError(f"vocabulary {path}: cannot be read ({error.strerror}); check the path") from None
    if lines == [""]:
        raise UserError(f"vocabulary {path}: is empty; wanted one word per line")
    first_line: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        entry = split_count(line.rstrip("\r"))
        word = line.rstrip("\r") if entry is None else entry[0]
        if not word or word.startswith("\t"):
            raise UserError(f"vocabulary {path}: line {number} has no word; remove it")
        if word in first_line:
            raise UserError(
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
    force: bool = False,
) -> str:
    """Make the class file of a vocabulary from tokenized texts.

    Args:
        texts, dim, window, seed: as in `train_word_vectors`.
        epochs: passes over the texts. On the Penn Treebank (900,000 words), 280 of 1000 classes have a single
            word after 5 epochs, 43 after 20.
        vocab_file: as in `read_vocabulary`.
        num_classes: K; the paper suggests slightly less than a tenth of the words (A.4).
        output: the .npz file to write.
        figure: the PNG file to write, a plot of the class sizes (Figure 2).
        force: overwrite existing files.

    Returns:
        A summary with a histogram of the class sizes.

    Raises:
        UserError: as in the functions called.
        ImportError: gensim, scikit-learn or (for a figure) matplotlib is not installed.
    """
    words = read_vocabulary(vocab_file)
    inputs = {"--text": (PathOption.FILE, texts), "--vocab": (PathOption.FILE, vocab_file)}
    _check_before_work(len(words), num_classes, seed)
    _check_files(inputs, output, figure, force)
    vectors = train_word_vectors(texts, words, dim, window, epochs, seed)
    settings = {
        "texts": [os.path.basename(text) for text in texts],
        "vocabulary": os.path.basename(vocab_file),
        **{"num_classes": num_classes, "dim": dim, "window": window, "epochs": epochs, "seed": seed},
    }
    made = WordClasses(words, *cluster(vectors, num_classes, seed), vectors, settings)
    return _write(made, output, figure)


def regroup(
    classes: Path,
    num_classes: int,
    output: Path,
    seed: int = 0,
    figure: Path | None = None,
    force: bool = False,
) -> str:
    """Make a different number of classes from the word vectors of a class file, without the texts.

    With the same `seed`, the result equals that of `make_classes` with this number and the settings of
    `classes`.

    Args:
        classes: the file that provides the vectors.
        num_classes, output, figure, force: as in `make_classes`.
        seed: for the initial centers.

    Returns:
        A summary with a histogram of the class sizes.

    Raises:
        ValueError, ImportError: as in the functions called.
    """
    known = WordClasses.load(classes)
    _check_before_work(len(known.words), num_classes, seed)
    _check_files({"--vectors-of": (PathOption.FILE, classes)}, output, figure, force)
    clusters = cluster(known.vectors, num_classes, seed)
    settings = {**known.settings, "num_classes": num_classes, "seed": seed}
    return _write(WordClasses(known.words, *clusters, known.vectors, settings), output, figure)


def _check_settings(num_classes: int, seed: int) -> None:
    """Raise UserError for an invalid number of classes or seed."""
    if num_classes < 1:
        raise UserError(f"num_classes is {num_classes}, but it must be at least 1; raise it")
    if not 0 <= seed < 2**32:
        raise UserError(f"seed is {seed}, but it must be at least 0 and below 2**32; choose another number")


def _check_before_work(words: int, num_classes: int, seed: int) -> None:
    """Raise errors early that would otherwise appear after the long work."""
    require("sklearn.cluster")
    _check_settings(num_classes, seed)
    if num_classes > words:
        raise UserError(f"num_classes is {num_classes}, more than the {words} words; lower it")


def _check_files(
    inputs: Mapping[str, tuple[PathOption, Given]], output: Path, figure: Path | None, force: bool
) -> None:
    """Check the files, and that matplotlib is available if a figure is requested."""
    outputs = {"--output": (PathOption.NEW_FILE, output), "--figure": (PathOption.NEW_FILE, figure)}
    check_paths({**inputs, **outputs}, force)
    if figure is not None:
        require("matplotlib.figure")


def _write(made: WordClasses, output: Path, figure: Path | None) -> str:
    """Write a class file and its figure, both or neither, and return the summary."""
    with staged([pathlib.Path(path) for path in (output, figure) if path is not None]) as places:
        made.save(places[0])
        if figure is not None:
            draw_sizes(made, places[1])
    lines = [describe_sizes(made)]
    unseen = int((~made.vectors.any(axis=1)).sum())
    if unseen:
        lines.append(
            f"words that do not occur in the texts: {unseen:,}, in class {class_of_unseen(made.centers)}"
        )
    if figure is not None:
        lines.append(f"figure: {figure}")
    return "\n".join([*lines, f"classes: {output}"])


_BAR = 40


def describe_sizes(word_classes: WordClasses) -> str:
    """A text histogram of the class sizes."""
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
    """Plot the class sizes, largest first (Figure 2), to a PNG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    sizes = np.sort(word_classes.sizes())[::-1]
    figure = require("matplotlib.figure").Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.bar(np.arange(len(sizes)), sizes, width=1.0)
    axes.set_xlabel("class, by size")
    axes.set_ylabel("words")
    axes.set_title(f"{len(word_classes.words):,} words in {len(sizes):,} classes")
    with replacing(pathlib.Path(path)) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


# gensim truncates longer sentences.
_LONGEST_SENTENCE = 10_000


def train_word_vectors(
    texts: Sequence[Path],
    vocabulary: Sequence[str],
    dim: int = 100,
    window: int = 5,
    epochs: int = 5,
    seed: int = 0,
) -> np.ndarray:
    """Train skip-gram vectors (Mikolov et al., 2013) for the words of a vocabulary.

    Training is deterministic (one worker). Tokens outside the vocabulary are skipped, as word2vec skips rare
    words.

    Args:
        texts: UTF-8 files with one sentence per line and whitespace between tokens (words, or subwords as the
            model uses them).
        vocabulary: the V words to train vectors for.
        dim, window, epochs: of skip-gram.
        seed: for initialization and sampling.

    Returns:
        ``(V, dim)`` float32; all zeros for a word that never occurs.

    Raises:
        UserError: a text is missing or not UTF-8, no word of the vocabulary occurs, or a setting is below 1.
        ImportError: gensim is not installed.
    """
    for name, value in (("dim", dim), ("window", window), ("epochs", epochs)):
        if value < 1:
            raise UserError(f"{name} is {value}, but it must be at least 1; raise it")
    if seed < 0:
        raise UserError(f"seed is {seed}, but it must be at least 0; raise it")
    sentences = _Sentences(texts, vocabulary)
    counts, number = sentences.count()
    if not counts:
        raise UserError("no word of the vocabulary occurs in the texts; tokenize the texts as the vocabulary")
    model = require("gensim.models").Word2Vec(
        vector_size=dim, window=window, sg=1, min_count=1, workers=1, seed=seed, epochs=epochs
    )
    # In vocabulary order, so that ties between counts are always broken the same way.
    model.build_vocab_from_freq({word: counts[word] for word in vocabulary if word in counts})
    with _progress(number * epochs) as bar:
        sentences.bar = bar
        model.train(sentences, total_examples=number, epochs=epochs)
    vectors = np.zeros((len(vocabulary), dim), dtype=np.float32)
    for position, word in enumerate(vocabulary):
        if word in counts:
            vectors[position] = model.wv[word]
    return vectors


def _progress(total: int) -> Any:
    """A progress bar over sentences, shown on a terminal only."""
    from tqdm import tqdm

    return tqdm(total=total, desc="word vectors", unit=" sentences", disable=None)


class _Sentences:
    """The sentences of text files as lists of in-vocabulary words; can be iterated many times."""

    def __init__(self, texts: Sequence[Path], vocabulary: Sequence[str]) -> None:
        self.texts = texts
        self.vocabulary = frozenset(vocabulary)
        self.bar: Any = None

    def __iter__(self) -> Iterator[list[str]]:
        for text in self.texts:
            for line in _lines(text):
                words = [word for word in line.split() if word in self.vocabulary]
                for start in range(0, len(words), _LONGEST_SENTENCE):
                    if self.bar is not None:
                        self.bar.update()
                    yield words[start : start + _LONGEST_SENTENCE]

    def count(self) -> tuple[Counter[str], int]:
        """Word counts and the number of sentences."""
        counts: Counter[str] = Counter()
        number = 0
        for words in self:
            counts.update(words)
            number += 1
        return counts, number


def _lines(text: Path) -> Iterator[str]:
    """The lines of a UTF-8 file; raises ValueError with its name if it cannot be read."""
    try:
        with open(text, encoding="utf-8-sig") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise UserError(f"text {text}: is not UTF-8 ({error.reason}); convert it") from None
    except OSError as error:
        raise UserError(f"text {text}: cannot be read ({error.strerror}); check the path") from None
