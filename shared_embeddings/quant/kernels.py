"""Compiled loops over packed codes on a CPU, which replace operations of torch where numba is installed.

Results agree with the operations up to rounding. Loops use as many threads as the operations of torch.

Axes: ``n`` rows, ``N`` tokens, ``D`` numbers of a row, ``S`` groups of numbers that share a scale.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# The most pairs of a run in a `LanePlan`, with coarse and with fine entries: their sums fit into 32 bits.
LANE_PAIRS = (256, 40)
_NO_SIGNS, _NO_MATRIX = np.empty(0, np.uint8), np.empty((0, 0), np.float32)
_HAS_NUMBA = importlib.util.find_spec("numba") is not None
# Numbers that are worth another thread.
_NUMBERS_PER_THREAD = 2**17


def usable(*tensors: Tensor) -> bool:
    """Whether the loops can replace operations on these tensors: on a CPU, without gradients or compilers."""
    if torch.compiler.is_compiling() or not _HAS_NUMBA:
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    # Fake tensors and other subclasses have no memory that a loop can read.
    return all(type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" for tensor in tensors)


class LanePlan(NamedTuple):
    """How vectors of rows are decoded: numbers in pairs, in runs of pairs whose factors are equal. Arrays.

    A number is found by its state, the last bits of a window of 16. Its product with a factor has a hash
    in its upper bits. A coarse entry is the sum of those for the upper and lower half of 8 bits; a fine entry
    is on a line, whose number 4 bits of the hash are.
    """

    places: Any  # of the words, each with 16 bits of a row, that the window of a pair begins in ``(P,)``
    shifts: Any  # the bits of that word before the window ``(P,)``
    bounds: Any  # the first pair of each run, and the number of pairs ``(R + 1,)``
    factors: Any  # of first and second numbers, bits between these, whether entries are fine ``(R, 4)``
    tables: Any  # bytes ``(4, 16)``: of halves of coarse entries; starts and slopes of lines
    columns: Any  # of both numbers of a pair ``(P, 2)``; -1 for no second one
    unit: float  # the size of one in `tables`


@functools.cache
def plain(dim: int) -> tuple[Any, Any]:
    """Sizes ``(D,)`` of one and a center ``(D,)`` of zero, for `decode_rows`."""
    return np.ones(dim, np.float32), np.zeros(dim, np.float32)


class EntryPlan(NamedTuple):
    """Where codes of the first numbers ``(D',)`` of a row are in its stream, and all entries. Arrays."""

    # Of each run of equally spaced codes ``(R, 7)``: the first column, the distance of columns, the number of
    # codes; the bit after the first code, the distance of codes, the entry of code 0; and how many codes 64
    # bits have if the first one begins in their first byte.
    runs: Any
    width: int  # the bits of a code
    book: Any  # all entries

    @classmethod
    def of(cls, runs: Sequence[tuple[int, ...]], width: int, book: Any) -> EntryPlan:
        """A plan for codes with so many bits; runs are what comes first in `runs`."""
        complete = [(*run, 1 + (64 - 7 - width) // max(1, run[4])) for run in runs]
        return cls(np.array(complete, np.int64).reshape(-1, 7), width, book)


def decode_rows(
    codes: Tensor,
    scales: Tensor,
    plan: EntryPlan,
    sizes: Any,
    center: Any,
    ids: Tensor | None = None,
    rotation: tuple[Tensor, Any] | None = None,
) -> Tensor:
    """Rows ``(n, D)`` from streams of bytes ``(V, B)``, ``(entries * sizes + center) * scales`` rotated back.

    Args:
        codes, plan: numbers without a code have an entry of 0.
        scales: ``(n, 1)``.
        sizes, center: ``(D,)``.
        ids: which of the streams to read, ``(n,)``; by default all.
        rotation: the signs ``(D,)`` and the matrix ``(d, d)`` along the axis of the largest odd factor of D
            of `shared_embeddings.modules.quantized.rotate`; by default none.
    """
    out = torch.empty(len(scales), len(sizes))
    ids = torch.arange(len(codes)) if ids is None else ids.long()
    signs, matrix = rotation or (_NO_SIGNS, _NO_MATRIX)
    _run("decode_rows", len(sizes), [ids, scales], [codes, tuple(plan), sizes, center, signs, matrix], out)
    return out.to(scales.dtype)


def rotate_back(rows: Tensor, rotation: tuple[Tensor, Any]) -> Tensor:
    """Rows ``(n, D)`` before the rotation."""
    out = torch.empty(rows.shape)
    _run("rotate_back", rows.size(1), [rows], list(rotation), out)
    return out.to(rows.dtype)


def lane_scores(hidden: Tensor, codes: Tensor, scales: Tensor, plan: LanePlan) -> Tensor:
    """Products ``(N, n)`` of states ``(N, D)``, which are rounded to 16 bits, with entries of rows times
    `scales` ``(n, 1)``.
    """
    out = torch.empty(len(hidden), len(codes))
    _run("lane_scores", len(plan.places), [codes, scales], [tuple(plan), hidden], out.t())
    return out.to(hidden.dtype)


def field_scores(stream: Tensor, widths: Sequence[int], count: int, tables: Tensor) -> Tensor:
    """Sums ``(N, n)`` over the integers of rows, from what each of them adds.

    Args:
        stream: the bytes of all rows without gaps, lowest bit first.
        widths: the bits of each integer of a row.
        count: n.
        tables: for every token and integer of a row, what its values add, ``(N, T, K)``.
    """
    out = torch.empty(len(tables), count)
    others = [stream, torch.tensor(widths), tables]
    _run("field_scores", len(widths), [torch.arange(count)], others, out.t())
    return out.to(tables.dtype)


def uniform_scores(
    hidden: Tensor, codes: Tensor, width: int, zero: float, scales: Tensor, group_size: int
) -> Tensor:
    """Products ``(N, n)`` of hidden states ``(N, D)`` with rows of evenly spaced levels.

    Args:
        hidden: floats.
        codes: bytes of rows, the first number of a byte in its high bits.
        width: the bits of a number, at most 8.
        zero: the code of the number 0.
        scales: of groups ``(n, S)``.
        group_size: the numbers of a group, a multiple of 8; the last one may have fewer.
    """
    out, dim = torch.empty(len(hidden), len(codes)), hidden.size(1)
    if len(hidden) == 1 and 8 % width == 0 and dim % group_size == 0:  # all groups are as many whole bytes
        states, offsets = hidden.reshape(-1, 8 // width), zero * hidden.reshape(-1, group_size).sum(dim=1)
        _run("code_scores", dim, [codes, scales], [width, states.t().flip(0), offsets], out[0])
        return out.to(hidden.dtype)
    states = F.pad(hidden, (0, -dim % 8)).unflatten(1, (-1, 8)).transpose(1, 2).flatten(1)
    _run("level_scores", 2 * dim, [codes, scales], [width, zero, group_size // 8, states], out.t())
    return out.to(hidden.dtype)


def nearest_paths(
    rows: Tensor,
    steps: Sequence[tuple[int, int, int]],
    weights: Tensor,
    starts: Tensor,
    count: int,
    books: Tensor,
) -> Tensor:
    """The states ``(n, T)`` of the nearest path to each row, among those that begin in some states.

    Args:
        rows: ``(n, D)``.
        steps: for each state, the bits between it and the one before, how many numbers it gives, and the book
            of the first one.
        weights: of the squared errors of the numbers ``(D,)``.
        starts: the first state ``(n,)`` that a path can begin in.
        count: the number of these states.
        books: entries of all states; numbers that share a state have consecutive books.
    """
    out = torch.empty(len(rows), len(steps), dtype=torch.long)
    others = [torch.tensor(steps).t(), weights, count, books]
    _run("nearest_paths", rows.size(1) * books.size(1), [rows, starts], others, out)
    return out


def nearest_codes(
    rows: Tensor, bits: int, books: Tensor, factor: float, largest: int, row_bytes: int
) -> Tensor:
    """The codes ``(n, row_bytes)`` of the nearest path to each row, whose numbers all have one rate.

    Numbers are rounded to words, and costs to words less the lowest one of the step before: results are the
    same on all processors with vector instructions for words.

    Args:
        rows: ``(n, D)`` at the size of entries.
        bits: between a state and the one before.
        books: the entries of all states, a row for each of the numbers that share a state.
        factor: that of all numbers before they are rounded; it makes entries whole numbers.
        largest: the largest number after that; larger ones are replaced by it.
    """
    out = torch.empty(len(rows), row_bytes, dtype=torch.uint8)
    search = ("nearest_codes", bits, len(books))
    _run(search, rows.size(1) * books.size(1), [rows], [factor, largest, books], out)
    return out


def _run(
    loop: str | tuple[Any, ...], cost: int, rows: Sequence[Tensor], others: Sequence[Any], out: Tensor
) -> None:
    """Run a loop of `shared_embeddings.quant.loops`, in threads for parts of the rows.

    The loop is named, or returned by a function whose name and arguments are given.
    Its arguments are the tensors `rows`, with an axis of rows as `out` has, then `others`; the cost is the
    operations of a row.
    """
    # numba takes most of a second to import.
    loops = importlib.import_module("shared_embeddings.quant.loops")
    name, *constants = (loop,) if isinstance(loop, str) else loop
    run = getattr(loops, name)(*constants) if constants else getattr(loops, name)
    arrays: list[Any] = []
    for value in (*rows, *others):
        if isinstance(value, Tensor):  # in memory as they are indexed, real numbers in 32 bits
            value = value.float() if value.is_floating_point() else value
            value = value.contiguous().numpy(force=True)
        arrays.append(value)
    target, count = out.numpy(), len(out)
    threads = max(1, min(torch.get_num_threads(), count, count * cost // _NUMBERS_PER_THREAD))
    if threads == 1:
        run(*arrays, target)
        return

    def work(chosen: slice) -> None:
        by_row = [array[chosen] for array in arrays[: len(rows)]]
        run(*by_row, *arrays[len(rows) :], target[chosen])

    bounds = [count * thread // threads for thread in range(threads + 1)]
    # A pool that lives longer would be unusable in processes that are forked later.
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, map(slice, bounds, bounds[1:])))
