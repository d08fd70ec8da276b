"""Choosing the method of compressed embeddings: try candidates at one size, and keep the best.

Methods name their candidates, see `shared_embeddings.method.Candidate`. A candidate is measured like any
compressed model: by its quality on validation data, or by the predictions that it keeps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shared_embeddings.checkpoints.adapter import find_host
from shared_embeddings.checkpoints.compress import announce, checked_files, compress, publish
from shared_embeddings.checkpoints.quality import Quality, Validation
from shared_embeddings.checkpoints.report import CompressionReport, TrimReport
from shared_embeddings.method import Candidate
from shared_embeddings.options import OptionError
from shared_embeddings.registry import method_class, methods
from shared_embeddings.sizing.suggest import as_yaml
from shared_embeddings.sizing.targets import Target
from shared_embeddings.utils.files import workplace

# The ratios that `smallest` searches, and how close it gets: by a factor of 64**(1 / 2**6), about 1.07.
_RATIOS = (2.0, 128.0)
_HALVINGS = 6


@dataclasses.dataclass(frozen=True)
class Trial:
    """One candidate at one size.

    Attributes:
        method, options, store: of the candidate.
        report: of the compressed model, or None if the method is impossible at this size.
        reason: why it is impossible.
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
    def quality_before(self) -> Quality | None:
        """The quality of the model that was compressed, if it was measured."""
        found = None if self.report is None else self.report.quality
        return None if found is None else Quality(found.measure, found.before, found.how)

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
        """The trial that kept the most."""
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
        rows = [("method", "store", "bytes", "smaller", "error", *self._quality_titles(), "kept")]
        rows += [self._row(trial) for trial in self.trials if trial.report is not None]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(_aligned(cells, widths)) for cells in rows]
        lines += [
            f"not possible: {trial.method}: {trial.reason.removeprefix(f'{trial.method}: ')}"
            for trial in self.trials
            if trial.report is None
        ]
        if self.output is not None:
            lines += ["", self.written().described()]
        return "\n".join(lines)

    def _quality_titles(self) -> list[str]:
        quality = self.written().quality
        return [] if quality is None else [quality.measure]

    def _row(self, trial: Trial) -> tuple[str, ...]:
        """The cells of one trial."""
        report = trial.report
        assert report is not None
        quality = [] if report.quality is None else [f"{report.quality.after:.2f}"]
        share = "unknown" if trial.share < 0 else f"{100 * trial.share:.1f}%"
        ratio = f"{trial.smaller:.1f}x"
        error = f"{report.tables[0].relative_error:.3f}"
        options = {
            name: value for name, value in report.tables[0].fit.options.items() if len(str(value)) <= 20
        }
        size = f"{trial.embedding_bytes:,}"
        return (as_yaml(trial.method, options), trial.store, size, ratio, error, *quality, share)


def choose(
    model: Path,
    output: Path | None,
    target: Target,
    *,
    counts: Mapping[str, int] | None = None,
    texts: Sequence[Path] | None = None,
    validation: Validation | None = None,
    seed: int = 0,
    force: bool = False,
    report_file: Path | None = None,
    progress: bool = True,
    trimmed: TrimReport | None = None,
) -> Choice:
    """Compress a model with every candidate, and write the one that keeps the most.

    Args:
        model, counts, texts, validation, seed, force, report_file, progress, trimmed: as in `compress`.
        output: the model to write; None compares only.
        target: the size of the embeddings.

    Raises:
        ValueError: as in `compress`, or no candidate is possible at this size.
        OSError: a file cannot be read or written.
    """
    if output is not None:
        checked_files(find_host(model)[1].read(model), output, texts, validation, report_file, force)
    settings: dict[str, object] = {
        "counts": counts,
        "texts": texts,
        "validation": validation,
        "seed": seed,
        "progress": progress,
        "trimmed": trimmed,
    }
    with workplace(output) as folder:
        name = Path(model).name if output is None else output.name
        trials: list[Trial] = []
        possible = list(candidates())
        for number, (method, candidate) in enumerate(possible, 1):
            described = as_yaml(method, candidate.options)
            announce(f"candidate {number} of {len(possible)}: {described} in {candidate.store}", progress)
            place = folder / str(len(trials)) / name
            trials.append(tried(model, place, method, candidate, target, settings))
            settings["before"] = trials[-1].quality_before or settings.get("before")
        ranked = sorted(trials, key=lambda trial: (trial.report is None, -trial.share, trial.embedding_bytes))
        if ranked[0].report is None:
            raise ValueError(f"no method is possible at this size; {ranked[0].reason}")
        if output is None:
            return Choice(ranked, None)
        trained = find_host(model)[1].read(model)
        files = trained.files(Path(ranked[0].report.output))
        found = Choice(ranked, None).with_output(output)
        publish(dict(zip(files, trained.files(output))), found.written(), report_file)
        return found


def smallest(model: Path, max_loss: float, **settings: object) -> Target:
    """The smallest size at which the first candidate loses at most `max_loss` of the quality or predictions.

    Args:
        model: as in `compress`.
        max_loss: the largest loss, from 0 to 1.
        settings: other arguments of `compress`.

    Raises:
        ValueError: as in `compress`, or the loss is larger at all sizes.
    """
    if not 0.0 <= max_loss < 1.0:
        raise ValueError(f"the largest loss is {max_loss:.0%}, but it must be at least 0% and below 100%")
    method, candidate = next(iter(candidates()))
    low, high = map(math.log, _RATIOS)
    found: Target | None = None
    with workplace(None) as folder:
        for number in range(_HALVINGS):
            target = Target(ratio=math.exp((low + high) / 2))
            place = folder / str(number) / Path(model).name
            trial = tried(model, place, method, candidate, target, settings)
            settings["before"] = trial.quality_before or settings.get("before")
            if trial.share >= 1.0 - max_loss:
                found, low = target, (low + high) / 2
            else:
                high = (low + high) / 2
    if found is None:
        raise ValueError(
            f"{method} loses more than {max_loss:.1%} at all sizes that were tried; allow a larger loss"
        )
    return found


def candidates() -> Iterator[tuple[str, Candidate]]:
    """The candidates of all methods; those of the method with the most come first."""
    for method in sorted(methods(), key=lambda name: -len(method_class(name).candidates)):
        for candidate in method_class(method).candidates:
            yield method, candidate


def tried(
    model: Path,
    output: Path,
    method: str,
    candidate: Candidate,
    target: Target | None,
    settings: Mapping[str, object],
) -> Trial:
    """Compress a model with one candidate; a trial without a report if the method is impossible at this size.

    Args:
        model, output, target: as in `compress`.
        method, candidate: of the embeddings.
        settings: other arguments of `compress`.

    Raises:
        ValueError, OSError: as in `compress`.
    """
    output.parent.mkdir(parents=True)
    options, store = candidate
    try:
        report = compress(
            model,
            method,
            output,
            options=options,
            target=target,
            store=store,
            **settings,  # type: ignore[arg-type]
        )
    except OptionError as error:
        return Trial(method, options, store, None, str(error))
    return Trial(method, options, store, report)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """Cells padded to their widths: text to the left, numbers to the right."""
    for place, (cell, width) in enumerate(zip(cells, widths)):
        yield cell.ljust(width) if place < 2 else cell.rjust(width)
