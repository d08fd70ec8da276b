"""A trained model while it is compressed: read once, with what is known about its tokens and predictions.

This module knows no host; models come through `shared_embeddings.compress.host`.

Axes: ``V`` vocabulary, ``D`` model dimension.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared_embeddings.accounting import count_parameters
from shared_embeddings.compress.calibration import (
    TOKENS,
    Calibration,
    calibrate,
    read_calibration,
    write_calibration,
)
from shared_embeddings.compress.host import (
    EmbeddingTable,
    TrainedModel,
    find_host,
    place_plain,
    scores_rows,
    scoring_only,
)
from shared_embeddings.compress.measure import (
    GENERATED,
    LISTED,
    NOT_CHECKED,
    PREDICTIONS,
    Comparison,
    QualityReport,
    Retention,
    ScoredWords,
    Validation,
    names_of,
    split_lines,
)
from shared_embeddings.compress.options import CompressOptions
from shared_embeddings.compress.sizing import Target, options_within
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.quant.packed_tensor import inner_tensors
from shared_embeddings.registry import get_method_config
from shared_embeddings.spec import Options
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.progress import begin_phase, plan_phases
from shared_embeddings.words.general import languages, write_words
from shared_embeddings.words.token_counts import counts_of, read_counts

# Of codes that are the nearest ones to a table.
NOT_CALIBRATED = "not calibrated"
# Predictions for vocabularies larger than twice this are compared by about so many tokens: those of the
# compared texts, then as many of the most frequent ones as the second number, then others at equal distances.
SAMPLED_WORDS, _FREQUENT = 2**13, 2**12
# Scores of predictions that are kept in memory, in 16 bits, where they are of all tokens.
_MOST_SCORES = 2**28
# The power of token counts that weighs tokens: lower than 1, since other texts have other tokens.
_POWER = 0.6


class Session:
    """A model that is compressed: it takes any number of embeddings one after another.

    What is measured of the original is measured at its first use, before anything is placed in the model.
    """

    def __init__(self, options: CompressOptions) -> None:
        begin_phase("reading")
        self.options = options
        # No line that is measured is calibrated on, if there is more than one; both are empty without a text.
        self._folder = tempfile.TemporaryDirectory()
        split = split_lines(options.text, Path(self._folder.name)) if options.text else None
        self.is_split = split is not None
        self.calibration_texts, self.measured_texts = map(tuple, split or (options.text, options.text))
        self.host, adapter = find_host(options.model, options.skip_undecodable)
        is_rounded = options.method is None or get_method_config(options.method).takes_metric
        self.sides = options.calibrate or ("both" if options.text and is_rounded else "none")
        is_measured = options.calibration is not None and options.calibration.exists()
        runs = options.check or (self.sides != "none" and not is_measured)
        self.trained: TrainedModel = adapter.read(options.model, runs=runs)
        self.tables = self.trained.tables()
        self.table_bytes = sum(-(-table.stored_bits // 8) for table in self.tables)
        plan_phases(self._seconds())
        self.footprint = footprint(self.trained, self.trained.tensors())
        self.is_calibrated, self._calibrated_on = True, ""

    def _seconds(self) -> dict[str, float]:
        """Return about how long each phase takes, with 50 billion products a second."""
        numbers = sum(table.table.numel() for table in self.tables)
        products = 2e-11 * max(0, count_parameters(self.trained.module) - numbers)
        measuring, coding = 2 * PREDICTIONS * products, numbers / 1e6
        return {
            "measuring the original": measuring,
            "calibrating": 3 * TOKENS * products if self.sides != "none" else 0.0,
            "comparing": 0.0 if self.options.method is not None else measuring + coding / 8,
            "coding": coding,
            "training": measuring * (0 if self.options.recover is None else 100),
            "measuring": measuring,
        }

    @functools.cached_property
    def counts(self) -> dict[str, Tensor]:
        """The counts ``(V,)`` of the tokens of each table, by name; empty without counts or texts."""
        if self.options.token_counts is not None:
            counts: Mapping[str, int] = read_counts(self.options.token_counts)
        elif self.calibration_texts:
            counts = self.trained.count_text(self.calibration_texts)
        else:
            return {}
        return {table.name: counts_of(table.words, counts, table.sentence_marks) for table in self.tables}

    @functools.cached_property
    def calibrations(self) -> Mapping[str, Calibration]:
        """What errors of each table count, by name; empty without a calibration."""
        options, file = self.options, self.options.calibration
        if file is not None and options.calibrate == "none":
            raise UserError(f"calibration {file} has no effect with calibrate 'none'; remove one of them")
        if file is not None and file.exists():
            self._calibrated_on = f"what {file.name} was measured on"
            return read_calibration(file, self.tables, options.calibrate)
        if self.sides == "none":
            if file is not None:
                raise UserError(f"calibration {file}: no such file; measure it with text")
            return {}
        self._calibrated_on = (
            names_of(self.calibration_texts) if self.calibration_texts else "what the model generates"
        )
        # Scores of all tokens of a large vocabulary would take most of the time.
        plain = [] if self.scored_words is None else place_plain(self.trained, self.tables)
        begin_phase("calibrating")
        with scoring_only(plain, self.scored_words):
            try:
                # By the seed, the model generates another text than the one that is measured.
                texts = self.calibration_texts or None
                measured = calibrate(self.trained, self.tables, texts, options.seed + 1, self.sides)
            except UserError as error:
                raise UserError(f"cannot calibrate ({error}); give calibrate 'none'") from error
        if not measured and (options.calibrate or file):
            name = "calibrate" if options.calibrate else "calibration"
            raise UserError(f"{name}: this {self.host} predicts nothing with its tables; remove it")
        if file is not None:
            write_calibration(file, self.tables, self.sides, measured)
        return measured

    def calibration_of(self, method: str) -> str | None:
        """Return whether and on what the codes of a method are calibrated; None for one without codes."""
        if not get_method_config(method).takes_metric:
            return None
        is_calibrated = self.is_calibrated and self.calibrations
        return f"calibrated on {self._calibrated_on}" if is_calibrated else NOT_CALIBRATED

    @functools.cached_property
    def comparison(self) -> Comparison | None:
        """What the model keeps, against the original; None if the model is not run."""
        options = self.options
        if not options.check:
            return None
        validation = None
        if options.validation is not None or options.validation_source is not None:
            validation = Validation(options.validation, options.validation_source, options.validation_target)
        lists = {}
        for language in languages() if self.trained.reads_raw_text else ():
            lists[language] = Path(self._folder.name, f"list.{language}"), LISTED
            # Calibration has the words of other seeds.
            path, number = lists[language]
            write_words(path, language, number, seed=-1 - options.seed)
        return self._compared(validation, lists)

    def measured(
        self,
        embeddings: Mapping[str, SharedEmbedding],
        quality: QualityReport | None = None,
        retention: Retention | None = None,
    ) -> tuple[QualityReport | None, Retention]:
        """Return the quality of the model with these embeddings and what it keeps, unless that is known.

        Also of the languages that it knows.
        """
        comparison = self.comparison
        if comparison is None:
            return None, NOT_CHECKED
        begin_phase("measuring")
        with self.scoring(embeddings, comparison.words):
            if retention is None:
                quality, retention = comparison.result()
            retention = comparison.with_languages(retention)
        notes = [*retention.notes]
        if self.options.text and not self.is_split:
            notes.append("the text has too few lines to hold some out: calibration read what is measured")
        if self.trained.reads_raw_text and not languages():
            notes.append("other languages are not measured: the package wordfreq is not installed")
        return quality, dataclasses.replace(retention, notes=notes)

    @functools.cached_property
    def held_out(self) -> Comparison:
        """The predictions that recovery compares."""
        comparison = self.comparison
        if comparison is None or comparison.samples is None:
            comparison = self._compared(None)
        if comparison.reason:
            raise UserError(f"recover needs predictions of the model ({comparison.reason}); remove it")
        return comparison

    def _compared(
        self, validation: Validation | None, lists: Mapping[str, tuple[Path, int]] | None = None
    ) -> Comparison:
        begin_phase("measuring the original")
        tokens = PREDICTIONS if self.measured_texts else GENERATED
        if not self._has_scored_words:
            tokens = min(tokens, _MOST_SCORES // max(len(table.table) for table in self.tables))
        texts = self.measured_texts or None
        return Comparison(
            self.trained, validation, texts, self.options.seed, tokens, lists, self._scoring_original
        )

    @contextlib.contextmanager
    def _scoring_original(self, read: Tensor | None) -> Iterator[ScoredWords | None]:
        """Within this context, the original scores some tokens only, which stand for all."""
        words = self.words_of(read)
        with scoring_only([] if words is None else place_plain(self.trained, self.tables), words):
            yield words

    def scoring(
        self, embeddings: Mapping[str, SharedEmbedding], words: ScoredWords | None
    ) -> AbstractContextManager[None]:
        """A context in which the new embeddings score these tokens only, if they can."""
        scored = [embeddings[table.name] for table in self.tables if table.is_scored]
        can = words is not None and all(scores_rows(embedding, words.ids) for embedding in scored)
        return scoring_only(scored if can else [], words)

    @property
    def _has_scored_words(self) -> bool:
        sizes = {len(table.table) for table in self.tables}
        # Deeper embeddings score tokens by other rows.
        is_whole = all(table.part is None for table in self.tables)
        is_scored = any(table.is_scored for table in self.tables)
        return len(sizes) == 1 and max(sizes) > 2 * SAMPLED_WORDS and is_whole and is_scored

    @property
    def scored_words(self) -> ScoredWords | None:
        """The tokens by whose predictions the model is compared; None for all tokens."""
        if self.comparison is None or self.comparison.samples is None:
            return self.words_of(torch.empty(0, dtype=torch.long))
        return self.comparison.words

    def words_of(self, read: Tensor | None, number: int = 0) -> ScoredWords | None:
        """Return the tokens that are scored where the vocabulary is large; None for all.

        Args:
            read: ``(w,)`` the ids of tokens that are certain to be there; None if they are unknown.
            number: of the selection of rare tokens.
        """
        if not self._has_scored_words or read is None:
            return None
        count, counts = len(self.tables[0].table), self.counts.get(self.tables[0].name)
        order = torch.arange(count) if counts is None else counts.argsort(descending=True)
        # All that are certain to be there stand for themselves, and each of the others for several.
        certain = torch.cat([read, order[:_FREQUENT]]).unique()
        step = count // (SAMPLED_WORDS - _FREQUENT)
        others = torch.arange(number % step, count, step)
        others = others[~torch.isin(others, certain)]
        ids = torch.cat([certain, others]).sort().values
        offset = math.log((count - len(certain)) / max(len(others), 1))
        return ScoredWords(ids, offset * torch.isin(ids, others), count)

    def options_for(
        self, table: EmbeddingTable, method: str, fixed: Options, store: str, target: Target | None
    ) -> Options:
        """Return the options of a method for a table: the fixed ones, and those that meet the target."""
        options = dict(fixed)
        if target is not None:
            (words, width), kind = table.table.shape, table.table.dtype
            limit = target.limit(table.table, [other.table for other in self.tables])
            options = options_within(method, words, width, limit, store, table.has_output_bias, kind, fixed)
            if not table.is_scored and "output" not in fixed:
                options.pop("output", None)
        return self.trained.options_for(table.name, method, options)

    def fit_arguments(self, table: EmbeddingTable, takes_metric: bool) -> dict[str, Any]:
        """Return what is known about the tokens of a table, as arguments of `fit`.

        The importance of a token grows with its part of the predictions plus its part of the text.
        """
        counts, importance = self.counts.get(table.name), None
        is_calibrated = takes_metric and self.is_calibrated
        calibration = self.calibrations.get(table.name) if is_calibrated else None
        if calibration is not None and bool(calibration.shares.any()):
            importance = calibration.shares / calibration.shares.sum()
            if counts is not None:  # tokens that the text does not have count once
                importance += (counts - 1) / (counts - 1).sum().clamp(min=1)
            importance **= _POWER
        return {
            "padding_idx": table.padding_idx,
            "words": table.words,
            "token_counts": counts,
            "metric": None if calibration is None else calibration.metric,
            "importance": importance,
        }


def footprint(trained: TrainedModel, written: Mapping[str, Tensor]) -> tuple[int, int, int]:
    """Return the bytes of the `written` tensors and of those in memory, and the parameters of a model."""
    module = trained.module
    in_memory = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return (
        sum(part.nbytes for tensor in written.values() for part in inner_tensors(tensor)),
        sum(part.nbytes for tensor in in_memory.values() for part in inner_tensors(tensor)),
        count_parameters(module),
    )
