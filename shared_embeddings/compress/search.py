"""Choose the method, the codec and the size of new embeddings.

Candidates for large tables are ranked on a sample of rows first. Those that are close are fitted to the
tokens of a text and compared by the predictions of the model; only the best one is fitted to all tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch

from shared_embeddings.compress.fit import fit
from shared_embeddings.compress.fit_tables import Errors, Fitted, fit_tables, hold_as
from shared_embeddings.compress.host import EmbeddingTable
from shared_embeddings.compress.measure import QualityReport, Retention
from shared_embeddings.compress.options import MaxLoss
from shared_embeddings.compress.report import Sizes
from shared_embeddings.compress.session import NOT_CALIBRATED, Session
from shared_embeddings.compress.sizing import Target, as_yaml, stored_bytes
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.registry import get_method_config, methods
from shared_embeddings.spec import Candidate, Options
from shared_embeddings.utils.command_line import align
from shared_embeddings.utils.errors import UserError, first_line
from shared_embeddings.utils.progress import begin_phase

# Candidates for tables of more than twice so many rows are ranked by fits to so many; at most so many of
# them, whose errors are at most so many times the smallest, are then compared by predictions.
SAMPLED_ROWS, MOST_COMPARED, CLOSE_ERROR = 2**11, 3, 1.05
# The ratios that are searched for the smallest size, and the factor between two that are as good as equal.
_RATIOS, CLOSE_RATIO = (2.0, 128.0), 1.07
# The share of the largest loss that is close enough to it.
_NEAR = 0.8
# The divergence of predictions, in nats, up to which a calibration estimates well what errors cost.
SMALL_KL = 0.05
# The bits for a number of the tables of a curve.
_CURVE = (8.0, 4.0, 3.0, 2.0, 1.5, 1.0)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One candidate at one size."""

    method: str  # of the candidate
    options: Options  # of the candidate
    store: str
    reason: str = ""  # why it was not measured: the method is impossible at this size, or it failed
    retention: Retention | None = None  # what the model retains; None if that was not measured
    quality: QualityReport | None = None  # if there is validation data
    sizes: Sizes = Sizes(0, 0)  # the bytes of all tables as stored
    relative_error: float = 0.0  # of the first table
    chosen: Options = dataclasses.field(default_factory=dict)  # its options as fitted
    fitted: Fitted | None = None  # the embeddings of all tokens, for the best
    calibration: str | None = None  # of its codes, see `Session.calibration_of`

    @property
    def rank(self) -> tuple[bool, bool, float, int]:
        """What orders trials, best first: by divergence or else by share, then by bytes."""
        retention = self.retention
        share, kl = (None, None) if retention is None else (retention.share, retention.kl)
        return retention is None, share is None, -(share or 0.0) if kl is None else kl, self.sizes.after

    def loss(self, in_nats: bool) -> float:
        """Return the loss as `MaxLoss` limits it; infinite if it could not be measured."""
        retention = self.retention
        if retention is None or retention.share is None:
            return math.inf
        if in_nats:
            return math.inf if retention.kl is None else retention.kl
        return 1.0 - retention.share if retention.perplexity is None else retention.perplexity.change


@dataclasses.dataclass(frozen=True)
class SearchReport:
    """The trials of a search at the chosen size, best first, and the best candidate at other sizes."""

    trials: Sequence[Trial]
    curve: Sequence[Trial] = ()

    def summary(self) -> str:
        """Return a table of the trials and one of the sizes."""
        best = self.trials[0]
        names = {trial.calibration for trial in self.trials} - {None, NOT_CALIBRATED}
        codes = "".join(f"; codes are {name}" for name in names)
        lines = [] if best.retention is None else [f"candidates, compared on {best.retention.how}{codes}:"]
        lines += align(_rows(self.trials), texts=2)
        lines += [
            f"not tried: {as_yaml(trial.method, trial.options)}: {trial.reason}"
            for trial in self.trials
            if trial.retention is None
        ]
        if self.curve:
            title = "the best one at other sizes, where another one may be better:"
            lines += ["", title, *align(_rows(self.curve), texts=2)]
        return "\n".join(lines)


def _rows(trials: Sequence[Trial]) -> list[tuple[str, ...]]:
    """Return the cells of a table of trials that were measured, below their titles."""
    measure = next((trial.quality.measure for trial in trials if trial.quality is not None), "perplexity")
    rows: list[tuple[str, ...]] = [("method", "store", "bytes", "smaller", "error", measure, "KL", "kept")]
    for trial in trials:
        if (retention := trial.retention) is None:
            continue
        options = {name: value for name, value in trial.chosen.items() if len(str(value)) <= 20}
        value = "–"
        if trial.quality is not None:
            value = f"{trial.quality.after:.2f}"
        elif (text := retention.perplexity) is not None:
            value = f"{text.after:.2f} ({text.described()})"
        rows.append(
            (
                as_yaml(trial.method, options)
                + (f", {NOT_CALIBRATED}" if trial.calibration == NOT_CALIBRATED else ""),
                trial.store,
                f"{trial.sizes.after:,}",
                f"{trial.sizes.smaller:.1f}x",
                f"{trial.relative_error:.3f}",
                value,
                "–" if retention.kl is None else f"{retention.kl:.4f}",
                "unknown" if retention.share is None else f"{100 * retention.share:.1f}%",
            )
        )
    return rows


def candidates() -> Iterator[tuple[str, Candidate]]:
    """Yield the candidates of all methods; those of the method with the most come first."""
    for method in sorted(methods(), key=lambda name: -len(get_method_config(name).candidates())):
        for candidate in get_method_config(method).candidates():
            yield method, candidate


def search(session: Session, target: Target) -> list[Trial]:
    """Return the trials of the candidates at a size, best first; UserError if all are impossible or fail.

    Calibration weighs small errors. With few bits for a translation model, it can lose more, so that the best
    one is also tried without.
    """
    trials = try_candidates(session, list(candidates()), target, is_last=True)
    best = min(trials, key=lambda trial: trial.rank)
    is_calibrated = get_method_config(best.method).takes_metric
    kl = None if best.retention is None else best.retention.kl
    if (
        best.retention is not None
        and is_calibrated
        and (kl is None or kl > SMALL_KL)
        and session.calibrations
    ):
        session.is_calibrated = False
        trials.append(attempt(session, best.method, Candidate(best.options, best.store), target))
        session.is_calibrated = True
    trials.sort(key=lambda trial: trial.rank)
    if trials[0].retention is None:
        # One reason for all is about the model.
        is_one = len({trial.reason for trial in trials}) == 1
        raise UserError(f"{'' if is_one else 'no method is possible at this size; '}{trials[0].reason}")
    return trials


def curve(session: Session, best: Trial) -> list[Trial]:
    """Return trials of the best candidate at other sizes, where divergences are measured."""
    if best.retention is None or best.retention.kl is None:
        return []
    session.is_calibrated = best.calibration != NOT_CALIBRATED
    candidate = Candidate(best.options, best.store)
    trials = [attempt(session, best.method, candidate, Target(bits=bits)) for bits in _CURVE]
    return [dataclasses.replace(trial, fitted=None) for trial in trials if trial.retention is not None]


def try_candidates(
    session: Session, rivals: Sequence[tuple[str, Candidate]], target: Target, is_last: bool = False
) -> list[Trial]:
    """Return the trials of candidates at a size; the best one may have its embeddings.

    At the last size, a single promising candidate is fitted to all tokens at once.
    """
    rivals, trials = _promising(session, rivals, target)
    for number, (method, candidate) in enumerate(rivals, 1):
        begin_phase("comparing", f" candidate {number} of {len(rivals)}")
        trials.append(attempt(session, method, candidate, target, in_full=is_last and len(rivals) == 1))
        best = min(trials, key=lambda trial: trial.rank)
        # Only the best embeddings stay in memory.
        trials = [trial if trial is best else dataclasses.replace(trial, fitted=None) for trial in trials]
    return trials


def attempt(
    session: Session, method: str, candidate: Candidate, target: Target | None, in_full: bool = False
) -> Trial:
    """Fit, place and measure one candidate; return a trial with a reason if it is impossible or fails.

    Where the vocabulary is large, codes are compared by the predictions of some tokens, and only these are
    fitted unless `in_full`.
    """
    comparison = session.comparison  # of the original, whose failure is no fault of the candidate either
    assert comparison is not None
    try:
        # Without samples, the quality of all tokens is measured; without a metric, there are no codes.
        has_codes = comparison.samples is not None and get_method_config(method).takes_metric
        words = session.scored_words if has_codes else None
        embeddings, fits, fitted = dict[str, SharedEmbedding](), [], None
        if words is None or in_full:
            fitted = fit_tables(session, method, *candidate, target)
            embeddings = fitted.embeddings
            after = sum(report.stored_bytes.after for report in fitted.reports)
            first = fitted.reports[0]
            relative_error, chosen = (first.storage or first.fit).relative_error, first.fit.options
        else:
            for table in session.tables:
                arguments = session.fit_arguments(table, takes_metric=True)
                arguments |= session.options_for(table, method, *candidate, target)
                arguments |= {"seed": session.options.seed, "progress": False, "only": words.ids}
                embedding, report = fit(method, table.table, **arguments)
                embedding.to(table.table.dtype).eval()
                hold_as(embedding, candidate.store)
                fits.append(report)
                embeddings[table.name] = embedding
            after = sum(stored_bytes(embedding, candidate.store) for embedding in embeddings.values())
            relative_error, chosen = fits[0].relative_error, fits[0].options
        session.trained.place(embeddings)
        with session.scoring(embeddings, comparison.words):
            quality, retention = comparison.result()
    except OSError:
        raise
    except Exception as error:
        return _failed(method, candidate, error)
    sizes = Sizes(session.table_bytes, after)
    return Trial(
        method,
        *candidate,
        retention=retention,
        quality=quality,
        sizes=sizes,
        relative_error=relative_error,
        chosen=chosen,
        fitted=fitted,
        calibration=session.calibration_of(method),
    )


def _failed(method: str, candidate: Candidate, error: Exception) -> Trial:
    """Return the trial of a candidate that is impossible at a size, or that failed in any other way."""
    reason = first_line(error).removeprefix(f"{method}: ")
    if not isinstance(error, ValueError) and reason != type(error).__name__:
        reason = f"{type(error).__name__}: {reason}"
    return Trial(method, *candidate, reason)


def _promising(
    session: Session, rivals: Sequence[tuple[str, Candidate]], target: Target
) -> tuple[Sequence[tuple[str, Candidate]], list[Trial]]:
    """Return the candidates whose predictions are compared, and trials with a reason of the others.

    Where a table is large, these are the ones with the smallest errors on a sample of its rows.
    """
    if max(len(table.table) for table in session.tables) <= 2 * SAMPLED_ROWS or len(rivals) == 1:
        return rivals, []
    trials: list[Trial] = []
    errors: list[tuple[float, str, Candidate]] = []
    for number, (method, candidate) in enumerate(rivals, 1):
        begin_phase("comparing", f" samples of rows, candidate {number} of {len(rivals)}")
        try:
            sums = [_sampled_error(session, table, method, candidate, target) for table in session.tables]
        except OSError:
            raise
        except Exception as error:
            trials.append(_failed(method, candidate, error))
            continue
        squared_errors, squares = map(sum, zip(*sums))
        errors.append((math.sqrt(squared_errors / squares) if squares else 0.0, method, candidate))
    errors.sort(key=lambda entry: entry[0])
    limit = CLOSE_ERROR * errors[0][0] if errors else 0.0
    close = [entry for entry in errors[:MOST_COMPARED] if entry[0] <= limit]
    for relative, method, candidate in errors[len(close) :]:
        reason = f"on a sample of rows, its error is {relative:.3f}, the smallest {errors[0][0]:.3f}"
        trials.append(Trial(method, *candidate, reason))
    return [(method, candidate) for _, method, candidate in close], trials


def _sampled_error(
    session: Session, table: EmbeddingTable, method: str, candidate: Candidate, target: Target
) -> tuple[float, float]:
    """Return the weighted squared errors and norms of a sample of rows, to which a candidate is fitted."""
    options = session.options_for(table, method, candidate.options, candidate.store, target)
    ids = torch.arange(0, len(table.table), max(1, len(table.table) // SAMPLED_ROWS))
    ids = ids[ids != (-1 if table.padding_idx is None else table.padding_idx)]
    known, rows = session.fit_arguments(table, takes_metric=True), table.table[ids].float()
    counts = None if known["token_counts"] is None else known["token_counts"][ids]
    sampled = {"token_counts": counts, "metric": known["metric"]}
    embedding, _ = fit(method, rows, seed=session.options.seed, progress=False, **sampled, **options)
    # Tokens weigh as much as in `quantized` by default.
    exponent = vars(get_method_config("quantized"))["count_exponent"]
    weights = torch.ones(len(ids)) if counts is None else counts**exponent
    return Errors(embedding.eval(), rows.__getitem__, known["metric"]).weighted(weights)


def smallest_within(session: Session, max_loss: MaxLoss) -> Target:
    """Return the smallest size at which a candidate loses at most `max_loss`, by bisection.

    All candidates are tried at the first size, and those that may be the best at others.
    """
    low, high = _RATIOS
    rivals, reason = list(candidates()), "allow a larger loss"
    is_within = False
    while high / low > CLOSE_RATIO:
        ratio = math.sqrt(low * high)
        trials = try_candidates(session, rivals, Target(ratio=ratio))
        trials.sort(key=lambda trial: trial.loss(max_loss.in_nats))
        loss, reason = trials[0].loss(max_loss.in_nats), trials[0].reason or reason
        if loss > max_loss.limit:
            high = ratio
        else:
            low, is_within = ratio, True
            if loss >= _NEAR * max_loss.limit > 0:
                break
        measured = [trial for trial in trials if trial.retention is not None]
        best = [(trial.method, Candidate(trial.options, trial.store)) for trial in measured]
        rivals = best[:MOST_COMPARED] or rivals
    if not is_within:
        raise UserError(f"all methods lose more than that at all sizes that were tried; {reason}")
    return Target(ratio=low)
