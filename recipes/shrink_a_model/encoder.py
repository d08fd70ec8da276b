"""Vectors of sentences, from an encoder in PyTorch or in ONNX Runtime.

Axes: ``N`` sentences, ``B`` batch, ``T`` tokens, ``D`` dimensions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shared_embeddings.hf  # noqa: F401  (registers compressed models with transformers)
from shared_embeddings.utils.extras import require

_BATCH = 32
# Longer sentences are cut, as the configuration of the original for sentence-transformers has it.
_LONGEST = 256
# Runs of which the fastest counts.
_ROUNDS = 5
# What an encoder reads.
_INPUTS = ("input_ids", "attention_mask")
Run = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Encoder:
    """An encoder with its tokenizer.

    Attributes:
        tokenizer: of transformers.
        run: from ids and attention mask ``(B, T)`` to hidden states ``(B, T, D)``.
    """

    tokenizer: Any
    run: Run

    def encode(self, sentences: Sequence[str]) -> np.ndarray:
        """Means of the hidden states of each sentence, of length one ``(N, D)``."""
        order = sorted(range(len(sentences)), key=lambda place: len(sentences[place]))
        found: list[np.ndarray] = []
        for start in range(0, len(order), _BATCH):
            ids, mask = self.tokens([sentences[place] for place in order[start : start + _BATCH]])
            hidden = self.run(ids, mask) * mask[..., None]
            mean = hidden.sum(axis=1) / mask.sum(axis=1, keepdims=True)
            found.extend(mean / np.linalg.norm(mean, axis=1, keepdims=True))
        vectors = np.empty((len(order), len(found[0])), dtype=np.float32)
        vectors[order] = found
        return vectors

    def tokens(self, sentences: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids and attention mask of one batch ``(B, T)``."""
        batch = self.tokenizer(
            list(sentences), padding=True, truncation=True, max_length=_LONGEST, return_tensors="np"
        )
        return batch["input_ids"].astype(np.int64), batch["attention_mask"].astype(np.int64)


def read_encoder(folder: Path) -> Encoder:
    """The model in a folder, compressed or not, in PyTorch."""
    transformers = require("transformers")
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()

    @torch.inference_mode()
    def run(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        output = model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))
        return np.asarray(output.last_hidden_state)

    return Encoder(_tokenizer(folder), run)


def read_onnx(file: Path, folder: Path) -> Encoder | None:
    """The exported model with the tokenizer of its folder; None where the file has its embeddings only."""
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

    return Encoder(_tokenizer(folder), run)


def _tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder."""
    return require("transformers").AutoTokenizer.from_pretrained(folder, local_files_only=True)


def speed_ratio(encoder: Encoder, original: Encoder, sentences: Sequence[str]) -> float:
    """How many times the speed of the original an encoder has, in tokens per second.

    The two take turns, so that other work on the machine slows both.
    """
    ids, mask = original.tokens(sentences[:_BATCH])
    own_ids, own_mask = encoder.tokens(sentences[:_BATCH])
    best: dict[bool, float] = {}
    for _ in range(_ROUNDS):
        for is_own, inputs in ((False, (ids, mask)), (True, (own_ids, own_mask))):
            run = encoder.run if is_own else original.run
            started = time.perf_counter()
            run(*inputs)
            seconds = (time.perf_counter() - started) / inputs[0].size
            best[is_own] = min(best.get(is_own, seconds), seconds)
    return best[False] / best[True]


def table_bytes(folder: Path) -> int:
    """Bytes of the plain table of the words of a model."""
    model = require("transformers").AutoModel.from_pretrained(folder, local_files_only=True)
    return int(model.get_input_embeddings().weight.nbytes)
