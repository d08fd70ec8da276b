"""Loops over packed codes, compiled by numba. `shared_embeddings.quant.kernels` calls and describes them.

The last argument is overwritten; its first axis is that of the rows.

Arrays: ``n`` rows, ``N`` tokens, ``D`` numbers of a row.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np

from shared_embeddings.quant import lanes

_FAR = np.float32(1e30)
# A cost in words that is too high for a path, and the most that a step may add to one.
_HIGH = 2**15
_STATES, _START_BITS = 2**11, 8  # constants of `shared_embeddings.quant.codecs.trellis`

_compiled = numba.njit(nogil=True, cache=True, fastmath=True, error_model="numpy")


@_compiled
def code_scores(codes: Any, scales: Any, width: int, states: Any, offsets: Any, out: Any) -> None:
    """Products ``(n,)`` of one vector with rows of evenly spaced levels, code minus zero point.

    A byte has fields of `width` bits; what multiplies them is in `states` ``(8 / width, B)``, the lowest bits
    first, and what the zero points of a group add up to in `offsets` ``(S,)``.
    """
    groups, mask = scales.shape[1], np.int32((1 << width) - 1)
    size = codes.shape[1] // groups
    # Without this array the sums over groups keep the products from being vectorized.
    products = np.empty(codes.shape[1], np.float32)
    for row in range(codes.shape[0]):
        for place in range(codes.shape[1]):
            products[place] = np.float32(np.int32(codes[row, place]) & mask) * states[0, place]
        for field in range(1, states.shape[0]):
            shift = np.int32(width * field)
            for place in range(codes.shape[1]):
                code = np.int32(codes[row, place]) >> shift & mask
                products[place] += np.float32(code) * states[field, place]
        score = np.float32(0.0)
        for group in range(groups):
            part = np.float32(0.0)
            for place in range(size):
                part += products[group * size + place]
            score += scales[row, group] * (part - offsets[group])
        out[row] = score


@_compiled
def level_scores(codes: Any, scales: Any, width: int, zero: float, size: int, hidden: Any, out: Any) -> None:
    """Products ``(n, N)`` of vectors ``(N, D)`` with rows of evenly spaced levels, each decoded once.

    Eight consecutive numbers, which take `width` bytes, share a scale, like the next `size - 1` eights.
    Vectors have the first numbers of all eights, then the second ones; what a row lacks is 0 in them.
    """
    eights, mask, middle = hidden.shape[1] // 8, np.int32((1 << width) - 1), np.float32(zero)
    stream = np.zeros(codes.shape[1] + 8 + width, np.uint8)
    bits, factors = np.empty(eights, np.uint64), np.empty(eights, np.float32)
    levels = np.empty(hidden.shape[1], np.float32)
    for row in range(codes.shape[0]):
        for place in range(codes.shape[1]):
            stream[place] = codes[row, place]
        for eight in range(eights):
            bits[eight] = lanes.load_bswap(stream, eight * width)
        for group in range(scales.shape[1]):
            factors[group * size : (group + 1) * size] = scales[row, group]
        for field in range(8):
            shift = np.uint64(64 - width * (field + 1))
            of_field = levels[field * eights : (field + 1) * eights]
            for eight in range(eights):
                code = np.int32(bits[eight] >> shift) & mask
                of_field[eight] = (np.float32(code) - middle) * factors[eight]
        for token in range(hidden.shape[0]):
            score = np.float32(0.0)
            for column in range(levels.shape[0]):
                score += levels[column] * hidden[token, column]
            out[row, token] = score


@_compiled
def field_scores(rows: Any, stream: Any, widths: Any, tables: Any, out: Any) -> None:
    """Sums ``(n, N)`` over the fields of consecutive `rows` of integers, with a table for each field."""
    bit = rows[0] * np.sum(widths)
    place, unread = bit // 8, -(bit % 8)
    buffer = np.uint64(0)
    for row in range(out.shape[0]):
        out[row] = 0.0
        for field in range(widths.shape[0]):
            while unread < widths[field]:
                # The bits before the first row are shifted out.
                byte = np.uint64(stream[place])
                buffer |= byte << np.uint64(unread) if unread >= 0 else byte >> np.uint64(-unread)
                place += 1
                unread += 8
            code = buffer & ((np.uint64(1) << np.uint64(widths[field])) - np.uint64(1))
            buffer >>= np.uint64(widths[field])
            unread -= widths[field]
            for token in range(out.shape[1]):
                out[row, token] += tables[token, field, code]


@_compiled
def decode_rows(
    ids: Any, scales: Any, codes: Any, plan: Any, sizes: Any, center: Any, signs: Any, matrix: Any, out: Any
) -> None:
    """`kernels.decode_rows`; two zeros precede the bytes of a row."""
    runs, width, book = plan
    mask = np.uint64((1 << width) - 1)
    stream, entries = np.zeros(codes.shape[1] + 10, np.uint8), np.zeros(out.shape[1], np.float32)
    signed, mixed = _signed(signs, matrix), np.empty(out.shape[1], np.float32)
    for row in range(ids.shape[0]):
        word = ids[row]
        for place in range(codes.shape[1]):
            stream[place + 2] = codes[word, place]
        for run in range(runs.shape[0]):
            # Unsigned numbers save tests for negative places.
            column, step, start = np.uint64(runs[run, 0]), np.uint64(runs[run, 1]), np.uint64(runs[run, 5])
            left, end, stride, at_once = runs[run, 2], runs[run, 3], runs[run, 4], runs[run, 6]
            while left > 0:
                bit = end - width + 16
                window, shift = lanes.load_bswap(stream, bit >> 3), 64 - width - (bit & 7)
                for _ in range(min(at_once, left)):
                    entries[column] = book[start + (window >> np.uint64(shift) & mask)]
                    column += step
                    shift -= stride
                end += stride * at_once
                left -= at_once
        scale = scales[row, 0]
        for place in range(out.shape[1]):
            out[row, place] = (entries[place] * sizes[place] + center[place]) * scale
        if signs.shape[0]:
            _rotate_back(out[row], signed, matrix, mixed)


@_compiled
def rotate_back(rows: Any, signs: Any, matrix: Any, out: Any) -> None:
    """`kernels.rotate_back`."""
    signed, mixed = _signed(signs, matrix), np.empty(out.shape[1], np.float32)
    for row in range(rows.shape[0]):
        out[row] = rows[row]
        _rotate_back(out[row], signed, matrix, mixed)


@_compiled
def _signed(signs: Any, matrix: Any) -> Any:
    """What numbers are multiplied with after Hadamard matrices of ones: the inverse of their norm, signed."""
    signed = np.full(signs.shape[0], np.sqrt(matrix.shape[0] / max(1, signs.shape[0])), np.float32)
    for place in range(signs.shape[0]):
        signed[place] *= -1 if signs[place] else 1
    return signed


@_compiled
def _rotate_back(values: Any, signed: Any, matrix: Any, mixed: Any) -> None:
    """Multiply numbers with the inverse of a matrix along an axis of parts of 2**i numbers, then each part
    with a Hadamard matrix of ones, then with those of `_signed`.
    """
    width, dim, count = lanes.FLOATS, values.shape[0], matrix.shape[0]
    size, factors = dim // count, matrix.reshape(-1)
    distance = 1
    for part in range(count):
        if size < width:
            for place in range(size):
                mixed[part * size + place] = 0.0
                for other in range(count):
                    mixed[part * size + place] += matrix[other, part] * values[other * size + place]
            continue
        for place in range(0, size, width):
            sums = lanes.zero_floats()
            for other in range(count):
                numbers = lanes.load_floats(values, other * size + place)
                factor = lanes.broadcast_float(factors, other * count + part)
                sums = lanes.add_products(sums, factor, numbers)
            lanes.store(mixed, part * size + place, lanes.hadamard(sums))
        distance = width
    while distance < size:
        start = 0
        while start < dim:  # a range would divide
            if distance < width:
                for place in range(start, start + distance):
                    first, second = mixed[place], mixed[place + distance]
                    mixed[place], mixed[place + distance] = first + second, first - second
            else:
                for place in range(start, start + distance, width):
                    first_numbers = lanes.load_floats(mixed, place)
                    numbers = lanes.load_floats(mixed, place + distance)
                    lanes.store(mixed, place, lanes.add_floats(first_numbers, numbers))
                    lanes.store(mixed, place + distance, lanes.sub_floats(first_numbers, numbers))
            start += 2 * distance
        distance *= 2
    for place in range(dim):
        values[place] = mixed[place] * signed[place]


@_compiled
def nearest_paths(
    rows: Any, starts: Any, steps_of: Any, weights: Any, count: int, books: Any, out: Any
) -> None:
    """`kernels.nearest_paths`; vectors have one number of each of `lanes.FLOATS` rows."""
    bits, sizes, firsts = steps_of[0], steps_of[1], steps_of[2]
    width, states, steps = lanes.FLOATS, books.shape[1], bits.shape[0]
    numbers = np.empty(rows.shape[1] * width, np.float32)
    costs, lowest = np.empty(states * width, np.float32), np.empty(states * width, np.float32)
    # The bits of the next step, and the first place of each step in `chosen`.
    shifts, offsets = np.zeros(steps + 1, np.int64), np.zeros(steps + 1, np.int64)
    for step in range(steps):
        shifts[step + 1] = bits[step + 1] if step + 1 < steps else 0
        offsets[step + 1] = offsets[step] + (states >> shifts[step + 1]) * width
    chosen, places = np.empty(offsets[steps], np.uint8), np.empty(width, np.int32)
    for first in range(0, rows.shape[0], width):
        costs[:] = _FAR
        for lane in range(width):
            row = min(first + lane, rows.shape[0] - 1)
            for column in range(rows.shape[1]):
                numbers[column * width + lane] = rows[row, column]
            for state in range(starts[row], starts[row] + count):
                costs[state * width + lane] = 0.0
        column = 0
        for step in range(steps):
            best = lowest[: (states >> shifts[step + 1]) * width]
            choices = chosen[offsets[step] : offsets[step + 1]]
            entries = books[firsts[step] : firsts[step] + sizes[step]].reshape(-1)
            _advance(costs, shifts[step], entries, numbers, column, sizes[step], weights, best, choices)
            costs, lowest = lowest, costs
            column += sizes[step]
        best_cost, place = lanes.load_floats(costs, 0), lanes.splat_int(np.int32(0))
        for state in range(1, states):
            cost = lanes.load_floats(costs, state * width)
            place = lanes.select_lower(cost, best_cost, state, place)
            best_cost = lanes.min_floats(cost, best_cost)
        lanes.store(places, 0, place)
        for lane in range(min(width, rows.shape[0] - first)):
            best_state = int(places[lane])
            out[first + lane, steps - 1] = best_state
            for step in range(steps - 2, -1, -1):
                head = best_state >> bits[step + 1]
                choice = chosen[offsets[step] + head * width + lane]
                best_state = head + choice * (states >> bits[step + 1])
                out[first + lane, step] = best_state


@_compiled
def _advance(
    costs: Any,
    shift: Any,
    entries: Any,
    numbers: Any,
    column: Any,
    size: Any,
    weights: Any,
    out: Any,
    choices: Any,
) -> None:
    """The lowest costs of states with the same trailing bits, and which of these states has it.

    Costs are those of states without their last `shift` bits, and the errors of `entries` for some numbers.
    """
    width = lanes.FLOATS
    heads, states = out.shape[0] // width, entries.shape[0] // size
    first_numbers, weight = lanes.load_floats(numbers, column * width), lanes.broadcast_float(weights, column)
    for head in range(heads):
        best, place = lanes.zero_floats(), lanes.splat_int(np.int32(0))
        for choice in range(states // heads):
            state = head + choice * heads
            cost = lanes.load_floats(costs, (state >> shift) * width)
            cost = lanes.add_squared_errors(
                cost, lanes.broadcast_float(entries, state), first_numbers, weight
            )
            for number in range(1, size):
                others = lanes.load_floats(numbers, (column + number) * width)
                entry = lanes.broadcast_float(entries, number * states + state)
                cost = lanes.add_squared_errors(
                    cost, entry, others, lanes.broadcast_float(weights, column + number)
                )
            if choice == 0:
                best = cost
            else:
                place = lanes.select_lower(cost, best, choice, place)
                best = lanes.min_floats(cost, best)
        lanes.store(out, head * width, best)
        lanes.store_low_bytes(choices, head * width, place)


@functools.cache
def nearest_codes(bits: int, size: int) -> Any:
    """Return `kernels.nearest_codes` for states with so many new bits; vectors have consecutive states.

    These bits are a constant in compiled loops, which LLVM unrolls.
    """
    choices, heads = 1 << bits, _STATES >> bits

    @_compiled
    def search(rows: Any, factor: float, largest: int, books: Any, out: Any) -> None:
        width, steps = lanes.ROWS, -(-rows.shape[1] // size)
        entries = np.rint(books * np.float32(factor)).astype(np.int16).reshape(-1)
        numbers = np.empty(rows.shape[1], np.int16)
        # Of states with the same trailing bits the lowest cost, before each step and after the last one.
        lowest = np.full((steps + 1) * heads, _HIGH, np.uint16)
        lowest[: 1 << _START_BITS >> bits] = 0
        highest = lanes.splat_word(np.uint16(_HIGH))
        for row in range(rows.shape[0]):
            for column in range(rows.shape[1]):
                number: Any = np.int32(np.rint(rows[row, column] * np.float32(factor)))
                numbers[column] = min(max(number, -largest), largest)
            offset = np.uint16(0)
            for step in range(steps):
                before, column = step * heads, step * size
                first_number, offsets = lanes.splat_word(numbers[column]), lanes.splat_word(offset)
                least = highest
                for head in range(0, heads, width):
                    best = highest
                    for choice in range(choices):
                        state = head + choice * heads
                        # Processors wait for loads that need what two vectors stored: they are aligned.
                        place = (head >> bits) + choice * (heads >> bits)
                        first = place & lanes.SPREAD - 1
                        places = lanes.spread_of(np.uint16(bits), np.uint16(first))
                        cost = lanes.load_spread(lowest, before + place - first, places)
                        cost = lanes.add_squares(cost, first_number, lanes.load_words(entries, state))
                        for number in range(1, min(size, rows.shape[1] - column)):
                            others = lanes.splat_word(numbers[column + number])
                            entry = lanes.load_words(entries, number * _STATES + state)
                            cost = lanes.add_squares(cost, others, entry)
                        best = lanes.min_words(best, cost)
                    best = lanes.sub_words(best, offsets)
                    lanes.store(lowest, before + heads + head, best)
                    least = lanes.min_words(least, best)
                offset = lanes.least_word(least)
            _write_codes(numbers, entries, lowest, bits, size, out[row])

    return search


@_compiled
def _write_codes(numbers: Any, entries: Any, lowest: Any, bits: int, size: int, out: Any) -> None:
    """Write the codes of the path with the lowest cost, from its last state back to the first one."""
    steps, heads = -(-numbers.shape[0] // size), _STATES >> bits
    head: Any = np.argmin(lowest[steps * heads : (steps + 1) * heads])
    # The bits that are not written yet, after those of unused ones.
    place, count, buffer = out.shape[0], 8 * out.shape[0] - (_START_BITS + bits * (steps - 1)), 0
    for step in range(steps - 1, -1, -1):
        best: Any = 1 << 40
        for state in range(head, _STATES, heads):
            cost = np.int64(lowest[step * heads + (state >> bits)])
            for column in range(step * size, min(step * size + size, numbers.shape[0])):
                error = np.int64(numbers[column]) - entries[(column - step * size) * _STATES + state]
                cost += error * error + (1 << 14) >> 15
            best = min(best, cost * _STATES + state)  # of equal ones the first; branches would take longer
        best &= _STATES - 1
        head = best >> bits
        width = bits if step else _START_BITS
        buffer |= (best & (1 << width) - 1) << count
        count += width
        while count >= 8:
            place -= 1
            out[place] = np.uint8(buffer & 255)
            buffer >>= 8
            count -= 8


# Numbers of paths, 16 or 32 rows at a time. `shared_embeddings.quant.kernels.LanePlan` describes the
# arguments after codes and scales: where pairs of numbers are, and what decodes them.

_AT_ONCE = 32  # bytes of a row


@_compiled
def lane_scores(codes: Any, scales: Any, plan: Any, hidden: Any, out: Any) -> None:
    """Products ``(n, N)`` of the entries of rows, times `unit` and `scales` ``(n, 1)``, with vectors `hidden`
    ``(N, D)``, whose numbers are rounded to 16 bits.
    """
    places, _, bounds, _, _, columns, unit = plan
    pairs, units = _paired(hidden, columns, unit)
    blocks = (codes.shape[1] + _AT_ONCE - 1) // _AT_ONCE
    # Rows to pad the last ones.
    flat, spare = codes.reshape(-1), np.zeros(lanes.ROWS * codes.shape[1] + _AT_ONCE, np.uint8)
    # Zeros come before the first word of a row; windows after the last bit read two more words.
    words = np.zeros((blocks * _AT_ONCE // 2 + 4) * lanes.ROWS, np.uint16)
    values = np.empty(places.shape[0] * 2 * lanes.ROWS, np.uint16)  # all entries
    sums = np.empty(lanes.ROWS, np.float32)
    for first in range(0, codes.shape[0], lanes.ROWS):
        count = min(lanes.ROWS, codes.shape[0] - first)
        _read_lanes(flat, first, codes.shape[1], spare, plan, words, values)
        for token in range(pairs.shape[0]):
            low, high = lanes.zero_floats(), lanes.zero_floats()
            for run in range(bounds.shape[0] - 1):
                firsts = lanes.splat_int(np.int32(0))
                others = firsts
                for pair in range(bounds[run], bounds[run + 1]):
                    place, numbers = 2 * pair * lanes.ROWS, pairs[token, pair]
                    entries = lanes.load_words(values, place)
                    firsts = lanes.add_ints(firsts, lanes.madd(entries, numbers))
                    entries = lanes.load_words(values, place + lanes.ROWS)
                    others = lanes.add_ints(others, lanes.madd(entries, numbers))
                low = lanes.add_floats(low, lanes.sitofp(firsts))
                high = lanes.add_floats(high, lanes.sitofp(others))
            lanes.store(sums, 0, low)
            lanes.store(sums, lanes.ROWS // 2, high)
            for row in range(count):
                # Of each eight rows, the first four are in `low`.
                score = sums[row // 8 * 4 + row // 4 % 2 * (lanes.ROWS // 2) + row % 4]
                out[first + row, token] = score * units[token] * scales[first + row, 0]


@_compiled
def _paired(hidden: Any, columns: Any, unit: float) -> Any:
    """Numbers of vectors ``(N, D)`` in 16 bits, two for each pair ``(N, P)``; the size of one ``(N,)``."""
    pairs = np.empty((hidden.shape[0], columns.shape[0]), np.int32)
    units = np.empty(hidden.shape[0], np.float32)
    for token in range(hidden.shape[0]):
        most = max(np.max(np.abs(hidden[token])) / np.float32(32767), np.float32(1e-30))
        units[token] = most * np.float32(unit)
        for pair in range(columns.shape[0]):
            first, second = np.int32(np.rint(hidden[token, columns[pair, 0]] / most)), np.int32(0)
            if columns[pair, 1] >= 0:
                second = np.int32(np.rint(hidden[token, columns[pair, 1]] / most))
            pairs[token, pair] = first & np.int32(0xFFFF) | second << np.int32(16)
    return pairs, units


@_compiled
def _read_lanes(flat: Any, first: int, stride: int, spare: Any, plan: Any, words: Any, values: Any) -> None:
    """Write pairs of entries of rows from `first` on to `values`, as whole numbers in words."""
    places, shifts, bounds, factors, tables, _, _ = plan
    start, source = first * stride, flat
    if start + spare.shape[0] > flat.shape[0]:
        spare[: flat.shape[0] - start] = flat[start:]
        start, source = 0, spare
    for byte in range(0, stride, _AT_ONCE):
        lanes.transpose(source, start + byte, stride, words, lanes.ROWS * (1 + byte // 2))
        for line in range(0, lanes.ROWS * _AT_ONCE, 64):  # of the next rows
            lanes.prefetch(flat, start + lanes.ROWS * (stride + byte) + line)
    upper, lower = lanes.load_table(tables, 0), lanes.load_table(tables, 16)
    starts, slopes = lanes.load_table(tables, 32), lanes.load_table(tables, 48)
    for run in range(bounds.shape[0] - 1):
        of_first, of_second = lanes.splat_word(factors[run, 0]), lanes.splat_word(factors[run, 1])
        back, is_fine = factors[run, 2], factors[run, 3]
        for pair in range(bounds[run], bounds[run + 1]):
            place = places[pair] * lanes.ROWS
            before, after = lanes.load_words(words, place), lanes.load_words(words, place + lanes.ROWS)
            window = lanes.fshl(before, after, shifts[pair])
            hashed = lanes.mul_words(lanes.lshr(window, back), of_first)
            others = lanes.mul_words(window, of_second)
            if is_fine:
                entries = lanes.interpolate(hashed, starts, slopes)
                next_entries = lanes.interpolate(others, starts, slopes)
                lanes.store(values, 2 * pair * lanes.ROWS, lanes.unpack_low_words(entries, next_entries))
                lanes.store(
                    values, (2 * pair + 1) * lanes.ROWS, lanes.unpack_high_words(entries, next_entries)
                )
            else:
                both = lanes.high_bytes(hashed, others)
                sums = lanes.shuffle_bytes(upper, lanes.high_nibbles(both))
                sums = lanes.add_bytes(sums, lanes.shuffle_bytes(lower, lanes.low_nibbles(both)))
                lanes.store(values, 2 * pair * lanes.ROWS, lanes.sext_low_bytes(sums))
                lanes.store(values, (2 * pair + 1) * lanes.ROWS, lanes.sext_high_bytes(sums))
