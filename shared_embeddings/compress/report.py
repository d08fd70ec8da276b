"""Reports of compressing and trimming: sizes before and after, reconstruction errors, coverage of texts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from shared_embeddings.compress.fit import FitReport
from shared_embeddings.compress.measure import QualityReport, Retention
from shared_embeddings.compress.sizing import as_yaml

# Embeddings that take more than twice as long for a token as before are slow.
_SLOW = 0.5
# The head of a table of sizes in Markdown.
_BEFORE_AFTER = ("| | before | after | smaller |", "| --- | ---: | ---: | ---: |")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A number for the original model, and for the one that was written."""

    before: int
    after: int

    @property
    def smaller(self) -> float:
        """How many times smaller the second number is."""
        return self.before / max(self.after, 1)


@dataclasses.dataclass(frozen=True)
class Band:
    """The error on words of similar frequency."""

    first: int  # ranks by descending frequency, starting at 1
    last: int
    loss: float  # mean over the words of ``||e - ê||`` (Distilled Embedding, Eq. 5).
    relative_error: float  # ``||E - Ê|| / ||E||`` in the Frobenius norm


@dataclasses.dataclass(frozen=True)
class StorageReport:
    """The cost of storing a fitted embedding in fewer bits; the padding row does not count."""

    store: str  # the storage format
    stored_bytes: Sizes  # of the fitted embedding, and as stored with its scales
    added_error: float  # ``||Ê - Ē|| / ||Ê||`` of the stored table Ē against the fitted one Ê
    relative_error: float  # ``||E - Ē|| / ||E||`` of the stored table against the original table E
    added_bands: list[Band]  # of the stored table against the fitted one, by frequency
    bands: list[Band]  # of the stored table against the original one, by frequency


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Generating a text token by token on this CPU: a look-up, and the scores of all words if it has any."""

    scores: bool  # whether there are scores
    before: float  # tokens per second with the original table and with the embedding
    after: float
    memory: Sizes  # bytes of the table, and of the embedding with what it caches

    def described(self) -> str:
        """The speed in one line."""
        timed = "look-up and scores" if self.scores else "look-up"
        return (
            f"{timed} of the table alone on this CPU, one token at a time: "
            f"{self.before:,.0f} tokens/s before, {self.after:,.0f} after"
        )


@dataclasses.dataclass(frozen=True)
class TableReport:
    """The result for one table."""

    name: str  # the host's name for it
    uses: tuple[str, ...]  # where the model uses it
    # The part of the embedding that was replaced and that the numbers describe; None for all of it.
    part: str | None
    parameters: Sizes  # of the embedding
    stored_bytes: Sizes  # of the embedding, as written; codes count with their own bits
    fit: FitReport  # how well the new embedding reconstructs the table before it is stored
    order: str  # what ranks the words of the bands
    bands: list[Band]  # the same error by frequency
    storage: StorageReport | None  # the cost of its storage; None for fp32
    decoding: Decoding  # its speed and its memory

    def method(self) -> str:
        """The method and its options, without long lists, such as the classes of all words."""
        fitted = self.fit.options.items()
        options = {name: value for name, value in fitted if not isinstance(value, list) or len(value) <= 5}
        return as_yaml(self.fit.method, options)

    def lines(self) -> Iterator[str]:
        """The report as text."""
        fit, stored = self.fit, self.storage
        of_part = "" if self.part is None else f", {self.part}"
        yield f"table '{self.name}' ({', '.join(self.uses)}){of_part}: {self.method()}"
        yield _line("  bytes", self.stored_bytes)
        yield _line("  bytes in memory", self.decoding.memory)
        yield f"  {self.decoding.described()}"
        weighted = "" if fit.weighted_error is None else f", weighted by counts {fit.weighted_error:.4f}"
        error = f"  relative error {fit.relative_error:.4f}{weighted}, mean distance {fit.loss:.5f}"
        sections = [([error], self.bands)]
        if stored is not None:
            error = (
                f"  relative error in {stored.store} {stored.relative_error:.4f}, to the fitted table "
                f"{stored.added_error:.5f}"
            )
            size = _line(f"  bytes, fp32 to {stored.store}", stored.stored_bytes)
            sections.append(([size, error], stored.bands))
        for lines, bands in sections:
            yield from lines
            for band in bands:
                ranks = f"words {band.first:,} to {band.last:,} {self.order}"
                error = f"relative error {band.relative_error:.4f}, mean distance {band.loss:.5f}"
                yield f"    {ranks:<48} {error}"


@dataclasses.dataclass(frozen=True)
class Coverage:
    """How much of one text the trimmed vocabulary covers."""

    text: str  # the file
    tokens: int  # their number, in the original vocabulary
    kept: int  # how many of them are in the trimmed vocabulary
    unknown: int  # how many of those were the unknown word in the original, too
    whole: int  # lines whose tokens are all kept; they are tokenized as before
    lines: int  # all lines
    round_trips: Sizes  # lines that can be decoded from their ids, before and after

    def described(self) -> tuple[str, str]:
        """Two lines: the tokens, and the lines that round-trip."""
        return (
            f"text {self.text}: {self.kept / max(self.tokens, 1):.2%} of {self.tokens:,} tokens kept "
            f"({self.unknown:,} of them unknown, as before); {self.whole:,} lines kept whole, tokenized as "
            "before",
            f"text {self.text}: of {self.lines:,} lines, {self.round_trips.before:,} round-trip before, "
            f"{self.round_trips.after:,} after",
        )


@dataclasses.dataclass(frozen=True)
class TrimmedVocabulary:
    """One trimmed vocabulary."""

    name: str  # the host's name for it
    rows: Sizes  # of its tables
    reasons: Mapping[str, int]  # why rows are kept -> how many that no earlier reason keeps
    map_file: str | None  # the old and the new id of every kept row; None if nothing was written
    texts: Sequence[Coverage]  # in the order given, held-out texts last


@dataclasses.dataclass(frozen=True)
class TrimReport:
    """The result of trimming a model."""

    model: str  # the files or folders; no output if nothing was written
    output: str | None
    host: str  # whose format they are in
    vocabularies: Sequence[TrimmedVocabulary]  # each with its own rows
    bytes_of_weights: Sizes  # of the tensors
    # Of all files, if they were written; the one before may include training state.
    bytes_on_disk: Sizes | None
    notes: Sequence[str]  # other changes

    def described(self) -> str:
        """The report as text."""
        lines = [f"{self.model} ({self.host}) -> {self.output or 'nothing written'}"]
        for vocabulary in self.vocabularies:
            lines.append(_change(f"rows of {vocabulary.name}", vocabulary.rows))
            lines += [f"  {reason:<36}{count:>23,}" for reason, count in vocabulary.reasons.items()]
        lines.append(_change("bytes of weights", self.bytes_of_weights))
        if self.bytes_on_disk is not None:
            lines.append(_change("bytes on disk", self.bytes_on_disk))
        lines += [line for vocab in self.vocabularies for text in vocab.texts for line in text.described()]
        lines += [f"old and new ids: {vocab.map_file}" for vocab in self.vocabularies if vocab.map_file]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def card(self) -> str:
        """What was done, in Markdown, for the card of the written model."""
        lines = [*_BEFORE_AFTER, _row("weights", self.bytes_of_weights)]
        lines += [_row(f"rows of {item.name}", item.rows, "{:,}".format) for item in self.vocabularies]
        lines.append("")
        for text in (text for vocabulary in self.vocabularies for text in vocabulary.texts):
            named = dataclasses.replace(text, text=Path(text.text).name)
            lines += [f"- {line}" for line in named.described()]
        return "\n".join([*lines, ""])


@dataclasses.dataclass(frozen=True)
class RecoveryReport:
    """The result of training a compressed model."""

    minutes: float  # of wall time
    steps: int
    tokens: int  # whose predictions were learned
    kl_before: float  # of predictions on other lines from those of the original, in nats
    kl_after: float

    def described(self) -> str:
        """The result in one line, without the time, which differs from run to run."""
        return (
            f"recovery: {self.steps:,} steps on {self.tokens:,} tokens, KL on other lines "
            f"{self.kl_before:.4f} before, {self.kl_after:.4f} after"
        )


@dataclasses.dataclass(frozen=True)
class CompressionReport:
    """The result of compressing a model."""

    model: str  # the files or folders
    output: str
    host: str  # whose format they are in
    method: str  # of the new embeddings
    store: str  # the storage format of their numbers
    bytes_on_disk: Sizes  # of the files; the one before may include training state
    bytes_of_weights: Sizes  # of all tensors, in memory before and as written after
    bytes_in_memory: Sizes  # of parameters and buffers
    parameters: Sizes  # of the whole model
    quality: QualityReport | None  # of both models; None without a text for validation
    kept: Retention  # how much of the original's behavior the written model keeps
    tables: list[TableReport]  # one per replaced table
    notes: list[str]  # other changes
    recovery: RecoveryReport | None = None  # if the model was trained
    calibration: str | None = None  # whether and on what codes are calibrated; None without codes
    # How the model was trimmed before; sizes and quality before compression are then those of the
    # trimmed model.
    trimmed: TrimReport | None = None

    def card(self) -> str:
        """What was done and what it cost, in Markdown; nothing that differs from run to run, as speeds do."""
        lines = [] if self.trimmed is None else [self._all_bytes(self.trimmed), ""]
        lines += [*_BEFORE_AFTER, _row("weights", self.bytes_of_weights)]
        how = []
        for table in self.tables:
            lines.append(_row(f"table '{table.name}' ({', '.join(table.uses)})", table.stored_bytes))
            lines.append(_row(f"table '{table.name}' in memory", table.decoding.memory))
            bits = 8 * table.stored_bytes.after / max(table.parameters.before, 1)
            how.append(f"- table '{table.name}': `{table.method()}`, {bits:.2f} bits a weight")
        how.append(f"- numbers are stored as {self.store}")
        if self.calibration is not None:
            how.append(f"- codes are {self.calibration}")
        others = "other weights are those of the original"
        how.append(f"- {others if self.recovery is None else self.recovery.described()}")
        how += [f"- {note}" for note in self.notes]
        lines += ["", "## Quality", "", *self._quality(), "", "## How it was compressed", "", *how]
        return "\n".join(lines)

    def _quality(self) -> Iterator[str]:
        """What was measured, in Markdown."""
        rows = []
        if (score := self.quality) is not None:
            change = f"{100 * (score.after / max(score.before, 1e-9) - 1):+.1f} %"
            rows.append((score.measure, score.before, score.after, score.how, change))
        texts = {} if self.kept.perplexity is None else {self.kept.how: self.kept.perplexity}
        if self.kept.languages:
            worst = self.kept.worst_language
            texts[f"{worst}, the worst language, by a list of words"] = self.kept.languages[worst]
        for text, value in texts.items():
            rows.append(("perplexity", value.before, value.after, text, value.described()))
        if rows:
            yield from (
                "| measured on | | original | this model | change |",
                "| --- | --- | ---: | ---: | ---: |",
            )
        for measure, before, after, text, change in rows:
            yield f"| {text} | {measure} | {before:.2f} | {after:.2f} | {change} |"
        if rows:
            yield ""
        is_measured = self.kept.share is not None
        lines = (
            self.kept.described() if is_measured else f"not measured ({self.kept.how}); evaluate it on a text"
        )
        yield from (f"- {line}" for line in lines.splitlines())

    def summary(self) -> str:
        """The result in a few lines: sizes, how much of the model was kept, and what to look at."""
        before = (
            self.bytes_of_weights.before if self.trimmed is None else self.trimmed.bytes_of_weights.before
        )
        weights = Sizes(before, self.bytes_of_weights.after)
        timed = [table.decoding for table in self.tables if table.decoding.scores]  # others hardly take time
        speeds = [decoding.after / decoding.before for decoding in timed]
        parts = [
            f"{self.output}: weights of {_readable(weights.after)} instead of {_readable(weights.before)} "
            f"({weights.smaller:.1f}x smaller)"
        ]
        if self.kept.share is not None:
            parts.append(f"{math.floor(100 * self.kept.share)}% of the {self.kept.of} kept")
        if speeds:
            parts.append(f"the table alone {min(speeds):.2g}x as fast, one token at a time")
        lines = ["; ".join(parts)] + ([] if self.trimmed is None else [self._all_bytes(self.trimmed)])
        for table in self.tables:
            sizes = table.stored_bytes
            lines.append(
                f"table '{table.name}' ({', '.join(table.uses)}): {_readable(sizes.after)} instead of "
                f"{_readable(sizes.before)} ({sizes.smaller:.1f}x smaller), {table.method()}"
            )
        if (score := self.quality) is not None:
            lines.append(f"{score.measure} {score.after:.2f}, {score.before:.2f} before ({score.how})")
        if self.recovery is not None:
            lines.append(f"{self.recovery.described()}; {self.recovery.minutes:.1f} minutes")
        lines += [f"note: {note}" for note in self.notes]
        if min(speeds, default=1.0) < _SLOW:
            codecs = {table.fit.options.get("codec", "uniform") for table in self.tables}
            advice = "" if codecs == {"uniform"} else "; --codec uniform is the fastest one"
            lines.append(
                "note: tokens are looked up and scored more slowly than before, which slows down generation "
                f"where it takes most of the time{advice}"
            )
        return "\n".join([*lines, self.kept.described(self.calibration)])

    def described(self) -> str:
        """All sizes, errors and speeds as text."""
        lines = [] if self.trimmed is None else [self.trimmed.described(), ""]
        lines += [
            f"{self.output}: {self.host} model with {self.method} embeddings in {self.store}",
            f"{'':<28}{'before':>16}{'after':>16}{'smaller':>10}",
            _line("bytes on disk", self.bytes_on_disk),
            _line("bytes of weights", self.bytes_of_weights),
            _line("bytes in memory", self.bytes_in_memory),
        ]
        if (score := self.quality) is not None:
            lines.append(f"{score.measure:<28}{score.before:>16.2f}{score.after:>16.2f}")
            lines.append(f"  {score.measure} of {score.how}")
        for table in self.tables:
            lines += ["", *table.lines()]
        return "\n".join(lines)

    def _all_bytes(self, trimmed: TrimReport) -> str:
        sizes = Sizes(trimmed.bytes_of_weights.before, self.bytes_of_weights.after)
        return (
            f"bytes of weights: {sizes.before:,} before, {trimmed.bytes_of_weights.after:,} after trimming, "
            f"{sizes.after:,} after compressing ({sizes.smaller:.2f}x smaller)"
        )


def _readable(count: int) -> str:
    """A number of bytes with three digits, such as 12.5 MB."""
    power = min(max(len(str(count)) - 1, 0) // 3, 3)
    value = count / 1000**power
    return (
        f"{value:.{max(0, 3 - len(str(int(value)))) if power else 0}f} {('bytes', 'kB', 'MB', 'GB')[power]}"
    )


def _line(title: str, sizes: Sizes) -> str:
    return f"{title:<28}{sizes.before:>16,}{sizes.after:>16,}{sizes.smaller:>9.2f}x"


def _change(title: str, sizes: Sizes) -> str:
    share = sizes.after / max(sizes.before, 1)
    return f"{title:<24}{sizes.before:>16,} -> {sizes.after:>14,}  ({share:.1%})"


def _row(title: str, sizes: Sizes, show: Callable[[int], str] = _readable) -> str:
    """A row of a table in Markdown below `_BEFORE_AFTER`."""
    return f"| {title} | {show(sizes.before)} | {show(sizes.after)} | {sizes.smaller:.2f}x |"
