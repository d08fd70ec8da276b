"""Numbers in few bits: fp16, int8 with a scale for each row, int4 with one for each group, 8-bit logarithms
of positive numbers, bits of integers.

int8 is symmetric: a row is a scale times integers from -127 to 127. Each row has its own scale, since norms
differ most between rows: rows of tables and codes are words, whose norms grow with rarity, and rows of a
basis are directions, whose norms decay like singular values. For a trained table of 4,120 x 128, the relative
error was 0.0066 with a scale per word, 0.0092 per dimension, and 0.023 with a single scale. Short rows, as in
codebooks of pieces, share a scale, see `_scaled_axes`.

int4 divides a row into groups of 32 values, the last one maybe smaller. A group is a scale times integers
from -8 to 7; the scale has the least squared error and may be negative, so that -8 is on the side of the
largest value. For a normal table of 4,000 x 128, the relative error is 0.082 with 4.5 bits per value,
compared with 0.0065 for int8 with 8.125 bits. Errors of factors add up: a product of normal factors of rank
64 is off by 0.115, compared with 0.0088. `RepeatableCodec` chooses scales that packing again finds.

Axes: ``n`` of the first axis of a tensor, ``N`` hidden states, ``D`` width of a matrix.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.quant import kernels
from shared_embeddings.quant.codec import STEPS_PER_OCTAVE
from shared_embeddings.quant.repeatable import SCALE_TYPE, RepeatableCodec

# The largest integer of int8. The 8 bits of precision of a scale times its 7 are exact in float32, so that
# packing unpacked rows finds the same scale; the range of scales is that of float32.
_LARGEST = 127
# int4: the bits of a value, and the values that share a scale.
_WIDTH = 4
_GROUP = 32
# int4 is encoded, and integers are decoded, in parts of this many values, to save memory.
_VALUES_AT_ONCE = 2**20
# The most bits of an integer: with those of a byte before it, they fit into 64.
_MOST_BITS = 56
# More hidden states than this are multiplied faster with decoded rows.
_FEW_STATES = 4
# The minimum number of values per scale, so that scales stay small compared to values.
_LEAST_IN_ROW = 16


class Packed(NamedTuple):
    """A tensor in few bits.

    Attributes:
        codes: its numbers without their scales.
        scales: in bfloat16; None for fp16.
    """

    codes: Tensor
    scales: Tensor | None


class NumberFormat(ABC):
    """How the numbers of tensors of a shape are stored, except for the size of the first axis.

    The length of the first axis of `codes` and of `scales` is a multiple of that of the tensor.

    Args:
        shape: of the tensor, with at least two axes.

    Attributes:
        name: of the storage.
        shape: of the tensor.
        widths: the bits of the integers of each column; empty for real numbers.
    """

    name: ClassVar[str]
    widths: tuple[int, ...] = ()

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.rows = math.prod(self.shape[: _scaled_axes(self.shape)])

    @property
    @abstractmethod
    def bytes(self) -> int:
        """The bytes of a tensor, including its scales."""

    @abstractmethod
    def encode(self, values: Tensor) -> Packed:
        """The nearest packed tensor to finite values in float32."""

    @abstractmethod
    def check(self, packed: Packed) -> None:
        """Raise ValueError unless types and sizes are those of a packed tensor of `shape`."""

    @abstractmethod
    def decode(self, packed: Packed) -> Tensor:
        """The values in float32 ``(n, ...)`` of n of the first axis."""

    def decode_rows(self, packed: Packed, ids: Tensor) -> Tensor:
        """The values ``(n, ...)`` at the places `ids` ``(n,)`` of the first axis."""
        return self.decode(self.rows_of(packed, lambda part: part.index_select(0, ids)))

    def rows_of(self, packed: Packed, choose: Callable[[Tensor], Tensor]) -> Packed:
        """The codes and scales of some of the first axis; `choose` selects from this axis."""
        chosen = [
            None if part is None else choose(part.unflatten(0, (self.shape[0], -1))).flatten(0, 1)
            for part in packed
        ]
        return Packed(*chosen)  # type: ignore[arg-type]

    def scores(self, hidden: Tensor, packed: Packed) -> Tensor:
        """The products ``(N, n)`` of hidden states ``(N, D)`` in at least 32 bits with n rows of a matrix."""
        return F.linear(hidden, self.decode(packed).to(hidden.dtype))

    def direct_scores(self, hidden: Tensor, packed: Packed) -> Tensor | None:
        """`scores` without decoded rows in memory; None where that is impossible or slower."""
        return None


class Float16(NumberFormat):
    """See the module."""

    name = "fp16"

    @property
    def bytes(self) -> int:
        """As in the base class."""
        return 2 * math.prod(self.shape)

    def encode(self, values: Tensor) -> Packed:
        """As in the base class; values above 65504 become infinite."""
        return Packed(values.half(), None)

    def check(self, packed: Packed) -> None:
        """As in the base class."""
        expect(packed.codes.dtype == torch.float16 and packed.scales is None)
        expect(packed.codes.shape == self.shape)

    def decode(self, packed: Packed) -> Tensor:
        """As in the base class."""
        return packed.codes.float()


class Int8(NumberFormat):
    """See the module."""

    name = "int8"

    @property
    def bytes(self) -> int:
        """As in the base class."""
        return math.prod(self.shape) + self.rows * SCALE_TYPE.itemsize

    def encode(self, values: Tensor) -> Packed:
        """As in the base class: integers with the shape of `values`, and a scale for every row."""
        within = list(range(_scaled_axes(values.shape), values.dim()))
        scales = (values.abs().amax(dim=within, keepdim=True) / _LARGEST).to(SCALE_TYPE)
        # Scales below the smallest normal number are not exact; such rows become zero.
        scales = scales.masked_fill(scales < torch.finfo(SCALE_TYPE).tiny, 0.0)
        integers = (values / scales.float()).nan_to_num(0.0, 0.0, 0.0).round()
        return Packed(integers.clamp(-_LARGEST, _LARGEST).to(torch.int8), scales)

    def check(self, packed: Packed) -> None:
        """As in the base class."""
        axes = _scaled_axes(self.shape)
        expect(packed.codes.dtype == torch.int8 and packed.codes.shape == self.shape)
        _expect_scales(packed.scales, self.shape[:axes] + (1,) * (len(self.shape) - axes))

    def decode(self, packed: Packed) -> Tensor:
        """As in the base class."""
        assert packed.scales is not None
        return packed.codes.float().mul_(packed.scales.float())

    def scores(self, hidden: Tensor, packed: Packed) -> Tensor:
        """As in the base class; the scales multiply the scores, which are fewer than the values."""
        assert packed.scales is not None
        return F.linear(hidden, packed.codes.to(hidden.dtype)).mul_(packed.scales.float().t())


class Int4(NumberFormat):
    """See the module."""

    name = "int4"

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__(shape)
        self._codec = RepeatableCodec(math.prod(self.shape[_scaled_axes(self.shape) :]), _GROUP)

    @property
    def bytes(self) -> int:
        """As in the base class."""
        return self.rows * (self._codec.row_bytes(_WIDTH) + self._codec.num_scales * SCALE_TYPE.itemsize)

    def encode(self, values: Tensor) -> Packed:
        """As in the base class: bytes and scales, each with an axis of rows."""
        rows = values.reshape(-1, self._codec.dim)
        parts = rows.split(max(1, _VALUES_AT_ONCE // self._codec.dim))
        encoded = [self._codec.encode(part, _WIDTH, {}) for part in parts]
        return Packed(
            torch.cat([part.codes for part in encoded]), torch.cat([part.scales for part in encoded])
        )

    def check(self, packed: Packed) -> None:
        """As in the base class."""
        expect(packed.codes.dtype == torch.uint8)
        expect(packed.codes.shape == (self.rows, self._codec.row_bytes(_WIDTH)))
        _expect_scales(packed.scales, (self.rows, self._codec.num_scales))

    def decode(self, packed: Packed) -> Tensor:
        """As in the base class."""
        halves = self._halves(packed).unflatten(1, (2, -1))
        rows = halves.transpose(1, 2).flatten(1)[:, : self._codec.dim]
        return rows.reshape(-1, *self.shape[1:])

    def scores(self, hidden: Tensor, packed: Packed) -> Tensor:
        """As in the base class; the dimensions of the hidden states are reordered instead of the values."""
        values = self._halves(packed)
        missing = values.size(1) - hidden.size(1)
        halves = F.pad(hidden, (0, missing)).unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
        return F.linear(halves, values.to(hidden.dtype))

    def direct_scores(self, hidden: Tensor, packed: Packed) -> Tensor | None:
        """As in the base class: for a few hidden states, by a compiled loop."""
        assert packed.scales is not None
        is_even = self._codec.dim % self._codec.group_size == 0 and self._codec.group_size % 2 == 0
        if (
            not is_even
            or len(hidden) > _FEW_STATES
            or not kernels.usable(hidden, packed.codes, packed.scales)
        ):
            return None
        return kernels.uniform_scores(hidden, packed.codes, _WIDTH, packed.scales)

    def _halves(self, packed: Packed) -> Tensor:
        """Rows with the values of even positions before those of odd ones, possibly padded at both ends.

        The first value of a byte is in its upper half. A code with its first bit inverted is a signed integer
        of 4 bits, which shifts extend to 8 bits.
        """
        codec = self._codec
        assert packed.scales is not None
        width = packed.codes.size(1) if codec.num_scales == 1 else codec.num_scales * _GROUP // 2
        codes = F.pad(packed.codes, (0, width - packed.codes.size(1))) ^ 0x88
        values = torch.empty(len(codes), 2, width, device=codes.device)
        values[:, 0] = codes.view(torch.int8) >> _WIDTH
        values[:, 1] = (codes << _WIDTH).view(torch.int8) >> _WIDTH
        groups = values.unflatten(2, (codec.num_scales, -1))
        return groups.mul_(packed.scales.float()[:, None, :, None]).flatten(1)


class Logarithms(NumberFormat):
    """Nonnegative numbers as powers of 2 in steps of 1/16, in 8 bits; zero, and negative numbers, are 0.

    The scale is a power of two that no number exceeds. Numbers are off by 1.3 % on average, 2.2 % at most;
    those below 2**-15.9 of the largest one are that, or zero, whichever is nearer.
    """

    name = "log8"

    @property
    def bytes(self) -> int:
        """As in the base class."""
        return math.prod(self.shape) + SCALE_TYPE.itemsize

    def encode(self, values: Tensor) -> Packed:
        """As in the base class, with one scale for all."""
        steps = (values.clamp(min=torch.finfo(torch.float32).tiny).log2() * STEPS_PER_OCTAVE).round()
        top = (steps.max() / STEPS_PER_OCTAVE).ceil().clamp(max=127)
        codes = 255 + steps - STEPS_PER_OCTAVE * top
        # Half of the smallest number is as near to it as to zero.
        is_zero = (values <= 0) | (codes <= 1 - STEPS_PER_OCTAVE)
        codes = codes.clamp(1, 255).masked_fill(is_zero, 0)
        return Packed(codes.to(torch.uint8), top.exp2().to(SCALE_TYPE).reshape(1, 1))

    def check(self, packed: Packed) -> None:
        """As in the base class."""
        expect(packed.codes.dtype == torch.uint8 and packed.codes.shape == self.shape)
        _expect_scales(packed.scales, (1, 1))

    def decode(self, packed: Packed) -> Tensor:
        """As in the base class."""
        assert packed.scales is not None
        numbers = torch.exp2((packed.codes.float() - 255) / STEPS_PER_OCTAVE) * packed.scales.float()
        return numbers.masked_fill(packed.codes == 0, 0.0)

    def rows_of(self, packed: Packed, choose: Callable[[Tensor], Tensor]) -> Packed:
        """As in the base class; they keep the scale."""
        return Packed(choose(packed.codes), packed.scales)


class BitCodes(NumberFormat):
    """Nonnegative integers such as word codes: each column in the bits of its largest value, least bit first.

    The rows follow each other without gaps, in one array of bytes that is filled from the lowest bit.

    Args:
        shape: of the tensor.
        widths: the bits of each column, or of all integers if the tensor is not a matrix.
    """

    name = "bits"

    def __init__(self, shape: Sequence[int], widths: Sequence[int]) -> None:
        expect(len(widths) > 0 and all(0 <= width <= _MOST_BITS for width in widths))
        self.shape, self.widths = tuple(shape), tuple(widths)
        self.rows = math.prod(self.shape) // len(self.widths)
        expect(self.rows * len(self.widths) == math.prod(self.shape))

    @staticmethod
    def of(values: Tensor) -> BitCodes:
        """The format for nonnegative integers."""
        columns = values.size(1) if values.dim() == 2 else 1
        largest = values.reshape(-1, columns).amax(dim=0)
        return BitCodes(values.shape, [number.bit_length() for number in largest.tolist()])

    @property
    def bytes(self) -> int:
        """As in the base class."""
        return -(-self.rows * sum(self.widths) // 8)

    def encode(self, values: Tensor) -> Packed:
        """As in the base class; the integers are on a CPU."""
        codes = values.detach().long().reshape(-1, len(self.widths)).numpy()
        bits = [codes[:, [column]] >> np.arange(width) & 1 for column, width in enumerate(self.widths)]
        stream = np.packbits(np.concatenate(bits, axis=1).astype(np.uint8), bitorder="little")
        return Packed(torch.from_numpy(stream), None)

    def check(self, packed: Packed) -> None:
        """As in the base class."""
        expect(packed.codes.dtype == torch.uint8 and packed.scales is None)
        expect(packed.codes.shape == (self.bytes,))

    def decode(self, packed: Packed) -> Tensor:
        """All integers, in the smallest type."""
        ids = torch.arange(self.rows, device=packed.codes.device)
        size = self.rows if torch.compiler.is_compiling() else max(1, _VALUES_AT_ONCE // len(self.widths))
        parts = [self._decoded(packed.codes, part) for part in ids.split(size)]
        return (torch.cat(parts) if parts else ids).reshape(self.shape)

    def decode_rows(self, packed: Packed, ids: Tensor) -> Tensor:
        """As in the base class, in the smallest type."""
        each = self.rows // self.shape[0]
        if each != 1:
            return self.decode(packed).index_select(0, ids)
        return self._decoded(packed.codes, ids.long()).reshape(-1, *self.shape[1:])

    def table_scores(self, packed: Packed, tables: Tensor) -> Tensor | None:
        """Sums ``(N, rows)`` of what each integer adds, `tables` ``(N, columns, K)``; None without a loop."""
        if not kernels.usable(packed.codes, tables):
            return None
        return kernels.field_scores(packed.codes, self.widths, self.rows, tables)

    def _decoded(self, codes: Tensor, rows: Tensor) -> Tensor:
        """The integers ``(n, columns)`` of `rows` ``(n,)``."""
        ends = torch.tensor(self.widths, device=codes.device).cumsum(0)
        widths = ends.diff(prepend=ends.new_zeros(1))
        starts = rows.unsqueeze(1) * sum(self.widths) + (ends - widths)
        places, found = starts >> 3, torch.zeros_like(starts)
        for number in range((max(self.widths) + 14) // 8 if self.bytes else 0):
            found += codes[(places + number).clamp(max=len(codes) - 1)].long() << 8 * number
        return (found >> (starts & 7) & (1 << widths) - 1).to(self._type)

    @property
    def _type(self) -> torch.dtype:
        """The smallest type of the integers."""
        types = {8: torch.uint8, 15: torch.int16, 31: torch.int32, _MOST_BITS: torch.int64}
        return next(kind for bits, kind in types.items() if max(self.widths) <= bits)


FORMATS: dict[str, type[NumberFormat]] = {kind.name: kind for kind in (Float16, Int8, Int4)}


def format_of(name: str, shape: Sequence[int], widths: Sequence[int] = ()) -> NumberFormat:
    """The format of a name, for tensors of a shape; integers have `widths`."""
    if name == BitCodes.name:
        return BitCodes(shape, widths)
    return Logarithms(shape) if name == Logarithms.name else FORMATS[name](shape)


def _scaled_axes(shape: Sequence[int]) -> int:
    """The number of leading axes that index rows with their own scale; at least one.

    A row spans the fewest trailing axes with at least 16 values: the vector of a word or of a codebook entry,
    or all entries of a codebook if each is only a piece of a vector.
    """
    axes = len(shape) - 1
    while axes > 1 and math.prod(shape[axes:]) < _LEAST_IN_ROW:
        axes -= 1
    return axes


def _expect_scales(scales: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless scales have the right type and a shape."""
    expect(scales is not None and scales.dtype == SCALE_TYPE and scales.shape == shape)


def expect(condition: bool) -> None:
    """Raise ValueError unless `condition` is true."""
    if not condition:
        raise ValueError("unexpected type or shape")
