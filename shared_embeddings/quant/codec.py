"""What a codec provides: bytes for rows of a table, and rows for bytes. Also the codecs by name.

A codec is one file in `shared_embeddings.quant.codecs`, or any other that is imported, with a class that
`register` names. It is then a value of the option `codec` of `quantized`, a candidate of ``compress``, and a
case of the tests and benchmarks.

A row has a *rate*, the bits of each of its numbers, such as 4 or 0.5. Codecs see rows after the rotation, if
they want one.

Axes: ``V`` vocabulary, ``n`` rows, ``N`` hidden states, ``D`` dimensions, ``S`` scales of a row.
"""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.quant import decoder, kernels
from shared_embeddings.quant.allocation import rates_within
from shared_embeddings.quant.decoder import CODES, DECODERS, RATES
from shared_embeddings.quant.metric import Metric
from shared_embeddings.utils.errors import UserError

Books = dict[str, Tensor]
Kind = TypeVar("Kind", bound="type[Codec]")

# Scales of rows are stored as powers of 2 in steps of one over this.
STEPS_PER_OCTAVE = 16
# Rows that are computed with together, so that no dense table is in memory.
BLOCK = 512
# Words get different rates for a whole number of bits if that is worth half a bit, as for many rows of zeros;
# those whose rates differ get the same one if half of the squared error is left, as in two dimensions.
_WORTH_MIXING, _WORTH_SAVING = 2.0, 0.5
# The methods that programs without this library decode.
DECODED_METHODS = ("standard", "projective", "quantized")
_FUTURE = "from __future__ import annotations\n"
_IMPORT = re.compile(rf"^from {re.escape(decoder.__name__)} import (\([^)]*\)|.*)\n", re.MULTILINE)


class Encoded(NamedTuple):
    """Rows as a codec stores them: codes ``(n, row_bytes)`` uint8, and scales ``(n, S)``."""

    codes: Tensor
    scales: Tensor


class Codec(ABC):
    """One way to store rows in few bits.

    Args:
        dim: D.
        group_size: numbers that share a scale, for codecs with `has_groups`.
        layout: sizes that depend on the table, as `fit` found them; the option `directions`.

    Attributes:
        name: the value of the option `codec`.
        num_scales: S, the scales of a row.
        about: what the codec does, for the description of that option.
        rotates: whether rows are rotated before they are encoded.
        has_groups: whether groups of numbers have a scale. Other scales are positive, one for each row,
            which 8 bits are enough for.
        about_layout: what the option `directions` lists, for the description of that option.
        is_candidate: whether it is tried where no codec is asked for.
        rows_at_once: how many rows `encode` is best given.
        example_bits: a typical rate, for tests.
        few_states: more hidden states than this are scored faster by a product with decoded rows.
        codes_name: of the tensors with codes, before the number of a rate. Another name keeps a codec from
            reading files whose codes meant something else.
        onnx_rates: those whose codes ONNX Runtime reads: ``(code - 2**(rate - 1)) * scale`` by groups.
        standalone: functions that decode rows with numpy only; the last one is called as
            `shared_embeddings.quant.decoder.DECODERS` says. They may use what that module imports and has.
            Without any, models that are also loaded without the library are not compressed.
        rates: those that it supports, ascending from 0, which stands for rows without codes.
        errors: the share of the squared error that each rate leaves; by default the limit for normal numbers.
        book_shapes: the shapes of the codebooks by name.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    rotates: ClassVar[bool] = True
    has_groups: ClassVar[bool] = False
    about_layout: ClassVar[str] = ""
    is_candidate: ClassVar[bool] = True
    rows_at_once: ClassVar[int] = BLOCK
    example_bits: ClassVar[float] = 4.0
    few_states: ClassVar[int] = 4
    codes_name: ClassVar[str] = "codes"
    onnx_rates: ClassVar[Sequence[int]] = ()
    standalone: ClassVar[Sequence[Callable[..., Any]]] = ()
    errors: ClassVar[Mapping[float, float]] = {rate: 4.0**-rate for rate in RATES}
    rates: tuple[float, ...] = RATES[:9]

    def __init__(self, dim: int, group_size: int = 32, layout: Sequence[int] = ()) -> None:
        self.dim = dim
        self.group_size = min(group_size, dim)
        self.layout = tuple(layout)
        self.num_scales = -(-dim // self.group_size) if self.has_groups else 1
        self.book_shapes: dict[str, tuple[int, ...]] = {}

    def row_bytes(self, rate: float) -> int:
        """The bytes of the codes of a row with codes; by default those of its numbers."""
        return -(-(int(rate) * self.dim) // 8)

    def fit(
        self,
        table: Tensor,
        bits: float,
        importance: Tensor | None,
        metric: Tensor | None,
        is_small: Callable[[Codec, Mapping[float, int]], bool],
    ) -> tuple[Codec, Tensor]:
        """Derive what depends on a table, before any row is encoded. By default the codec stays the same.

        Args:
            table: ``(V, D)``, not rotated, in any type.
            bits: the mean bits of a number.
            importance: the weights ``(V,)`` of the squared errors of words; None for equal weights.
            metric: M ``(D, D)``, what errors of rows count; None for squared errors.
            is_small: whether a codec for numbers of words by rate takes as few bytes as wanted.

        Returns:
            The codec with the layout for this table, and the rates ``(V,)`` of all words.
        """
        is_whole = importance is None and bits in self.rates
        if is_whole and self.has_groups:  # other programs read a single rate only
            return self, torch.full((len(table),), float(bits))
        margin = _WORTH_MIXING if is_whole else _WORTH_SAVING
        errors = torch.tensor([self.errors[rate] for rate in self.rates], dtype=torch.float64)
        return self, self.allocate(squared_norms(table), importance, is_small, errors, margin)

    def allocate(
        self,
        energy: Tensor,
        importance: Tensor | None,
        is_small: Callable[[Codec, Mapping[float, int]], bool],
        errors: Tensor,
        margin: float = _WORTH_SAVING,
    ) -> Tensor:
        """The rates ``(V,)`` with the least error, as in `fit` and `rates_within`, for words ``(V,)`` whose
        squared error is `energy` without codes; each of `rates` leaves a share of it, `errors`.
        """
        weights = energy if importance is None else energy * importance
        sizes = [self.row_bytes(rate) if rate else 0 for rate in self.rates]
        return rates_within(
            weights.cpu(), lambda counts: is_small(self, counts), self.rates, sizes, errors, margin
        )

    def initial_books(self) -> Books:
        """Codebooks for normal numbers with a variance of one."""
        return {}

    def learn(self, rows: Tensor, rates: Tensor) -> Books:
        """Codebooks for a sample of rotated rows ``(n, D)`` and their rates ``(n,)``; by default none."""
        return {}

    def derived(self, books: Books, rates: Sequence[float]) -> Books:
        """What the methods below need besides codebooks, and get with them; computed once in inference.

        `project` uses only what is there for any rates.
        """
        return {}

    @abstractmethod
    def encode(self, rows: Tensor, rate: float, books: Books, metric: Metric | None = None) -> Encoded:
        """The nearest codes and scales that the search finds for rows ``(n, D)`` in float32.

        The metric is what the errors of projected rows count; None for squared errors.
        """

    @abstractmethod
    def decode(self, codes: Tensor, scales: Tensor, rate: float, books: Books) -> Tensor:
        """Rows ``(n, D)`` before `project` is inverted, in the type of the scales ``(n, S)``."""

    def decoding(self, rate: float, books: Books) -> tuple[kernels.EntryPlan, Any, Any] | None:
        """The plan, sizes and center with which `kernels.decode_rows` gives what `decode` does, if it can."""
        return None

    def uncoded(self, scales: Tensor, books: Books) -> Tensor:
        """Rows ``(n, D)`` of words without codes, likewise: multiples of the row ``center0.0``, or zeros."""
        if "center0.0" not in books:
            return scales.new_zeros(len(scales), self.dim)
        return books["center0.0"].to(scales.dtype) * scales

    def uncoded_scales(self, rows: Tensor, books: Books, metric: Metric | None = None) -> Tensor:
        """The best scales ``(n, 1)`` of `uncoded`, not negative, for rows ``(n, D)`` as in `encode`."""
        shared = self.uncoded(rows.new_ones(len(rows), self.num_scales), books)
        return fitted_scales(self.project(rows, books), shared, metric).clamp(min=0)

    def project(self, hidden: Tensor, books: Books, is_inverted: bool = False) -> Tensor:
        """Hidden states ``(N, D)`` whose products with decoded rows are those of `hidden` with vectors.

        This is an orthogonal map, by default none. Inverted, it gives the vectors ``(n, D)`` of decoded rows.
        """
        return hidden

    def scores(self, hidden: Tensor, codes: Tensor, scales: Tensor, rate: float, books: Books) -> Tensor:
        """The products ``(N, n)`` of projected hidden states ``(N, D)`` with decoded rows, in blocks."""
        if len(hidden) <= self.few_states and kernels.usable(hidden, codes, scales, *books.values()):
            products = self.direct_scores(hidden, codes, scales, rate, books)
            if products is not None:
                return products
        # Results of blocks in a list would keep the memory of decoded blocks from being used again.
        products = hidden.new_empty(len(hidden), len(codes))
        for start in range(0, len(codes), BLOCK):
            block = slice(start, start + BLOCK)
            products[:, block] = F.linear(hidden, self.decode(codes[block], scales[block], rate, books))
        return products

    def direct_scores(
        self, hidden: Tensor, codes: Tensor, scales: Tensor, rate: float, books: Books
    ) -> Tensor | None:
        """`scores` of a few hidden states by a compiled loop, without decoded rows; None if there is none."""
        return None


_registered: dict[str, type[Codec]] = {}


def register(name: str) -> Callable[[Kind], Kind]:
    """Class decorator: register a codec by its name."""

    def add(codec: Kind) -> Kind:
        if name in _registered:
            raise ValueError(f"two codecs are registered as '{name}': rename one")
        codec.name = name
        _registered[name] = codec
        if codec.standalone:
            DECODERS[name] = codec.standalone[-1]
            CODES[name] = codec.codes_name
        return codec

    return add


def codecs() -> dict[str, type[Codec]]:
    """All codecs by name, sorted."""
    return dict(sorted(_registered.items()))


def program(file: Path) -> str:
    """The text of a module in which an import from `decoder` is replaced by that module and all decoders."""
    parts = [inspect.getsource(decoder).partition(_FUTURE)[2]]
    decoders = {name: codec.standalone for name, codec in codecs().items() if codec.standalone}
    functions = {
        function: inspect.getsource(function)
        for functions_of in decoders.values()
        for function in functions_of
    }
    parts += functions.values()
    parts += [
        f'DECODERS["{name}"] = {functions_of[-1].__name__}\n' for name, functions_of in decoders.items()
    ]
    parts += [f'CODES["{name}"] = "{CODES[name]}"\n' for name in decoders]
    text, count = _IMPORT.subn(lambda _: "\n\n".join(parts), file.read_text(encoding="utf-8"))
    assert count == 1, file
    return text


def check_decoder(method: str, options: Mapping[str, Any]) -> None:
    """Raise UserError if an embedding has a codec that no program decodes; the default codec has one."""
    codec = codecs().get(str(options.get("codec")))
    if method == "quantized" and codec is not None and not codec.standalone:
        raise UserError(
            f"codec {codec.name} has no stand-alone decoder, so programs without this library could not load "
            "the model; choose another"
        )


# Parts of several codecs.


def squared_norms(rows: Tensor, metric: Tensor | None = None) -> Tensor:
    """The squared norms ``(n,)`` of rows ``(n, D)`` in a metric ``(D, D)``, in float64."""
    norms = []
    for part in (block.float() for block in rows.split(BLOCK)):
        weighted = part if metric is None else part @ metric.to(part)
        norms.append((part.double() * weighted.double()).sum(dim=1))
    return torch.cat(norms)


def fitted_scales(rows: Tensor, values: Tensor, metric: Metric | None = None) -> Tensor:
    """The scales ``(n, 1)`` with which `values` ``(n, D)`` are nearest to `rows` ``(n, D)`` in a metric."""
    weighted = values
    if metric is not None:
        # Scales that fit a few directions only may be off by any factor in the others: a ridge has full rank.
        matrix = metric.matrix.to(values)
        weighted = values @ matrix + matrix.diagonal().mean() * values
    norms = (weighted * values).sum(dim=1, keepdim=True).clamp(min=1e-30)
    return (weighted * rows).sum(dim=1, keepdim=True) / norms


def row_sizes(rows: Tensor) -> Tensor:
    """The root mean square ``(n, 1)`` of each row ``(n, D)``, a power of 2**(1/16).

    Scales are such powers when they are stored, so exact codes need no other scale. Rows of zeros have the
    least one whose inverse is finite: they can be divided by it, and have no weight by its square.
    """
    sizes = rows.square().mean(dim=1, keepdim=True).sqrt()
    sizes = sizes.clamp(min=torch.finfo(sizes.dtype).tiny)
    return (sizes.log2() * STEPS_PER_OCTAVE).round().div(STEPS_PER_OCTAVE).exp2()
