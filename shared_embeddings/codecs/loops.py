"""Loops over packed codes, compiled by numba. `kernels` calls them on tensors.

Arrays: ``n`` rows, ``D`` numbers of a row, ``S`` groups of numbers that share a scale.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

# Rows whose path costs are updated together: two vectors of a CPU with AVX2.
LANES = 16
# Sums that `nearest_sums` keeps in every stage.
BEAM = 4
_FAR = np.float32(1e30)

_compiled = numba.njit(nogil=True, cache=True, fastmath=True, error_model="numpy")


@_compiled
def decode_windows(codes: Any, width: int, first: int, mask: int, book: Any, out: Any) -> None:
    """Entries ``(n, D)`` of `book` for the last bits of a stream, `width` bits further for each number.

    Args:
        codes: the streams, bytes ``(n, B)``.
        width: the bits of a number.
        first: the bits of the first number.
        mask: the states less one.
        book: the entry of each state.
        out: ``(n, D)``, overwritten.
    """
    for row in range(codes.shape[0]):
        stream, unread, place, need = 0, 0, 0, first
        for column in range(out.shape[1]):
            while unread < need:
                stream = (stream << 8 | codes[row, place]) & 0xFFFFFFFF
                place += 1
                unread += 8
            unread -= need
            out[row, column] = book[stream >> unread & mask]
            need = width


@_compiled
def nibble_scores(codes: Any, scales: Any, even: Any, odd: Any, out: Any) -> None:
    """Products of a vector with rows of 4-bit numbers from -8 to 7.

    Args:
        codes: two numbers in a byte, the first one in the high bits, ``(n, D / 2)``.
        scales: ``(n, S)``.
        even: the vector's numbers 0, 2, ..., ``(D / 2,)``.
        odd: the others.
        out: ``(n,)``, overwritten.
    """
    groups, pairs = scales.shape[1], codes.shape[1]
    size = pairs // groups
    # (code - 8) * number = code * number - 8 * number, whose second part is the same for all rows.
    offsets = np.empty(groups, np.float32)
    for group in range(groups):
        offsets[group] = 8 * np.sum(even[group * size : group * size + size])
        offsets[group] += 8 * np.sum(odd[group * size : group * size + size])
    # Without this array the sums over groups keep the products from being vectorized.
    products = np.empty(pairs, np.float32)
    for row in range(codes.shape[0]):
        for pair in range(pairs):
            both = np.int32(codes[row, pair])
            high, low = np.float32(both >> np.int32(4)), np.float32(both & np.int32(15))
            products[pair] = high * even[pair] + low * odd[pair]
        score = np.float32(0.0)
        for group in range(groups):
            part = np.float32(0.0)
            for place in range(size):
                part += products[group * size + place]
            score += scales[row, group] * (part - offsets[group])
        out[row] = score


@_compiled
def byte_scores(codes: Any, scales: Any, vector: Any, out: Any) -> None:
    """Products of a `vector` ``(D,)`` with rows of 8-bit numbers from -128 to 127; as `nibble_scores`."""
    groups = scales.shape[1]
    size = codes.shape[1] // groups
    offsets = np.empty(groups, np.float32)
    for group in range(groups):
        offsets[group] = 128 * np.sum(vector[group * size : group * size + size])
    for row in range(codes.shape[0]):
        score = np.float32(0.0)
        for group in range(groups):
            part = np.float32(0.0)
            for place in range(size):
                column = group * size + place
                part += np.float32(np.int32(codes[row, column])) * vector[column]
            score += scales[row, group] * (part - offsets[group])
        out[row] = score


@_compiled
def nearest_sums(pieces: Any, stages: Any, out: Any) -> None:
    """Codes ``(n, s)`` of sums of entries that are near to pieces ``(n, p)``: a beam search.

    Args:
        pieces: float32.
        stages: the entries ``(s, p, e)`` of every stage, by dimension.
        out: uint8, overwritten.
    """
    count, dim, entries = stages.shape
    norms = np.zeros((count, entries), np.float32)
    for stage in range(count):
        for column in range(dim):
            for entry in range(entries):
                norms[stage, entry] += stages[stage, column, entry] * stages[stage, column, entry]
    left, spare = np.empty((BEAM, dim), np.float32), np.empty((BEAM, dim), np.float32)
    codes, others = np.empty((BEAM, count), np.uint8), np.empty((BEAM, count), np.uint8)
    errors, costs = np.empty(entries, np.float32), np.empty(BEAM, np.float32)
    parents, chosen = np.empty(BEAM, np.int64), np.empty(BEAM, np.int64)
    for row in range(pieces.shape[0]):
        for column in range(dim):
            left[0, column] = pieces[row, column]
        beams = 1
        for stage in range(count):
            kept = 1 if stage == count - 1 else BEAM
            for place in range(kept):
                costs[place] = _FAR
            for beam in range(beams):
                _insert_nearest(
                    left[beam], beam, norms[stage], stages[stage], errors, costs[:kept], parents, chosen
                )
            for place in range(kept):
                for column in range(dim):
                    spare[place, column] = left[parents[place], column] - stages[stage, column, chosen[place]]
                for before in range(stage):
                    others[place, before] = codes[parents[place], before]
                others[place, stage] = chosen[place]
            left, spare, codes, others, beams = spare, left, others, codes, kept
        for stage in range(count):
            out[row, stage] = codes[0, stage]


@_compiled
def _insert_nearest(
    left: Any, beam: int, norms: Any, entries: Any, errors: Any, costs: Any, parents: Any, chosen: Any
) -> None:
    """Insert the entries nearest to what is `left` of a piece into the candidates, ascending by cost."""
    size = np.float32(0.0)
    for column in range(left.shape[0]):
        size += left[column] * left[column]
    for entry in range(norms.shape[0]):
        errors[entry] = norms[entry] + size
    for column in range(left.shape[0]):
        factor = -2 * left[column]
        for entry in range(norms.shape[0]):
            errors[entry] += factor * entries[column, entry]
    last = costs.shape[0] - 1
    for entry in range(norms.shape[0]):
        if errors[entry] < costs[last]:
            place = last
            while place > 0 and errors[entry] < costs[place - 1]:
                costs[place], parents[place] = costs[place - 1], parents[place - 1]
                chosen[place] = chosen[place - 1]
                place -= 1
            costs[place], parents[place], chosen[place] = errors[entry], beam, entry


@_compiled
def nearest_paths(rows: Any, width: int, start: int, book: Any, out: Any) -> None:
    """The states ``(n, D)`` of the path that is nearest to each row, as `trellis.nearest_paths`.

    Args:
        rows: ``(n, D)``, n a multiple of `LANES`.
        width: the bits of a number.
        start: the number of states that a path can begin in.
        book: the entry of each state.
        out: int64 ``(n, D)``, overwritten.
    """
    dim, states = rows.shape[1], book.shape[0]
    lowest = np.empty((dim, states >> width, LANES), np.float32)
    costs, spare = np.empty((states, LANES), np.float32), np.empty((states, LANES), np.float32)
    for begin in range(0, rows.shape[0], LANES):
        columns = np.ascontiguousarray(rows[begin : begin + LANES].T)
        last = _path_costs(columns, width, start, book, lowest, costs, spare)
        _trace(columns, width, start, book, lowest, last, out[begin : begin + LANES])


@_compiled
def _path_costs(columns: Any, width: int, start: int, book: Any, lowest: Any, costs: Any, spare: Any) -> Any:
    """The lowest cost of a path to each state at the end; fills `lowest` with those before each number."""
    heads, tails = book.shape[0] >> width, 1 << width
    best, numbers = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    for state in range(book.shape[0]):
        for lane in range(LANES):
            error = book[state] - columns[0, lane]
            costs[state, lane] = error * error if state < start else _FAR
    for step in range(1, columns.shape[0]):
        for lane in range(LANES):
            numbers[lane] = columns[step, lane]
        for head in range(heads):
            for lane in range(LANES):
                best[lane] = costs[head, lane]
            for before in range(1, tails):
                for lane in range(LANES):
                    cost = costs[before * heads + head, lane]
                    best[lane] = cost if cost < best[lane] else best[lane]
            for lane in range(LANES):
                lowest[step, head, lane] = best[lane]
            for tail in range(tails):
                entry = book[head * tails + tail]
                for lane in range(LANES):
                    error = entry - numbers[lane]
                    spare[head * tails + tail, lane] = best[lane] + error * error
        costs, spare = spare, costs
    return costs


@_compiled
def _trace(columns: Any, width: int, start: int, book: Any, lowest: Any, last: Any, out: Any) -> None:
    """The states of the cheapest paths, from the last to the first; costs on the way are computed again."""
    heads, tails = book.shape[0] >> width, 1 << width
    for lane in range(LANES):
        state = 0
        for other in range(book.shape[0]):
            if last[other, lane] < last[state, lane]:
                state = other
        out[lane, columns.shape[0] - 1] = state
        for step in range(columns.shape[0] - 2, -1, -1):
            head, least = state >> width, 4 * _FAR
            for before in range(tails):
                other = before * heads + head
                error = book[other] - columns[step, lane]
                cost = error * error
                if step > 0:
                    cost += lowest[step, other >> width, lane]
                elif other >= start:
                    cost += _FAR
                if cost < least:
                    least, state = cost, other
            out[lane, step] = state
