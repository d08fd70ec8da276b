"""Texts to evaluate a model on, in its own word ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.data.corpus import load_corpus
from lm.data.texts import word_blocks
from lm.data.vocabulary import Vocabulary
from shared_embeddings.errors import UserError
from shared_embeddings.utils.files import sha256


class Text(NamedTuple):
    """What is evaluated on.

    Attributes:
        tokens: ``(n,)`` word ids of the model.
        name: for people.
        split: of the corpus; None for a file.
        unknown: how many of the tokens are ``<unk>``.
        checksum: SHA-256 of the data.
    """

    tokens: np.ndarray
    name: str
    split: str | None
    unknown: int
    checksum: str


def read_data(path: Path, split: str | None, known: Sequence[str]) -> Text:
    """A text in the ids of a model: one split of a prepared corpus, or a file of words.

    Args:
        path: the folder of the corpus, or the file.
        split: of the corpus; None for its test text, and for a file.
        known: the model's words, in the order of their ids.

    Raises:
        UserError: there is no such text, it is of another vocabulary, or it is too short.
    """
    if path.is_dir():
        corpus = load_corpus(path)
        _check_same_words(path, corpus.vocabulary.words, known)
        split = split or "test"
        tokens = {"train": corpus.train, "valid": corpus.valid, "test": corpus.test}[split]
        unknown = corpus.description["unknown"][split]
        return Text(tokens, f"{split} text of {path}", split, unknown, corpus.description["checksum"])
    if split is not None:
        raise UserError(f"split is {split}, but {path} is no folder of lm_prepare; leave -split out")
    vocabulary = Vocabulary(known, [0] * len(known))
    blocks = [np.empty(0, np.int32)]
    for words in word_blocks(path):
        blocks.append(np.array([vocabulary.index.get(word, vocabulary.unk) for word in words], np.int32))
    tokens = np.concatenate(blocks)
    if len(tokens) < 2:
        raise UserError(f"{path}: {len(tokens)} tokens, but at least 2 are needed; give a longer text")
    unknown = int(np.count_nonzero(tokens == vocabulary.unk))
    return Text(tokens, str(path), None, unknown, sha256(path))


def _check_same_words(path: Path, words: Sequence[str], known: Sequence[str]) -> None:
    """Raise `UserError` unless the vocabulary of a corpus is the model's."""
    if list(words) != list(known):
        differing = next(
            (i for i, (a, b) in enumerate(zip(words, known)) if a != b), min(len(words), len(known))
        )
        raise UserError(
            f"data {path}: its vocabulary ({len(words):,} words) is not the model's ({len(known):,} words): "
            f"they differ from word {differing} on; use the folder that the model was trained on, or a text"
        )


def number_of_words(words: int | None, reference: Path | None) -> int | None:
    """The words that a loss is to be shared out among; None when that was not asked for.

    Args:
        words: their number.
        reference: a text whose words and line ends are counted.

    Raises:
        UserError: both are given, or there are no words.
    """
    if words is not None and reference is not None:
        raise UserError("words and reference both say how many words there are; give one of them")
    if reference is not None:
        words = sum(len(block) for block in word_blocks(reference))
        if words < 1:
            raise UserError(f"{reference}: it has no words; give the text in words")
    if words is not None and words < 1:
        raise UserError(f"words is {words}, but it must be at least 1; raise it")
    return words
