"""Replacing the embeddings of a trained model by smaller ones that are fitted to them.

This module knows no host; models come through `shared_embeddings.checkpoints.adapter`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from shared_embeddings.checkpoints.adapter import EmbeddingTable, StoredModel, TrainedModel, find_host
from shared_embeddings.checkpoints.agreement import NOT_CHECKED, Comparison, Original
from shared_embeddings.checkpoints.fitted_tables import fit_table
from shared_embeddings.checkpoints.quality import Validation
from shared_embeddings.checkpoints.report import CompressionReport, Sizes, TableReport, TrimReport
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.options import STORED, OptionError
from shared_embeddings.quant.packed_tensor import inner_tensors
from shared_embeddings.quant.storage import check_store, pack
from shared_embeddings.registry import options as find_spec
from shared_embeddings.sizing import accounting
from shared_embeddings.sizing.targets import Target, options_within
from shared_embeddings.utils.files import bytes_on_disk, first_line, staged
from shared_embeddings.utils.path_options import PathOption, check_paths

# Options that the table determines.
_SET_BY_THE_TABLE = ("num_embeddings", "embedding_dim", "padding_idx", "words")
# A storage format that adds more than this to the relative error gets a note.
_MUCH_ADDED = 0.05


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured and written when a model is compressed, with any method.

    Attributes:
        counts: of the words, for methods that weight words by frequency and for the frequency bands.
        texts: to count words in without `counts`, tokenized by the host; without `validation`, the
            predictions of both models in them are compared.
        validation: what the quality of the model is measured on, before and after.
        original: what has been measured of the model with the same texts and validation.
        seed: of all random numbers.
        force: replace existing files.
        report_file: a JSON file for the report.
        progress: show progress bars for long fits.
        trimmed: how the model was trimmed before, for the report and the model card.
    """

    counts: Mapping[str, int] | None = None
    texts: Sequence[Path] | None = None
    validation: Validation | None = None
    original: Original | None = None
    seed: int = 0
    force: bool = False
    report_file: Path | None = None
    progress: bool = True
    trimmed: TrimReport | None = None

    def counts_for(self, model: TrainedModel) -> Mapping[str, int] | None:
        """The counts of a model's words: `counts`, or those in the texts."""
        return model.count_text(self.texts) if self.counts is None and self.texts is not None else self.counts

    def comparison(self, model: TrainedModel) -> Comparison:
        """The comparison of a model that is about to change."""
        return Comparison(model, self.validation, self.texts, self.seed, self.original)


DEFAULTS = Settings()


def compress(
    model: Path,
    method: str,
    output: Path,
    *,
    options: Mapping[str, object] | None = None,
    target: Target | None = None,
    store: str | None = None,
    steps: int | None = None,
    check: bool = True,
    settings: Settings = DEFAULTS,
) -> CompressionReport:
    """Write a copy of a trained model with other embeddings, fitted to its own.

    Args:
        model: a file or folder of any host.
        method: of the new embeddings.
        output: the file or folder to write, in the host's format.
        options: of the method.
        target: a size that determines the other options.
        store: how the numbers of the embeddings are stored, see `shared_embeddings.quant.storage`; None
            for the method's `default_store`.
        steps: of gradient descent, for methods that are fitted by it.
        check: run the model before and after to measure what it keeps. Without, a Hugging Face model is not
            built, which saves memory.
        settings: what is measured and written.

    Raises:
        ValueError: no host recognizes the model, the paths clash, the options are invalid, or the quality
            cannot be measured.
        OSError: a file cannot be read or written.
    """
    store = find_spec(method).default_store if store is None else store
    check_store(store)
    given = _checked_options(method, options or {})
    announce(f"reading {model}", settings.progress)
    host, adapter = find_host(model)
    trained = adapter.read(model) if check else adapter.read_tables(model)
    files = checked_files(trained, output, settings, _named_files(method, given))
    counts, tables = settings.counts_for(trained), trained.tables()
    # All options are checked before the first fit, which may take long.
    chosen = _chosen_options(trained, tables, method, given, target, store)
    comparison = settings.comparison(trained) if check else None
    compression = _Compression(trained, model, output, host, method, store, settings)
    fitting = {"seed": settings.seed, "steps": steps, "progress": settings.progress}
    fits = {one.name: fit_table(one, method, store, counts, fitting | chosen[one.name]) for one in tables}
    reports = [report for _, report in fits.values()]
    notes = [*_shortcomings(reports, tables, target)]
    notes += compression.place({table: embedding for table, (embedding, _) in fits.items()})
    return compression.write(files, reports, notes, comparison)


class _Compression:
    """Places fitted embeddings in a model, and writes it with its report.

    Args:
        trained: the model, not yet changed.
        model, output, method, store, settings: as in `compress`.
        host: name of the model's host.
    """

    def __init__(
        self,
        trained: TrainedModel,
        model: Path,
        output: Path,
        host: str,
        method: str,
        store: str,
        settings: Settings,
    ) -> None:
        self._trained, self._settings = trained, settings
        self._model, self._output = model, output
        self._host, self._method, self._store = host, method, store
        self._tensors = trained.tensors()
        self._before = _Footprint.of(trained, self._tensors)

    def place(self, fitted: Mapping[str, SharedEmbedding]) -> Sequence[str]:
        """Place embeddings in the model; returns notes for the report."""
        notes = self._trained.place(fitted)
        self._tensors = _packed(self._trained, fitted, self._store)
        return notes

    def write(
        self,
        files: Sequence[Path],
        tables: list[TableReport],
        notes: list[str],
        comparison: Comparison | None,
    ) -> CompressionReport:
        """Write the model and its report; all files appear, or none.

        Raises:
            OSError: they cannot be written.
        """
        trained, trimmed, before = self._trained, self._settings.trimmed, self._before
        after = _Footprint.of(trained, self._tensors)
        quality, kept = (None, NOT_CHECKED) if comparison is None else comparison.result()
        disk = sum(map(bytes_on_disk, trained.sources()))
        result = CompressionReport(
            model=os.fspath(self._model) if trimmed is None else trimmed.model,
            output=os.fspath(self._output),
            host=self._host,
            method=self._method,
            store=self._store,
            bytes_on_disk=Sizes(disk, 0),
            bytes_of_weights=Sizes(before.weights, after.weights),
            bytes_in_memory=Sizes(before.memory, after.memory),
            parameters=Sizes(before.parameters, after.parameters),
            quality=quality,
            kept=kept,
            tables=tables,
            notes=notes,
            trimmed=trimmed,
        )
        with _writing(self._output, files, self._settings.report_file) as (places, report_place):
            trained.write(places[0], self._tensors, result.card())
            after_disk = Sizes(disk, sum(map(bytes_on_disk, places)))
            result = dataclasses.replace(result, bytes_on_disk=after_disk)
            if report_place is not None:
                result.write(report_place)
        return result


def announce(text: str, progress: bool) -> None:
    """Print a step of a long command to stderr if that is a terminal."""
    if progress and sys.stderr.isatty():
        print(f"{text} ...", file=sys.stderr, flush=True)


def checked_files(
    trained: StoredModel,
    output: Path,
    settings: Settings,
    named: Mapping[str, str] | None = None,
    beside: Sequence[Path] = (),
) -> list[Path]:
    """The files of a compressed model, after checking that they can be written.

    Args:
        trained: the model.
        output, settings: as in `compress`.
        named: files that options of the method name, by option.
        beside: other files that are written together with the model.

    Raises:
        ValueError: the paths clash, or a file is missing or would be replaced.
    """
    files = trained.files(output)
    check_paths(
        {
            "--model": (PathOption.SOURCE, trained.sources()),
            "--text": (PathOption.FILE, settings.texts),
            **_paths_of(settings.validation),
            **{f"--{name}": (PathOption.FILE, path) for name, path in (named or {}).items()},
            "--output": (_kind_of(trained.sources()), [*files, *beside]),
            "--report": (PathOption.NEW_FILE, settings.report_file),
        },
        settings.force,
    )
    return files


def publish(moves: Mapping[Path, Path], report: CompressionReport, report_file: Path | None) -> None:
    """Move finished files or folders to their places, and write the report: all of them, or none.

    Args:
        moves: where each one is -> where it belongs.
        report: of the compressed model.
        report_file: as in `compress`.

    Raises:
        OSError: one cannot be written.
    """
    reports = [] if report_file is None else [report_file]
    with staged([*moves.values(), *reports]) as temporary:
        for source, place in zip(moves, temporary):
            os.replace(source, place)
        if report_file is not None:
            report.write(temporary[-1])


@dataclasses.dataclass(frozen=True)
class _Footprint:
    """The bytes of a model's tensors as written and in memory, and its number of parameters."""

    weights: int
    memory: int
    parameters: int

    @classmethod
    def of(cls, trained: TrainedModel, written: Mapping[str, Tensor]) -> _Footprint:
        """That of a model whose tensors are `written`."""
        module = trained.module
        held = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        return cls(
            sum(part.nbytes for tensor in written.values() for part in inner_tensors(tensor)),
            sum(part.nbytes for tensor in held.values() for part in inner_tensors(tensor)),
            accounting.count_parameters(module),
        )


def _chosen_options(
    trained: TrainedModel,
    tables: Sequence[EmbeddingTable],
    method: str,
    given: Mapping[str, object],
    target: Target | None,
    store: str,
) -> dict[str, dict[str, object]]:
    """The options of the method by table: those given, and those that meet the target."""
    return {
        table.name: trained.options_for(
            table.name,
            method,
            given if target is None else within(target, method, given, store, table, tables),
        )
        for table in tables
    }


@contextmanager
def _writing(
    output: Path, files: Sequence[Path], report: Path | None
) -> Iterator[tuple[list[Path], Path | None]]:
    """Yield temporary paths for the files of a model and its report; all of them appear at the end, or none.

    Raises:
        OSError: they cannot be written.
    """
    try:
        with staged([*files, *([] if report is None else [report])]) as places:
            yield places[: len(files)], None if report is None else places[-1]
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise OSError(
            f"output {output}: cannot be written ({reason}); free some space, or choose another path"
        ) from error


def _shortcomings(
    reports: Sequence[TableReport], tables: Sequence[EmbeddingTable], target: Target | None
) -> Iterator[str]:
    """Notes about tables that miss their target, or that their storage makes much worse."""
    for found, table in zip(reports, tables):
        limit = None if target is None else target.limit(table, tables)
        if limit is not None and found.stored_bytes.after > limit:
            method = found.fit.method
            yield f"{method} chose its own sizes when it was fitted: table {found.name} misses the target"
        stored = found.storage
        if stored is not None and stored.relative_error > found.fit.relative_error + _MUCH_ADDED:
            yield (
                f"{stored.store} raises the relative error of table {found.name} from "
                f"{found.fit.relative_error:.4f} to {stored.relative_error:.4f}; another storage keeps more"
            )


def _packed(trained: TrainedModel, fitted: Mapping[str, SharedEmbedding], store: str) -> dict[str, Tensor]:
    """The tensors of a model to write, with those of its fitted embeddings packed."""
    own = {tensor.data_ptr() for embedding in fitted.values() for tensor in embedding.state_dict().values()}
    tensors = trained.tensors()
    return pack(tensors, [name for name, tensor in tensors.items() if tensor.data_ptr() in own], store)


def within(
    target: Target,
    method: str,
    given: Mapping[str, object],
    store: str,
    table: EmbeddingTable,
    tables: Sequence[EmbeddingTable],
) -> dict[str, object]:
    """The given options and those that meet a target for one table."""
    words, width = table.table.shape
    limit = target.limit(table, tables)
    kind = table.table.dtype
    bias = table.has_output_bias
    options = dict(options_within(method, words, width, limit, store, bias, kind, dict(given)))
    if not table.is_scored and "output" not in given:
        options.pop("output", None)
    return options


def _checked_options(method: str, options: Mapping[str, object]) -> Mapping[str, object]:
    """The options unchanged.

    Raises:
        OptionError: the model determines one of them.
    """
    find_spec(method)
    for name in (*_SET_BY_THE_TABLE, "seed"):
        if name in options:
            raise OptionError(f"option '{name}' is set by the model or the fit; remove it")
    return options


def _paths_of(validation: Validation | None) -> dict[str, tuple[PathOption, Path | None]]:
    """The texts of a validation by their options."""
    if validation is None:
        return {}
    return {
        "--validation": (PathOption.SOURCE, validation.text),
        "--validation-source": (PathOption.FILE, validation.source),
        "--validation-target": (PathOption.FILE, validation.target),
    }


def _named_files(method: str, options: Mapping[str, object]) -> dict[str, str]:
    """The options of a method that name a file."""
    given = {name: options.get(name) for name in find_spec(method).file_options}
    return {name: value for name, value in given.items() if isinstance(value, str) and value != STORED}


def _kind_of(sources: Sequence[Path]) -> PathOption:
    """What a model is written to: a folder if it was read from one, else files."""
    return PathOption.NEW if any(map(os.path.isdir, sources)) else PathOption.NEW_FILE
