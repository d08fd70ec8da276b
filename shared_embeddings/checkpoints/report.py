"""What a compression cost: sizes before and after, and the error of every table by frequency band.

Axes: ``V`` vocabulary, ``D`` model dimension.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from shared_embeddings.checkpoints.agreement import Kept
from shared_embeddings.checkpoints.quality import QualityReport
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.fitting.fit import FitReport
from shared_embeddings.sizing.suggest import as_yaml

# The last rank of each band of words, by falling frequency; a last band has the rest.
BANDS = (100, 1_000, 10_000)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A number before and after.

    Attributes:
        before: of the model that was read.
        after: of the model that was written.
    """

    before: int
    after: int


@dataclasses.dataclass(frozen=True)
class Band:
    """The error on words of like frequency.

    Attributes:
        first, last: ranks by falling frequency, counted from 1.
        loss: mean over the words of ``||e - ê||`` (Distilled Embedding, Eq. 5).
        relative_error: ``||E - Ê|| / ||E||`` in the Frobenius norm.
    """

    first: int
    last: int
    loss: float
    relative_error: float


@dataclasses.dataclass(frozen=True)
class StorageReport:
    """What storing a fitted embedding in fewer bits cost; the padding row does not count.

    Attributes:
        store: the storage.
        stored_bytes: of the embedding as it was fitted, and as it is stored, scales included.
        added_error: ``||Ê - Ē|| / ||Ê||``, of the stored table Ē to the fitted one Ê.
        relative_error: ``||E - Ē|| / ||E||``, of the stored table to the table E of the model that was read.
        added_bands: of the stored table to the fitted one, by frequency.
        bands: of the stored table to that of the model that was read, by frequency.
    """

    store: str
    stored_bytes: Sizes
    added_error: float
    relative_error: float
    added_bands: list[Band]
    bands: list[Band]


@dataclasses.dataclass(frozen=True)
class TableReport:
    """What became of one table.

    Attributes:
        name: the host's name of it.
        uses: where the model uses it.
        part: of an embedding that it is, and that the numbers here are of; None for all of the embedding.
        parameters: of the embedding before and after.
        stored_bytes: of the embedding before, and as it is written; codes have their own bits.
        fit: how well the new embedding reconstructs the table before it is stored.
        order: what ranks the words of the bands.
        bands: the error by frequency, likewise.
        storage: what its storage added; None where its numbers are stored as they are.
    """

    name: str
    uses: tuple[str, ...]
    part: str | None
    parameters: Sizes
    stored_bytes: Sizes
    fit: FitReport
    order: str
    bands: list[Band]
    storage: StorageReport | None


@dataclasses.dataclass(frozen=True)
class CompressionReport:
    """What a compression cost.

    Attributes:
        model, output: the files.
        host: whose model it is.
        method: of the embeddings.
        store: how their numbers are stored.
        bytes_on_disk: of the files; the one before may hold what is there for training only.
        bytes_of_weights: of all tensors as they are in memory before, and as they are written after.
        bytes_in_memory: of parameters and buffers.
        parameters: of the whole model.
        quality: of the model before and as it is written; None where there was no text for that.
        kept: how much of what the model did it still does as it is written.
        tables: one for each table that was replaced.
        notes: what else changed.
    """

    model: str
    output: str
    host: str
    method: str
    store: str
    bytes_on_disk: Sizes
    bytes_of_weights: Sizes
    bytes_in_memory: Sizes
    parameters: Sizes
    quality: QualityReport | None
    kept: Kept
    tables: list[TableReport]
    notes: list[str]

    def described(self) -> str:
        """The report as a table to read; the last line says how much of the model was kept."""
        rows = {
            "bytes on disk": self.bytes_on_disk,
            "bytes of weights": self.bytes_of_weights,
            "bytes in memory": self.bytes_in_memory,
            "parameters": self.parameters,
        }
        lines = [f"{self.output}: {self.host} model with {self.method} embeddings in {self.store}"]
        lines += [f"{'':<28}{'before':>16}{'after':>16}{'smaller':>10}"]
        lines += [_line(title, sizes) for title, sizes in rows.items()]
        if self.quality is not None:
            lines += _quality_lines(self.quality)
        for table in self.tables:
            lines += ["", *_table_lines(table)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes), self.kept.described()])


def relative_error(embedding: SharedEmbedding, wanted: Tensor) -> float:
    """``||E - Ê|| / ||E||`` of `embedding` against a table ``(V, D)``, over all words but the padding."""
    words = torch.arange(len(wanted))
    if embedding.padding_idx is not None:
        words = words[words != embedding.padding_idx]
    return _error_of_words(embedding, wanted, words)[1]


def frequency_bands(embedding: SharedEmbedding, teacher: Tensor, counts: Tensor | None) -> list[Band]:
    """The error of `embedding` against the table `teacher` ``(V, D)``, by frequency band.

    Args:
        counts: ``(V,)`` how often the words occur; None for words that are in order of frequency already.
    """
    ids = torch.arange(len(teacher))
    order = ids if counts is None else torch.argsort(counts, descending=True, stable=True)
    if embedding.padding_idx is not None:
        order = order[order != embedding.padding_idx]
    edges = [0, *(edge for edge in BANDS if edge < len(order)), len(order)]
    return [
        Band(first + 1, last, *_error_of_words(embedding, teacher, order[first:last]))
        for first, last in zip(edges, edges[1:])
    ]


@torch.no_grad()
def _error_of_words(embedding: SharedEmbedding, wanted: Tensor, words: Tensor) -> tuple[float, float]:
    """The mean distance of the rows of words from those that are wanted, and the relative error."""
    rows = wanted[words].double()
    missed = embedding(words).double() - rows
    norm = float(rows.norm())
    return float(missed.norm(dim=1).mean()), float(missed.norm()) / norm if norm else 0.0


def _line(title: str, sizes: Sizes) -> str:
    """One line of sizes."""
    factor = sizes.before / max(sizes.after, 1)
    return f"{title:<28}{sizes.before:>16,}{sizes.after:>16,}{factor:>9.2f}x"


def _quality_lines(quality: QualityReport) -> Iterator[str]:
    """The lines about the quality."""
    yield f"{quality.measure:<28}{quality.before:>16.2f}{quality.after:>16.2f}"
    yield f"  {quality.measure} of {quality.how}"


def _table_lines(table: TableReport) -> Iterator[str]:
    """The lines about one table."""
    fit = table.fit
    # Lists of classes and ranks of a large vocabulary would fill the screen.
    options = {name: value for name, value in fit.options.items() if len(str(value)) <= 60}
    of_part = "" if table.part is None else f", {table.part}"
    yield f"table {table.name} ({', '.join(table.uses)}){of_part}: {as_yaml(fit.method, options)}"
    yield _line("  parameters", table.parameters)
    yield _line("  bytes", table.stored_bytes)
    weighted = "" if fit.weighted_error is None else f", weighted by counts {fit.weighted_error:.4f}"
    yield f"  relative error {fit.relative_error:.4f}{weighted}, mean distance {fit.loss:.5f}"
    yield from _band_lines(table.bands, table.order)
    if table.storage is not None:
        stored = table.storage
        yield _line(f"  bytes, fp32 to {stored.store}", stored.stored_bytes)
        yield (
            f"  relative error in {stored.store} {stored.relative_error:.4f}, to the fitted table "
            f"{stored.added_error:.5f}"
        )
        yield from _band_lines(stored.bands, table.order)


def _band_lines(bands: list[Band], order: str) -> Iterator[str]:
    """The lines about the error by frequency."""
    for band in bands:
        ranks = f"words {band.first:,} to {band.last:,} {order}"
        yield f"    {ranks:<48} relative error {band.relative_error:.4f}, mean distance {band.loss:.5f}"
