"""Choosing the method of compressed embeddings: try candidates at one size, and keep the best.

Methods name their candidates, see `shared_embeddings.spec.Candidate`. A candidate is measured like any
compressed model: by its quality on validation data, or by the distance of its predictions from those of the
original.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from shared_embeddings.checkpoints.adapter import EmbeddingTable, find_host
from shared_embeddings.checkpoints.agreement import Original
from shared_embeddings.checkpoints.compress import (
    DEFAULTS,
    Settings,
    announce,
    checked_files,
    compress,
    publish,
    within,
)
from shared_embeddings.checkpoints.fitted_tables import Errors
from shared_embeddings.checkpoints.report import CompressionReport
from shared_embeddings.checkpoints.token_counts import counts_of
from shared_embeddings.errors import UserError
from shared_embeddings.fitting.fit import fit
from shared_embeddings.registry import methods
from shared_embeddings.registry import options as find_spec
from shared_embeddings.sizing.suggest import as_yaml
from shared_embeddings.sizing.targets import Target
from shared_embeddings.spec import Candidate
from shared_embeddings.utils.files import first_line, workplace

# Candidates for larger tables are ranked by fits to so many rows; so many of them are fitted to all rows.
_SAMPLED, _FITTED = 2**12, 3
# The ratios that `smallest` searches, and the factor between two ratios that are as good as equal.
_RATIOS, _CLOSE = (2.0, 128.0), 1.07
# The first ratio that it tries, and the share of the largest loss that is close enough to it.
_FIRST_RATIO, _NEAR = 16.0, 0.8
# Losses are taken to grow by this factor where codes have a bit less: between distance and squared distance.
_LOSS_PER_BIT = 3.0


@dataclasses.dataclass(frozen=True)
class Trial:
    """One candidate at one size.

    Attributes:
        method, options, store: of the candidate.
        report: of the compressed model, or None if it was not written.
        reason: why it was not written: the method is impossible at this size, or it failed.
    """

    method: str
    options: Mapping[str, object]
    store: str
    report: CompressionReport | None
    reason: str = ""

    @property
    def share(self) -> float:
        """The share of the quality or predictions that the model kept; -1 if it could not be measured."""
        if self.report is None or self.report.kept.share is None:
            return -1.0
        return self.report.kept.share

    @property
    def distance(self) -> float | None:
        """The distance of the model's predictions; None if its quality was measured instead."""
        return None if self.report is None else self.report.kept.distance

    @property
    def rank(self) -> tuple[bool, float, int]:
        """What orders trials, best first: by distance or else by share, then by bytes."""
        loss = -self.share if self.distance is None else self.distance
        return self.share < 0, loss, self.embedding_bytes

    @property
    def embedding_bytes(self) -> int:
        """The bytes of all tables as stored."""
        return 0 if self.report is None else sum(table.stored_bytes.after for table in self.report.tables)

    @property
    def smaller(self) -> float:
        """How many times fewer bytes than before all tables take."""
        before = 0 if self.report is None else sum(table.stored_bytes.before for table in self.report.tables)
        return before / max(self.embedding_bytes, 1)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The trials at the chosen size, best first.

    Attributes:
        trials: what was tried.
        output: the model that was written, or None if candidates were only compared.
    """

    trials: Sequence[Trial]
    output: Path | None

    @property
    def best(self) -> Trial:
        """The best trial."""
        return self.trials[0]

    def with_output(self, output: Path) -> Choice:
        """The same for a model that was moved."""
        best = dataclasses.replace(self.best, report=self.written().with_output(output))
        return Choice([best, *self.trials[1:]], output)

    def written(self) -> CompressionReport:
        """The report of the best trial."""
        assert self.best.report is not None
        return self.best.report

    def described(self) -> str:
        """A table of the trials, then the report of the best if it was written."""
        rows: list[tuple[str, ...]] = [
            ("method", "store", "bytes", "smaller", "error", self._measure(), "kept")
        ]
        rows += [self._row(trial) for trial in self.trials if trial.report is not None]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(_aligned(cells, widths)) for cells in rows]
        lines += [
            f"not tried: {as_yaml(trial.method, dict(trial.options))}: {trial.reason}"
            for trial in self.trials
            if trial.report is None
        ]
        if self.output is not None:
            lines += ["", self.written().described()]
        return "\n".join(lines)

    def _measure(self) -> str:
        """The name of the number that trials are ranked by."""
        quality = self.written().quality
        return "distance" if quality is None or self.best.distance is not None else quality.measure

    def _row(self, trial: Trial) -> tuple[str, ...]:
        """The cells of one trial."""
        report = trial.report
        assert report is not None
        measured = "unknown" if report.quality is None else f"{report.quality.after:.2f}"
        if trial.distance is not None:
            measured = f"{trial.distance:.4f}"
        share = "unknown" if trial.share < 0 else f"{100 * trial.share:.1f}%"
        ratio = f"{trial.smaller:.1f}x"
        error = f"{report.tables[0].relative_error:.3f}"
        options = {
            name: value for name, value in report.tables[0].fit.options.items() if len(str(value)) <= 20
        }
        size = f"{trial.embedding_bytes:,}"
        return (as_yaml(trial.method, options), trial.store, size, ratio, error, measured, share)


def choose(
    model: Path,
    output: Path | None,
    target: Target,
    settings: Settings = DEFAULTS,
) -> Choice:
    """Compress a model with every candidate, and write the best one.

    A candidate that fails does not stop the others.

    Args:
        model, settings: as in `compress`.
        output: the model to write; None compares only.
        target: the size of the embeddings.

    Raises:
        UserError: as in `compress`, or no candidate is possible at this size, or all fail.
        OSError: a file cannot be read or written.
    """
    if output is not None:
        checked_files(find_host(model)[1].read(model), output, settings)
    stored = find_host(model)[1].read_tables(model)
    counts, progress = settings.counts_for(stored), settings.progress
    possible, trials = promising(stored.tables(), target, counts, settings.seed, progress)
    # Candidates are written to a temporary folder, without a report.
    each = dataclasses.replace(
        settings, counts=counts, original=_measured(model, settings), force=False, report_file=None
    )
    with workplace(output) as folder:
        name = Path(model).name if output is None else output.name
        for number, (method, candidate) in enumerate(possible, 1):
            described = as_yaml(method, candidate.options)
            announce(f"candidate {number} of {len(possible)}: {described} in {candidate.store}", progress)
            trials.append(tried(model, folder / str(number) / name, method, candidate, target, each))
        ranked = sorted(trials, key=lambda trial: (trial.report is None, trial.rank))
        if ranked[0].report is None:
            # One reason for all is about the model.
            is_one = len({trial.reason for trial in ranked}) == 1
            raise UserError(f"{'' if is_one else 'no method is possible at this size; '}{ranked[0].reason}")
        if output is None:
            return Choice(ranked, None)
        trained = find_host(model)[1].read(model)
        files = trained.files(Path(ranked[0].report.output))
        found = Choice(ranked, None).with_output(output)
        publish(dict(zip(files, trained.files(output))), found.written(), settings.report_file)
        return found


def _measured(model: Path, settings: Settings) -> Original:
    """The quality or predictions of a model, which are the same for all candidates.

    Raises:
        UserError: the quality cannot be measured.
    """
    original = Original()
    dataclasses.replace(settings, original=original).comparison(find_host(model)[1].read(model))
    return original


def promising(
    tables: Sequence[EmbeddingTable],
    target: Target,
    counts: Mapping[str, int] | None,
    seed: int,
    progress: bool,
) -> tuple[list[tuple[str, Candidate]], list[Trial]]:
    """The candidates to fit to all rows, and trials without reports of the others.

    Where a table is large, these are the ones with the smallest errors on a sample of its rows.

    Args:
        tables: of the model.
        target, counts, seed, progress: as in `choose`.
    """
    every = list(candidates())
    if max(len(table.table) for table in tables) <= 2 * _SAMPLED or len(every) <= _FITTED:
        return every, []
    errors: list[tuple[float, str, Candidate]] = []
    trials: list[Trial] = []
    for number, (method, candidate) in enumerate(every, 1):
        announce(f"sample of rows {number} of {len(every)}: {method} {dict(candidate.options)}", progress)
        try:
            found = [
                _sampled_error(method, candidate, target, table, tables, counts, seed) for table in tables
            ]
        except OSError:
            raise
        except Exception as failure:
            trials.append(_failed(method, candidate, failure))
            continue
        missed, squares = map(sum, zip(*found))
        errors.append((math.sqrt(missed / squares) if squares else 0.0, method, candidate))
    errors.sort(key=lambda one: one[0])
    for error, method, candidate in errors[_FITTED:]:
        why = f"on a sample of rows, its error is {error:.3f}, the smallest {errors[0][0]:.3f}"
        trials.append(Trial(method, *candidate, None, why))
    return [(method, candidate) for _, method, candidate in errors[:_FITTED]], trials


def _sampled_error(
    method: str,
    candidate: Candidate,
    target: Target,
    table: EmbeddingTable,
    tables: Sequence[EmbeddingTable],
    counts: Mapping[str, int] | None,
    seed: int,
) -> tuple[float, float]:
    """The weighted squared distances and norms of a sample of rows, to which a candidate is fitted.

    Raises:
        Exception: the method is impossible at this size, or fails.
    """
    options = within(target, method, candidate.options, candidate.store, table, tables)
    ids = torch.arange(0, len(table.table), max(1, len(table.table) // _SAMPLED))
    ids = ids[ids != (-1 if table.padding_idx is None else table.padding_idx)]
    rows = table.table[ids].float()
    of_words = None if counts is None else counts_of(table.words, counts, table.sentence_marks)[ids]
    embedding, _ = fit(
        method,
        rows,
        token_counts=of_words,
        seed=seed,
        progress=False,
        **options,  # type: ignore[arg-type]
    )
    # Words weigh as much as in `quantized` by default.
    exponent = vars(find_spec("quantized"))["count_exponent"]
    weights = torch.ones(len(ids)) if of_words is None else of_words**exponent
    return Errors(embedding.eval(), rows.__getitem__).weighted(weights)


def smallest(model: Path, max_loss: float, settings: Settings = DEFAULTS) -> Target:
    """The smallest size at which the first candidate loses at most `max_loss` of the quality or predictions.

    The logarithm of the loss is taken to be linear in the bits of the codes, so that few sizes are tried.

    Args:
        model, settings: as in `compress`.
        max_loss: the largest loss, from 0 to 1.

    Raises:
        UserError: as in `compress`, or the loss is larger at all sizes.
    """
    if not 0.0 <= max_loss < 1.0:
        raise UserError(f"the largest loss is {max_loss:.0%}, but it must be at least 0% and below 100%")
    method, candidate = next(iter(candidates()))
    settings = dataclasses.replace(
        settings, original=_measured(model, settings), force=False, report_file=None
    )
    low, high, ratio = *_RATIOS, _FIRST_RATIO
    losses: dict[float, float] = {}  # by ratio
    with workplace(None) as folder:
        while high / low > _CLOSE:
            place = folder / str(len(losses)) / Path(model).name
            trial = tried(model, place, method, candidate, Target(ratio=ratio), settings)
            losses[ratio] = 1.0 - trial.share
            if losses[ratio] > max_loss:
                high = ratio
            else:
                low = ratio
                if losses[ratio] >= _NEAR * max_loss > 0:
                    break
            ratio = _next_ratio(losses, max_loss, low, high)
    if low not in losses:
        why = trial.reason or "allow a larger loss"
        raise UserError(f"{method} loses more than {max_loss:.1%} at all sizes that were tried; {why}")
    return Target(ratio=low)


def _next_ratio(losses: Mapping[float, float], max_loss: float, low: float, high: float) -> float:
    """A ratio between `low` and `high` whose loss should be a little below the largest one.

    Args:
        losses: those that were measured, by ratio; a ratio is 32 divided by the bits.
        max_loss: the largest loss.
        low, high: the loss at `low` is small enough, that at `high` is not.
    """
    middle = math.sqrt(low * high)
    wanted = max_loss * (1 + _NEAR) / 2
    # No loss is nothing to compute with, and it is at least 1 at impossible sizes.
    measured = {ratio: loss for ratio, loss in losses.items() if 0 < loss < 1}
    if not measured or wanted <= 0:
        return middle
    known = sorted(measured, key=lambda ratio: abs(math.log(measured[ratio] / wanted)))[:2]
    slope = math.log(_LOSS_PER_BIT)
    if len(known) == 2 and losses[known[1]] != losses[known[0]]:
        slope = math.log(losses[known[1]] / losses[known[0]]) / (32 / known[0] - 32 / known[1])
    if slope <= 0 or len(losses) > 2 and len(losses) % 3 == 0:
        return middle
    bits = 32 / known[0] + math.log(losses[known[0]] / wanted) / slope
    found = 32 / max(bits, 0.01)
    return found if low * _CLOSE**0.5 <= found <= high / _CLOSE**0.5 else middle


def candidates() -> Iterator[tuple[str, Candidate]]:
    """The candidates of all methods; those of the method with the most come first."""
    for method in sorted(methods(), key=lambda name: -len(find_spec(name).candidates)):
        for candidate in find_spec(method).candidates:
            yield method, candidate


def tried(
    model: Path,
    output: Path,
    method: str,
    candidate: Candidate,
    target: Target | None,
    settings: Settings,
) -> Trial:
    """Compress a model with one candidate; a trial without a report if it is impossible or fails.

    Args:
        model, output, target, settings: as in `compress`.
        method, candidate: of the embeddings.

    Raises:
        OSError: a file cannot be read or written, which is no fault of the candidate.
    """
    output.parent.mkdir(parents=True)
    options, store = candidate
    try:
        report = compress(
            model, method, output, options=options, target=target, store=store, settings=settings
        )
    except OSError:
        raise
    except Exception as error:
        return _failed(method, candidate, error)
    return Trial(method, options, store, report)


def _failed(method: str, candidate: Candidate, error: Exception) -> Trial:
    """The trial of a candidate that is impossible at a size, or that failed in any other way."""
    reason = first_line(error).removeprefix(f"{method}: ")
    if not isinstance(error, ValueError) and reason != type(error).__name__:
        reason = f"{type(error).__name__}: {reason}"
    return Trial(method, *candidate, None, reason)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """Cells padded to their widths: text to the left, numbers to the right."""
    for place, (cell, width) in enumerate(zip(cells, widths)):
        yield cell.ljust(width) if place < 2 else cell.rjust(width)
