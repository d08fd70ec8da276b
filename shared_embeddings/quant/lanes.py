"""Operations on vectors of 16 or 32 rows, for loops that numba compiles.

numba compiles loops over arrays, but it does not form the byte shuffles and 16-bit products that decoding
trellis codes lives on. This module gives numba one function for each of them, as ``immintrin.h`` gives a C
compiler ``_mm256_shuffle_epi8``. `shared_embeddings.quant.loops` is the only user.

**Lanes.** A vector register holds `ROWS` numbers of 16 bits (*words*) next to each other. Each of these
places is a *lane*, and lane i belongs to row i of the table: an operation on a vector does the same to 16 or
32 rows at once (or to as many states of one row, in the search for paths in words). The same register
can be read as twice as many *bytes* (row i has bytes 2 i and 2 i + 1), or as half as many *ints* or *floats*
of 32 bits (`FLOATS`). In C, with AVX2::

    typedef __m256i words;   /* 16 x int16  */   typedef __m256i bytes;   /* 32 x int8  */
    typedef __m256i ints;    /*  8 x int32  */   typedef __m256  floats;  /*  8 x float */

**How an intrinsic is built.** numba translates Python to LLVM's intermediate language, a typed assembler for
no particular processor, and LLVM translates that to instructions. ``numba.extending.intrinsic`` makes a
function that, when numba compiles a call of it, returns the type of the result and a function that *appends
LLVM instructions* to the program with a *builder*: ``builder.add(a, b)`` emits ``add <16 x i16> %a, %b``.
Nothing is computed at that moment. `_operation` wraps this for operations on values, `_in_memory` for those
at a place of an array, whose pointer it passes. `Lanes` tells numba that such values exist, and
`register_model` how LLVM names their types, for instance ``<16 x i16>``.

**What becomes of it.** A vector takes one register with AVX2 (256 bits) and AVX-512 (512 bits), and two with
NEON (128 bits each). LLVM chooses about these instructions::

    operation            LLVM                         AVX2, AVX-512               NEON
    load_words           load                         vmovdqu, vmovdqu64          ldp
    splat_word           insertelement, shufflevector vpbroadcastw                dup
    lshr                 lshr                         vpsrlw                      ushl
    fshl                 shl, lshr, or                vpsllw, vpsrlw, vpor        ushl, orr
    mul_words            mul                          vpmullw                     mul
    add_bytes, add_ints  add                          vpaddb, vpaddd              add
    high_bytes           lshr, select                 vpsrlw, vpblendvb/vpblendmb ushr, bsl
    high_nibbles         lshr                         vpsrlw, vpand               ushr
    shuffle_bytes        llvm.x86.avx2.pshuf.b, ...   vpshufb                     tbl
    sext_low_bytes       shufflevector, ashr          vpunpcklbw, vpsraw          sshll
    unpack_low_words     shufflevector                vpunpcklwd                  zip1
    madd                 sext, mul, shufflevector, add vpmaddwd                   smull, addp
    sitofp               sitofp                       vcvtdq2ps                   scvtf
    add_floats           fadd                         vaddps                      fadd
    broadcast_float      load, shufflevector          vbroadcastss                ld1r
    add_products         fmul, fadd contract          vfmadd                      fmla
    hadamard             shufflevector, fmul, fadd    vpermps, vfmadd             ext, fmla
    add_squared_errors   fsub, fmul, fadd contract    vsubps, vmulps, vfmadd      fsub, fmul, fmla
    min_floats           fcmp, select                 vminps                      fcmgt, bsl
    min_words            llvm.umin                    vpminuw                     umin
    least_word           llvm.vector.reduce.umin      vpminuw, vphminposuw        uminv
    add_squares          sub, pmul.hr.sw, ..., add    vpsubw, vpmulhrsw, vpaddw   sub, sqrdmulh, add
    load_spread          load, pshuf.b, ...           vpshufb, vpermw             tbl

Names are those of LLVM or of Intel's guide. On x86, ``vpshufb`` and ``vpunpck*`` work within each 128 bits of
a register, which is why several operations take "of each 8 words the first four". Operations on words and
bytes need AVX-512BW, AVX2 or NEON (`INSTRUCTIONS`); those on floats run anywhere.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic, models, register_model

# The vector instructions that the operations use, among those that numba compiles for.
INSTRUCTIONS: str | None = "neon"
if platform.machine().lower() not in ("aarch64", "arm64"):
    _features = getattr(config, "CPU_FEATURES", None)  # of NUMBA_CPU_FEATURES
    _names = str(get_host_cpu_features().flatten() if _features is None else _features).split(",")
    INSTRUCTIONS = next((name for name in ("avx512bw", "avx2") if f"+{name}" in _names), None)
ROWS = 32 if INSTRUCTIONS == "avx512bw" else 16
FLOATS = ROWS // 2  # of a vector
SPREAD = 32 if INSTRUCTIONS == "avx512bw" else 8  # words that `load_spread` reads
# Without this, type checkers see functions with other arguments.
_intrinsic: Any = intrinsic

_BYTE, _WORD, _INT, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_WORDS, _BYTES = ir.VectorType(_WORD, ROWS), ir.VectorType(_BYTE, 2 * ROWS)
_INTS, _FLOATS = ir.VectorType(_INT, FLOATS), ir.VectorType(_FLOAT, FLOATS)


class Lanes(types.Type):
    """The type of a vector in numba, with the LLVM type that holds it."""

    def __init__(self, name: str, llvm_type: Any) -> None:
        self.llvm_type = llvm_type
        super().__init__(name=f"Lanes({name})")


_words, _bytes = Lanes("words", _WORDS), Lanes("bytes", _BYTES)
_ints, _floats = Lanes("ints", _INTS), Lanes("floats", _FLOATS)


register_model(Lanes)(lambda manager, lanes: models.PrimitiveModel(manager, lanes, lanes.llvm_type))


def _operation(result: Any, build: Callable[..., Any]) -> Any:
    """Return an operation on up to four vectors and numbers; `build` appends its LLVM instructions."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return build(builder, *values)

    typed: dict[int, Callable[..., Any]] = {
        0: lambda typing: (result(), generate),
        1: lambda typing, a: (result(a), generate),
        2: lambda typing, a, b: (result(a, b), generate),
        3: lambda typing, a, b, c: (result(a, b, c), generate),
        4: lambda typing, a, b, c, d: (result(a, b, c, d), generate),
    }
    return _intrinsic(typed[build.__code__.co_argcount - 1])


def _in_memory(result: Any, build: Callable[..., Any]) -> Any:
    """Return an operation at a place of a contiguous array: a load, or a store of a vector if it is void."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        loaded = build(builder, builder.gep(data, [values[1]]), *values[2:])
        return context.get_dummy_value() if result is types.void else loaded

    if build.__code__.co_argcount == 3:
        return _intrinsic(lambda typing, array, place, vector: (result(array, types.intp, vector), generate))
    return _intrinsic(lambda typing, array, place: (result(array, types.intp), generate))


# Parts of several operations.


def _load(builder: Any, pointer: Any, kind: Any) -> Any:
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=1)


def _store(builder: Any, pointer: Any, vector: Any) -> None:
    builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()), align=1)


def _shufflevector(builder: Any, a: Any, b: Any, places: Sequence[int]) -> Any:
    """Append a choice of elements of two vectors; the places of the second follow those of the first."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INT, len(places)), list(places)))


def _splat(builder: Any, number: Any, kind: Any) -> Any:
    """Append a vector of equal numbers, of their lower bits if the number is wider."""
    if number.type != kind.element and number.type.width > kind.element.width:
        number = builder.trunc(number, kind.element)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(_INT, 0))
    return _shufflevector(builder, first, first, [0] * kind.count)


def _constant(word: int) -> Any:
    """Return a vector of equal words."""
    return ir.Constant(_WORDS, [word] * ROWS)


def _unpack_places(first: int) -> list[int]:
    """Return the places of words of two vectors in turns: of each 8 words, four from `first` on."""
    words = [word for eight in range(first, ROWS, 8) for word in range(eight, eight + 4)]
    return [place for word in words for place in (word, ROWS + word)]


def _call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Append a call of a function of LLVM."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _by_register(builder: Any, name: str, *vectors: Any) -> Any:
    """Append calls of a function for the registers of a processor, which may be parts of vectors."""
    kind = vectors[0].type
    size = kind.count // (2 if INSTRUCTIONS == "neon" else 1)
    halves = []
    for first in range(0, kind.count, size):
        part = range(first, first + size)
        arguments = [_shufflevector(builder, vector, vector, part) for vector in vectors]
        halves.append(_call(builder, name, ir.VectorType(kind.element, size), *arguments))
    return _shufflevector(builder, halves[0], halves[-1], range(kind.count))


# Loads and stores.


def _load_table(builder: Any, pointer: Any) -> Any:
    table = _load(builder, pointer, ir.VectorType(_BYTE, 16))
    return _shufflevector(builder, table, table, [byte % 16 for byte in range(2 * ROWS)])


def _prefetch(builder: Any, pointer: Any) -> None:
    place = builder.bitcast(pointer, _BYTE.as_pointer())
    options = [ir.Constant(_INT, number) for number in (0, 3, 1)]
    _call(builder, "llvm.prefetch.p0i8", ir.VoidType(), place, *options)


load_words = _in_memory(_words, lambda builder, pointer: _load(builder, pointer, _WORDS))
load_floats = _in_memory(_floats, lambda builder, pointer: _load(builder, pointer, _FLOATS))
load_table = _in_memory(_bytes, _load_table)  # 16 bytes, repeated, for `shuffle_bytes`
# A number of 64 bits whose first byte is the highest.
load_bswap = _in_memory(
    types.uint64, lambda builder, pointer: builder.bswap(_load(builder, pointer, ir.IntType(64)))
)
broadcast_float = _in_memory(
    _floats, lambda builder, pointer: _splat(builder, builder.load(pointer), _FLOATS)
)
store = _in_memory(types.void, _store)
# The lower 8 bits of each int.
store_low_bytes = _in_memory(
    types.void,
    lambda builder, pointer, ints: _store(
        builder, pointer, builder.trunc(ints, ir.VectorType(_BYTE, FLOATS))
    ),
)
splat_word = _operation(_words, lambda builder, number: _splat(builder, number, _WORDS))
splat_int = _operation(_ints, lambda builder, number: _splat(builder, number, _INTS))
zero_floats = _operation(_floats, lambda builder: ir.Constant(_FLOATS, [0.0] * FLOATS))
# Asks for the memory at a place, or after the end of the array.
prefetch = _in_memory(types.void, _prefetch)


# Words.


def _fshl(builder: Any, before: Any, after: Any, count: Any) -> Any:
    rest = _splat(builder, builder.sub(ir.Constant(count.type, 15), count), _WORDS)
    high = builder.shl(before, _splat(builder, count, _WORDS))
    return builder.or_(high, builder.lshr(builder.lshr(after, _constant(1)), rest))


def _high_bytes(builder: Any, a: Any, b: Any) -> Any:
    shifted = builder.bitcast(builder.lshr(a, _constant(8)), _BYTES)
    is_even = ir.Constant(ir.VectorType(ir.IntType(1), 2 * ROWS), [1, 0] * ROWS)
    return builder.select(is_even, shifted, builder.bitcast(b, _BYTES))


def _interpolate(builder: Any, hashed: Any, starts: Any, slopes: Any) -> Any:
    signed = builder.xor(hashed, _constant(0x8000))
    sign = builder.ashr(signed, _constant(15))
    place = builder.xor(signed, sign)
    line = builder.bitcast(builder.lshr(place, _constant(11)), _BYTES)
    start, slope = (
        builder.and_(builder.bitcast(_shuffle_bytes(builder, table, line), _WORDS), _constant(255))
        for table in (starts, slopes)
    )
    rest = builder.and_(builder.lshr(place, _constant(5)), _constant(63))
    value = builder.add(builder.shl(start, _constant(6)), builder.mul(slope, rest))
    return builder.xor(builder.lshr(value, _constant(3)), sign)


def _madd(builder: Any, a: Any, pair: Any) -> Any:
    numbers, wide = builder.bitcast(_splat(builder, pair, _INTS), _WORDS), ir.VectorType(_INT, ROWS)
    products = builder.mul(builder.sext(a, wide), builder.sext(numbers, wide))
    firsts, seconds = (_shufflevector(builder, products, products, range(first, ROWS, 2)) for first in (0, 1))
    return builder.add(firsts, seconds)


def _add_squares(builder: Any, costs: Any, a: Any, b: Any) -> Any:
    name = {"avx512bw": "llvm.x86.avx512.pmul.hr.sw.512", "neon": "llvm.aarch64.neon.sqrdmulh.v8i16"}.get(
        INSTRUCTIONS or "", "llvm.x86.avx2.pmul.hr.sw"
    )
    differences = builder.sub(a, b)
    return builder.add(costs, _by_register(builder, name, differences, differences))


def _spread_of(builder: Any, bits: Any, first: Any) -> Any:
    places = builder.lshr(ir.Constant(_WORDS, list(range(ROWS))), _splat(builder, bits, _WORDS))
    if INSTRUCTIONS == "avx512bw":
        return builder.add(places, _splat(builder, first, _WORDS))
    # The places of both bytes of each word.
    both = builder.mul(first, ir.Constant(first.type, 0x0202))
    places = builder.add(builder.mul(places, _constant(0x0202)), _constant(0x0100))
    return builder.add(places, _splat(builder, both, _WORDS))


def _load_spread(builder: Any, pointer: Any, places: Any) -> Any:
    if INSTRUCTIONS == "avx512bw":
        words = _load(builder, pointer, _WORDS)
        return _call(builder, "llvm.x86.avx512.permvar.hi.512", _WORDS, words, places)
    table = _load_table(builder, pointer)
    return builder.bitcast(_shuffle_bytes(builder, table, builder.bitcast(places, _BYTES)), _WORDS)


# ``words >> count``, by less than 16; bits that enter are zeros.
lshr = _operation(_words, lambda builder, words, count: builder.lshr(words, _splat(builder, count, _WORDS)))
# Funnel shift by 0 to 15: the upper 16 bits of ``(before << 16 | after) << count``.
fshl = _operation(_words, _fshl)
mul_words = _operation(_words, lambda builder, a, b: builder.mul(a, b))  # the lower 16 bits
# Of each 8 words the first (last) four of `a`, in turns with those of `b`.
unpack_low_words = _operation(_words, lambda builder, a, b: _shufflevector(builder, a, b, _unpack_places(0)))
unpack_high_words = _operation(_words, lambda builder, a, b: _shufflevector(builder, a, b, _unpack_places(4)))
high_bytes = _operation(_bytes, _high_bytes)  # the upper bytes of the words of `a` and of `b`, in turns
sub_words = _operation(_words, lambda builder, a, b: builder.sub(a, b))
min_words = _operation(_words, lambda builder, a, b: _call(builder, f"llvm.umin.v{ROWS}i16", _WORDS, a, b))
least_word = _operation(
    types.uint16,
    lambda builder, words: _call(builder, f"llvm.vector.reduce.umin.v{ROWS}i16", _WORD, words),
)
# Costs, and the squares of the signed words ``a - b``, divided by 2**15 and rounded.
add_squares = _operation(_words, _add_squares)
# What `load_spread` needs to load words, from one of the first on, into ``2**bits`` lanes each, at least two.
spread_of = _operation(_words, _spread_of)
# Of `SPREAD` words some, each in several lanes.
load_spread = _in_memory(_words, _load_spread)
# The fine entry of each hash, the upper 11 bits of a word: a sign, one of 16 lines, and a place on it.
interpolate = _operation(_words, _interpolate)
# Each two words times the two words of an int, summed.
madd = _operation(_ints, _madd)


# Bytes.


def _shuffle_bytes(builder: Any, table: Any, places: Any) -> Any:
    name = {"avx512bw": "llvm.x86.avx512.pshuf.b.512", "neon": "llvm.aarch64.neon.tbl1.v16i8"}.get(
        INSTRUCTIONS or "", "llvm.x86.avx2.pshuf.b"
    )
    return _by_register(builder, name, table, places)


def _sext_bytes(builder: Any, vector: Any, first: int) -> Any:
    """Append eight of each 16 bytes, from `first` on, as words with their sign."""
    bytes_of = [byte for part in range(first, 2 * ROWS, 16) for byte in range(part, part + 8)]
    places = [place for byte in bytes_of for place in (2 * ROWS, byte)]  # the lower byte is a zero
    zeros = ir.Constant(_BYTES, [0] * 2 * ROWS)
    words = builder.bitcast(_shufflevector(builder, vector, zeros, places), _WORDS)
    return builder.ashr(words, _constant(8))


_FIFTEEN = ir.Constant(_BYTES, [15] * 2 * ROWS)
add_bytes = _operation(_bytes, lambda builder, a, b: builder.add(a, b))
low_nibbles = _operation(_bytes, lambda builder, vector: builder.and_(vector, _FIFTEEN))
high_nibbles = _operation(
    _bytes, lambda builder, vector: builder.lshr(vector, ir.Constant(_BYTES, [4] * 2 * ROWS))
)
# For each byte of `places`, below 16, that entry of a table of `load_table`.
shuffle_bytes = _operation(_bytes, _shuffle_bytes)
# Of rows 0 to 3, 8 to 11, ...; and of rows 4 to 7, 12 to 15, ...: each row has two bytes.
sext_low_bytes = _operation(_words, lambda builder, vector: _sext_bytes(builder, vector, 0))
sext_high_bytes = _operation(_words, lambda builder, vector: _sext_bytes(builder, vector, 8))


# Ints and floats.


def _add_squared_errors(builder: Any, costs: Any, entries: Any, numbers: Any, weights: Any) -> Any:
    fused = ("contract",)  # products and sums in one instruction
    errors = builder.fsub(entries, numbers, flags=fused)
    squares = builder.fmul(builder.fmul(errors, weights, flags=fused), errors, flags=fused)
    return builder.fadd(costs, squares, flags=fused)


def _hadamard(builder: Any, floats: Any) -> Any:
    for distance in (2**level for level in range(FLOATS.bit_length() - 1)):
        others = _shufflevector(builder, floats, floats, [place ^ distance for place in range(FLOATS)])
        signs = ir.Constant(_FLOATS, [-1.0 if place & distance else 1.0 for place in range(FLOATS)])
        floats = builder.fadd(others, builder.fmul(floats, signs, flags=("contract",)), flags=("contract",))
    return floats


add_ints = _operation(_ints, lambda builder, a, b: builder.add(a, b))
sitofp = _operation(_floats, lambda builder, ints: builder.sitofp(ints, _FLOATS))
add_floats = _operation(_floats, lambda builder, a, b: builder.fadd(a, b))
add_products = _operation(
    _floats,
    lambda builder, sums, a, b: builder.fadd(
        sums, builder.fmul(a, b, flags=("contract",)), flags=("contract",)
    ),
)
sub_floats = _operation(_floats, lambda builder, a, b: builder.fsub(a, b))
hadamard = _operation(_floats, _hadamard)  # the product with a Hadamard matrix of ones
min_floats = _operation(_floats, lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), a, b))
add_squared_errors = _operation(_floats, _add_squared_errors)
# An integer where the first floats are lower, else the ints of a vector.
select_lower = _operation(
    _ints,
    lambda builder, a, b, place, places: builder.select(
        builder.fcmp_ordered("<", a, b), _splat(builder, place, _INTS), places
    ),
)


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
        rows = []
        for row in range(16):
            halves = []
            for group in groups:
                index = builder.add(start, builder.mul(stride, ir.Constant(start.type, row + group)))
                loaded = _load(builder, builder.gep(source, [index]), ir.VectorType(_BYTE, 32))
                # Swaps the bytes of each word.
                halves.append(_shufflevector(builder, loaded, loaded, [byte ^ 1 for byte in range(32)]))
            joined = _shufflevector(builder, halves[0], halves[-1], range(32 * len(halves)))
            rows.append(builder.bitcast(joined, _WORDS))
        for _ in range(3):
            pairs = [pair for eight in (rows[:8], rows[8:]) for pair in zip(eight[:4], eight[4:])]
            rows = [
                _shufflevector(builder, a, b, _unpack_places(first)) for a, b in pairs for first in (0, 4)
            ]
        for number in range(16):
            firsts = [part + group + number // 8 * 8 for group in groups for part in (0, ROWS)]
            places = [word for first in firsts for word in range(first, first + 8)]
            vector = _shufflevector(builder, rows[number % 8], rows[8 + number % 8], places)
            index = builder.add(place, ir.Constant(place.type, ROWS * number))
            _store(builder, builder.gep(target, [index]), vector)
        return context.get_dummy_value()

    return types.void(codes, types.intp, types.intp, out, types.intp), generate
