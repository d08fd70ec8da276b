"""Compiled loops over packed codes on a CPU, which replace operations of torch where numba is installed.

Results agree with the operations up to rounding. Loops use as many threads as the operations of torch.

Axes: ``n`` rows, ``N`` tokens, ``D`` numbers of a row, ``S`` groups of numbers that share a scale.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

# Numbers that are worth another thread.
_NUMBERS_PER_THREAD = 2**17


def usable(*tensors: Tensor) -> bool:
    """Whether the loops can replace operations on these tensors: on a CPU, without gradients or compilers."""
    if torch.compiler.is_compiling() or not _has_numba():
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    # Fake tensors and other subclasses have no memory that a loop can read.
    return all(type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" for tensor in tensors)


def decode_windows(codes: Tensor, count: int, width: int, first: int, book: Tensor) -> Tensor:
    """Entries ``(n, count)`` of `book` ``(2**b,)`` for the last b bits of a stream at each number.

    Args:
        codes: streams, bytes ``(n, B)``.
        count: the numbers of a row.
        width: the bits of a number.
        first: the bits of the first number, `width` or 8.
        book: floats.
    """
    out = torch.empty(len(codes), count)
    streams, entries, values = _array(codes), _array(book.float()), out.numpy()

    def decode(rows: slice) -> None:
        _loops().decode_windows(streams[rows], width, first, len(entries) - 1, entries, values[rows])

    _in_threads(decode, len(codes), count)
    return out.to(book.dtype)


def window_scores(
    hidden: Tensor, codes: Tensor, width: int, first: int, book: Tensor, scales: Tensor
) -> Tensor:
    """Products ``(N, n)`` of hidden states ``(N, D)`` with rows as in `decode_windows`, times `scales`."""
    out = torch.empty(len(hidden), len(codes))
    streams, entries, states = _array(codes), _array(book.float()), _array(hidden.float())
    factors, products = _array(scales.float().squeeze(1)), out.numpy()

    def score(rows: slice) -> None:
        mask = len(entries) - 1
        _loops().window_scores(
            streams[rows], width, first, mask, entries, factors[rows], states, products[:, rows]
        )

    _in_threads(score, len(codes), hidden.size(1))
    return out.to(hidden.dtype)


def table_scores(codes: Tensor, tables: Tensor, scales: Tensor) -> Tensor:
    """Products ``(N, n)`` of hidden states with rows, from what each byte of a row adds to them.

    Args:
        codes: bytes ``(n, B)``.
        tables: for every hidden state and place, what the 256 bytes add, ``(N, B, 256)``.
        scales: of a row or of groups of as many bytes, ``(n, S)``.
    """
    out = torch.empty(len(tables), len(codes))
    numbers, factors = _array(codes), _array(scales.float())
    for table, row in zip(_array(tables.float()), out.numpy()):

        def score(rows: slice, row: Any = row, table: Any = table) -> None:
            _loops().table_scores(numbers[rows], table, factors[rows], row[rows])

        _in_threads(score, len(codes), codes.size(1))
    return out.to(tables.dtype)


def field_scores(stream: Tensor, widths: Sequence[int], count: int, tables: Tensor) -> Tensor:
    """Sums ``(N, n)`` over the integers of rows, from what each of them adds.

    Args:
        stream: the bytes of all rows without gaps, lowest bit first.
        widths: the bits of each integer of a row.
        count: n.
        tables: for every token and integer of a row, what its values add, ``(N, T, K)``.
    """
    out = torch.empty(len(tables), count)
    numbers, entries, sums = _array(stream), _array(tables.float()), out.numpy()
    bits = _array(torch.tensor(widths))

    def score(rows: slice) -> None:
        _loops().field_scores(numbers, bits, rows.start, entries, sums[:, rows])

    _in_threads(score, count, len(widths))
    return out.to(tables.dtype)


def uniform_scores(hidden: Tensor, codes: Tensor, width: int, scales: Tensor) -> Tensor:
    """Products ``(N, n)`` of hidden states ``(N, D)`` with rows of evenly spaced levels in whole groups.

    Args:
        hidden: floats.
        codes: bytes ``(n, D * width / 8)``.
        width: 4 or 8 bits.
        scales: ``(n, S)``.
    """
    out = torch.empty(len(hidden), len(codes))
    numbers, factors = _array(codes), _array(scales.float())
    for state, row in zip(hidden.float(), out.numpy()):
        parts = [_array(state[0::2]), _array(state[1::2])] if width == 4 else [_array(state)]
        loop = _loops().nibble_scores if width == 4 else _loops().byte_scores

        def score(rows: slice, row: Any = row, parts: Any = parts, loop: Any = loop) -> None:
            loop(numbers[rows], factors[rows], *parts, row[rows])

        _in_threads(score, len(codes), hidden.size(1))
    return out.to(hidden.dtype)


def nearest_sums(pieces: Tensor, stages: Tensor) -> Tensor:
    """Codes ``(n, s)`` of sums of entries that are near to pieces, by a beam search.

    Args:
        pieces: ``(n, p)``.
        stages: the entries of every stage ``(s, 256, p)``.
    """
    out = torch.empty(len(pieces), len(stages), dtype=torch.uint8)
    numbers, entries, codes = _array(pieces.float()), _array(stages.float().transpose(1, 2)), out.numpy()

    def find(rows: slice) -> None:
        _loops().nearest_sums(numbers[rows], entries, codes[rows])

    _in_threads(find, len(pieces), stages.numel())
    return out


def decode_fields(codes: Tensor, ends: Tensor, numbers: Tensor, books: Tensor) -> Tensor:
    """Entries ``(n, D)`` of codebooks for the last b bits of a stream at each number.

    Args:
        codes: streams, bytes ``(n, B)``.
        ends: the bits up to the end of each number ``(D,)``.
        numbers: the codebook of each number ``(D,)``.
        books: floats ``(m, 2**b)``.
    """
    out = torch.empty(len(codes), len(ends))
    streams, places, offsets = _array(codes), _array(ends), _array(numbers * books.size(1))
    entries, values = _array(books.float().flatten()), out.numpy()

    def decode(rows: slice) -> None:
        _loops().decode_fields(streams[rows], places, offsets, books.size(1) - 1, entries, values[rows])

    _in_threads(decode, len(codes), len(ends))
    return out.to(books.dtype)


def path_scores(
    hidden: Tensor, codes: Tensor, ends: Tensor, numbers: Tensor, books: Tensor, scales: Tensor
) -> Tensor:
    """Products ``(N, n)`` of hidden states ``(N, D)`` with rows as in `decode_fields`, times `scales`."""
    out = torch.empty(len(hidden), len(codes))
    streams, places, offsets = _array(codes), _array(ends), _array(numbers * books.size(1))
    entries, states = _array(books.float().flatten()), _array(hidden.float())
    factors, products = _array(scales.float().squeeze(1)), out.numpy()

    def score(rows: slice) -> None:
        mask = books.size(1) - 1
        _loops().path_scores(
            streams[rows], places, offsets, mask, entries, factors[rows], states, products[:, rows]
        )

    _in_threads(score, len(codes), hidden.size(1))
    return out.to(hidden.dtype)


def nearest_paths(
    rows: Tensor, steps: Sequence[tuple[int, int]], weights: Tensor, start: int, books: Tensor
) -> Tensor:
    """The states ``(n, T)`` of the nearest path to each row, among those that begin in the first states.

    Args:
        rows: ``(n, D)``.
        steps: for each state, the bits between it and the one before, and how many numbers it gives.
        weights: of the squared errors of the numbers ``(D,)``.
        start: the number of states that a path can begin in.
        books: the entry of each state, for the first, second, ... number that it gives.
    """
    out = torch.empty(len(rows), len(steps), dtype=torch.long)
    numbers, entries, states = _array(rows.float()), _array(books.float()), out.numpy()
    bits, sizes = _array(torch.tensor(steps)).T
    factors = _array(weights.float())

    def find(some: slice) -> None:
        _loops().nearest_paths(numbers[some], bits, sizes, factors, start, entries, states[some])

    _in_threads(find, len(rows), rows.size(1) * entries.shape[1])
    return out


@functools.cache
def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


@functools.cache
def _loops() -> Any:
    """The compiled loops; numba takes most of a second to import."""
    return importlib.import_module("shared_embeddings.quant.loops")


def _array(tensor: Tensor) -> Any:
    """The numbers of a tensor in memory as they are indexed."""
    return tensor.detach().contiguous().numpy()


def _in_threads(work: Callable[[slice], None], count: int, cost: int) -> None:
    """Call `work` for slices of `count` rows, each of which takes `cost` operations."""
    threads = max(1, min(torch.get_num_threads(), count, count * cost // _NUMBERS_PER_THREAD))
    bounds = [count * thread // threads for thread in range(threads + 1)]
    slices = [slice(start, stop) for start, stop in zip(bounds, bounds[1:])]
    if threads == 1:
        work(slices[0])
        return
    # A pool that lives longer would be unusable in processes that are forked later.
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, slices))
