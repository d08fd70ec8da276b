"""Numbers in few bits: fp16, int8 with a scale for each row, 8-bit logarithms of positive numbers, bits of
integers.

int8 is symmetric: a row is a scale times integers from -127 to 127. Each row has its own scale, since norms
differ most between rows: rows of tables and codes are words, whose norms grow with rarity, and rows of a
basis are directions, whose norms decay like singular values. For a trained table of 4,120 x 128, the relative
error was 0.0066 with a scale per word, 0.0092 per dimension, and 0.023 with a single scale. Short rows, as in
codebooks of pieces, share a scale.

Packing unpacked numbers again gives the same codes and scales. Scales are in bfloat16, whose 8 bits of
precision times those of an integer are exact in float32.

Axes: ``n`` of the first axis of a tensor, ``N`` hidden states, ``D`` width of a matrix.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.nn.tracing import needs_fixed_shapes
from shared_embeddings.quant.codec import STEPS_PER_OCTAVE

_SCALE_TYPE = torch.bfloat16
_RANGE = torch.finfo(_SCALE_TYPE)
# The largest integer of int8.
_LARGEST = 127
# Integers are decoded in parts of this many values, to save memory.
_VALUES_AT_ONCE = 2**20
# The most bits of an integer: with those of a byte before it, they fit into 64.
_MOST_BITS = 56
# The minimum number of values per scale, so that scales stay small compared to values.
_LEAST_IN_ROW = 16


class Packed(NamedTuple):
    """A tensor in few bits."""

    codes: Tensor  # its numbers without their scales
    scales: Any  # a tensor in bfloat16; None for fp16 and integers


class NumberFormat(ABC):
    """How the numbers of tensors of a shape are stored, except for the size of the first axis.

    The length of the first axis of `codes` and of `scales` is a multiple of that of the tensor.

    Attributes:
        name: of the storage.
        kind: the type of the codes.
        shape: of the tensor, with at least two axes.
        codes_shape: of the codes.
        scales_shape: of the scales; None without.
        widths: the bits of the integers of each column; empty for real numbers.
    """

    name: ClassVar[str]
    kind: ClassVar[torch.dtype]
    scales_shape: tuple[int, ...] | None = None
    widths: tuple[int, ...] = ()

    def __init__(self, shape: Sequence[int], widths: Sequence[int] = ()) -> None:
        self.shape = self.codes_shape = tuple(shape)

    @property
    def bytes(self) -> int:
        """The bytes of a tensor, including its scales."""
        of_scales = 0 if self.scales_shape is None else math.prod(self.scales_shape) * _SCALE_TYPE.itemsize
        return math.prod(self.codes_shape) * self.kind.itemsize + of_scales

    def check(self, packed: Packed) -> None:
        """Raise ValueError unless types and sizes are those of a packed tensor of `shape`, and finite."""
        of_codes = packed.codes.dtype, packed.codes.shape
        of_scales = None if packed.scales is None else (packed.scales.dtype, packed.scales.shape)
        wanted = None if self.scales_shape is None else (_SCALE_TYPE, self.scales_shape)
        if of_codes != (self.kind, self.codes_shape) or of_scales != wanted:
            raise ValueError("unexpected type or shape")
        # Scales are multiplied by integers up to 127, or by powers up to 1.
        factor = _LARGEST if self.kind == torch.int8 else 1
        largest = packed.codes if packed.scales is None else packed.scales.float() * factor
        if largest.is_floating_point() and not bool(largest.isfinite().all()):
            raise ValueError("numbers that are not finite")

    @abstractmethod
    def encode(self, values: Tensor) -> Packed:
        """The nearest packed tensor to finite values in float32."""

    @abstractmethod
    def decode(self, packed: Packed) -> Tensor:
        """The values in float32 ``(n, ...)`` of n of the first axis."""

    def decode_rows(self, packed: Packed, ids: Tensor) -> Tensor:
        """The values ``(n, ...)`` at the places `ids` ``(n,)`` of the first axis."""
        return self.decode(self.rows_of(packed, lambda part: part.index_select(0, ids)))

    def rows_of(self, packed: Packed, choose: Callable[[Tensor], Tensor]) -> Packed:
        """The codes and scales of some of the first axis; `choose` selects from this axis."""
        codes, scales = packed
        if scales is not None and len(scales) > 1:
            scales = choose(scales.unflatten(0, (self.shape[0], -1))).flatten(0, 1)
        return Packed(choose(codes.unflatten(0, (self.shape[0], -1))).flatten(0, 1), scales)

    def scores(self, hidden: Tensor, packed: Packed) -> Tensor:
        """The products ``(N, n)`` of hidden states ``(N, D)`` in at least 32 bits with n rows of a matrix."""
        return F.linear(hidden, self.decode(packed).to(hidden.dtype))


class Float16(NumberFormat):
    """See the module; values above 65504 become infinite."""

    name = "fp16"
    kind = torch.float16

    def encode(self, values: Tensor) -> Packed:
        return Packed(values.half(), None)

    def decode(self, packed: Packed) -> Tensor:
        return packed.codes.float()


class Int8(NumberFormat):
    """See the module."""

    name = "int8"
    kind = torch.int8

    def __init__(self, shape: Sequence[int], widths: Sequence[int] = ()) -> None:
        super().__init__(shape)
        # A row with its own scale spans the fewest trailing axes with at least 16 values: the vector of a
        # word or codebook entry, or all entries of a codebook if each is only a piece of a vector.
        self.axes = len(self.shape) - 1  # the leading ones, which index rows; at least one
        while self.axes > 1 and math.prod(self.shape[self.axes :]) < _LEAST_IN_ROW:
            self.axes -= 1
        self.scales_shape = self.shape[: self.axes] + (1,) * (len(self.shape) - self.axes)

    def encode(self, values: Tensor) -> Packed:
        within = list(range(self.axes, values.dim()))
        scales = (values.abs().amax(dim=within, keepdim=True) / _LARGEST).to(_SCALE_TYPE)
        # Scales below the smallest normal number are not exact; such rows become zero.
        scales = scales.masked_fill(scales < _RANGE.tiny, 0.0)
        integers = (values / scales.float()).nan_to_num(0.0, 0.0, 0.0).round()
        return Packed(integers.clamp(-_LARGEST, _LARGEST).to(torch.int8), scales)

    def decode(self, packed: Packed) -> Tensor:
        return packed.codes.float().mul_(packed.scales.float())

    def scores(self, hidden: Tensor, packed: Packed) -> Tensor:
        """The scales multiply the scores, which are fewer than the values."""
        return F.linear(hidden, packed.codes.to(hidden.dtype)).mul_(packed.scales.float().t())


class Logarithms(NumberFormat):
    """Nonnegative numbers as powers of 2 in steps of 1/16, in 8 bits; zero, and negative numbers, are 0.

    All have one scale, a power of two that no number exceeds. Numbers are off by 1.3 % on average, 2.2 % at
    most; those below 2**-15.9 of the largest one are that, or zero, whichever is nearer.
    """

    name = "log8"
    kind = torch.uint8
    scales_shape = (1, 1)

    def encode(self, values: Tensor) -> Packed:
        steps = (values.clamp(min=torch.finfo(torch.float32).tiny).log2() * STEPS_PER_OCTAVE).round()
        top = (steps.max() / STEPS_PER_OCTAVE).ceil().clamp(max=127)
        codes = 255 + steps - STEPS_PER_OCTAVE * top
        # Half of the smallest number is as near to it as to zero.
        is_zero = (values <= 0) | (codes <= 1 - STEPS_PER_OCTAVE)
        codes = codes.clamp(1, 255).masked_fill(is_zero, 0)
        return Packed(codes.to(torch.uint8), top.exp2().to(_SCALE_TYPE).reshape(1, 1))

    def decode(self, packed: Packed) -> Tensor:
        numbers = torch.exp2((packed.codes.float() - 255) / STEPS_PER_OCTAVE) * packed.scales.float()
        return numbers.masked_fill(packed.codes == 0, 0.0)


class BitCodes(NumberFormat):
    """Nonnegative integers such as word codes: each column in the bits of its largest value, least bit first.

    The rows follow each other without gaps, in one array of bytes that is filled from the lowest bit. They
    are decoded in the smallest type.

    Args:
        shape: of the tensor.
        widths: the bits of each column, or of all integers if the tensor is not a matrix.
    """

    name = "bits"
    kind = torch.uint8

    def __init__(self, shape: Sequence[int], widths: Sequence[int] = ()) -> None:
        self.shape, self.widths = tuple(shape), tuple(widths)
        self.rows = math.prod(self.shape) // len(self.widths)
        is_even = self.rows * len(self.widths) == math.prod(self.shape)
        if not is_even or not all(0 <= width <= _MOST_BITS for width in widths):
            raise ValueError("unexpected type or shape")
        self.codes_shape = (-(-self.rows * sum(self.widths) // 8),)

    @staticmethod
    def of(values: Tensor) -> BitCodes:
        """The format for nonnegative integers."""
        columns = values.size(1) if values.dim() == 2 else 1
        largest = values.reshape(-1, columns).amax(dim=0)
        return BitCodes(values.shape, [number.bit_length() for number in largest.tolist()])

    def encode(self, values: Tensor) -> Packed:
        """Codes of integers on a CPU."""
        codes = values.detach().long().reshape(-1, len(self.widths)).numpy()
        bits = [codes[:, [column]] >> np.arange(width) & 1 for column, width in enumerate(self.widths)]
        stream = np.packbits(np.concatenate(bits, axis=1).astype(np.uint8), bitorder="little")
        return Packed(torch.from_numpy(stream), None)

    def decode(self, packed: Packed) -> Tensor:
        """All integers."""
        ids = torch.arange(self.rows, device=packed.codes.device)
        size = self.rows if torch.compiler.is_compiling() else max(1, _VALUES_AT_ONCE // len(self.widths))
        parts = [self._decoded(packed.codes, part) for part in ids.split(size)]
        return (torch.cat(parts) if parts else ids).reshape(self.shape)

    def decode_rows(self, packed: Packed, ids: Tensor) -> Tensor:
        if ids.device.type == "cpu" and ids.numel() and not needs_fixed_shapes(ids):
            if int(ids.min()) < 0 or int(ids.max()) >= self.shape[0]:
                raise IndexError(f"an index is out of range: there are {self.shape[0]} rows")
        if self.rows != self.shape[0]:
            return self.decode(packed).index_select(0, ids)
        return self._decoded(packed.codes, ids.long()).reshape(-1, *self.shape[1:])

    def _decoded(self, codes: Tensor, rows: Tensor) -> Tensor:
        """The integers ``(n, columns)`` of `rows` ``(n,)``."""
        ends = torch.tensor(self.widths, device=codes.device).cumsum(0)
        widths = ends.diff(prepend=ends.new_zeros(1))
        starts = rows.unsqueeze(1) * sum(self.widths) + (ends - widths)
        places, fields = starts >> 3, torch.zeros_like(starts)
        for number in range((max(self.widths) + 14) // 8 if self.bytes else 0):
            fields += codes[(places + number).clamp(max=len(codes) - 1)].long() << 8 * number
        kinds = {8: torch.uint8, 15: torch.int16, 31: torch.int32, _MOST_BITS: torch.int64}
        kind = next(kind for bits, kind in kinds.items() if max(self.widths) <= bits)
        return (fields >> (starts & 7) & (1 << widths) - 1).to(kind)


FORMATS: dict[str, type[NumberFormat]] = {kind.name: kind for kind in (Float16, Int8, Logarithms, BitCodes)}
