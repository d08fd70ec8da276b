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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared_embeddings.accounting import count_parameters
from shared_embeddings.compress.calibration import (
    Calibration,
    calibrate,
    merged,
    normalized,
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
from shared_embeddings.compress.options import NO_CALIBRATION, CompressOptions
from shared_embeddings.compress.sizing import Target, options_within
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.quant.packed_tensor import inner_tensors
from shared_embeddings.registry import get_method_config
from shared_embeddings.spec import Options
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import write_lines
from shared_embeddings.utils.progress import begin_phase, plan_phases
from shared_embeddings.words.general import code_lines, languages, write_words
from shared_embeddings.words.token_counts import counts_of, read_counts

# Of codes that are the nearest ones to a table.
NOT_CALIBRATED = "not calibrated"
# Predictions for vocabularies larger than twice this are compared by about so many tokens: those of the
# compared texts, then as many of the most frequent ones as the second number, then others at equal distances.
SAMPLED_WORDS, _FREQUENT = 2**13, 2**12
# Scores of predictions that are kept in memory, in 16 bits, where they are of all tokens.
_MOST_SCORES = 2**28
# How much each use of a token counts towards its importance: in the user's text, in the predictions after
# what calibration reads, in many languages, and in code.
USES = {"text": 0.1, "predictions": 0.4, "languages": 0.35, "code": 0.15}
# Words of each language that are counted, and about how many predictions calibrate: after the user's text,
# and after other languages and code.
_WORDS, _OF_TEXT, _OF_OTHERS = 10_000, 5_120, 2_560
# Expected counts of tokens add up to this.
_COUNTED = 1e7


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
        self.is_calibrated = is_rounded and options.calibration != NO_CALIBRATION
        is_measured = options.calibration is not None and options.calibration.exists()
        # Without a text and a check, the model is not even built: large ones take less memory.
        self.runs = options.check or (self.is_calibrated and bool(options.text) and not is_measured)
        self.trained: TrainedModel = adapter.read(options.model, runs=self.runs)
        self.languages = languages() if self.trained.reads_raw_text and not options.only_text else []
        self.tables = self.trained.tables()
        self.table_bytes = sum(-(-table.stored_bits // 8) for table in self.tables)
        plan_phases(self._seconds())
        self.footprint = footprint(self.trained, self.trained.tensors())
        self._calibrated_on = ""

    def _seconds(self) -> dict[str, float]:
        """Return about how long each phase takes, with 50 billion products a second."""
        numbers = sum(table.table.numel() for table in self.tables)
        products = 2e-11 * max(0, count_parameters(self.trained.module) - numbers)
        measuring, coding = 2 * PREDICTIONS * products, numbers / 1e6
        return {
            "measuring the original": measuring,
            "calibrating": 3 * (_OF_TEXT + _OF_OTHERS) * products * self.is_calibrated,
            "comparing": 0.0 if self.options.method is not None else measuring + coding / 8,
            "coding": coding,
            "training": measuring * (0 if self.options.recover is None else 100),
            "measuring": measuring,
        }

    @functools.cached_property
    def general_texts(self) -> dict[str, Path]:
        """Texts of what models know beyond that of the user, by language and "code"; empty without lists."""
        texts = self._word_lists(self.languages, _WORDS, self.options.seed)
        if texts:
            texts["code"] = Path(self._folder.name, "code")
            write_lines(texts["code"], code_lines())
        return texts

    def _word_lists(self, names: Sequence[str], number: int, seed: int) -> dict[str, Path]:
        """Write lists of so many words of languages, and return their files by language."""
        lists = {name: Path(self._folder.name, f"{name}.{number}") for name in names}
        for language, path in lists.items():
            write_words(path, language, number, seed)
        return lists

    @functools.cached_property
    def usage(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The shares ``(V,)`` of tokens in each of `USES` that is known without the model, by table."""
        options, trained = self.options, self.trained
        counted: dict[str, Mapping[str, int]] = {}
        if options.token_counts is not None:
            counted["text"] = read_counts(options.token_counts)
        elif self.calibration_texts:
            counted["text"] = trained.count_text(self.calibration_texts)
        counted |= {name: trained.count_text([path]) for name, path in self.general_texts.items()}
        usage: dict[str, dict[str, Tensor]] = {}
        for table in self.tables:
            if not table.words:  # calibration counts how often its rows are read
                usage[table.name] = {}
                continue
            shares = {
                name: normalized(counts_of(table.words, counts, table.sentence_marks) - 1)
                for name, counts in counted.items()
            }
            parts = {name: part for name, part in shares.items() if name in USES}
            if self.languages:
                parts["languages"] = torch.stack([shares[name] for name in self.languages]).mean(dim=0)
            elif parts and table.is_by_frequency and not options.only_text:
                parts["languages"] = normalized(1 / torch.arange(1.0, len(table.words) + 1))  # Zipf's law
            usage[table.name] = parts
        return usage

    def counts_of(self, table: EmbeddingTable, shares: Tensor | None = None) -> Tensor | None:
        """Return how often tokens are expected ``(V,)``; None if nothing is known about them.

        Args:
            shares: ``(V,)`` of predictions, or of look-ups in a table without words, from a calibration.
        """
        parts = dict(self.usage[table.name])
        if shares is not None and bool(shares.any()):
            parts["predictions"] = normalized(shares)
        if not parts:
            return None
        weighted = [USES[name] * part for name, part in parts.items()]
        return _COUNTED * normalized(torch.stack(weighted).sum(dim=0))

    @functools.cached_property
    def calibrations(self) -> Mapping[str, Calibration]:
        """What errors of each table count, by name; empty without a calibration."""
        options, file = self.options, self.options.calibration
        if not self.is_calibrated:
            return {}
        if file is not None and file.exists():
            self._calibrated_on = f"what {file.name} was measured on"
            return read_calibration(file, self.tables)
        general = list(self.general_texts.values()) if self.runs else []
        texts = [
            (paths, tokens)
            for paths, tokens in ((self.calibration_texts, _OF_TEXT), (general, _OF_OTHERS))
            if paths
        ]
        if not texts:
            if file is not None:
                raise UserError(f"calibration {file}: no such file; measure it with text")
            return {}
        # Scores of all tokens of a large vocabulary would take most of the time.
        plain = [] if self.scored_words is None else place_plain(self.trained, self.tables)
        begin_phase("calibrating")
        with scoring_only(plain, self.scored_words):
            try:
                measured = merged(
                    [
                        calibrate(self.trained, self.tables, paths, options.seed, tokens)
                        for paths, tokens in texts
                    ]
                )
            except UserError as error:
                if not options.text and file is None:
                    return {}
                raise UserError(f"cannot calibrate ({error}); give calibration 'none'") from error
        if not measured and file is not None:
            raise UserError(f"calibration: this {self.host} predicts nothing with its tables; remove it")
        names = [names_of(self.calibration_texts)] if self.calibration_texts else []
        names += [f"words of {len(self.languages)} languages and code"] if self.languages else []
        self._calibrated_on = " and ".join(names)
        if file is not None:
            write_calibration(file, self.tables, measured)
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
        # Calibration has the words of other seeds.
        names = languages() if self.trained.reads_raw_text else []
        return self._compared(validation, self._word_lists(names, LISTED, seed=-1 - options.seed))

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
            notes.append("other languages are neither kept nor measured: the package wordfreq is missing")
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

    def _compared(self, validation: Validation | None, lists: Mapping[str, Path] | None = None) -> Comparison:
        begin_phase("measuring the original")
        tokens = PREDICTIONS if self.measured_texts else GENERATED
        if not self._has_scored_words:
            rows = (len(table.table) for table in self.tables if table.words)
            tokens = min(tokens, _MOST_SCORES // max(rows, default=1))
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
        sizes = {len(table.table) for table in self.tables if table.words}
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
        table = next(table for table in self.tables if table.words)
        count, counts = len(table.table), self.counts_of(table)
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
        """Return what is known about the tokens of a table, as arguments of `fit`."""
        is_calibrated = takes_metric and self.is_calibrated
        calibration = self.calibrations.get(table.name) if is_calibrated else None
        return {
            "padding_idx": table.padding_idx,
            "words": table.words or None,
            "token_counts": self.counts_of(table, None if calibration is None else calibration.shares),
            "metric": None if calibration is None else calibration.metric,
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
