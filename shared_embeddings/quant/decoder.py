"""Decodes embeddings with numpy only: tensors of files in few bits, then tables of a few methods.

`shared_embeddings.quant.codec.program` writes this module, with the decoders of codecs, into programs that
need no library. In the library, `shared_embeddings.quant.codec.register` adds those decoders.

Axes: ``V`` vocabulary, ``D`` model dimension, ``n`` rows.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

HEADER = "packed_tensors"
# The bits of a number, in the order in which files number them: the tensor ``codes9`` has rows of half a bit.
RATES = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 0.5, 0.25)
# For each codec a function of codes ``(n, bytes)``, their rate, D, and the options and other tensors by name.
# It returns rows ``(n, D)`` before they are scaled and rotated back.
DECODERS: dict[str, Callable[..., Any]] = {}
# What their tensors of codes are called, before the number of a rate, if not "codes".
CODES: dict[str, str] = {}
# The kinds of numpy's types: of arrays with the codes of each format, and of others.
_CODE_KINDS = {"fp16": "f", "int8": "i", "log8": "u", "bits": "u"}
_INTEGER_KINDS = "ui"
# Options that files leave out.
_DEFAULTS = {"codec": "trellis", "group_size": 32, "directions": ()}
# Rows that are decoded together.
_BLOCK = 2048


def windows(codes: Any, ends: Any, width: Any) -> Any:
    """Numbers ``(n, T)`` of `width` bits, at most 16, before each of `ends` ``(T,)`` in streams ``(n, B)``.

    Bits before the first byte are zero.
    """
    padded = np.pad(codes, ((0, 0), (3, 0))).astype(np.uint32)
    last = (ends - 1) // 8 + 3
    joined = padded[:, last - 2] << 16 | padded[:, last - 1] << 8 | padded[:, last]
    return joined >> (7 - (ends - 1) % 8).astype(np.uint32) & (1 << np.uint32(width)) - 1


def unpacked(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a file as numbers by name; those in few bits are described in the array `HEADER`."""
    numbers = dict(arrays)
    header = numbers.pop(HEADER, None)
    forms = {} if header is None else json.loads(bytes(header))["tensors"]
    for name, form in forms.items():
        codes, scales = numbers[name], numbers.pop(f"{name}.scale", None)
        if codes.dtype.kind != _CODE_KINDS[form["as"]]:
            raise ValueError(f"{name} is of type {codes.dtype}, but stored as {form['as']}")
        if form["as"] == "fp16":
            numbers[name] = codes.astype(np.float32)
        elif form["as"] == "int8":
            numbers[name] = codes.astype(np.float32) * scales
        elif form["as"] == "log8":
            powers = np.exp2((codes.astype(np.float32) - 255) / 16)
            numbers[name] = np.where(codes == 0, 0, powers) * scales
        else:  # integers in bits
            widths, ends = form["widths"], np.cumsum(form["widths"])
            rows = math.prod(form["shape"]) // len(ends)
            bits = np.unpackbits(codes, count=rows * int(ends[-1])).reshape(rows, -1).astype(np.int64)
            columns = [bits[:, end - size : end] @ (1 << np.arange(size)) for end, size in zip(ends, widths)]
            numbers[name] = np.stack(columns, axis=1).reshape(form["shape"])
    return numbers


def decoded_table(
    method: str,
    num_embeddings: int,
    embedding_dim: int,
    options: Mapping[str, Any],
    tensors: Mapping[str, Any],
) -> Any:
    """The table ``(V, D)`` in float32 of an embedding.

    Args:
        method, num_embeddings, embedding_dim, options: as it was built.
        tensors: its numbers by name, see `unpacked`.

    Raises:
        ValueError: this program does not decode the method or codec, or numbers do not belong together.
    """
    if method == "standard":
        return np.asarray(tensors["weight"], np.float32)
    if method == "projective":
        return np.asarray(tensors["codes"], np.float32) @ np.asarray(tensors["basis"], np.float32)
    settings = {**_DEFAULTS, **options}
    decode = DECODERS.get(settings["codec"])
    if method != "quantized" or decode is None:
        name = f"codec {settings['codec']}" if method == "quantized" else f"method {method}"
        raise ValueError(f"embeddings of {name} need shared-embeddings: install it")
    kind = CODES.get(settings["codec"], "codes")
    for name, array in tensors.items():
        kinds = _INTEGER_KINDS if name.startswith((kind, "widths", "signs")) else "f"
        if array.dtype.kind not in kinds:
            raise ValueError(f"{name} is of type {array.dtype}")
    codes = {name: np.asarray(array, np.uint8) for name, array in tensors.items() if name.startswith(kind)}
    numbers = {name: np.asarray(array, np.float32) for name, array in tensors.items() if name not in codes}
    only = int(min(codes).removeprefix(kind)) if codes else 0
    places = numbers.get("widths", np.full(num_embeddings, only))
    scales = numbers["row_scales"] if "row_scales" in numbers else numbers["scales"]
    group = embedding_dim if "row_scales" in numbers else min(settings["group_size"], embedding_dim)
    groups = -(-embedding_dim // group)  # with scales, then offsets, if there are any
    table = np.zeros((num_embeddings, embedding_dim), np.float32)
    if places.shape != (num_embeddings,) or not np.isin(places, range(len(RATES))).all():
        raise ValueError("widths are not those of the words")
    for place, rate in enumerate(RATES):
        words = np.flatnonzero(places == place)
        if not len(words) or (not rate and "center" not in numbers):
            continue  # words without codes are zero
        rows = codes[f"{kind}{place}"] if rate else np.zeros((len(words), 0), np.uint8)
        if len(rows) != len(words):
            raise ValueError(
                f"{len(words)} words have {rate:g} bits by widths, but {len(rows)} by their codes"
            )
        for start in range(0, len(words), _BLOCK):
            ids = words[start : start + _BLOCK]
            decoded = decode(rows[start : start + _BLOCK], rate, embedding_dim, {**settings, **numbers})
            decoded = decoded * np.repeat(scales[ids, :groups], group, axis=1)[:, :embedding_dim]
            if scales.shape[1] > groups:
                decoded = decoded + np.repeat(scales[ids, groups:], group, axis=1)[:, :embedding_dim]
            if "signs" in numbers:
                # Rotated back by small orthogonal matrices along the factors of D, then signs.
                done = 1
                for size in factors_of(embedding_dim):
                    decoded = decoded.reshape(-1, size, embedding_dim // (done * size))
                    decoded = orthogonal(size).T.astype(np.float32) @ decoded
                    done *= size
                decoded = decoded.reshape(-1, embedding_dim) * (1 - 2 * numbers["signs"])
            table[ids] = decoded
    return table


def factors_of(dim: int) -> list[int]:
    """The sizes of the orthogonal matrices for D dimensions: an odd number, then powers of two up to 64,
    ascending. The order of the latter changes nothing, but products along the last axis are fast.
    """
    odd = dim // (dim & -dim)
    rest, factors = dim // odd, [odd] if odd > 1 else []
    sixties = 0
    while rest > 64:
        rest, sixties = rest // 64, sixties + 1
    return factors + [rest] * (rest > 1) + [64] * sixties


@functools.cache
def orthogonal(size: int) -> Any:
    """A Hadamard matrix for a power of two, the cosine transform (DCT-II) otherwise, in float64."""
    if size & (size - 1) == 0:
        matrix = np.ones((1, 1))
        while len(matrix) < size:
            matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        return matrix / math.sqrt(size)
    places = np.arange(size)
    matrix = np.cos(math.pi / size * (places + 0.5) * places[:, None]) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix
