"""Each operation on vectors of rows, against numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

numba = pytest.importorskip("numba")
lanes: Any = pytest.importorskip("shared_embeddings.quant.lanes")
needs_words = pytest.mark.skipif(lanes.INSTRUCTIONS is None, reason="no vector instructions for words")

ROWS, FLOATS = lanes.ROWS, lanes.FLOATS
RANDOM = np.random.default_rng(0)
A, B = (RANDOM.integers(0, 2**16, ROWS).astype(np.uint16) for _ in range(2))
TABLE, SLOPES = (RANDOM.integers(0, 256, 16).astype(np.uint8) for _ in range(2))
X, Y, Z, W = (RANDOM.normal(size=FLOATS).astype(np.float32) for _ in range(4))


def run(kind: Any, body: Callable[..., Any], *arrays: Any) -> Any:
    """What a compiled loop stores that computes one vector from arrays."""
    compute = numba.njit(body)

    @numba.njit
    def loop(out: Any, *arrays: Any) -> None:
        lanes.store(out, 0, compute(*arrays))

    out = np.zeros(ROWS * 2 // np.dtype(kind).itemsize, kind)
    loop(out, *arrays)
    return out


def in_turns(first: Any, second: Any) -> Any:
    return np.stack([first, second], axis=1).reshape(-1)


def halves_of_eights(first: int) -> Any:
    """The numbers of four of each eight rows."""
    return np.arange(ROWS).reshape(-1, 8)[:, first : first + 4].reshape(-1)


def two(operation: Any, kind: Any = np.uint16) -> Any:
    return run(kind, lambda a, b: operation(lanes.load_words(a, 0), lanes.load_words(b, 0)), A, B)


@needs_words
def test_words() -> None:
    assert (run(np.uint16, lambda a: lanes.load_words(a, 0), A) == A).all()
    assert (run(np.uint16, lambda: lanes.splat_word(np.uint16(40_000))) == 40_000).all()
    assert (two(lanes.mul_words) == A * B).all()
    for count in (0, 3, 15):
        shift = np.uint16(count)
        shifted = run(np.uint16, lambda a, count: lanes.lshr(lanes.load_words(a, 0), count), A, shift)
        assert (shifted == A >> count).all()
        funnel = run(
            np.uint16,
            lambda a, b, count: lanes.fshl(lanes.load_words(a, 0), lanes.load_words(b, 0), count),
            *(A, B, shift),
        )
        joined = (A.astype(np.uint32) << 16 | B) << count >> 16
        assert (funnel == (joined & 0xFFFF)).all()
    for operation, first in ((lanes.unpack_low_words, 0), (lanes.unpack_high_words, 4)):
        rows = halves_of_eights(first)
        assert (two(operation) == in_turns(A[rows], B[rows])).all()
    assert (two(lanes.high_bytes, np.uint8) == in_turns(A >> 8, B >> 8)).all()
    pair = 1234 & 0xFFFF | (-567 << 16)
    sums = run(np.int32, lambda a, pair: lanes.madd(lanes.load_words(a, 0), pair), A, np.int32(pair))
    signed = A.view(np.int16).astype(np.int32)
    assert (sums == signed[::2] * 1234 + signed[1::2] * -567).all()


@needs_words
def test_costs_of_paths() -> None:
    costs, signed = A >> 1, A.view(np.int16).astype(np.int64)
    assert (two(lanes.sub_words) == A - B).all()
    assert (two(lanes.min_words) == np.minimum(A, B)).all()
    least = run(np.uint16, lambda a: lanes.splat_word(lanes.least_word(lanes.load_words(a, 0))), A)
    assert (least == A.min()).all()

    def squares(costs: Any, a: Any, b: Any) -> Any:
        return lanes.add_squares(lanes.load_words(costs, 0), lanes.load_words(a, 0), lanes.load_words(b, 0))

    small = (signed >> 1).astype(np.int16).view(np.uint16)
    differences = (signed >> 1) - 1000
    expected = costs + (differences**2 + 2**14 >> 15)
    assert (run(np.uint16, squares, costs, small, np.full(ROWS, 1000, np.uint16)) == expected).all()


@needs_words
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_words_in_several_lanes(bits: int) -> None:
    words = RANDOM.integers(0, 2**16, 2 * lanes.SPREAD).astype(np.uint16)
    count = ROWS >> bits
    for first in range(0, lanes.SPREAD, count):

        def loaded(words: Any, bits: Any, first: Any) -> Any:
            return lanes.load_spread(words, lanes.SPREAD, lanes.spread_of(bits, first))

        spread = run(np.uint16, loaded, words, np.uint16(bits), np.uint16(first))
        assert (spread == np.repeat(words[lanes.SPREAD + first :][:count], 2**bits)).all()


@needs_words
def test_bytes() -> None:
    tables = np.concatenate([TABLE, SLOPES])

    def loaded(table: Any) -> Any:
        return lanes.load_table(table, 0)

    assert (run(np.uint8, loaded, tables) == np.tile(TABLE, ROWS // 8)).all()

    def summed(table: Any) -> Any:
        return lanes.add_bytes(lanes.load_table(table, 0), lanes.load_table(table, 16))

    assert (run(np.uint8, summed, tables) == np.tile(TABLE + SLOPES, ROWS // 8)).all()

    def nibbles(a: Any, b: Any, is_high: bool) -> Any:
        both = lanes.high_bytes(lanes.load_words(a, 0), lanes.load_words(b, 0))
        return lanes.high_nibbles(both) if is_high else lanes.low_nibbles(both)

    both = in_turns(A >> 8, B >> 8)
    assert (run(np.uint8, nibbles, A, B, True) == both >> 4).all()
    assert (run(np.uint8, nibbles, A, B, False) == both & 15).all()

    def looked_up(a: Any, b: Any, table: Any) -> Any:
        both = lanes.high_bytes(lanes.load_words(a, 0), lanes.load_words(b, 0))
        return lanes.shuffle_bytes(lanes.load_table(table, 0), lanes.low_nibbles(both))

    assert (run(np.uint8, looked_up, A, B, tables) == TABLE[both & 15]).all()
    for operation, first in ((lanes.sext_low_bytes, 0), (lanes.sext_high_bytes, 4)):

        def extended(a: Any, b: Any, operation: Any = operation) -> Any:
            return operation(lanes.high_bytes(lanes.load_words(a, 0), lanes.load_words(b, 0)))

        rows = halves_of_eights(first)
        expected = in_turns(A[rows] >> 8, B[rows] >> 8).astype(np.uint8).view(np.int8)
        assert (run(np.int16, extended, A, B) == expected).all()


@needs_words
def test_interpolation() -> None:
    """A hash is a sign, 4 bits of a line, 6 bits along it, and 5 that do not count."""
    starts, slopes = np.arange(0, 160, 10, np.uint8), np.arange(16, dtype=np.uint8)

    def body(a: Any, starts: Any, slopes: Any) -> Any:
        return lanes.interpolate(
            lanes.load_words(a, 0), lanes.load_table(starts, 0), lanes.load_table(slopes, 0)
        )

    is_negative = A < 0x8000
    place = np.where(is_negative, ~(A ^ 0x8000) & 0xFFFF, A ^ 0x8000).astype(np.int32)
    line = place >> 11
    value = (starts[line].astype(np.int32) * 64 + slopes[line] * (place >> 5 & 63)) >> 3
    output = run(np.int16, body, A, starts, slopes)
    assert (output == np.where(is_negative, ~value, value)).all()


def test_ints_and_floats() -> None:
    def loaded(x: Any) -> Any:
        return lanes.load_floats(x, 0)

    assert (run(np.float32, loaded, X) == X).all()
    assert (run(np.float32, lambda x: lanes.broadcast_float(x, 3), X) == X[3]).all()
    assert (run(np.float32, lambda: lanes.zero_floats()) == 0).all()
    assert (run(np.int32, lambda: lanes.splat_int(np.int32(-5))) == -5).all()
    assert (
        run(np.int32, lambda: lanes.add_ints(lanes.splat_int(np.int32(4)), lanes.splat_int(np.int32(-9))))
        == -5
    ).all()
    assert (run(np.float32, lambda: lanes.sitofp(lanes.splat_int(np.int32(-5)))) == -5.0).all()

    def both(x: Any, y: Any, is_sum: bool) -> Any:
        a, b = lanes.load_floats(x, 0), lanes.load_floats(y, 0)
        return lanes.add_floats(a, b) if is_sum else lanes.min_floats(a, b)

    def difference(x: Any, y: Any) -> Any:
        return lanes.sub_floats(lanes.load_floats(x, 0), lanes.load_floats(y, 0))

    def products(x: Any, y: Any, z: Any) -> Any:
        return lanes.add_products(lanes.load_floats(x, 0), lanes.load_floats(y, 0), lanes.load_floats(z, 0))

    assert (run(np.float32, difference, X, Y) == X - Y).all()
    np.testing.assert_allclose(run(np.float32, products, X, Y, Z), X + Y * Z, rtol=1e-5, atol=1e-6)
    matrix = np.ones((1, 1))
    while len(matrix) < FLOATS:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    transformed = run(np.float32, lambda x: lanes.hadamard(lanes.load_floats(x, 0)), X)
    np.testing.assert_allclose(transformed, matrix @ X, rtol=1e-5, atol=1e-5)
    assert (run(np.float32, both, X, Y, True) == X + Y).all()
    assert (run(np.float32, both, X, Y, False) == np.minimum(X, Y)).all()

    def errors(x: Any, y: Any, z: Any, w: Any) -> Any:
        return lanes.add_squared_errors(
            lanes.load_floats(x, 0), lanes.load_floats(y, 0), lanes.load_floats(z, 0), lanes.load_floats(w, 0)
        )

    np.testing.assert_allclose(
        run(np.float32, errors, X, Y, Z, W), X + W * (Y - Z) ** 2, rtol=1e-5, atol=1e-6
    )

    def selected(x: Any, y: Any) -> Any:
        places = lanes.splat_int(np.int32(2))
        return lanes.select_lower(lanes.load_floats(x, 0), lanes.load_floats(y, 0), 7, places)

    assert (run(np.int32, selected, X, Y) == np.where(X < Y, 7, 2)).all()


@needs_words
def test_memory() -> None:
    stride, start = 40, 3
    codes = RANDOM.integers(0, 256, start + ROWS * stride + 32).astype(np.uint8)

    @numba.njit
    def loop(codes: Any, words: Any, low: Any, first: Any) -> None:
        lanes.transpose(codes, start, stride, words, 0)
        lanes.prefetch(codes, 0)
        lanes.store_low_bytes(low, 1, lanes.splat_int(np.int32(0x1234)))
        first[0] = lanes.load_bswap(codes, 1)

    words, low, first = np.zeros(16 * ROWS, np.uint16), np.zeros(FLOATS + 2, np.uint8), np.zeros(1, np.uint64)
    loop(codes, words, low, first)
    rows = np.stack([codes[start + row * stride :][:32] for row in range(ROWS)])
    expected = rows.reshape(ROWS, 16, 2).astype(np.uint16)
    assert (words.reshape(16, ROWS) == (expected[..., 0] << 8 | expected[..., 1]).T).all()
    assert low.tolist() == [0, *[0x34] * FLOATS, 0]
    assert int(first[0]) == int.from_bytes(codes[1:9].tobytes(), "big")
