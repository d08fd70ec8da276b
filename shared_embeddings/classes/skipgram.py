"""Skip-gram word vectors of tokenised text, by gensim: what semantic classes are made from (UnClE, 4.2)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

Path = str | os.PathLike[str]

# gensim cuts sentences off after this many words.
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

    One worker, so that the same texts, vocabulary and seed give the same vectors. Tokens that are not in the
    vocabulary are left out, as word2vec leaves out rare words.

    Args:
        texts: UTF-8 files, a sentence per line, tokens between white space: words, or sub-words as the model
            will see them.
        vocabulary: the words (V) that get a vector.
        dim, window, epochs: of skip-gram.
        seed: of the first vectors and of all draws.

    Returns:
        ``(V, dim)`` in 32 bits; all zeros for a word that never occurs.

    Raises:
        ValueError: a text is missing or not UTF-8, no word of the vocabulary occurs, or a setting below 1.
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
            "no word of the vocabulary occurs in the texts; give texts tokenised as the vocabulary is"
        )
    try:
        from gensim.models import Word2Vec  # type: ignore[import-untyped]
    except ImportError:
        raise ImportError(
            "word vectors need gensim, which is not installed; pip install 'shared-embeddings[classes]'"
        ) from None
    model = Word2Vec(vector_size=dim, window=window, sg=1, min_count=1, workers=1, seed=seed, epochs=epochs)
    # In the order of the vocabulary, so that words of equal counts come in the same order every time.
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
    """A progress bar over sentences, on a terminal only."""
    from tqdm import tqdm

    return tqdm(total=total, desc="word vectors", unit=" sentences", disable=None)


class _Sentences:
    """The sentences of text files, as lists of words of a vocabulary; can be gone through many times."""

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
        """How often every word occurs, and how many sentences there are."""
        counts: Counter[str] = Counter()
        number = 0
        for words in self:
            counts.update(words)
            number += 1
        return counts, number


def _lines(text: Path) -> Iterator[str]:
    """The lines of a UTF-8 file; ValueError names the file where it cannot be read."""
    try:
        with open(text, encoding="utf-8-sig") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise ValueError(f"text {text}: is not UTF-8 ({error.reason}); convert it") from None
    except OSError as error:
        raise ValueError(f"text {text}: cannot be read ({error.strerror}); check the path") from None
