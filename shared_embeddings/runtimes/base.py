"""What runtimes read: grids of numbers, and how and where a table in them is stored. Runtimes by name.

A runtime is one file in this package, with a class that `register` names. It is then a
value of ``--for``, and a row of the tests and tables. Options name the runtimes, so these modules import
neither torch nor numpy before they write.

Axes: ``V`` vocabulary, ``D`` dimensions, ``S`` groups of a row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from shared_embeddings.utils.errors import UserError

if TYPE_CHECKING:
    import numpy as np

Kind = TypeVar("Kind", bound="type[Runtime]")


@dataclass(frozen=True)
class Grid:
    """The numbers that a table can have: those of a codec of `quantized` with a rate for all words.

    Args:
        codec: a `shared_embeddings.quant.grid.GridCodec`.
        bits: of a code.
        group_size: the numbers that share a scale, a divisor of D; None for all of a row.
    """

    codec: str
    bits: int
    group_size: int | None

    def options(self, widths: Sequence[int]) -> dict[str, Any]:
        """Return the options of `quantized` for tables of some widths D."""
        group = max(widths) if self.group_size is None else self.group_size
        return {"codec": self.codec, "bits": float(self.bits), "group_size": group, "count_exponent": 0.0}

    def fits(self, widths: Sequence[int]) -> bool:
        """Return whether rows of these widths are whole groups and bytes."""
        return not any(width % (self.group_size or 8) for width in widths)


class CodedTable(NamedTuple):
    """A table in a grid."""

    codes: np.ndarray  # ``(V, D)`` uint8, from 0
    scales: np.ndarray  # ``(V, S)`` float32, bfloat16 numbers
    offsets: np.ndarray | None  # likewise


class Runtime:
    """A program that runs models with tables in its own grids.

    Attributes:
        name: the value of ``--for``.
        about: what is written, for the description of that option.
        grids: by the runtime's name; of several with the same bits, the first one that fits is the default.
        takes_gguf: whether a file of the original is needed, whose layers are copied.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    grids: ClassVar[Mapping[str, Grid]]
    takes_gguf: ClassVar[bool] = False

    def find_grid(self, bits: float | None, name: str | None, widths: Sequence[int]) -> tuple[str, Grid]:
        """Return the grid of a name, or the first one of some bits, for tables of these widths.

        Raises:
            UserError: there is none.
        """
        if name is not None and name not in self.grids:
            raise UserError(f"grid {name}: {self.name} has {', '.join(self.grids)}; choose one of them")
        named = {name: self.grids[name]} if name is not None else self.grids
        chosen = {key: grid for key, grid in named.items() if bits is None or grid.bits == bits}
        if not chosen or (name is None and bits is None):
            sizes = sorted({grid.bits for grid in named.values()})
            raise UserError(
                f"bits is {bits}, but {name or self.name} has {' and '.join(map(str, sizes))}; choose one"
            )
        for key, grid in chosen.items():
            if grid.fits(widths):
                return key, grid
        raise UserError(
            f"rows of {' and '.join(map(str, widths))} numbers are not whole groups of {', '.join(chosen)}; "
            f"{self.name} also has {', '.join(key for key, grid in self.grids.items() if grid.fits(widths))}"
        )


class FolderRuntime(Runtime):
    """A runtime that reads a Hugging Face folder with other tensors in place of each table.

    Attributes:
        library: the Hub's name of it.
        loading: Python code that loads the folder DIR.
        ties_layers: whether an output layer uses the tensors of the input layer that it is tied to.
        scales_in_float32: whether scales are float32, not in the dtype of the model.
    """

    library: ClassVar[str]
    loading: ClassVar[str]
    scales_in_float32: ClassVar[bool] = False
    ties_layers: ClassVar[bool] = False

    @abstractmethod
    def layer_tensors(self, path: str, is_output: bool, table: CodedTable, grid: Grid) -> dict[str, Any]:
        """Return the tensors of a layer with a table, as arrays by name.

        Args:
            path: of the layer, without ``.weight``.
            is_output: whether the layer scores words.
        """

    @abstractmethod
    def settings(self, paths: Sequence[str], grid: Grid) -> dict[str, Any]:
        """Return entries of ``config.json``, for tables in layers with these paths."""


_registered: dict[str, Runtime] = {}


def register(name: str) -> Callable[[Kind], Kind]:
    """Class decorator: register a runtime by its name."""

    def add(runtime: Kind) -> Kind:
        runtime.name = name
        _registered[name] = runtime()
        return runtime

    return add


def runtimes() -> dict[str, Runtime]:
    """All runtimes by name, sorted."""
    return dict(sorted(_registered.items()))


def little_endian_bits(codes: np.ndarray, width: int) -> np.ndarray:
    """Return codes ``(V, D)`` of `width` bits in bytes ``(V, D * width / 8)``, from the lowest bit on."""
    import numpy as np

    if width == 8:
        return codes
    if width in (2, 4):
        parts = codes.reshape(len(codes), -1, 8 // width)
        return np.bitwise_or.reduce(parts << np.arange(0, 8, width, dtype=np.uint8), axis=2)
    bits = codes[:, :, None] >> np.arange(width, dtype=np.uint8) & 1
    return np.packbits(bits.reshape(len(codes), -1), axis=1, bitorder="little")
