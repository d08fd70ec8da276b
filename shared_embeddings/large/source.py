"""The rows of a table in safetensors files, which are read in blocks.

Axes: ``V`` rows, ``D`` dimensions.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import quote

# Rows of a sample that follow each other in the file, and how often it is mapped anew, which frees its pages.
_RUN, _RUNS = 16, 64


class _Piece(NamedTuple):
    """Consecutive rows of the table: a tensor of a file."""

    file: Path
    tensor: str
    rows: int


class TableRows:
    """A table ``(V, D)`` in one tensor, or in several whose names differ in a number, one after the other.

    Args:
        path: a safetensors file, or a folder with such files.
        name: of the tensor; ``*`` stands for the number of a part, as in ``table.shard_*.weight``.

    Raises:
        UserError: the files have no such tensor, or it is not a table of real numbers; parts are missing or
            differ in width.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        pattern = re.compile(re.escape(name).replace(r"\*", r"(\d+)"))
        pieces: dict[int, _Piece] = {}
        names, widths, self.dtypes = [], set(), set()
        for file in files:
            try:
                with safe_open(file, "pt") as opened:
                    for tensor in opened.keys():
                        names.append(tensor)
                        if (match := pattern.fullmatch(tensor)) is None:
                            continue
                        part = opened.get_slice(tensor)
                        shape = part.get_shape()
                        if len(shape) != 2 or part.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                            raise UserError(
                                f"{file}: tensor {tensor} is {part.get_dtype()} {tuple(shape)}, but a table "
                                "has two axes and real numbers; name another"
                            )
                        widths.add(shape[1])
                        self.dtypes.add(part.get_dtype())
                        pieces[int(match[1]) if match.groups() else 0] = _Piece(file, tensor, shape[0])
            except SafetensorError as error:
                raise UserError(f"{file}: cannot be read ({error}); copy it again") from error
        if not pieces:
            shown = ", ".join(names[:5])
            raise UserError(f"table {quote(name)}: {path} has no such tensor; it has {shown or 'none'}")
        missing = set(range(min(pieces), max(pieces) + 1)) - pieces.keys()
        if missing or len(widths) > 1:
            what = f"no part {min(missing)}" if missing else f"parts of the widths {sorted(widths)}"
            raise UserError(f"table {quote(name)}: {path} has {what}; copy it again")
        self._pieces = [pieces[number] for number in sorted(pieces)]
        self._ends = [*itertools.accumulate(piece.rows for piece in self._pieces)]
        self.num_embeddings, self.embedding_dim = self._ends[-1], widths.pop()

    @property
    def nbytes(self) -> int:
        """The bytes of the table in its files."""
        sizes = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
        return self.num_embeddings * self.embedding_dim * max(sizes[dtype] for dtype in self.dtypes)

    def read(self, first: int, last: int) -> Tensor:
        """Return rows ``(last - first, D)`` in float32; the memory that maps them is freed."""
        return torch.cat([*self._parts(first, last)])

    def _parts(self, first: int, last: int) -> Iterator[Tensor]:
        while first < last:
            number = bisect.bisect_right(self._ends, first)
            piece, end = self._pieces[number], self._ends[number]
            start = end - piece.rows
            with safe_open(piece.file, "pt") as opened:
                part: Tensor = opened.get_slice(piece.tensor)[first - start : min(last, end) - start]
                yield part.to(torch.float32, copy=True)
            first = min(last, end)

    def sample(self, number: int) -> Tensor:
        """Return about `number` rows ``(n, D)``, in runs at equal distances; all rows of a smaller table."""
        if self.num_embeddings <= number:
            return self.read(0, self.num_embeddings)
        runs = max(1, number // _RUN)
        starts = [run * (self.num_embeddings - _RUN) // max(1, runs - 1) for run in range(runs)]
        return torch.cat([self.read(start, start + _RUN) for start in starts])
