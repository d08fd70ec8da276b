"""Vectors of sentences, from an encoder in PyTorch or ONNX Runtime, and how good they are.

Axes: ``N`` sentences, ``B`` batch, ``T`` tokens, ``D`` dimensions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

import shared_embeddings.hf  # noqa: F401  (registers compressed models with transformers)
from recipes.common.results import Record
from recipes.common.table import Column, number
from shared_embeddings.analysis import WordPairs, read_pairs, spearman, word_similarity
from shared_embeddings.utils.errors import require

_BATCH = 32
# Longer sentences are cut, as the configuration of the original for sentence-transformers has it.
_LONGEST = 256
# Runs of which the fastest counts.
_ROUNDS = 5
# What an encoder reads.
_INPUTS = ("input_ids", "attention_mask")
WORDS = "words"
Vectors = Mapping[str, np.ndarray]


class SentenceEncoder(Protocol):
    """What computes vectors of sentences."""

    def encode(self, sentences: Sequence[str]) -> np.ndarray:
        """Return vectors of length one ``(N, D)``."""


@dataclass(frozen=True)
class Encoder:
    """An encoder with its tokenizer.

    Attributes:
        tokenizer: of transformers.
        run: from ids and attention mask ``(B, T)`` to hidden states ``(B, T, D)``.
    """

    tokenizer: Any
    run: Callable[[np.ndarray, np.ndarray], np.ndarray]

    def encode(self, sentences: Sequence[str]) -> np.ndarray:
        """Return means of the hidden states of each sentence, of length one ``(N, D)``."""
        order = sorted(range(len(sentences)), key=lambda place: len(sentences[place]))
        parts: list[np.ndarray] = []
        for start in range(0, len(order), _BATCH):
            ids, mask = self.tokens([sentences[place] for place in order[start : start + _BATCH]])
            hidden = self.run(ids, mask) * mask[..., None]
            mean = hidden.sum(axis=1) / mask.sum(axis=1, keepdims=True)
            parts.append(mean / np.linalg.norm(mean, axis=1, keepdims=True))
        vectors = np.concatenate(parts).astype(np.float32)
        return vectors[np.argsort(order)]

    def tokens(self, sentences: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and attention mask of one batch ``(B, T)``."""
        batch = self.tokenizer(
            list(sentences), padding=True, truncation=True, max_length=_LONGEST, return_tensors="np"
        )
        return batch["input_ids"].astype(np.int64), batch["attention_mask"].astype(np.int64)


def read_encoder(folder: Path) -> Encoder:
    """Return the model in a folder, compressed or not, in PyTorch."""
    model = require("transformers").AutoModel.from_pretrained(folder, local_files_only=True).eval()

    @torch.inference_mode()
    def run(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        output = model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))
        return np.asarray(output.last_hidden_state)

    return Encoder(read_tokenizer(folder), run)


def read_onnx(file: Path, folder: Path) -> Encoder | None:
    """Return the exported model with the tokenizer of its folder; None if the file has embeddings only."""
    runtime = require("onnxruntime")
    settings = runtime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    settings.log_severity_level = 3
    session = runtime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    if not {*_INPUTS} <= {*names}:
        return None
    output = session.get_outputs()[0].name

    def run(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        # Others, such as the segments of BERT, are zero.
        others = dict.fromkeys(names, np.zeros_like(ids))
        return np.asarray(session.run([output], {**others, **dict(zip(_INPUTS, (ids, mask)))})[0])

    return Encoder(read_tokenizer(folder), run)


def read_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in the folder of a model."""
    return require("transformers").AutoTokenizer.from_pretrained(folder, local_files_only=True)


def speed_ratio(encoder: Encoder, original: Encoder, sentences: Sequence[str]) -> float:
    """Return how many times the speed of the original an encoder has, in tokens per second.

    The two take turns, so that other work on the machine slows both.
    """
    encoders = (original, encoder)
    inputs = [compared.tokens(sentences[:_BATCH]) for compared in encoders]
    best = [float("inf")] * 2
    for _ in range(_ROUNDS):
        for place, (ids, mask) in enumerate(inputs):
            started = time.perf_counter()
            encoders[place].run(ids, mask)
            best[place] = min(best[place], (time.perf_counter() - started) / ids.size)
    return best[0] / best[1]


def table_bytes(folder: Path) -> int:
    """Return the bytes of the plain table of the words of a model."""
    model = require("transformers").AutoModel.from_pretrained(folder, local_files_only=True)
    return int(model.get_input_embeddings().weight.nbytes)


@dataclass(frozen=True)
class EncoderTexts:
    """What the models are measured with: sentences, and headlines and descriptions of the same news."""

    captions: list[str]
    headlines: list[str]
    descriptions: list[str]

    def encode(self, encoder: SentenceEncoder, pairs: Path) -> dict[str, np.ndarray]:
        """Return the vectors of all texts, and of all words of the `pairs`, by name."""
        vectors = {name: encoder.encode(sentences) for name, sentences in vars(self).items()}
        return {**vectors, WORDS: encoder.encode(words_of(read_all(pairs)))}


def read_all(pairs: Path) -> list[WordPairs]:
    """Return the sets of pairs in a folder."""
    return [read_pairs(path) for path in sorted(pairs.iterdir())]


def words_of(tests: Sequence[WordPairs]) -> list[str]:
    """Return all words of the sets, each once."""
    pairs = [pair for test in tests for pair in test.pairs]
    return list(dict.fromkeys(word for first, second, _ in pairs for word in (first, second)))


def measure(vectors: Vectors, original: Vectors, tests: Sequence[WordPairs]) -> dict[str, Any]:
    """Return the scores of an encoder by its vectors of `EncoderTexts.encode`, and those of the original.

    Returns:
        ``rho`` by set of word pairs; ``found``, the fraction of headlines whose own description is the
        nearest one; ``top1`` and ``top10``, how many of the nearest neighbors of each caption and headline
        are those of the original; ``correlation``, Spearman's, of the similarities of all pairs of captions
        and headlines with those of the original.
    """
    nearest = (vectors["headlines"] @ vectors["descriptions"].T).argmax(axis=1)
    after, before = (
        similarities(np.concatenate([v["captions"], v["headlines"]])) for v in (vectors, original)
    )
    above = np.triu_indices(len(after), k=1)
    words = words_of(tests)
    return {
        "rho": {test.name: word_similarity(words, vectors[WORDS], test).rho for test in tests},
        "found": float((nearest == np.arange(len(nearest))).mean()),
        "top1": agreement(after, before, 1),
        "top10": agreement(after, before, 10),
        "correlation": spearman(after[above], before[above]),
    }


def similarities(vectors: np.ndarray) -> np.ndarray:
    """Return cosines of vectors of length one ``(N, D)`` with each other ``(N, N)``; -1 with themselves."""
    cosines = vectors @ vectors.T
    np.fill_diagonal(cosines, -1)
    return cosines


def agreement(first: np.ndarray, second: np.ndarray, number: int) -> float:
    """Return the mean fraction of nearest neighbors that two matrices of similarities ``(N, N)`` share."""
    sets = [np.argpartition(-matrix, number - 1, axis=1)[:, :number] for matrix in (first, second)]
    return float(np.mean([len(np.intersect1d(*pair)) / number for pair in zip(*sets, strict=True)]))


def quality_columns(sets: Sequence[str]) -> list[Column]:
    """Return the columns of a table about what `measure` measures, with these sets of word pairs."""

    def rho(name: str, record: Record) -> str:
        value = record["metrics"]["rho"][name]
        return "undefined" if value is None else f"{value:.3f}"

    percent = partial(number, "{:.1f} %", "metrics", factor=100)
    return [
        *(
            Column(f"rho {name.removeprefix('EN-').removesuffix('-ALL')}", partial(rho, name))
            for name in sets
        ),
        Column("headlines found", percent("found")),
        Column("nearest as before", percent("top1")),
        Column("10 nearest as before", percent("top10")),
        Column("correlation", number("{:.4f}", "metrics", "correlation")),
    ]
