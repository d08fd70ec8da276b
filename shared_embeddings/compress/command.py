"""Compress the embeddings of a trained model: read it, choose, fit, train, measure, write."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from shared_embeddings.compress.fit_tables import Fitted, fit_tables
from shared_embeddings.compress.measure import QualityReport, Retention
from shared_embeddings.compress.options import (
    NO_CALIBRATION,
    CompressOptions,
    TrimOptions,
    check_runtime,
    parse_max_loss,
)
from shared_embeddings.compress.recovery import SavedRecovery, recover
from shared_embeddings.compress.report import CompressionReport, Sizes, TrimReport
from shared_embeddings.compress.search import SearchReport, Trial, curve, search, smallest_within
from shared_embeddings.compress.session import NOT_CALIBRATED, Session, footprint
from shared_embeddings.compress.sizing import Target
from shared_embeddings.compress.trim import map_files, trim
from shared_embeddings.quant.storage import pack
from shared_embeddings.registry import get_method_config
from shared_embeddings.spec import Options
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import bytes_on_disk, replacing, write_text
from shared_embeddings.utils.options import STORED, OptionError
from shared_embeddings.utils.paths import check_outputs
from shared_embeddings.utils.progress import command_progress

# Options that the table or the fit determines.
_SET_BY_MODEL = ("num_embeddings", "embedding_dim", "padding_idx", "words", "seed")


class Trimmed(NamedTuple):
    """How the model was trimmed first."""

    report: TrimReport
    maps: Mapping[Path, bytes]  # files for old and new ids -> their content


class Compressed(NamedTuple):
    """The result of compressing a model."""

    report: CompressionReport
    search: SearchReport | None  # the candidates that were tried; None with a method


def compress(options: CompressOptions, **method_options: object) -> Compressed:
    """Write a copy of a trained model with other embeddings, fitted to its own.

    Without a method, the candidates of all methods are tried, and the best one is kept.

    Args:
        options: what to compress and how.
        method_options: options of the method; with a size, those that it does not determine.

    Raises:
        UserError: no host recognizes the model, the paths clash, the options are invalid, or the quality
            cannot be measured.
        OSError: a file cannot be read or written.
    """
    runtime = None if options.runtime is None else check_runtime(options.runtime, options.gguf)
    grid, gguf = options.grid, options.gguf
    if runtime is not None:
        for name in method_options:
            raise UserError(f"{name} is an option of a method; a runtime (for) has its own codes")
        options = dataclasses.replace(options, runtime=None, grid=None, gguf=None, method="quantized")
    target, method_options = _method_options(options, method_options)
    with command_progress(), _trimmed(options) as (model, trimmed):
        session = Session(dataclasses.replace(options, model=model))
        if (output := options.output) is None:
            raise UserError("output is missing; name the model to write, or compare")
        files = session.trained.files(output)
        if runtime is not None:
            if not hasattr(session.trained, "write_for"):
                raise UserError(
                    f"for {runtime.name}: takes Hugging Face models, not those of the host '{session.host}'"
                )
            widths = [table.table.size(1) for table in session.tables]
            grid, of_grid = runtime.find_grid(options.bits, grid, widths)
            method_options = of_grid.options(widths)
        inputs = [options.model, *options.text, *options.trim_to, options.token_counts, gguf]
        inputs += [options.validation, options.validation_source, options.validation_target]
        for name in get_method_config(options.method).file_options if options.method is not None else ():
            value = method_options.get(name, STORED)
            inputs.append(Path(value) if isinstance(value, str) and value != STORED else None)
        maps = () if trimmed is None else trimmed.maps
        check_outputs(filter(None, [*files, *maps, options.report]), filter(None, inputs), options.force)
        saved = None
        if options.recover is not None:
            _ = session.held_out
            counted = [session.counts_of(table) for table in session.tables]
            counts = [None if counts is None else counts.tolist() for counts in counted]
            texts = [(text.name, text.stat().st_size) for text in options.text]
            names = ("method", "store", "fit_steps", "recover", "seed", "calibration")
            asked = [repr((method_options, target)), repr([getattr(options, name) for name in names])]
            saved = SavedRecovery(output, [*asked, texts, counts, session.trained.tensors()])
        trials: list[Trial] | None = None
        known: tuple[QualityReport | None, Retention | None] = None, None
        if options.method is None:
            target = target or smallest_within(session, parse_max_loss(options.max_loss or "1%"))
            trials = search(session, target)
            best = trials[0]
            session.is_calibrated = best.calibration != NOT_CALIBRATED
            if best.fitted is not None and saved is None:
                known = best.quality, best.retention
            fitted = best.fitted or fit_tables(session, best.method, best.options, best.store, target)
        else:
            store = options.store or get_method_config(options.method).default_store
            fitted = fit_tables(session, options.method, method_options, store, target)
        write = None
        if runtime is not None:
            write = functools.partial(session.trained.write_for, runtime, grid, output, gguf)  # type: ignore[attr-defined]
        report = _finish(session, output, fitted, known, saved, trimmed, write)
    return Compressed(report, None if trials is None else SearchReport(trials))


def compare(options: CompressOptions) -> SearchReport:
    """Compare the candidates of all methods at one size, and the best one at other sizes; write nothing.

    Raises:
        UserError, OSError: as in `compress`.
    """
    target = options.target()
    with command_progress(), _trimmed(options) as (model, _):
        session = Session(dataclasses.replace(options, model=model))
        target = target or smallest_within(session, parse_max_loss(options.max_loss or "1%"))
        trials = search(session, target)
        return SearchReport(trials, curve(session, trials[0]))


def _method_options(options: CompressOptions, method_options: Options) -> tuple[Target | None, Options]:
    """Return the target, and the options of the method: its own `bits`, where it has that option."""
    target = options.target()
    if options.method is None:
        for name in method_options:
            raise UserError(f"{name} is an option of a method; also give method")
        return target, {}
    spec = get_method_config(options.method)
    for name in _SET_BY_MODEL:
        if name in method_options:
            raise OptionError(f"option '{name}' is set by the model or the fit; remove it")
    if options.calibration not in (None, NO_CALIBRATION) and not spec.takes_metric:
        raise UserError(f"calibration has no effect with method {options.method}; remove it")
    if options.bits is not None and "bits" in spec.__dataclass_fields__:
        return None, {**method_options, "bits": options.bits}
    return target, method_options


@contextlib.contextmanager
def _trimmed(options: CompressOptions) -> Iterator[tuple[Path, Trimmed | None]]:
    """Yield the model to compress: with `trim_to`, a trimmed copy in a temporary folder."""
    if not options.trim_to:
        yield options.model, None
        return
    final = options.output or options.model
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / final.name
        skip = options.skip_undecodable
        report = trim(
            TrimOptions(model=options.model, text=options.trim_to, output=small, skip_undecodable=skip)
        )
        [vocabulary] = report.vocabularies
        place, temporary = (
            map_files(options.model, path, [vocabulary.name])[vocabulary.name] for path in (final, small)
        )
        # A folder contains its own map.
        maps = {} if place.parent == final else {place: temporary.read_bytes()}
        is_written = options.output is not None
        vocabulary = dataclasses.replace(vocabulary, map_file=os.fspath(place) if is_written else None)
        output = os.fspath(final) if is_written else None
        yield small, Trimmed(dataclasses.replace(report, output=output, vocabularies=[vocabulary]), maps)


def _finish(
    session: Session,
    output: Path,
    fitted: Fitted,
    known: tuple[QualityReport | None, Retention | None],
    saved: SavedRecovery | None,
    trimmed: Trimmed | None,
    write: Callable[[str], None] | None,
) -> CompressionReport:
    """Place embeddings in the model, train it if that is wanted, measure it, and write it.

    What is `known` of a model that is not trained is not measured again. A model for a runtime is written by
    `write`, given the model card.
    """
    model, trained, options = session.options.model, session.trained, session.options
    notes = trained.place(fitted.embeddings)
    recovery = None
    if saved is not None:
        recovery, more_notes = recover(session, fitted, saved)
        notes += more_notes
    tensors = trained.tensors()
    new = {part.data_ptr() for layer in fitted.embeddings.values() for part in layer.state_dict().values()}
    packed = pack(tensors, [name for name, part in tensors.items() if part.data_ptr() in new], fitted.store)
    weights, memory, parameters = map(Sizes, session.footprint, footprint(trained, packed))
    quality, retention = session.measured(fitted.embeddings, *known)
    report = CompressionReport(
        model=os.fspath(model) if trimmed is None else trimmed.report.model,
        output=os.fspath(output),
        host=session.host,
        method=fitted.method,
        store=fitted.store,
        bytes_on_disk=Sizes(sum(map(bytes_on_disk, trained.files(model))), 0),
        bytes_of_weights=weights,
        bytes_in_memory=memory,
        parameters=parameters,
        quality=quality,
        kept=retention,
        tables=fitted.reports,
        notes=[*fitted.notes, *notes],
        recovery=recovery,
        calibration=session.calibration_of(fitted.method),
        trimmed=None if trimmed is None else trimmed.report,
    )
    files = trained.files(output)
    for path, content in trimmed.maps.items() if trimmed is not None else ():
        with replacing(path) as temporary:
            temporary.write_bytes(content)
    if write is None:
        trained.write(output, packed, report.card())
    else:
        write(report.card())
    written = Sizes(report.bytes_on_disk.before, sum(map(bytes_on_disk, files)))
    report = dataclasses.replace(report, bytes_on_disk=written)
    if options.report is not None:
        write_text(options.report, json.dumps(dataclasses.asdict(report), indent=1) + "\n")
    if saved is not None:
        saved.path.unlink(missing_ok=True)
    return report
