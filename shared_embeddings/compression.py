"""Replacing the embeddings of a trained model by smaller ones that are fitted to them.

Programs whose models can be compressed are in `shared_embeddings.compression_hosts`; this module knows none.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from shared_embeddings import accounting
from shared_embeddings.compression_hosts import TiedTable, TrainedModel, find_host
from shared_embeddings.compression_report import CompressionReport, Sizes, TableReport, frequency_bands
from shared_embeddings.compression_targets import options_within
from shared_embeddings.files import bytes_on_disk, write_text
from shared_embeddings.fitting import fit
from shared_embeddings.interface import SharedEmbedding
from shared_embeddings.options import OptionError
from shared_embeddings.registry import method_class
from shared_embeddings.token_counts import counts_of

# Options that follow from the table.
_SET_BY_THE_TABLE = ("num_embeddings", "embedding_dim", "padding_idx", "words")


@dataclasses.dataclass(frozen=True)
class Target:
    """How small the replaced embeddings become together.

    Attributes:
        ratio: times smaller in bytes, or None.
        total_bytes: bytes, or None; exactly one of both is given.
    """

    ratio: float | None = None
    total_bytes: int | None = None

    def __post_init__(self) -> None:
        """Refuse targets that mean nothing."""
        if (self.ratio is None) == (self.total_bytes is None):
            raise ValueError("the target is a ratio or a number of bytes; give exactly one of them")
        if self.ratio is not None and not 1.0 < self.ratio < float("inf"):
            raise ValueError(f"target ratio is {self.ratio:g}, but it must be above 1, such as 8")
        if self.total_bytes is not None and self.total_bytes < 1:
            raise ValueError(f"target bytes is {self.total_bytes}, but it must be at least 1")

    def limit(self, table: TiedTable, tables: Sequence[TiedTable]) -> int:
        """The bytes of one table; a total is divided as the plain tables are."""
        plain = table.table.nbytes
        if self.ratio is not None:
            return int(plain / self.ratio)
        assert self.total_bytes is not None
        return self.total_bytes * plain // sum(other.table.nbytes for other in tables)


def compress(
    model: Path,
    method: str,
    output: Path,
    *,
    options: Mapping[str, object] | None = None,
    target: Target | None = None,
    counts: Mapping[str, int] | None = None,
    texts: Sequence[Path] | None = None,
    seed: int = 0,
    steps: int | None = None,
    force: bool = False,
    report_file: Path | None = None,
    progress: bool = True,
) -> CompressionReport:
    """Write a copy of a trained model with other embeddings, fitted to its own.

    Args:
        model: a file of any host.
        method: of the new embeddings.
        output: the file to write, in the host's format.
        options: of the method; none beside a target.
        target: a size from which the options follow.
        counts: how often words occur, for methods that weigh them and for the frequency bands.
        texts: to count the words in, in place of `counts`, as the host divides them.
        seed: of everything that is drawn.
        steps: of gradient descent, for methods that are fitted by it.
        force: replace files that are there.
        report_file: where the report is written as JSON, too.
        progress: show bars for long fits.

    Raises:
        ValueError: no host knows the file, the paths clash, or the options cannot be.
        OSError: a file cannot be read or written.
    """
    given = _checked_options(method, options or {}, target)
    name, host = find_host(model)
    trained = host.read(model)
    files = trained.files(output)
    _check_paths(trained.sources(), files, report_file, force)
    if texts is not None:
        counts = trained.count_text(texts)
    before = _measure(trained, {})
    tables = trained.tables()
    # All options are checked before the first fit, which may take long.
    chosen = {
        table.name: trained.options_for(
            table.name, method, given if target is None else _within(target, method, table, tables)
        )
        for table in tables
    }
    fitted: dict[str, SharedEmbedding] = {}
    reports, missed = [], []
    for table in tables:
        weights = None if counts is None else counts_of(table.words, counts, table.sentence_marks)
        fitting = {"seed": seed, "steps": steps, "progress": progress, **chosen[table.name]}
        fitted[table.name], found = _fit_table(table, method, weights, fitting)
        reports.append(found)
        if target is not None and found.stored_bytes.after > target.limit(table, tables):
            missed.append(f"the fit of {method} chose sizes of its own: table {table.name} misses the target")
    notes = [*missed, *trained.place(fitted)]
    after = _measure(trained, fitted)
    disk = sum(map(bytes_on_disk, trained.sources()))
    trained.write(output)
    result = CompressionReport(
        model=os.fspath(model),
        output=os.fspath(output),
        host=name,
        method=method,
        bytes_on_disk=Sizes(disk, sum(map(bytes_on_disk, files))),
        bytes_of_weights=Sizes(before.weights, after.weights),
        bytes_in_memory=Sizes(before.memory, after.memory),
        parameters=Sizes(before.parameters, after.parameters),
        tables=reports,
        notes=notes,
    )
    if report_file is not None:
        write_text(report_file, json.dumps(dataclasses.asdict(result), indent=1) + "\n")
    return result


def _fit_table(
    table: TiedTable, method: str, counts: Tensor | None, options: Mapping[str, object]
) -> tuple[SharedEmbedding, TableReport]:
    """An embedding fitted to a table, and what became of the table; `options` are all those of `fit`."""
    embedding, found = fit(
        method,
        table.table,
        token_counts=counts,
        padding_idx=table.padding_idx,
        words=table.words,
        **options,  # type: ignore[arg-type]
    )
    embedding.to(table.table.dtype).eval()
    return embedding, TableReport(
        name=table.name,
        uses=table.uses,
        parameters=Sizes(table.parameters, found.parameters),
        stored_bytes=Sizes(-(-table.stored_bits // 8), -(-accounting.stored_bits(embedding) // 8)),
        fit=found,
        order="in the order of the vocabulary" if counts is None else "by count",
        bands=frequency_bands(embedding, table.table.float(), counts),
    )


@dataclasses.dataclass(frozen=True)
class _Measure:
    """The size of a model in bytes of stored weights, bytes of memory, and parameters."""

    weights: int
    memory: int
    parameters: int


def _measure(trained: TrainedModel, fitted: Mapping[str, SharedEmbedding]) -> _Measure:
    """The size of a model; embeddings that were fitted count with the bits that they need."""
    tensors = {id(tensor): tensor for tensor in (*trained.module.parameters(), *trained.module.buffers())}
    own = {tensor.data_ptr() for embedding in fitted.values() for tensor in embedding.state_dict().values()}
    rest = {
        tensor.data_ptr(): tensor.nbytes
        for tensor in trained.written().values()
        if tensor.data_ptr() not in own
    }
    bits = sum(accounting.stored_bits(embedding) for embedding in fitted.values())
    return _Measure(
        weights=sum(rest.values()) + -(-bits // 8),
        memory=sum(tensor.nbytes for tensor in tensors.values()),
        parameters=accounting.count_parameters(trained.module),
    )


def _within(target: Target, method: str, table: TiedTable, tables: Sequence[TiedTable]) -> dict[str, object]:
    """The options that meet a target for one table."""
    words, width = table.table.shape
    options = dict(options_within(method, words, width, target.limit(table, tables)))
    if not table.is_scored:
        options.pop("output", None)
    return options


def _checked_options(
    method: str, options: Mapping[str, object], target: Target | None
) -> Mapping[str, object]:
    """The options, or OptionError where they are not the method's to take here."""
    method_class(method)
    if target is not None and options:
        raise OptionError(
            f"option '{next(iter(options))}' cannot be given beside a target, which picks the options; leave "
            "one of them out"
        )
    for name in (*_SET_BY_THE_TABLE, "seed"):
        if name in options:
            raise OptionError(f"option '{name}' follows from the model or the fit; leave it out")
    return options


def _check_paths(inputs: Sequence[Path], outputs: Sequence[Path], report: Path | None, force: bool) -> None:
    """Refuse to write over the input, or over anything unless `force`; models may be folders."""
    read = {file.resolve() for file in inputs}
    is_folder = any(file.is_dir() for file in inputs)
    written = [*outputs, *([] if report is None else [report])]
    for file in written:
        if file.resolve() in read or any(file.resolve() in source.parents for source in read):
            raise ValueError(f"output {file}: is a file of the model that is read; name another one")
        if file.is_dir() and (file == report or not is_folder):
            raise ValueError(f"output {file}: is a folder; name a file")
        if file.exists() and not force:
            raise ValueError(f"output {file}: is there already; add --force, or name another file")
    if len({file.resolve() for file in written}) < len(written):
        raise ValueError(f"output {report}: is both the model and its report; name two files")
