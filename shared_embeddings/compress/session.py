"""Compress the embeddings of a trained model: read it once, fit and measure in memory, write one result.

`compress` takes one method; `choose` tries every candidate of the methods at one size, or looks for the
smallest size within a loss, and keeps the best. This module knows no host; models come through
`shared_embeddings.compress.host`.

Axes: ``V`` vocabulary, ``D`` model dimension.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from shared_embeddings import accounting
from shared_embeddings.compress.calibration import Calibration, calibrate, read_calibration, write_calibration
from shared_embeddings.compress.fit import FitReport, fit
from shared_embeddings.compress.host import (
    EmbeddingTable,
    StoredModel,
    TrainedModel,
    find_host,
    place_plain,
    scoring_only,
)
from shared_embeddings.compress.measure import (
    NOT_CHECKED,
    Comparison,
    Kept,
    QualityReport,
    Samples,
    ScoredWords,
    Validation,
)
from shared_embeddings.compress.recovery import Plan, Pupil, Saved, recover
from shared_embeddings.compress.report import (
    Band,
    CompressionReport,
    Decoding,
    RecoveryReport,
    Sizes,
    StorageReport,
    TableReport,
    TrimReport,
)
from shared_embeddings.compress.sizing import Target, as_yaml, options_within
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.fitting.task import BAR_DELAY
from shared_embeddings.quant.packed_tensor import inner_tensors, install
from shared_embeddings.quant.storage import check_store, hold, pack
from shared_embeddings.registry import get_method_config, methods
from shared_embeddings.spec import Candidate, Options
from shared_embeddings.utils.command_line import align
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import bytes_on_disk, first_line, staged
from shared_embeddings.utils.options import STORED, OptionError
from shared_embeddings.utils.path_options import PathOption, check_paths
from shared_embeddings.words.token_counts import counts_of

# Options that the table or the fit determines.
_NOT_GIVEN = ("num_embeddings", "embedding_dim", "padding_idx", "words", "seed")
# A storage format that adds more than this to the relative error gets a note.
_MUCH_ADDED = 0.05
# Candidates for larger tables are ranked by fits to so many rows; so many of them are fitted to all rows.
SAMPLED_ROWS, FITTED = 2**12, 3
# The ratios that are searched for the smallest size, and the factor between two that are as good as equal.
_RATIOS, CLOSE = (2.0, 128.0), 1.07
# The first ratio that is tried, and the share of the largest loss that is close enough to it.
_FIRST_RATIO, _NEAR = 16.0, 0.8
# Losses are taken to grow by this factor where codes have a bit less, as squared errors do.
_LOSS_PER_BIT = 4.0
# Candidates for vocabularies larger than this are compared by the predictions of so many words: those of the
# compared texts, then the most frequent ones up to the first number, then others at equal distances.
SAMPLED_WORDS, _FREQUENT = 2**13, 2**12
# The power of what words count: lower than 1, since other texts have other words.
_POWER = 0.6
# The bits for a number of the tables of a curve.
_CURVE = (8.0, 4.0, 3.0, 2.0, 1.5, 1.0)
# The last rank of each band of words by descending frequency; one more band has the rest.
BANDS = (100, 1_000, 10_000)
# Rows that are compared at a time.
_ROWS = 512
# Decoding is timed for about this many seconds, with at most so many tokens.
_TIMED_SECONDS, _TIMED_TOKENS = 0.5, 20


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured and written when a model is compressed, with any method."""

    # Of the words, for methods that weight words by frequency and for the frequency bands.
    counts: Mapping[str, int] | None = None
    # To count words in without `counts`, tokenized by the host; without `validation`, the predictions
    # of both models in them are compared.
    texts: Sequence[Path] | None = None
    validation: Validation | None = None  # what the quality of the model is measured on, before and after
    # What is calibrated: "both" sides, "output" or "none"; None for both with texts, and none without.
    calibrate: str | None = None
    calibration: Path | None = None  # the file with the result: read if it is there, else written
    recovery: Plan | None = None  # how long the model is trained afterwards
    seed: int = 0  # of all random numbers
    force: bool = False  # replace existing files
    report_file: Path | None = None  # a JSON file for the report
    progress: bool = True  # show progress bars for long fits
    trimmed: TrimReport | None = None  # how the model was trimmed before, for the report and the model card
    # Finished file -> where it belongs; they appear together with the model.
    beside: Mapping[Path, Path] = dataclasses.field(default_factory=dict)


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
        store: how the numbers of the embeddings are stored, see `shared_embeddings.quant.storage`; None for
            the method's `default_store`.
        steps: of gradient descent, for methods that are fitted by it.
        check: run the model before and after to measure what it keeps. Without, a Hugging Face model is not
            built, which saves memory.
        settings: what is measured and written.

    Raises:
        UserError: no host recognizes the model, the paths clash, the options are invalid, or the quality
            cannot be measured.
        OSError: a file cannot be read or written.
    """
    store = get_method_config(method).default_store if store is None else store
    check_store(store)
    spec = get_method_config(method)
    if settings.calibrate not in (None, "none") and not spec.takes_metric:
        raise UserError(f"--calibrate {settings.calibrate} has no effect with --method {method}; remove it")
    if settings.calibration is not None and not spec.takes_metric:
        raise UserError(f"--calibration has no effect with --method {method}; remove it")
    given = dict(options or {})
    for name in _NOT_GIVEN:
        if name in given:
            raise OptionError(f"option '{name}' is set by the model or the fit; remove it")
    named = {name: given.get(name) for name in get_method_config(method).file_options}
    session = Session(model, settings, check)
    paths = {name: Path(file) for name, file in named.items() if isinstance(file, str) and file != STORED}
    files = check_files(session.trained, model, output, settings, paths)
    saved = session.saved(output, (method, given, store, target, steps))
    fitted = session.fit(method, given, store, target, steps)
    return session.finish(fitted, output, files, saved)


def choose(
    model: Path,
    output: Path | None,
    target: Target | None = None,
    max_loss: MaxLoss | None = None,
    settings: Settings = DEFAULTS,
) -> Choice:
    """Try every candidate of the methods at one size, and write the best one.

    A candidate that fails does not stop the others. Where a vocabulary is large, candidates are compared by
    their predictions of a sample of words, and only the best is fitted to all words.

    Args:
        model, settings: as in `compress`.
        output: the model to write; None compares only.
        target: the size of the embeddings.
        max_loss: without a target, the largest loss: the size is the smallest at which a candidate loses no
            more.

    Raises:
        UserError: as in `compress`, or no candidate is possible at this size, or all fail.
        OSError: a file cannot be read or written.
    """
    session = Session(model, settings)
    files = [] if output is None else check_files(session.trained, model, output, settings)
    saved = None if output is None else session.saved(output, (target, max_loss))
    if target is None:
        target = session.smallest_within(max_loss or MaxLoss(1.0))
    trials = session.tried(list(candidates()), target)
    trials = sorted([*trials, *session.tried_uncalibrated(trials, target)], key=lambda trial: trial.rank)
    best = trials[0]
    if not best.is_calibrated:
        session.calibrations = {}
    if best.kept is None:
        # One reason for all is about the model.
        is_one = len({trial.reason for trial in trials}) == 1
        raise UserError(f"{'' if is_one else 'no method is possible at this size; '}{best.reason}")
    curve = session.curve(best)
    if output is None:
        return Choice(trials, curve)
    fitted = best.fitted or session.fit(best.method, best.options, best.store, target)
    return Choice(trials, curve, session.finish(fitted, output, files, saved))


@dataclasses.dataclass(frozen=True)
class MaxLoss:
    """The largest loss of a model.

    Attributes:
        limit: the loss.
        in_nats: whether it is the divergence of the predictions, in nats; else it is a share of the quality,
            the rise of the perplexity of the text or, for other models, the share of predictions that change.
    """

    limit: float
    in_nats: bool = False

    def __post_init__(self) -> None:
        if not (0.0 <= self.limit and (self.in_nats or self.limit <= 1.0)):
            raise UserError(f"the largest loss is {self.limit:g}, but it must be from 0% to 100%, or in nats")

    def loss(self, trial: Trial) -> float:
        """The loss of a trial; infinite if it could not be measured."""
        kept = trial.kept
        if kept is None or kept.share is None:
            return math.inf
        if self.in_nats:
            return math.inf if kept.kl is None else kept.kl
        return 1.0 - kept.share if kept.perplexities is None else kept.rise


class Fitted(NamedTuple):
    """New embeddings of a model."""

    method: str  # of all of them
    store: str
    embeddings: dict[str, SharedEmbedding]  # by table
    reports: list[TableReport]  # of the tables
    notes: list[str]  # about tables that miss their target, or that their storage makes much worse


@dataclasses.dataclass(frozen=True)
class Trial:
    """One candidate at one size."""

    method: str  # of the candidate
    options: Options  # of the candidate
    store: str
    reason: str = ""  # why it was not measured: the method is impossible at this size, or it failed
    kept: Kept | None = None  # what the model keeps; None if that was not measured
    quality: QualityReport | None = None  # if there is validation data
    sizes: Sizes = Sizes(0, 0)  # the bytes of all tables as stored
    relative_error: float = 0.0  # of the first table
    chosen: Options = dataclasses.field(default_factory=dict)  # its options as fitted
    fitted: Fitted | None = None  # the embeddings of all words, for the best
    is_calibrated: bool = True  # unless it was tried without the calibration of the others

    @property
    def rank(self) -> tuple[bool, bool, float, int]:
        """What orders trials, best first: by divergence or else by share, then by bytes."""
        share, kl = (None, None) if self.kept is None else (self.kept.share, self.kept.kl)
        return self.kept is None, share is None, -(share or 0.0) if kl is None else kl, self.sizes.after


@dataclasses.dataclass(frozen=True)
class Choice:
    """The trials at the chosen size, best first."""

    trials: Sequence[Trial]  # what was tried
    curve: Sequence[Trial] = ()  # the best candidate at other sizes
    report: CompressionReport | None = None  # if it was written

    def summary(self) -> str:
        """A table of the trials and one of the sizes, then the summary of the best if it was written."""
        lines = align(_rows(self.trials), texts=2)
        lines += [
            f"not tried: {as_yaml(trial.method, trial.options)}: {trial.reason}"
            for trial in self.trials
            if trial.kept is None
        ]
        if self.curve:
            title = "the best one at other sizes, where another one may be better:"
            lines += ["", title, *align(_rows(self.curve), texts=2)]
        return "\n".join(lines if self.report is None else [*lines, "", self.report.summary()])


def _rows(trials: Sequence[Trial]) -> list[tuple[str, ...]]:
    """The cells of a table of trials that were measured, below their titles."""
    measure = next((trial.quality.measure for trial in trials if trial.quality is not None), "perplexity")
    rows: list[tuple[str, ...]] = [("method", "store", "bytes", "smaller", "error", measure, "KL", "kept")]
    for trial in trials:
        if (kept := trial.kept) is None:
            continue
        options = {name: value for name, value in trial.chosen.items() if len(str(value)) <= 20}
        value = "–"
        if trial.quality is not None:
            value = f"{trial.quality.after:.2f}"
        elif kept.perplexities is not None:
            value = f"{kept.perplexities[1]:.2f} ({kept.rise:+.1%})"
        cells = (
            f"{trial.sizes.after:,}",
            f"{trial.sizes.smaller:.1f}x",
            f"{trial.relative_error:.3f}",
            value,
            "–" if kept.kl is None else f"{kept.kl:.4f}",
            "unknown" if kept.share is None else f"{100 * kept.share:.1f}%",
        )
        name = as_yaml(trial.method, options) + ("" if trial.is_calibrated else ", not calibrated")
        rows.append((name, trial.store, *cells))
    return rows


class Session:
    """A model that is compressed: it is read once, and takes any number of embeddings one after another.

    Args:
        model, check, settings: as in `compress`.
    """

    def __init__(self, model: Path, settings: Settings = DEFAULTS, check: bool = True) -> None:
        self.model, self.settings, self.is_checked = model, settings, check
        self.announce(f"reading {model}")
        self.host, adapter = find_host(model)
        self.trained: TrainedModel = adapter.read(model, runs=check)
        self.tables = self.trained.tables()
        self._before = _footprint(self.trained, self.trained.tensors())
        self._table_bytes = sum(-(-table.stored_bits // 8) for table in self.tables)

    @functools.cached_property
    def counts(self) -> dict[str, Tensor]:
        """The counts ``(V,)`` of the words of each table, by name; empty without counts or texts."""
        given, texts = self.settings.counts, self.settings.texts
        if given is None and texts is not None:
            given = self.trained.count_text(texts)
        if given is None:
            return {}
        return {table.name: counts_of(table.words, given, table.sentence_marks) for table in self.tables}

    @functools.cached_property
    def calibrations(self) -> Mapping[str, Calibration]:
        """What errors of each table count, by name; empty without a calibration."""
        settings, file = self.settings, self.settings.calibration
        if file is not None and settings.calibrate == "none":
            raise UserError(f"--calibration {file} has no effect with --calibrate none; remove one of them")
        if file is not None and file.exists():
            return read_calibration(file, self.tables, settings.calibrate)
        sides = settings.calibrate or ("none" if settings.texts is None else "both")
        if file is not None and (sides == "none" or not self.is_checked):
            raise UserError(f"--calibration {file}: no such file; measure it with --text, without --no-check")
        if sides == "none" or not (self.is_checked or settings.calibrate):
            return {}
        if not self.is_checked:
            raise UserError(f"--calibrate {sides} runs the model; remove --no-check, or give --calibration")
        self.announce("calibrating")
        # Other lines than those that are compared.
        seed, texts, sample = settings.seed + 1, settings.texts, self.sample
        # Scores of all words of a large vocabulary would take most of the time.
        scored = [] if sample is None else place_plain(self.trained, self.tables)
        with scoring_only(scored, sample):
            try:
                found = calibrate(self.trained, self.tables, texts, seed, sides, settings.progress)
            except UserError as error:
                raise UserError(f"cannot calibrate ({error}); give --calibrate none") from error
        if not found and (settings.calibrate or file):
            option = "--calibrate" if settings.calibrate else "--calibration"
            raise UserError(f"{option}: this {self.host} predicts nothing with its tables; remove it")
        if file is not None:
            write_calibration(file, self.tables, sides, found)
        return found

    @functools.cached_property
    def comparison(self) -> Comparison | None:
        """What the model keeps, against the original; first used before anything is placed in the model."""
        settings = self.settings
        if not self.is_checked:
            return None
        return Comparison(self.trained, settings.validation, settings.texts, settings.seed)

    @functools.cached_property
    def held_out(self) -> Comparison:
        """The predictions to recover; first used before anything is placed in the model."""
        settings, found = self.settings, self.comparison
        if found is None or found.samples is None:
            found = Comparison(self.trained, None, settings.texts, settings.seed)
        if found.reason:
            raise UserError(f"--recover needs predictions of the model ({found.reason}); remove it")
        return found

    def saved(self, output: Path, chosen: object) -> Saved | None:
        """Where an interrupted training of the model waits, if it is to be trained.

        Args:
            output: of the command.
            chosen: what determines the new embeddings, beside the settings.
        """
        settings = self.settings
        if settings.recovery is None:
            return None
        _ = self.held_out
        texts = [(text.name, text.stat().st_size) for text in settings.texts or ()]
        about = [repr(chosen), repr(settings.recovery), settings.seed, texts, settings.calibrate]
        return Saved(output, [*about, settings.counts, self.trained.tensors()])

    def announce(self, text: str) -> None:
        """Print a step of a long command to stderr if that is a terminal."""
        if self.settings.progress and sys.stderr.isatty():
            print(f"{text} ...", file=sys.stderr, flush=True)

    def options_for(
        self, table: EmbeddingTable, method: str, given: Options, store: str, target: Target | None
    ) -> Options:
        """The options of a method for a table: those given, and those that meet the target."""
        found = dict(given)
        if target is not None:
            (words, width), kind = table.table.shape, table.table.dtype
            limit = target.limit(table.table, [other.table for other in self.tables])
            found = options_within(method, words, width, limit, store, table.has_output_bias, kind, given)
            if not table.is_scored and "output" not in given:
                found.pop("output", None)
        return self.trained.options_for(table.name, method, found)

    def fit(
        self, method: str, given: Options, store: str, target: Target | None = None, steps: int | None = None
    ) -> Fitted:
        """Fit an embedding of a method to every table."""
        # All options are checked, and the original is measured, before the first fit, which may take long.
        chosen = {table.name: self.options_for(table, method, given, store, target) for table in self.tables}
        _ = self.comparison
        fitting = {"seed": self.settings.seed, "steps": steps, "progress": self.settings.progress}
        every = [table.table for table in self.tables]
        fitted = Fitted(method, store, {}, [], [])
        for table in self.tables:
            known = self.given(table, get_method_config(method).takes_metric)
            embedding, report = fit_table(table, method, store, known | fitting | chosen[table.name])
            fitted.embeddings[table.name] = embedding
            if known["metric"] is not None:
                fitted.notes.append(
                    f"table {table.name} is rounded for predictions: its relative error is larger than with "
                    "--calibrate none"
                )
            counts = known["token_counts"]
            # Words that the text does not have count once.
            read = len(table.table) if counts is None else int((counts > 1).sum())
            if 2 * read < len(table.table) and getattr(embedding.options, "count_exponent", 0.0) > 0.0:
                fitted.notes.append(
                    f"the texts have {read:,} of the {len(table.table):,} words of table {table.name} more "
                    "than once; others get fewer bits, so give texts of all languages and domains that the "
                    "model is for"
                )
            fitted.reports.append(report)
            stored, error = report.storage, report.fit.relative_error
            if target is not None and report.stored_bytes.after > target.limit(table.table, every):
                fitted.notes.append(
                    f"{method} chose its own sizes when it was fitted: table {report.name} misses the target"
                )
            if stored is not None and stored.relative_error > error + _MUCH_ADDED:
                fitted.notes.append(
                    f"{stored.store} raises the relative error of table {report.name} from {error:.4f} to "
                    f"{stored.relative_error:.4f}; another storage keeps more"
                )
        return fitted

    def finish(
        self, fitted: Fitted, output: Path, files: Sequence[Path], saved: Saved | None
    ) -> CompressionReport:
        """Place embeddings in the model, train it if that is wanted, measure it, and write it.

        `files` and `saved` are from `check_files` and `saved`.
        """
        notes, recovery = self.trained.place(fitted.embeddings), None
        if saved is not None:
            recovery, more = self.recover(fitted, saved)
            notes += more
        tensors, trimmed = self.trained.tensors(), self.settings.trimmed
        own = {part.data_ptr() for one in fitted.embeddings.values() for part in one.state_dict().values()}
        names = [name for name, tensor in tensors.items() if tensor.data_ptr() in own]
        packed = pack(tensors, names, fitted.store)
        weights, memory, parameters = map(Sizes, self._before, _footprint(self.trained, packed))
        quality, kept = self._result()
        report = CompressionReport(
            model=os.fspath(self.model) if trimmed is None else trimmed.model,
            output=os.fspath(output),
            host=self.host,
            method=fitted.method,
            store=fitted.store,
            bytes_on_disk=Sizes(sum(map(bytes_on_disk, self.trained.files(self.model))), 0),
            bytes_of_weights=weights,
            bytes_in_memory=memory,
            parameters=parameters,
            quality=quality,
            kept=kept,
            tables=fitted.reports,
            notes=[*fitted.notes, *notes],
            recovery=recovery,
            trimmed=trimmed,
        )
        report = self._write(report, packed, files)
        if saved is not None:
            saved.remove()
        return report

    def _result(self) -> tuple[QualityReport | None, Kept]:
        """The quality of the model with the embeddings that are placed, and what it keeps."""
        return (None, NOT_CHECKED) if self.comparison is None else self.comparison.result()

    def recover(self, fitted: Fitted, saved: Saved) -> tuple[RecoveryReport, list[str]]:
        """Train the model with embeddings in place, see `shared_embeddings.compress.recovery.recover`."""
        self.announce("reading the original again")
        original = find_host(self.model)[1].read(self.model)
        settings, plan = self.settings, self.settings.recovery
        assert plan is not None
        pupil = Pupil(self.trained, fitted.embeddings, fitted.store, self.held_out, self.words_of)
        found = recover(
            pupil, original, self.tables, plan, saved, settings.texts, settings.seed, settings.progress
        )
        for embedding in fitted.embeddings.values():
            _hold(embedding, fitted.store)
        return found

    def _write(
        self, report: CompressionReport, tensors: Mapping[str, Tensor], files: Sequence[Path]
    ) -> CompressionReport:
        """Write the model, and the report with the bytes that it takes on disk; all files appear, or none."""
        beside, report_file = self.settings.beside, self.settings.report_file
        reports = [] if report_file is None else [report_file]
        try:
            with staged([*files, *beside.values(), *reports]) as places:
                self.trained.write(places[0], tensors, report.card())
                for source, place in zip(beside, places[len(files) :]):
                    shutil.copyfile(source, place)
                written = sum(map(bytes_on_disk, places[: len(files)]))
                sizes = Sizes(report.bytes_on_disk.before, written)
                report = dataclasses.replace(report, bytes_on_disk=sizes)
                if report_file is not None:
                    report.write(places[-1])
        except OSError as error:
            reason = error.strerror or first_line(error)
            raise OSError(
                f"output {report.output}: cannot be written ({reason}); "
                "free some space, or choose another path"
            ) from error
        return report

    @functools.cached_property
    def sample(self) -> ScoredWords | None:
        """The words by whose predictions candidates are compared; None for all words."""
        return self.words_of(None if self.comparison is None else self.comparison.samples)

    def words_of(self, samples: Samples | None, number: int = 0) -> ScoredWords | None:
        """The words that are scored for samples where the vocabulary is large; None for all words.

        Args:
            samples: the samples; None for no words that are certain to be there.
            number: of the selection of rare words.
        """
        sizes = {len(table.table) for table in self.tables}
        # Deeper embeddings score words by other rows.
        is_whole = all(table.part is None for table in self.tables)
        is_scored = any(table.is_scored for table in self.tables)
        read = torch.empty(0, dtype=torch.long) if samples is None else samples.words
        if len(sizes) > 1 or max(sizes) <= 4 * SAMPLED_WORDS or not is_whole or not is_scored or read is None:
            return None
        [count], counts = sizes, self.counts.get(self.tables[0].name)
        order = torch.arange(count) if counts is None else counts.argsort(descending=True)
        # All that are certain to be there stand for themselves, and each of the others for some.
        certain = torch.cat([read, order[:_FREQUENT]]).unique()
        every = count // (SAMPLED_WORDS - _FREQUENT)
        others = torch.arange(number % every, count, every)
        others = others[~torch.isin(others, certain)]
        ids = torch.cat([certain, others]).sort().values
        each = math.log((count - len(certain)) / max(len(others), 1))
        return ScoredWords(ids, each * torch.isin(ids, others))

    def attempt(self, method: str, candidate: Candidate, target: Target | None) -> Trial:
        """Fit, place and measure one candidate; a trial with a reason if it is impossible or fails."""
        comparison = self.comparison  # of the original, whose failure is no fault of the candidate either
        try:
            words = self.sample
            if comparison is None or comparison.samples is None or not get_method_config(method).takes_metric:
                words = None  # the quality of all words is measured, or the fit has no codes for words
            if words is not None:
                return self._tried_on_words(method, candidate, target, words)
            return self._tried_on_all(method, candidate, target)
        except OSError:
            raise
        except Exception as error:
            return _failed(method, candidate, error)

    def _tried_on_all(self, method: str, candidate: Candidate, target: Target | None) -> Trial:
        """The trial of a candidate that is fitted to all words."""
        fitted = self.fit(method, *candidate, target)
        self.trained.place(fitted.embeddings)
        quality, kept = self._result()
        sizes = Sizes(self._table_bytes, sum(report.stored_bytes.after for report in fitted.reports))
        error, chosen = fitted.reports[0].relative_error, fitted.reports[0].fit.options
        return Trial(method, *candidate, "", kept, quality, sizes, error, chosen, fitted)

    def _tried_on_words(
        self, method: str, candidate: Candidate, target: Target | None, words: ScoredWords
    ) -> Trial:
        """The trial of a candidate that is fitted to some words only; it has no embeddings of all."""
        assert self.comparison is not None
        fitting: dict[str, Any] = {"seed": self.settings.seed, "progress": False, "only": words.ids}
        embeddings, fits, after = dict[str, SharedEmbedding](), list[FitReport](), 0
        for table in self.tables:
            chosen = self.options_for(table, method, *candidate, target)
            embedding, found = fit(method, table.table, **self.given(table) | fitting | chosen)
            fits.append(found)
            embedding.to(table.table.dtype).eval()
            _hold(embedding, candidate.store)
            embeddings[table.name] = embedding
            after += -(-accounting.stored_bits(embedding, candidate.store) // 8)
        self.trained.place(embeddings)
        with scoring_only([embeddings[table.name] for table in self.tables if table.is_scored], words):
            kept = self.comparison.kept(words)
        sizes, error = Sizes(self._table_bytes, after), fits[0].relative_error
        return Trial(method, *candidate, kept=kept, sizes=sizes, relative_error=error, chosen=fits[0].options)

    def tried(self, rivals: Sequence[tuple[str, Candidate]], target: Target) -> list[Trial]:
        """The trials of candidates at a size, with a progress bar; the best one may have its embeddings."""
        possible, others = self._promising(rivals, target)
        trials: list[Trial] = []
        hidden = not self.settings.progress
        bar = tqdm(possible, "candidates", delay=BAR_DELAY, disable=hidden, leave=False)
        for method, candidate in bar:
            bar.set_postfix_str(as_yaml(method, candidate.options), refresh=True)
            trials.append(self.attempt(method, candidate, target))
            best = min(trials, key=lambda one: one.rank)
            # Only the best embeddings stay in memory.
            trials = [one if one is best else dataclasses.replace(one, fitted=None) for one in trials]
        return [*others, *trials]

    def tried_uncalibrated(self, trials: Sequence[Trial], target: Target) -> list[Trial]:
        """The best of the trials without calibration, where `compress` has calibrated by itself.

        Calibration weighs small errors. With few bits for a translation model, it can lose more.
        """
        best = min(trials, key=lambda trial: trial.rank)
        is_possible = best.kept is not None and get_method_config(best.method).takes_metric
        if not is_possible or self.settings.calibrate is not None or not self.calibrations:
            return []
        measured, self.calibrations = self.calibrations, {}
        found = self.attempt(best.method, Candidate(best.options, best.store), target)
        self.calibrations = measured
        return [dataclasses.replace(found, is_calibrated=False)]

    def curve(self, best: Trial) -> list[Trial]:
        """The best candidate at other sizes, where divergences are measured."""
        if best.kept is None or best.kept.kl is None:
            return []
        candidate = Candidate(best.options, best.store)
        found = [self.attempt(best.method, candidate, Target(bits=bits)) for bits in _CURVE]
        return [
            dataclasses.replace(trial, fitted=None, is_calibrated=best.is_calibrated)
            for trial in found
            if trial.kept is not None
        ]

    def _promising(
        self, rivals: Sequence[tuple[str, Candidate]], target: Target
    ) -> tuple[Sequence[tuple[str, Candidate]], list[Trial]]:
        """The candidates whose predictions are compared, and trials with a reason of the others.

        Where a table is large, these are the ones with the smallest errors on a sample of its rows.
        """
        if max(len(table.table) for table in self.tables) <= 2 * SAMPLED_ROWS or len(rivals) <= FITTED:
            return rivals, []
        trials: list[Trial] = []
        errors: list[tuple[float, str, Candidate]] = []
        for number, (method, candidate) in enumerate(rivals, 1):
            self.announce(f"sample of rows {number} of {len(rivals)}: {method} {candidate.options}")
            try:
                found = [self._sampled_error(table, method, candidate, target) for table in self.tables]
            except OSError:
                raise
            except Exception as error:
                trials.append(_failed(method, candidate, error))
                continue
            missed, squares = map(sum, zip(*found))
            errors.append((math.sqrt(missed / squares) if squares else 0.0, method, candidate))
        errors.sort(key=lambda one: one[0])
        for found_error, method, candidate in errors[FITTED:]:
            why = f"on a sample of rows, its error is {found_error:.3f}, the smallest {errors[0][0]:.3f}"
            trials.append(Trial(method, *candidate, why))
        return [(method, candidate) for _, method, candidate in errors[:FITTED]], trials

    def _sampled_error(
        self, table: EmbeddingTable, method: str, candidate: Candidate, target: Target
    ) -> tuple[float, float]:
        """The weighted squared distances and norms of a sample of rows, to which a candidate is fitted."""
        options = self.options_for(table, method, candidate.options, candidate.store, target)
        ids = torch.arange(0, len(table.table), max(1, len(table.table) // SAMPLED_ROWS))
        ids = ids[ids != (-1 if table.padding_idx is None else table.padding_idx)]
        known, rows = self.given(table), table.table[ids].float()
        counts, weights = (
            None if one is None else one[ids] for one in (known["token_counts"], known["importance"])
        )
        asked = {"token_counts": counts, "importance": weights, "metric": known["metric"]}
        embedding, _ = fit(method, rows, seed=self.settings.seed, progress=False, **asked, **options)
        if weights is None:
            # Words weigh as much as in `quantized` by default.
            exponent = vars(get_method_config("quantized"))["count_exponent"]
            weights = torch.ones(len(ids)) if counts is None else counts**exponent
        return Errors(embedding.eval(), rows.__getitem__, known["metric"]).weighted(weights)

    def given(self, table: EmbeddingTable, takes_metric: bool = True) -> dict[str, Any]:
        """What is known about the words of a table, as arguments of `fit`.

        The importance of a word grows with its part of the predictions plus its part of the text.
        """
        counts, importance = self.counts.get(table.name), None
        known = {"padding_idx": table.padding_idx, "words": table.words, "token_counts": counts}
        found = self.calibrations.get(table.name) if takes_metric else None
        if found is not None and bool(found.shares.any()):
            importance = found.shares / found.shares.sum()
            if counts is not None:  # words that the text does not have count once
                importance += (counts - 1) / (counts - 1).sum().clamp(min=1)
            importance **= _POWER
        return known | {"metric": None if found is None else found.metric, "importance": importance}

    def smallest_within(self, max_loss: MaxLoss) -> Target:
        """The smallest size at which a candidate loses at most `max_loss`.

        The logarithm of the loss is taken to be linear in the bits of the codes, so that few sizes are tried.
        All candidates are tried at the first size, and those that may be the best at others.
        """
        low, high, ratio = *_RATIOS, _FIRST_RATIO
        bits = 8 * self.tables[0].table.element_size()
        rivals, losses = list(candidates()), dict[float, float]()  # by ratio
        reason = "allow a larger loss"
        while high / low > CLOSE:
            found = sorted(self.tried(rivals, Target(ratio=ratio)), key=max_loss.loss)
            losses[ratio] = max_loss.loss(found[0])
            reason = found[0].reason or reason
            if losses[ratio] > max_loss.limit:
                high = ratio
            else:
                low = ratio
                if losses[ratio] >= _NEAR * max_loss.limit > 0:
                    break
            best = [(one.method, Candidate(one.options, one.store)) for one in found if one.kept is not None]
            rivals = best[:FITTED] or rivals
            ratio = _next_ratio(losses, max_loss.limit, low, high, bits)
        if low not in losses:
            raise UserError(f"all methods lose more than that at all sizes that were tried; {reason}")
        return Target(ratio=low)


def _footprint(trained: TrainedModel, written: Mapping[str, Tensor]) -> tuple[int, int, int]:
    """The bytes of the `written` tensors and of those in memory, and the number of parameters of a model."""
    module = trained.module
    held = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return (
        sum(part.nbytes for tensor in written.values() for part in inner_tensors(tensor)),
        sum(part.nbytes for tensor in held.values() for part in inner_tensors(tensor)),
        accounting.count_parameters(module),
    )


def check_files(
    trained: StoredModel,
    model: Path,
    output: Path,
    settings: Settings,
    named: Mapping[str, Path] | None = None,
) -> list[Path]:
    """The files of a compressed model, after checking that they can be written.

    Args:
        trained: the model.
        output, settings: as in `compress`.
        named: files that options of the method name, by option.
    """
    files, sources, validation = trained.files(output), trained.files(model), settings.validation
    is_file = all(source.is_file() for source in sources)
    check_paths(
        {
            "--model": (PathOption.SOURCE, sources),
            "--text": (PathOption.FILE, settings.texts),
            "--validation": (PathOption.SOURCE, getattr(validation, "text", None)),
            "--validation-source": (PathOption.FILE, getattr(validation, "source", None)),
            "--validation-target": (PathOption.FILE, getattr(validation, "target", None)),
            **{f"--{name}": (PathOption.FILE, path) for name, path in (named or {}).items()},
            "--output": (
                PathOption.NEW_FILE if is_file else PathOption.NEW,
                [*files, *settings.beside.values()],
            ),
            "--report": (PathOption.NEW_FILE, settings.report_file),
        },
        settings.force,
    )
    return files


def candidates() -> Iterator[tuple[str, Candidate]]:
    """The candidates of all methods; those of the method with the most come first."""
    for method in sorted(methods(), key=lambda name: -len(get_method_config(name).candidates())):
        for candidate in get_method_config(method).candidates():
            yield method, candidate


def _failed(method: str, candidate: Candidate, error: Exception) -> Trial:
    """The trial of a candidate that is impossible at a size, or that failed in any other way."""
    reason = first_line(error).removeprefix(f"{method}: ")
    if not isinstance(error, ValueError) and reason != type(error).__name__:
        reason = f"{type(error).__name__}: {reason}"
    return Trial(method, *candidate, reason)


def _next_ratio(losses: Mapping[float, float], max_loss: float, low: float, high: float, bits: int) -> float:
    """A ratio between `low` and `high` whose loss should be a little below the largest one.

    Args:
        losses: those that were measured, by ratio.
        max_loss: the largest loss.
        low, high: the loss at `low` is small enough, that at `high` is not.
        bits: of a number of the original table.
    """
    middle = math.sqrt(low * high)
    wanted = max_loss * (1 + _NEAR) / 2
    # No loss is nothing to compute with, and it is infinite at impossible sizes.
    measured = {ratio: loss for ratio, loss in losses.items() if 0 < loss < math.inf}
    if not measured or wanted <= 0:
        return middle
    known = sorted(measured, key=lambda ratio: abs(math.log(measured[ratio] / wanted)))[:2]
    slope = math.log(_LOSS_PER_BIT)
    if len(known) == 2 and losses[known[1]] != losses[known[0]]:
        slope = math.log(losses[known[1]] / losses[known[0]]) / (bits / known[0] - bits / known[1])
    if slope <= 0 or len(losses) > 2 and len(losses) % 3 == 0:
        return middle
    wanted_bits = bits / known[0] + math.log(losses[known[0]] / wanted) / slope
    found = bits / max(wanted_bits, 0.01)
    return found if low * CLOSE**0.5 <= found <= high / CLOSE**0.5 else middle


def fit_table(
    table: EmbeddingTable, method: str, store: str, options: Mapping[str, Any]
) -> tuple[SharedEmbedding, TableReport]:
    """Fit an embedding to a table of a trained model, with the values that `store` keeps.

    Args:
        table, method, store: as in `shared_embeddings.compress.session.compress`.
        options: other arguments of `fit`, as from `Session.given`.

    Returns:
        The embedding in evaluation mode, and its report.
    """
    of_words = options["token_counts"]
    embedding, found = fit(method, table.table, **options)
    embedding.to(table.table.dtype).eval()
    bands = Errors(embedding, table.table.__getitem__).bands(of_words)
    stored = None if store == "fp32" else _store(embedding, store, table.table, of_words)
    if stored is None:
        _hold(embedding, store)  # packs word codes
    after = -(-accounting.stored_bits(embedding) // 8) if stored is None else stored.stored_bytes.after
    return embedding, TableReport(
        name=table.name,
        uses=table.uses,
        part=table.part,
        parameters=Sizes(table.parameters, found.parameters),
        stored_bytes=Sizes(-(-table.stored_bits // 8), after),
        fit=found,
        order="in the order of the vocabulary" if of_words is None else "by count",
        bands=bands,
        storage=stored,
        decoding=_decoding(table, embedding),
    )


def _hold(embedding: SharedEmbedding, store: str) -> None:
    """Keep the numbers of an embedding in memory as its storage does, except for biases, which hosts copy."""
    tensors = accounting.distinct_state(embedding).items()
    state = {name: one for name, one in tensors if one.dim() > 1 or not one.is_floating_point()}
    embedding.load_state_dict(install(embedding, hold(pack(state, state, store))), strict=False)


@torch.no_grad()
def _store(embedding: SharedEmbedding, store: str, teacher: Tensor, counts: Tensor | None) -> StorageReport:
    """Keep the numbers of an embedding as its storage does, and measure the difference."""
    tensors = (*embedding.parameters(), *embedding.buffers())
    fitted = copy.deepcopy(embedding, {id(tensor): tensor for tensor in tensors})
    sizes = Sizes(*(-(-accounting.stored_bits(embedding, kind) // 8) for kind in ("fp32", store)))
    _hold(embedding, store)
    added, errors = Errors(embedding, fitted), Errors(embedding, teacher.__getitem__)
    added_bands, bands = added.bands(counts), errors.bands(counts)
    return StorageReport(store, sizes, added.relative(), errors.relative(), added_bands, bands)


class Errors:
    """The distances of an embedding's rows from wanted ones.

    Args:
        embedding: the embedding.
        wanted: rows ``(n, D)`` for ids ``(n,)``.
        metric: ``(D, D)`` what squared distances and norms are measured in; None for those of vectors.
    """

    @torch.no_grad()
    def __init__(
        self, embedding: SharedEmbedding, wanted: Callable[[Tensor], Tensor], metric: Tensor | None = None
    ) -> None:
        # Small tensors that stay between large ones would keep the allocator from using memory again.
        self._missed, self._squares = torch.zeros(2, embedding.num_embeddings, dtype=torch.float64)
        ids = torch.arange(embedding.num_embeddings)
        matrix = None if metric is None else metric.double()
        for some in ids.split(_ROWS):
            rows = wanted(some).double()
            missed = embedding(some).double() - rows
            for sums, vectors in ((self._missed, missed), (self._squares, rows)):
                weighed = vectors if matrix is None else vectors @ matrix
                sums[some] = (weighed * vectors).sum(dim=1)
        self._words = ids if embedding.padding_idx is None else ids[ids != embedding.padding_idx]

    def relative(self) -> float:
        """``||E - Ê|| / ||E||`` over all words except padding."""
        return self._of(self._words)[1]

    def weighted(self, weights: Tensor) -> tuple[float, float]:
        """The sums of squared distances and of squared norms over all words except padding.

        Args:
            weights: ``(V,)`` of the words.
        """
        own = weights[self._words].double()
        return float(self._missed[self._words] @ own), float(self._squares[self._words] @ own)

    def bands(self, counts: Tensor | None) -> list[Band]:
        """The errors by frequency band.

        Args:
            counts: ``(V,)`` of the words; None for words in order of frequency.
        """
        order = self._words
        if counts is not None:
            order = order[torch.argsort(counts[order], descending=True, stable=True)]
        edges = [0, *(edge for edge in BANDS if edge < len(order)), len(order)]
        return [Band(first + 1, last, *self._of(order[first:last])) for first, last in zip(edges, edges[1:])]

    def _of(self, words: Tensor) -> tuple[float, float]:
        """The mean distance of the rows of words, and the relative error."""
        missed, norm = self._missed[words], float(self._squares[words].sum().sqrt())
        return float(missed.sqrt().mean()), float(missed.sum().sqrt()) / norm if norm else 0.0


@torch.no_grad()
def _decoding(table: EmbeddingTable, embedding: SharedEmbedding) -> Decoding:
    """The speed and the memory of generating a text token by token, with the table and the embedding."""
    rows, ids = table.table, torch.arange(len(table.table))
    hidden = rows[:1]
    scores = table.is_scored and embedding.has_output and embedding.score_dim == rows.size(1)

    def plain(one: Tensor) -> None:
        F.embedding(one, rows)
        if scores:
            F.log_softmax(F.linear(hidden, rows), dim=-1)

    def compressed(one: Tensor) -> None:
        embedding(one)
        if scores:
            embedding.log_prob(hidden)

    before, after = _tokens_per_second(plain, ids), _tokens_per_second(compressed, ids)
    return Decoding(scores, before, after, Sizes(rows.nbytes, accounting.bytes_in_memory(embedding)))


def _tokens_per_second(step: Callable[[Tensor], object], ids: Tensor) -> float:
    """How many tokens ``(1,)`` a step takes in a second, by the fastest of some; the first fills caches."""
    step(ids[:1])
    fastest, started = float("inf"), time.perf_counter()
    for one in ids[:_TIMED_TOKENS].split(1):
        before = time.perf_counter()
        step(one)
        after = time.perf_counter()
        fastest = min(fastest, after - before)
        if after - started > _TIMED_SECONDS:
            break
    return 1 / max(fastest, 1e-9)
