"""Reads word vectors that ``shared-embeddings compress`` wrote. Needs numpy only.

    from load_vectors import load
    vectors = load("small.safetensors")
    vectors["word"]

Reads the methods ``quantized``, ``projective`` and ``standard``.

Axes: ``V`` words, ``D`` dimensions.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from shared_embeddings.quant.decoder import decoded_table, unpacked

FORMAT, VERSION = "shared-embeddings-vectors", "1"
# Tensors ``(V,)`` of tables whose rows several words share: the row of each word, and its factor.
EXTRAS = ("word_rows", "word_factors")
# The types of safetensors for numpy, which has no bfloat16.
_TYPES = {
    **{"F32": "<f4", "F16": "<f2", "BF16": "<u2", "BOOL": "?"},
    **{"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"},
}


class LoadedVectors:
    """Words and their vectors.

    Attributes:
        words: V words.
        vectors: ``(V, D)`` float32.
        ids: word -> row.
    """

    def __init__(self, words: list[str], vectors: np.ndarray) -> None:
        self.words = words
        self.vectors = vectors
        self.ids = {word: row for row, word in enumerate(words)}

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self.ids

    def __getitem__(self, word: str) -> np.ndarray:
        """Return the vector ``(D,)`` of a word; KeyError for an unknown one."""
        return np.asarray(self.vectors[self.ids[word]])


def load(path: str | Path) -> LoadedVectors:
    """Read a file.

    Raises:
        ValueError: the file is damaged, or of another format or method.
    """
    content = Path(path).read_bytes()
    try:
        return _read(content)
    except Exception as error:  # what a changed byte breaks is of any kind
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: damaged, or not written by shared-embeddings ({reason})") from error


def _read(content: bytes) -> LoadedVectors:
    start = 8 + int.from_bytes(content[:8], "little")
    entries = json.loads(content[8:start])
    metadata, tensors = entries.pop("__metadata__"), {}
    if (metadata["format"], metadata["version"]) != (FORMAT, VERSION):
        raise ValueError(f"{metadata['format']} {metadata['version']}, but this reads {FORMAT} {VERSION}")
    for name, entry in entries.items():
        first, last = (start + offset for offset in entry["data_offsets"])
        values = np.frombuffer(content[first:last], _TYPES[entry["dtype"]]).reshape(entry["shape"])
        if entry["dtype"] == "BF16":  # the first half of a number in 32 bits
            values = (values.astype(np.uint32) << 16).view(np.float32)
        tensors[name] = values
    words = bytes(tensors.pop("words")).decode("utf-8").split("\n")
    options, (count, dim) = json.loads(metadata["embedding"]), json.loads(metadata["sizes"])
    rows, factors = (tensors.pop(name, None) for name in EXTRAS)
    # Before memory is taken for them: every dimension has a number of at least a quarter of a bit.
    if len(words) != (count if rows is None else len(rows)) or not 0 < dim <= 32 * len(content):
        raise ValueError(f"{len(words)} words for {count} vectors of {dim} dimensions")
    table = decoded_table(options.pop("method"), count, dim, options, unpacked(tensors))
    if table.shape != (count, dim) or not np.isfinite(table).all():
        raise ValueError(f"numbers of {table.shape} that are not finite, or not {count} x {dim}")
    if rows is not None:
        table = table[rows]
    if factors is not None:
        table = table * factors[:, None].astype(np.float32)
    return LoadedVectors(words, table)
