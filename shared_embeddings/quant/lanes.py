"""Vectors of 16 rows for loops that numba compiles: operations that its own compiler does not form.

A vector is one of the `KINDS`: 16 words of 16 bits, the 32 bytes of those, 8 integers of 32 bits, 8 floats,
or a number of bits to shift by. Row i has word i, and bytes 2 i and 2 i + 1. The operations need AVX2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

ROWS = 16
# Without this, type checkers see functions with other arguments.
_intrinsic: Any = intrinsic

_BIT, _BYTE, _WORD, _INT, _FLOAT = (
    ir.IntType(1),
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.FloatType(),
)
_WORDS, _BYTES = ir.VectorType(_WORD, ROWS), ir.VectorType(_BYTE, 2 * ROWS)
_INTS, _FLOATS, _COUNT = ir.VectorType(_INT, 8), ir.VectorType(_FLOAT, 8), ir.VectorType(_WORD, 8)


class Lanes(types.Type):
    """The type of a vector in numba."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__(name=f"Lanes({kind})")


KINDS = {"words": _WORDS, "bytes": _BYTES, "ints": _INTS, "floats": _FLOATS, "count": _COUNT}
_words, _bytes, _ints, _floats, _count = (Lanes(kind) for kind in KINDS)


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


load_words = _in_memory(_words, _loaded(_WORDS))
load_bytes = _in_memory(_bytes, _loaded(_BYTES))
load_count = _in_memory(_count, _loaded(_COUNT))
store = _in_memory(types.void, _stored)


def _splat(builder: Any, number: Any, kind: Any) -> Any:
    """A vector of equal numbers."""
    width = kind.element.width
    number = builder.trunc(number, kind.element) if number.type.width > width else number
    none = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(none, number, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, none, ir.Constant(ir.VectorType(_INT, kind.count), [0] * kind.count))


repeat_int = _operation(_ints, lambda builder, number: _splat(builder, number, _INTS))


def _called(builder: Any, name: str, *arguments: Any, result: Any = _WORDS) -> Any:
    """The result of an instruction of the processor."""
    kind = ir.FunctionType(result, [one.type for one in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


# Unlike in LLVM's own shifts, all bits of a word may be shifted out.
shift_left = _operation(_words, lambda builder, a, by: _called(builder, "llvm.x86.avx2.psll.w", a, by))
shift_right = _operation(_words, lambda builder, a, by: _called(builder, "llvm.x86.avx2.psrl.w", a, by))
either = _operation(_words, lambda builder, a, b: builder.or_(a, b))
product = _operation(_words, lambda builder, a, b: builder.mul(a, b))
add_bytes = _operation(_bytes, lambda builder, a, b: builder.add(a, b))
add_ints = _operation(_ints, lambda builder, a, b: builder.add(a, b))


def _high_bytes(builder: Any, a: Any, b: Any) -> Any:
    shifted = builder.bitcast(builder.lshr(a, ir.Constant(_WORDS, [8] * ROWS)), _BYTES)
    even = ir.Constant(ir.VectorType(_BIT, 2 * ROWS), [1, 0] * ROWS)
    return builder.select(even, shifted, builder.bitcast(b, _BYTES))


high_bytes = _operation(_bytes, _high_bytes)  # of the words of two vectors, in turns

_NIBBLES = ir.Constant(_BYTES, [15] * 2 * ROWS)


def _high_nibbles(builder: Any, a: Any) -> Any:
    words = builder.lshr(builder.bitcast(a, _WORDS), ir.Constant(_WORDS, [4] * ROWS))
    return builder.and_(builder.bitcast(words, _BYTES), _NIBBLES)


high_nibbles = _operation(_bytes, _high_nibbles)
low_nibbles = _operation(_bytes, lambda builder, a: builder.and_(a, _NIBBLES))


def _looked_up(builder: Any, table: Any, places: Any) -> Any:
    return _called(builder, "llvm.x86.avx2.pshuf.b", table, places, result=_BYTES)


# For each byte below 16, that entry of a table of 16 bytes, which a vector has twice.
look_up = _operation(_bytes, _looked_up)


def _widened(first: int) -> Callable[..., Any]:
    """Half of the bytes as words: in each half of a vector, eight from `first` on."""
    places = [place for half in (0, 16) for byte in range(first, first + 8) for place in (half + byte, 32)]
    mask = ir.Constant(ir.VectorType(_INT, 32), places)

    def build(builder: Any, a: Any) -> Any:
        return builder.bitcast(builder.shuffle_vector(a, ir.Constant(_BYTES, [0] * 32), mask), _WORDS)

    return build


low_words = _operation(_words, _widened(0))  # of rows 0 to 3 and 8 to 11
high_words = _operation(_words, _widened(8))  # of rows 4 to 7 and 12 to 15


def _pair_products(builder: Any, a: Any, pair: Any) -> Any:
    numbers = builder.bitcast(_splat(builder, pair, _INTS), _WORDS)
    return _called(builder, "llvm.x86.avx2.pmadd.wd", a, numbers, result=_INTS)


# The sums of each two words times a pair of words, which an integer of 32 bits has.
pair_products = _operation(_ints, _pair_products)
as_floats = _operation(_floats, lambda builder, a: builder.sitofp(a, _FLOATS))
add_floats = _operation(_floats, lambda builder, a, b: builder.fadd(a, b))


@_intrinsic
def no_floats(typing: Any) -> Any:
    """Eight zeros."""
    return _floats(), lambda context, builder, signature, values: ir.Constant(_FLOATS, [0.0] * 8)


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
    """Write 16 vectors with one word of each row, of 32 bytes of 16 rows.

    The first row starts at `start` and the others `stride` after each other. The first byte of a word has its
    upper bits.
    """

    def words(places: list[int]) -> Any:
        return ir.Constant(ir.VectorType(_INT, ROWS), places)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        codes, start, stride, out, place = values
        source = context.make_array(signature.args[0])(context, builder, codes).data
        target = context.make_array(signature.args[3])(context, builder, out).data
        swapped = [byte for half in (0, 16) for word in range(0, 16, 2) for byte in (word + 1, word)]
        rows = []
        for row in range(ROWS):
            index = builder.add(start, builder.mul(stride, ir.Constant(start.type, row)))
            own = _loaded(_BYTES)(builder, builder.gep(source, [index]))
            rows.append(
                builder.bitcast(
                    _looked_up(builder, own, ir.Constant(_BYTES, [b % 16 for b in swapped])), _WORDS
                )
            )
        # Within each half of a vector: three times, the words of two vectors in turns.
        low = words([one for half in (0, 8) for word in range(half, half + 4) for one in (word, 16 + word)])
        high = words([one for half in (4, 12) for word in range(half, half + 4) for one in (word, 16 + word)])
        parts = []
        for some in (rows[:8], rows[8:]):
            for _ in range(3):
                pairs = zip(some[:4], some[4:])
                some = [builder.shuffle_vector(a, b, mask) for a, b in pairs for mask in (low, high)]
            parts.append(some)
        for number in range(ROWS):
            half = 8 * (number // 8)
            mask = words([*range(half, half + 8), *range(16 + half, 24 + half)])
            vector = builder.shuffle_vector(*(part[number % 8] for part in parts), mask)
            index = builder.add(place, ir.Constant(place.type, ROWS * number))
            _stored(builder, builder.gep(target, [index]), vector)
        return context.get_dummy_value()

    return types.void(codes, types.intp, types.intp, out, types.intp), generate
