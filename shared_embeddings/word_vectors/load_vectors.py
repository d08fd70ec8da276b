"""Reads word vectors that ``shared-embeddings compress`` wrote. Needs numpy only.

    from load_vectors import load
    vectors = load("small.safetensors")
    vectors["word"]

Reads the methods ``quantized``, ``projective`` and ``standard``.

Axes: ``V`` words, ``D`` dimensions.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from shared_embeddings.quant.decoder import decoded_table, unpacked

FORMAT = "shared-embeddings-vectors"
# The types of safetensors for numpy, which has no bfloat16, and for torch.
_TYPES = {
    "F32": ("<f4", "torch.float32"),
    "F16": ("<f2", "torch.float16"),
    "BF16": ("<u2", "torch.bfloat16"),
    "BOOL": ("?", "torch.bool"),
    "I64": ("<i8", "torch.int64"),
    "I32": ("<i4", "torch.int32"),
    "I16": ("<i2", "torch.int16"),
    "I8": ("i1", "torch.int8"),
    "U8": ("u1", "torch.uint8"),
}


class WordVectors:
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
        """The vector ``(D,)`` of a word; KeyError for an unknown one."""
        return np.asarray(self.vectors[self.ids[word]])


def load(path: str | Path) -> WordVectors:
    """Read a file.

    Raises:
        ValueError: the file is damaged, or of another format or method.
    """
    header, tensors = _read(Path(path))
    options = json.loads(header["embedding"])
    words = bytes(tensors.pop("words")).decode("utf-8").split("\n")
    try:
        count, dim = json.loads(header["sizes"])
        table = decoded_table(options.pop("method"), count, dim, options, unpacked(tensors))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return WordVectors(words, table)


def _read(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """The metadata and the tensors of a safetensors file."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    try:
        entries = json.loads(content[8:start])
        metadata = entries.pop("__metadata__")
        if metadata["format"] != FORMAT:
            raise ValueError("no word vectors")
        tensors, digests = {}, dict[str, str | bytes](metadata)
        for name, entry in entries.items():
            first, last = (start + offset for offset in entry["data_offsets"])
            kind, torch_name = _TYPES[entry["dtype"]]
            values = np.frombuffer(content[first:last], kind).reshape(entry["shape"])
            described = f"{torch_name} {values.shape} torch.strided"
            digests[name] = hashlib.sha256(described.encode() + values.tobytes()).digest()
            if entry["dtype"] == "BF16":  # the first half of a number in 32 bits
                values = (values.astype(np.uint32) << 16).view(np.float32)
            tensors[name] = values
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: damaged, or not written by shared-embeddings ({error})") from error
    checksum = digests.pop("checksum", None)  # missing in files of older versions
    if checksum is not None and checksum != _digest(digests):
        raise ValueError(f"{path}: does not match its checksum: it is damaged; copy or create it again")
    return metadata, tensors


def _digest(content: dict[str, str | bytes]) -> str:
    """The SHA-256 of texts and of digests of tensors, as that of the library for the whole file."""
    digest = hashlib.sha256()
    parts = [f"mapping of {len(content)}".encode()]
    for name, value in sorted(content.items()):
        parts += [f"str {name}".encode(), f"str {value}".encode() if isinstance(value, str) else value]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
