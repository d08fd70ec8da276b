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

FORMAT = "shared-embeddings-vectors"
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
    start = 8 + int.from_bytes(content[:8], "little")
    try:
        entries = json.loads(content[8:start])
        metadata, tensors = entries.pop("__metadata__"), {}
        if metadata["format"] != FORMAT:
            raise ValueError("no word vectors")
        for name, entry in entries.items():
            first, last = (start + offset for offset in entry["data_offsets"])
            values = np.frombuffer(content[first:last], _TYPES[entry["dtype"]]).reshape(entry["shape"])
            if entry["dtype"] == "BF16":  # the first half of a number in 32 bits
                values = (values.astype(np.uint32) << 16).view(np.float32)
            tensors[name] = values
        words = bytes(tensors.pop("words")).decode("utf-8").split("\n")
        options, (count, dim) = json.loads(metadata["embedding"]), json.loads(metadata["sizes"])
        table = decoded_table(options.pop("method"), count, dim, options, unpacked(tensors))
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path}: damaged, or not written by shared-embeddings ({error})") from error
    return LoadedVectors(words, table)
