"""Reads word vectors that ``shared-embeddings compress`` wrote. Needs numpy only.

    from load_vectors import load
    vectors = load("small.safetensors")
    vectors["word"]

Reads the method ``quantized`` with codec ``principal``, and ``standard``, stored as fp16 or fp32.

Axes: ``V`` words, ``D`` dimensions.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

FORMAT = "shared-embeddings-vectors"
_TYPES = {"F32": "<f4", "F16": "<f2", "U8": "u1"}
_NAMES = {"float32": "torch.float32", "float16": "torch.float16", "uint8": "torch.uint8"}
_BLOCK = 4096


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
    settings = json.loads(header.get("embedding", "{}"))
    words = bytes(tensors.pop("words")).decode("utf-8").split("\n")
    if settings.get("method") == "standard" and tensors["weight"].dtype != np.uint8:
        return WordVectors(words, tensors["weight"].astype(np.float32))
    is_principal = settings.get("codec") == "principal" and tensors["basis"].dtype != np.uint8
    if not is_principal:
        raise ValueError(f"{path}: needs shared_embeddings: not of codec principal in fp16 or fp32")
    return WordVectors(words, _decoded(len(words), settings, tensors))


def _read(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """The metadata and the tensors of a safetensors file."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    try:
        entries = json.loads(content[8:start])
        metadata = entries.pop("__metadata__")
        if metadata["format"] != FORMAT:
            raise ValueError("no word vectors")
        tensors = {}
        for name, entry in entries.items():
            first, last = (start + offset for offset in entry["data_offsets"])
            values = np.frombuffer(content[first:last], _TYPES[entry["dtype"]])
            tensors[name] = values.reshape(entry["shape"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: damaged, or not written by shared-embeddings ({error})") from error
    checksum = metadata.pop("checksum", None)  # missing in files of older versions
    if checksum is not None and checksum != _digest({**tensors, **metadata}):
        raise ValueError(f"{path}: does not match its checksum: it is damaged; copy or create it again")
    return metadata, tensors


def _digest(content: dict[str, str | np.ndarray]) -> str:
    """The SHA-256 of texts and tensors, as ``shared_embeddings.checkpoints.checksums.state_digest``."""
    digest = hashlib.sha256()
    parts = [f"mapping of {len(content)}".encode()]
    for name in sorted(content):
        value = content[name]
        if isinstance(value, str):
            own = f"str {value}".encode()
        else:
            kind = f"{_NAMES[value.dtype.name]} {value.shape} torch.strided"
            own = hashlib.sha256(kind.encode() + value.tobytes()).digest()
        parts += [f"str {name}".encode(), own]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _decoded(count: int, settings: dict[str, list[int]], tensors: dict[str, np.ndarray]) -> np.ndarray:
    """The vectors ``(V, D)`` of codec principal."""
    basis, spread, levels = (tensors[name].astype(np.float32) for name in ("basis", "spread", "levels"))
    widths = _widths(count, settings, tensors)
    vectors = np.tile(basis[0], (count, 1))
    for width in range(1, 9):
        ids = np.flatnonzero(widths == width)
        layout = settings["directions"][9 * width - 9 : 9 * width]
        for first in range(0, len(ids), _BLOCK):
            codes = tensors[f"codes{width}"][first : first + _BLOCK]
            factors = _factors(codes, layout, levels)
            rank = factors.shape[1]
            vectors[ids[first : first + _BLOCK]] += (factors * spread[width - 1, :rank]) @ basis[1 : 1 + rank]
    return vectors


def _factors(codes: np.ndarray, layout: list[int], levels: np.ndarray) -> np.ndarray:
    """The factors ``(n, R)`` of codes; the directions with the most bits come first."""
    stream, start, parts = np.unpackbits(codes, axis=1), 0, []
    for bits in range(8, 0, -1):
        end = start + bits * layout[bits]
        fields = stream[:, start:end].reshape(len(codes), layout[bits], bits)
        numbers = fields @ (1 << np.arange(bits - 1, -1, -1))
        # Those of 1 bit come first, then those of 2 bits and so on.
        parts.append(levels[numbers + 2**bits - 2])
        start = end
    return np.concatenate(parts, axis=1)


def _widths(count: int, settings: dict[str, list[int]], tensors: dict[str, np.ndarray]) -> np.ndarray:
    """The width ``(V,)`` of every word."""
    if "widths" not in tensors:
        return np.full(count, int(np.argmax(settings["words_per_width"])))
    header = json.loads(bytes(tensors["packed_tensors"]))["tensors"] if "packed_tensors" in tensors else {}
    if "widths" not in header:
        return tensors["widths"]
    (width,) = header["widths"]["widths"]
    bits = np.unpackbits(tensors["widths"], count=count * width).reshape(count, width)
    return bits @ (1 << np.arange(width))
