"""Skip-gram word vectors of tokenized text, trained by gensim, for semantic classes (UnClE, section 4.2)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shared_embeddings.utils.extras import require

Path = str | os.PathLike[str]

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
        ValueError: a text is missing or not UTF-8, no word of the vocabulary occurs, or a setting is below 1.
        ImportError: gensim is not installed.
    """
    for name, value in (("dim", dim), ("window", window), ("epochs", epochs)):
        if value < 1:
            raise ValueError(f"{name} is {value}, but it must be at least 1; raise it")
    if seed < 0:
        raise ValueError(f"seed is {seed}, but it must be at least 0; raise it")
    sentences = _Sentences(texts, vocabulary)
    counts, number = sentences.count()
    if not counts:
        raise ValueError(
            "no word of the vocabulary occurs in the texts; tokenize the texts as the vocabulary"
        )
    model = require("gensim.models").Word2Vec(
        vector_size=dim, window=window, sg=1, min_count=1, workers=1, seed=seed, epochs=epochs
    )
    # In vocabulary order, so that ties between counts are always broken alike.
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
        raise ValueError(f"text {text}: is not UTF-8 ({error.reason}); convert it") from None
    except OSError as error:
        raise ValueError(f"text {text}: cannot be read ({error.strerror}); check the path") from None
