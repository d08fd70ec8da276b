"""What a codec provides: bytes for rows of a table, with a scale for each row or group of numbers.

A row has a *width*, the bits of each of its numbers; the widths 9 and 10 stand for a half and a quarter of a
bit. Codecs see rows after the rotation, if they want one.

Axes: ``n`` rows, ``D`` dimensions, ``S`` scales of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.quant import kernels

Codebooks = dict[str, Tensor]

# The bits of a number by width.
RATES = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 0.5, 0.25)

# Scales of rows are stored as powers of 2 in steps of one over this.
STEPS_PER_OCTAVE = 16

# Rows that are computed with together, so that no dense table is in memory.
_BLOCK = 512
# More tokens than this are scored faster by a product with decoded rows.
_FEW_TOKENS = 4


class Encoded(NamedTuple):
    """Rows as a codec stores them.

    Attributes:
        codes: ``(n, row_bytes)`` uint8.
        scales: ``(n, S)``.
    """

    codes: Tensor
    scales: Tensor


class Codec(ABC):
    """One way to store rows in few bits.

    Attributes:
        name: the value of the option `codec`.
        rotates: whether rows are rotated before they are encoded.
        adapts: whether the sizes of its codebooks and the bits of its numbers depend on the table.
        widths: the widths that it supports, ascending by bits; 0 for rows without codes.
        row_scales: whether scales are positive and one for each row, which 8 bits are enough for.
        dim: D.
    """

    name: ClassVar[str]
    rotates: ClassVar[bool] = True
    adapts: ClassVar[bool] = False
    row_scales: ClassVar[bool] = True
    widths: tuple[int, ...] = tuple(range(9))

    def __init__(self, dim: int) -> None:
        self.dim = dim

    @property
    def num_scales(self) -> int:
        """S, the scales of a row."""
        return 1

    @abstractmethod
    def row_bytes(self, width: int) -> int:
        """The bytes of the codes of a row."""

    def codebook_shapes(self, widths: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The codebooks for rows of these widths by name; none by default."""
        return {}

    def initial_codebooks(self, widths: Sequence[int]) -> Codebooks:
        """Codebooks for normal numbers with a variance of one."""
        return {}

    def learn(self, rows: Tensor, widths: Sequence[int], seed: int) -> Codebooks:
        """Codebooks for these rows ``(n, D)``; by default the initial ones."""
        return self.initial_codebooks(widths)

    def adapted(self, rows: Tensor, bits: float) -> Codec:
        """The codec for a table ``(V, D)`` and a mean of `bits` for each number; by default the same."""
        return self

    def error_shares(self) -> Tensor:
        """The estimated share of the squared error of rows at each width; the limit for normal numbers."""
        return 4.0 ** -torch.tensor([RATES[width] for width in self.widths], dtype=torch.float64)

    def energy(self, rows: Tensor) -> Tensor:
        """The squared error ``(n,)`` of rows ``(n, D)`` without codes."""
        found = rows.new_empty(len(rows), dtype=torch.float64)
        for ids in torch.arange(len(rows), device=rows.device).split(_BLOCK):
            found[ids] = rows[ids].double().square().sum(dim=1)
        return found

    def laid_out(self, rows: Tensor, widths: Tensor) -> Codec:
        """The codec for a table ``(V, D)`` of words with `widths` ``(V,)``; by default the same."""
        return self

    def options(self) -> dict[str, object]:
        """The options of `quantized` that make this codec, for codecs that adapt."""
        return {}

    @abstractmethod
    def encode(self, rows: Tensor, width: int, codebooks: Codebooks) -> Encoded:
        """The nearest codes and scales that the search finds for rows ``(n, D)`` in float32."""

    @abstractmethod
    def decode(self, codes: Tensor, width: int, codebooks: Codebooks) -> Tensor:
        """Rows ``(n, D)`` before scaling, of codes ``(n, row_bytes)``, in the type of the codebooks."""

    def scaled(self, values: Tensor, scales: Tensor) -> Tensor:
        """Decoded `values` ``(n, D)`` times their `scales` ``(n, S)``."""
        return values.to(scales.dtype) * scales

    def uncoded(self, codebooks: Codebooks, scales: Tensor) -> Tensor:
        """The rows ``(n, D)`` of words without codes, for their scales ``(n, S)``: zeros."""
        return scales.new_zeros(scales.size(0), self.dim)

    def rows(self, codes: Tensor, width: int, codebooks: Codebooks, scales: Tensor) -> Tensor:
        """The decoded rows ``(n, D)`` times their scales, a block of rows at a time."""
        blocks = zip(codes.split(_BLOCK), scales.split(_BLOCK))
        return torch.cat(
            [self.scaled(self.decode(part, width, codebooks), factors) for part, factors in blocks]
        )

    def scored_states(self, hidden: Tensor, codebooks: Codebooks) -> Tensor:
        """Hidden states ``(N, D)`` as `scores` takes them, for rows of all widths; by default the same."""
        return hidden

    def scores(
        self, hidden: Tensor, codes: Tensor, width: int, codebooks: Codebooks, scales: Tensor
    ) -> Tensor:
        """The products ``(N, n)`` of hidden states ``(N, D)``, from `scored_states`, with scaled rows.

        Compiled loops score a few tokens without storing decoded rows; more take a block of rows at a time.
        """
        if len(hidden) <= _FEW_TOKENS and kernels.usable(hidden, codes, scales, *codebooks.values()):
            direct = self.direct_scores(hidden, codes, width, codebooks, scales)
            if direct is not None:
                return direct
        # Results of blocks in a list would keep the memory of decoded blocks from being used again.
        found = hidden.new_empty(len(hidden), len(codes))
        for start in range(0, len(codes), _BLOCK):
            block = slice(start, start + _BLOCK)
            values = self.scored_rows(codes[block], width, codebooks)
            found[:, block] = self.products(hidden, values, scales[block])
        return found

    def scored_rows(self, codes: Tensor, width: int, codebooks: Codebooks) -> Tensor:
        """The rows ``(n, D)`` before scaling that `scores` multiplies with; by default those of `decode`."""
        return self.decode(codes, width, codebooks)

    def direct_scores(
        self, hidden: Tensor, codes: Tensor, width: int, codebooks: Codebooks, scales: Tensor
    ) -> Tensor | None:
        """`scores` by a compiled loop for a few tokens; None if there is none."""
        tables = self.byte_tables(hidden, width, codebooks)
        return None if tables is None else kernels.table_scores(codes, tables, scales)

    def byte_tables(self, hidden: Tensor, width: int, codebooks: Codebooks) -> Tensor | None:
        """What every byte at every place of a row adds to the products with hidden states ``(N, D)``.

        Returns:
            ``(N, row_bytes, 256)`` before scaling, or None if bytes cannot be read one by one.
        """
        return None

    def products(self, hidden: Tensor, values: Tensor, scales: Tensor) -> Tensor:
        """The products ``(N, n)`` of hidden states ``(N, D)`` with decoded `values` times their `scales`."""
        return F.linear(hidden, values.to(scales.dtype)) * scales.t()


def fitted_scales(rows: Tensor, values: Tensor) -> Tensor:
    """The scales ``(n, 1)`` with which `values` ``(n, D)`` are nearest to `rows` ``(n, D)``."""
    norms = values.square().sum(dim=1, keepdim=True).clamp(min=1e-30)
    return (rows * values).sum(dim=1, keepdim=True) / norms


def row_sizes(rows: Tensor) -> Tensor:
    """The root mean square ``(n, 1)`` of each row ``(n, D)``, a power of 2**(1/16); one for rows of zeros.

    Scales are such powers when they are stored, so exact codes need no other scale.
    """
    found = rows.square().mean(dim=1, keepdim=True).sqrt()
    found = found.masked_fill(found == 0, 1.0)
    return (found.log2() * STEPS_PER_OCTAVE).round().div(STEPS_PER_OCTAVE).exp2()
