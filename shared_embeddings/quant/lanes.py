"""Vectors of 16 or 32 rows for loops that numba compiles: operations that its own compiler does not form.

A vector is one of the `KINDS`: a word of 16 bits for each row, the two bytes of each of those, or half as
many integers of 32 bits or floats. Row i has word i, and bytes 2 i and 2 i + 1. Operations on words and bytes
need AVX-512, AVX2 or NEON; those on floats do not.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic, models, register_model


def _instructions() -> str | None:
    """The vector instructions that the operations use, among those that numba compiles for."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return "neon"
    features = getattr(config, "CPU_FEATURES", None)  # of NUMBA_CPU_FEATURES
    names = str(get_host_cpu_features().flatten() if features is None else features).split(",")
    return next((name for name in ("avx512bw", "avx2") if f"+{name}" in names), None)


INSTRUCTIONS = _instructions()
ROWS = 32 if INSTRUCTIONS == "avx512bw" else 16
FLOATS = ROWS // 2  # of a vector
# Without this, type checkers see functions with other arguments.
_intrinsic: Any = intrinsic

_BYTE, _WORD, _INT, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_WORDS, _BYTES = ir.VectorType(_WORD, ROWS), ir.VectorType(_BYTE, 2 * ROWS)
_INTS, _FLOATS = ir.VectorType(_INT, FLOATS), ir.VectorType(_FLOAT, FLOATS)


def _repeated(word: int) -> Any:
    """A vector of equal words."""
    return ir.Constant(_WORDS, [word] * ROWS)


class Lanes(types.Type):
    """The type of a vector in numba."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__(name=f"Lanes({kind})")


KINDS = {"words": _WORDS, "bytes": _BYTES, "ints": _INTS, "floats": _FLOATS}
_words, _bytes, _ints, _floats = (Lanes(kind) for kind in KINDS)


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Lanes) -> None:
        super().__init__(manager, kind, KINDS[kind.kind])


def _operation(result: Any, build: Callable[..., Any]) -> Any:
    """An operation on vectors and numbers, from the instructions that `build` adds for their values."""

    def one(typing: Any, a: Any) -> Any:
        return result(a), lambda context, builder, signature, values: build(builder, *values)

    def two(typing: Any, a: Any, b: Any) -> Any:
        return result(a, b), lambda context, builder, signature, values: build(builder, *values)

    return _intrinsic(one if build.__code__.co_argcount == 2 else two)


def _in_memory(result: Any, build: Callable[..., Any]) -> Any:
    """An operation at a place of a contiguous array, from its pointer and possibly other vectors."""

    def at(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        return build(builder, builder.gep(data, [values[1]]), *values[2:])

    def read(typing: Any, array: Any, place: Any) -> Any:
        return result(array, types.intp), at

    def write(typing: Any, array: Any, place: Any, vector: Any) -> Any:
        def done(context: Any, *rest: Any) -> Any:
            at(context, *rest)
            return context.get_dummy_value()

        return result(array, types.intp, vector), done

    return _intrinsic(write if result is types.void else read)


def _loaded(kind: Any) -> Callable[..., Any]:
    def build(builder: Any, pointer: Any) -> Any:
        return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=1)

    return build


def _stored(builder: Any, pointer: Any, vector: Any) -> None:
    builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()), align=1)


def _chosen(builder: Any, a: Any, b: Any, places: list[int]) -> Any:
    """A vector of elements of two vectors; the places of the second follow those of the first."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INT, len(places)), places))


def _joined(builder: Any, halves: list[Any]) -> Any:
    """A vector of one or two others."""
    size = sum(half.type.count for half in halves)
    return _chosen(builder, halves[0], halves[-1], list(range(size)))


def _loaded_table(builder: Any, pointer: Any) -> Any:
    table = _loaded(ir.VectorType(_BYTE, 16))(builder, pointer)
    return _chosen(builder, table, table, [byte % 16 for byte in range(2 * ROWS)])


load_words = _in_memory(_words, _loaded(_WORDS))
load_table = _in_memory(_bytes, _loaded_table)  # of 16 bytes, for `look_up`
store = _in_memory(types.void, _stored)


def _first_bits(builder: Any, pointer: Any) -> Any:
    return builder.bswap(_loaded(ir.IntType(64))(builder, pointer))


load_bits = _in_memory(types.uint64, _first_bits)  # a number of 64 bits, highest first


def _splat(builder: Any, number: Any, kind: Any) -> Any:
    """A vector of equal numbers."""
    is_wide = number.type != kind.element and number.type.width > kind.element.width
    number = builder.trunc(number, kind.element) if is_wide else number
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(_INT, 0))
    return _chosen(builder, first, first, [0] * kind.count)


repeat_word = _operation(_words, lambda builder, number: _splat(builder, number, _WORDS))
repeat_int = _operation(_ints, lambda builder, number: _splat(builder, number, _INTS))


def _shift(builder: Any, name: str, a: Any, by: Any) -> Any:
    return getattr(builder, name)(a, _splat(builder, by, _WORDS))


shift_right = _operation(_words, lambda builder, a, by: _shift(builder, "lshr", a, by))  # by less than 16


@_intrinsic
def window(typing: Any, before: Any, after: Any, bits: Any) -> Any:
    """16 bits of every two words: all but the first 0 to 15 bits of the word before, then those after."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        before, after, bits = values
        rest = builder.sub(ir.Constant(bits.type, 15), bits)
        after = builder.lshr(after, _repeated(1))
        return builder.or_(_shift(builder, "shl", before, bits), _shift(builder, "lshr", after, rest))

    return _words(before, after, bits), generate


product = _operation(_words, lambda builder, a, b: builder.mul(a, b))
add_bytes = _operation(_bytes, lambda builder, a, b: builder.add(a, b))
add_ints = _operation(_ints, lambda builder, a, b: builder.add(a, b))


def _high_bytes(builder: Any, a: Any, b: Any) -> Any:
    shifted = builder.bitcast(builder.lshr(a, _repeated(8)), _BYTES)
    even = ir.Constant(ir.VectorType(ir.IntType(1), 2 * ROWS), [1, 0] * ROWS)
    return builder.select(even, shifted, builder.bitcast(b, _BYTES))


high_bytes = _operation(_bytes, _high_bytes)  # of the words of two vectors, in turns

_NIBBLES = ir.Constant(_BYTES, [15] * 2 * ROWS)


def _high_nibbles(builder: Any, a: Any) -> Any:
    words = builder.lshr(builder.bitcast(a, _WORDS), _repeated(4))
    return builder.and_(builder.bitcast(words, _BYTES), _NIBBLES)


high_nibbles = _operation(_bytes, _high_nibbles)
low_nibbles = _operation(_bytes, lambda builder, a: builder.and_(a, _NIBBLES))


def _looked_up(builder: Any, table: Any, places: Any) -> Any:
    names = {
        "avx512bw": "llvm.x86.avx512.pshuf.b.512",
        "avx2": "llvm.x86.avx2.pshuf.b",
        "neon": "llvm.aarch64.neon.tbl1.v16i8",
    }
    size = 16 if INSTRUCTIONS == "neon" else 2 * ROWS
    kind = ir.VectorType(_BYTE, size)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind, kind]), names[INSTRUCTIONS or "avx2"]
    )
    parts = []
    for first in range(0, 2 * ROWS, size):
        own = [_chosen(builder, one, one, list(range(first, first + size))) for one in (table, places)]
        parts.append(builder.call(function, own))
    return _joined(builder, parts)


# For each byte below 16, that entry of a table of 16 bytes, which a vector has several times.
look_up = _operation(_bytes, _looked_up)


def _widened(first: int) -> Callable[..., Any]:
    """Half of the bytes as words with a sign: of each 16, eight from `first` on."""
    places = [
        place
        for some in range(first, 2 * ROWS, 16)
        for byte in range(some, some + 8)
        for place in (2 * ROWS, byte)
    ]

    def build(builder: Any, a: Any) -> Any:
        words = builder.bitcast(_chosen(builder, a, ir.Constant(_BYTES, [0] * 2 * ROWS), places), _WORDS)
        return builder.ashr(words, _repeated(8))

    return build


def _in_turns(first: int) -> list[int]:
    """Of each 8 words, four of two vectors from `first` on."""
    words = [word for some in range(first, ROWS, 8) for word in range(some, some + 4)]
    return [one for word in words for one in (word, ROWS + word)]


low_words = _operation(_words, _widened(0))  # of rows 0 to 3, 8 to 11, ...
high_words = _operation(_words, _widened(8))  # of rows 4 to 7, 12 to 15, ...
# Words of the same rows of two vectors, in turns.
low_pairs = _operation(_words, lambda builder, a, b: _chosen(builder, a, b, _in_turns(0)))
high_pairs = _operation(_words, lambda builder, a, b: _chosen(builder, a, b, _in_turns(4)))


@_intrinsic
def on_lines(typing: Any, hashed: Any, starts: Any, slopes: Any) -> Any:
    """The fine entry of each hash, the upper 11 bits of a word, by the tables of the lines."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        hashed, *tables = values
        signed = builder.xor(hashed, _repeated(0x8000))
        sign = builder.ashr(signed, _repeated(15))
        place = builder.xor(signed, sign)
        line = builder.bitcast(builder.lshr(place, _repeated(11)), _BYTES)
        found = [builder.bitcast(_looked_up(builder, table, line), _WORDS) for table in tables]
        start, slope = (builder.and_(one, _repeated(255)) for one in found)
        rest = builder.and_(builder.lshr(place, _repeated(5)), _repeated(63))
        value = builder.add(builder.shl(start, _repeated(6)), builder.mul(slope, rest))
        return builder.xor(builder.lshr(value, _repeated(3)), sign)

    return _words(hashed, starts, slopes), generate


def _pair_products(builder: Any, a: Any, pair: Any) -> Any:
    numbers, wide = builder.bitcast(_splat(builder, pair, _INTS), _WORDS), ir.VectorType(_INT, ROWS)
    products = builder.mul(builder.sext(a, wide), builder.sext(numbers, wide))
    firsts, seconds = (_chosen(builder, products, products, list(range(first, ROWS, 2))) for first in (0, 1))
    return builder.add(firsts, seconds)


# The sums of each two words times a pair of words, which an integer of 32 bits has.
pair_products = _operation(_ints, _pair_products)
as_floats = _operation(_floats, lambda builder, a: builder.sitofp(a, _FLOATS))
add_floats = _operation(_floats, lambda builder, a, b: builder.fadd(a, b))

load_floats = _in_memory(_floats, _loaded(_FLOATS))
repeat_at = _in_memory(_floats, lambda builder, pointer: _splat(builder, builder.load(pointer), _FLOATS))


def _stored_bytes(builder: Any, pointer: Any, integers: Any) -> None:
    _stored(builder, pointer, builder.trunc(integers, ir.VectorType(_BYTE, FLOATS)))


store_bytes = _in_memory(types.void, _stored_bytes)  # the lower 8 bits of integers


_FUSED = ("contract",)  # products and sums in one instruction


@_intrinsic
def add_errors(typing: Any, costs: Any, entries: Any, numbers: Any, weights: Any) -> Any:
    """Costs plus the weighted squared errors of entries."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        costs, entries, numbers, weights = values
        errors = builder.fsub(entries, numbers, flags=_FUSED)
        squares = builder.fmul(builder.fmul(errors, weights, flags=_FUSED), errors, flags=_FUSED)
        return builder.fadd(costs, squares, flags=_FUSED)

    return _floats(costs, entries, numbers, weights), generate


def _is_lower(builder: Any, a: Any, b: Any) -> Any:
    return builder.fcmp_ordered("<", a, b)


lower = _operation(_floats, lambda builder, a, b: builder.select(_is_lower(builder, a, b), a, b))


@_intrinsic
def place_of_lower(typing: Any, a: Any, b: Any, place: Any, places: Any) -> Any:
    """An integer where the first floats are lower, else those of a vector."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        a, b, place, places = values
        return builder.select(_is_lower(builder, a, b), _splat(builder, place, _INTS), places)

    return _ints(a, b, types.intp, places), generate


@_intrinsic
def no_floats(typing: Any) -> Any:
    """Zeros."""
    return _floats(), lambda context, builder, signature, values: ir.Constant(_FLOATS, [0.0] * FLOATS)


@_intrinsic
def prefetch(typing: Any, array: Any, place: Any) -> Any:
    """Ask for the memory at a place of a contiguous array, or after its end."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        pointer = builder.bitcast(builder.gep(data, [values[1]]), _BYTE.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _INT, _INT, _INT])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [pointer, ir.Constant(_INT, 0), ir.Constant(_INT, 3), ir.Constant(_INT, 1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@_intrinsic
def transpose(typing: Any, codes: Any, start: Any, stride: Any, out: Any, place: Any) -> Any:
    """Write 16 vectors with one word of each row, from 32 bytes of all rows.

    The first row starts at `start` and the others `stride` after each other. The first byte of a word has its
    upper bits.
    """
    # Vectors have the 16 words of one row, or of a row and the 16th after it.
    groups = range(0, ROWS, 16)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        codes, start, stride, out, place = values
        source = context.make_array(signature.args[0])(context, builder, codes).data
        target = context.make_array(signature.args[3])(context, builder, out).data

        def loaded(row: int) -> Any:
            index = builder.add(start, builder.mul(stride, ir.Constant(start.type, row)))
            own = _loaded(ir.VectorType(_BYTE, 32))(builder, builder.gep(source, [index]))
            return _chosen(builder, own, own, [byte ^ 1 for byte in range(32)])

        rows = []
        for row in range(16):
            parts = [loaded(row + group) for group in groups]
            rows.append(builder.bitcast(_joined(builder, parts), _WORDS))
        turns = [_in_turns(first) for first in (0, 4)]
        for _ in range(3):
            pairs = [pair for some in (rows[:8], rows[8:]) for pair in zip(some[:4], some[4:])]
            rows = [_chosen(builder, a, b, places) for a, b in pairs for places in turns]
        for number in range(16):
            firsts = [part + group + number // 8 * 8 for group in groups for part in (0, ROWS)]
            places = [word for first in firsts for word in range(first, first + 8)]
            vector = _chosen(builder, rows[number % 8], rows[8 + number % 8], places)
            index = builder.add(place, ir.Constant(place.type, ROWS * number))
            _stored(builder, builder.gep(target, [index]), vector)
        return context.get_dummy_value()

    return types.void(codes, types.intp, types.intp, out, types.intp), generate
