"""Texts to evaluate a model on, as ids of its vocabulary."""

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
    """A text to evaluate on.

    Attributes:
        tokens: ``(n,)`` word ids.
        name: description for reports.
        split: split of the corpus; None for a file.
        unknown: number of ``<unk>``.
        checksum: SHA-256 of the data.
    """

    tokens: np.ndarray
    name: str
    split: str | None
    unknown: int
    checksum: str


def read_data(path: Path, split: str | None, known: Sequence[str]) -> Text:
    """Read one split of a corpus, or a tokenized text, as word ids of a model.

    Args:
        path: folder of the corpus, or the file.
        split: split of the corpus (default: test); None for a file.
        known: words of the model in the order of their ids.

    Raises:
        UserError: the text is missing, too short, or has another vocabulary.
    """
    if path.is_dir():
        corpus = load_corpus(path)
        _check_same_words(path, corpus.vocabulary.words, known)
        split = split or "test"
        tokens = {"train": corpus.train, "valid": corpus.valid, "test": corpus.test}[split]
        unknown = corpus.description["unknown"][split]
        return Text(tokens, f"{split} text of {path}", split, unknown, corpus.description["checksum"])
    if split is not None:
        raise UserError(f"split is {split}, but {path} is not a folder written by lm_prepare; remove -split")
    vocabulary = Vocabulary(known, [0] * len(known))
    blocks = [np.empty(0, np.int32)]
    for words in word_blocks(path):
        blocks.append(np.array([vocabulary.index.get(word, vocabulary.unk) for word in words], np.int32))
    tokens = np.concatenate(blocks)
    if len(tokens) < 2:
        raise UserError(f"{path}: {len(tokens)} tokens, but at least 2 are needed; use a longer text")
    unknown = int(np.count_nonzero(tokens == vocabulary.unk))
    return Text(tokens, str(path), None, unknown, sha256(path))


def _check_same_words(path: Path, words: Sequence[str], known: Sequence[str]) -> None:
    """Raise `UserError` if the vocabulary of a corpus is not the model's."""
    if list(words) != list(known):
        differing = next(
            (i for i, (a, b) in enumerate(zip(words, known)) if a != b), min(len(words), len(known))
        )
        raise UserError(
            f"data {path}: its vocabulary ({len(words):,} words) differs from the model's ({len(known):,} "
            f"words) at word {differing}; use the corpus that the model was trained on, or a text file"
        )


def number_of_words(words: int | None, reference: Path | None) -> int | None:
    """The number of words for the perplexity per word; None if not requested.

    Args:
        words: the number.
        reference: text whose words and line ends are counted.

    Raises:
        UserError: both are given, or the number is 0.
    """
    if words is not None and reference is not None:
        raise UserError("words and reference both set the number of words; remove one of them")
    if reference is not None:
        words = sum(len(block) for block in word_blocks(reference))
        if words < 1:
            raise UserError(f"{reference} has no words; use another text")
    if words is not None and words < 1:
        raise UserError(f"words is {words}, but it must be at least 1; raise it")
    return words
