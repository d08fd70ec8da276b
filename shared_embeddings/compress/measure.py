"""Measure whether a compressed model still works: its quality, or its unchanged predictions.

Each host measures its own models: perplexity for language models, BLEU for translation models.

Compares the predictions of both models after the same context. The share of those that stay is weighted by
the probabilities of the original, so that predictions it was unsure of count less. Candidates of a
compression are ranked by a finer measure, the divergence of the probabilities of all words.

Measured with an English-German Transformer on Multi30k and a table of 4,120 x 128 (`structured` at 1/4, 1/8
and 1/16 of the bytes, `funnel` at 1/4): the models kept 0.93, 0.78, 0.59 and 0.01 of the BLEU. The share of
predictions was 0.92, 0.86, 0.73 and 0.09 on real text, and 0.87, 0.76, 0.63 and 0.10 without a text.

The relative error of the table (0.16, 0.24, 0.36 and 0.68) does not predict quality: with `group_reduce` at
1/2 of the bytes it was 0.58 for this Transformer, which lost all BLEU, and 0.73 for a language model on the
Penn Treebank, which kept 0.99 of its perplexity and 0.99 of its predictions. Hence `USABLE_SHARE`.

Without a text, the model generates one. Random hidden states with the mean and covariance of the table's rows
are no substitute: models that kept 0.85 and 0.97 of their predictions agreed on 0.97 and 1.00 of those.

Axes: ``n`` predictions, ``S`` width of the hidden states, ``V`` vocabulary, ``w`` words that are scored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import write_lines
from shared_embeddings.utils.progress import progress_bar
from shared_embeddings.utils.reading import read_lines

# The approximate number of tokens of a text whose predictions are compared, and of what a model generates,
# which is slow; fewer than the last number are too few to judge.
PREDICTIONS, GENERATED, FEW = 2**13, 1_000, 2_000
# A model with a lower share is reported to require training.
USABLE_SHARE = 0.85
# What is compared of word vectors, and the factor of cosines in the softmax over neighbors, that of sentence
# encoders in training.
NEIGHBORS, SHARPNESS = "nearest neighbors", 20.0
# Sampled lines of the texts, enough even if lines are short.
LINES = 400
# Every fifth line of a text is measured, or fewer, for about so many characters: more than enough tokens.
_FIFTH, _MEASURED = 5, 60_000
# The log-probabilities of more words than this are kept in 16 bits, which rounds the divergence by less than
# 1e-5.
_MANY = 2**11
# Words of a list, and tokens of it that are read. A model knows languages whose words take it at most so many
# times the nats of those of its best language.
LISTED, _READ, _KNOWN = 200, 200, 2.0
# The 97.5 % quantile of a normal distribution.
_QUANTILE = 1.959964


@dataclasses.dataclass(frozen=True)
class Validation:
    """Validation data: one text for language models, two sides for translation models."""

    text: Path | None = None  # the text for a language model, or None
    source: Path | None = None  # the text for a translation model, tokenized like its training data, or None
    target: Path | None = None  # a reference translation of every line, tokenized like the output

    def one_text(self) -> Path:
        """Return the text for a language model; `UserError` if two sides were given."""
        if self.text is None:
            raise UserError(
                "validation_source and validation_target are for translation models, but this is a language "
                "model; give validation"
            )
        return self.text

    def two_sides(self) -> tuple[Path, Path]:
        """Return the two texts for a translation model; `UserError` if one was given."""
        if self.source is None or self.target is None:
            raise UserError(
                "validation is for language models, but this is a translation model; give validation_source "
                "and validation_target"
            )
        return self.source, self.target


@dataclasses.dataclass(frozen=True)
class Quality:
    """A quality measurement."""

    measure: str  # "perplexity" (lower is better) or "BLEU" (0 to 100, higher is better)
    value: float  # the result
    how: str  # the conditions, such as the context of a perplexity or the signature of sacreBLEU


@dataclasses.dataclass(frozen=True)
class QualityReport:
    """The quality of the input model and of the compressed one."""

    measure: str  # as in `Quality`
    how: str
    before: float  # the results
    after: float


class Batch(NamedTuple):
    """Some predictions, with gradients if they are enabled."""

    # ``(n, V)``, of words or of neighbors: log-probabilities up to a constant for each prediction.
    scores: Tensor
    hidden: Tensor | None = None  # ``(n, S)`` that words were scored for; None without an output side
    targets: Tensor | None = None  # ``(n,)`` what follows in the text; None where no text determines it


@dataclasses.dataclass(frozen=True)
class Samples:
    """Inputs that are read or generated once, and on which a model predicts as often as it changes."""

    how: str  # describes the inputs, such as "1,000 tokens of valid.txt"
    parts: Sequence[Any]  # that are predicted together, with the words that the model generated
    predict: Callable[[Any], Batch]  # in its current state for one part, maybe of another copy of it
    of: str = "predictions"  # what they are, for the report
    words: Tensor | None = None  # ``(w,)`` ids of all words that are looked up or follow; None if unknown
    running: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # in which it predicts
    read: int = 1  # about how many tokens are read for a prediction
    tokens: int = 0  # that are read, if these are more than the predictions
    has_targets: bool = False  # whether what follows in a text is known
    # By embedding table, the modules that return its vectors, and the factor of each.
    lookups: Mapping[str, Mapping[nn.Module, float]] = dataclasses.field(default_factory=dict)

    def batches(self) -> Iterator[Batch]:
        """The predictions for all parts."""
        with self.running():
            yield from map(self.predict, self.parts)


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """The perplexity of a text or of a list of words, before and after."""

    before: float
    after: float
    margin: float  # half of the 95 % interval of the relative change; infinite if unknown
    tokens: int  # that are predicted

    @classmethod
    def of(cls, before: Tensor, after: Tensor, tokens: Tensor) -> Perplexity:
        """Of the nats and the numbers of tokens ``(n,)`` of parts of a text."""
        count = float(tokens.sum())
        old, new = (math.exp(min(float(nats.sum()) / count, 700.0)) for nats in (before, after))
        return cls(old, new, new / old * margin(after - before, tokens), int(count))

    @property
    def change(self) -> float:
        """The relative change."""
        return self.after / self.before - 1.0

    def described(self) -> str:
        """The change, such as +0.1 % ± 0.2."""
        return f"{100 * self.change:+,.1f} %{_plus_minus(self.margin)}"


@dataclasses.dataclass(frozen=True)
class Retention:
    """The share of a model's predictions or quality that compression kept."""

    share: float | None  # 1 for all, None if it could not be measured
    of: str  # the measure: "predictions", `NEIGHBORS`, "BLEU" or "probability of a token"
    how: str  # the data of the measurement, or why it failed
    needs_training: bool  # whether the share is below `USABLE_SHARE` or unknown
    kl: float | None = None  # of the predictions from the original's, in nats; None for a quality
    # Of the text; None for a quality, and where no text determines the predicted words.
    perplexity: Perplexity | None = None
    margin: float | None = None  # half of the 95 % interval of the share; None for a quality
    tokens: int | None = None  # about how many are read for the predictions; None for a quality
    # By language that the model knows, of lists of words.
    languages: Mapping[str, Perplexity] = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()  # about what was measured, and what was not

    @classmethod
    def measured(cls, share: float, of: str, how: str, **others: Any) -> Retention:
        """Compare a share to `USABLE_SHARE`; NaN counts as 0."""
        share = 0.0 if math.isnan(share) else share
        return cls(share, of, how, share < USABLE_SHARE, **others)

    @property
    def worst_language(self) -> str:
        """The language that lost most; there is one."""
        return max(self.languages, key=lambda name: self.languages[name].change)

    def described(self, calibration: str | None = None) -> str:
        """The last lines of the printed report; with what calibrated the codes, if there are any."""
        plus_minus = "" if self.margin is None else _plus_minus(self.margin)
        how = f"{self.how},{plus_minus} points" if plus_minus else self.how
        how += "" if self.kl is None else f", KL {self.kl:.4f}"
        how += "" if calibration is None else f"; codes are {calibration}"
        if self.share is None:
            return f"warning: could not verify that this model still works ({how}); evaluate it on a text"
        line = f"kept {math.floor(100 * self.share)}% of the {self.of} of the original ({how})"
        if (text := self.perplexity) is not None:
            line += f", perplexity {text.after:.2f}, {text.before:.2f} before ({text.described()})"
        if self.needs_training:
            advice = "use more bits" if self.of == NEIGHBORS else "train this model before using it"
            line = f"warning: {line}: {advice}"
        lines = []
        if self.languages:
            text = self.languages[worst := self.worst_language]
            lines.append(
                f"the worst of {len(self.languages)} languages, by lists of words without sentences: "
                f"{worst}, perplexity {text.described()} ({text.tokens:,} tokens)"
            )
        lines += [f"note: {note}" for note in self.notes]
        if self.tokens is not None and self.tokens < FEW and self.of != NEIGHBORS:
            lines.append(
                f"warning: {self.tokens:,} tokens are too few to judge; give a text of {5 * FEW:,} or more"
            )
        return "\n".join([*lines, line])


# Of a model that was not run.
NOT_CHECKED = Retention(None, "predictions", "check=False", needs_training=True)


class ScoredWords(NamedTuple):
    """Some words that stand for a large vocabulary: their probabilities are about those among all words."""

    ids: Tensor  # ``(w,)`` ascending, with all that follow in a compared text
    offsets: Tensor  # ``(w,)`` added to their scores: the logarithm of how many words each stands for
    total: int  # V, of all words

    def __str__(self) -> str:
        return f"by {len(self.ids):,} of {self.total:,} tokens that stand for all"


class Comparison:
    """Compares a model before and after a change, by its quality if possible, else by its predictions.

    Args:
        model: the `TrainedModel`, to be changed between construction and `result`.
        validation: the data for its quality, or None.
        texts: texts whose words it predicts; None to generate one.
        seed: for sampling.
        tokens: about how many it reads.
        lists: by language, a list of `LISTED` words in random order.
        scoring: a context in which the original scores the returned words, to compare it by these; given all
            that it reads. None for all words.

    Attributes:
        samples: what is predicted; None if quality is measured instead, or if nothing can be.
        words: by which predictions are compared; None for all.
        reason: why nothing can be predicted; empty otherwise.
    """

    def __init__(
        self,
        model: Any,
        validation: Validation | None,
        texts: Sequence[Path] | None,
        seed: int,
        tokens: int = PREDICTIONS,
        lists: Mapping[str, Path] | None = None,
        scoring: Callable[[Tensor | None], AbstractContextManager[ScoredWords | None]] = (
            lambda _: contextlib.nullcontext()
        ),
    ) -> None:
        self._model, self._validation = model, validation
        self._quality = None if validation is None else model.quality(validation)
        self.samples: Samples | None = None
        self.words: ScoredWords | None = None
        self.reason = ""
        self._lists = lists or {}
        self._nats_before: dict[str, Tensor] = {}
        if (quality := self._quality) is not None:
            if not math.isfinite(quality.value):
                raise UserError(
                    f"the {quality.measure} of the model is {quality.value} before compression: its training "
                    "diverged; use another model"
                )
            if quality.value > 0:  # a BLEU of 0 cannot get worse
                return
        try:
            samples, listed = model.samples(texts, seed, tokens), self._read_lists(seed)
            read = [samples.words] if listed is None else [samples.words, listed.words]
            is_known = all(words is not None for words in read)
            with scoring(torch.cat(read).unique() if is_known else None) as self.words:
                self._before = list(_log_shares(samples, self.words))
                if listed is not None:
                    self._leave_out(listed, _nats(listed, self.words))
            self.samples = samples
        except ValueError as error:
            self.reason = str(error)

    def _read_lists(self, seed: int) -> Samples | None:
        """The lists of words, one part for each; None for a model that does not predict what follows."""
        parts = []
        for path in self._lists.values():
            samples = self._model.samples([path], seed, _READ)
            if not samples.has_targets:
                return None
            parts.append(samples)
        if not parts:
            return None
        return dataclasses.replace(
            parts[0],
            parts=[samples.parts[0] for samples in parts],
            words=torch.cat([samples.words for samples in parts]),
        )

    def _leave_out(self, listed: Samples, nats: Sequence[Tensor]) -> None:
        """Keep the languages that the model knows.

        Of words that are drawn alike, those of other languages are harder to predict.
        """
        of_words = [
            float(of_tokens.mean()) * sum(self._model.count_text([path]).values()) / LISTED
            for of_tokens, path in zip(nats, self._lists.values())
        ]
        known = [place for place, of_word in enumerate(of_words) if of_word <= _KNOWN * min(of_words)]
        names, parts = list(self._lists), listed.parts
        self._known = dataclasses.replace(listed, parts=[parts[place] for place in known])
        self._nats_before = {names[place]: nats[place] for place in known}

    def result(self) -> tuple[QualityReport | None, Retention]:
        """The quality before and after, if validation data was given, and what was kept."""
        before, quality = self._quality, None
        if before is not None and self._validation is not None:
            after = self._model.quality(self._validation)
            quality = QualityReport(before.measure, before.how, before.value, after.value)
            if before.value > 0:
                share, of = after.value / before.value, before.measure
                if of == "perplexity":
                    share, of = before.value / after.value, "probability of a token"
                return quality, Retention.measured(share, of, before.how)
        reason = self.reason
        if self.samples is not None and not reason:
            try:
                return quality, self.retention()
            except ValueError as error:
                reason = str(error)
        return quality, Retention(None, "predictions", reason, needs_training=True)

    def retention(self) -> Retention:
        """What the predictions of the model keep, which may score `words` only."""
        assert self.samples is not None
        measured = compare(self._before, _log_shares(self.samples, self.words))
        how = self.samples.how + (f", {self.words}" if self.words is not None else "")
        tokens = max(self.samples.tokens, sum(len(shares) for shares, _ in self._before))
        return Retention.measured(of=self.samples.of, how=how, tokens=tokens, **measured)

    def with_languages(self, retention: Retention) -> Retention:
        """Measure the languages that the original knows, too."""
        if not self._nats_before:
            return retention
        after = _nats(self._known, self.words)
        languages = {
            name: Perplexity.of(old, new, torch.ones_like(old))
            for (name, old), new in zip(self._nats_before.items(), after)
        }
        note = (
            f"of {len(self._lists)} languages, the original knows {len(languages)}: a word takes it at most "
            f"{_KNOWN:g} times the nats of one in its best language"
        )
        return dataclasses.replace(retention, languages=languages, notes=[note])


def _log_shares(samples: Samples, words: ScoredWords | None = None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The log-probabilities ``(n, V)`` of each part, and what follows ``(n,)``; UserError if they are NaN.

    With `words`, those ``(n, w)`` of these, and what follows as their places.
    """
    bar = progress_bar(len(samples.parts), "predictions", " windows")
    with torch.no_grad(), contextlib.closing(bar):
        for scores, _, targets in samples.batches():
            bar.update()
            scores = scores.detach().float()
            if words is not None:
                if scores.size(1) == words.total:
                    scores = scores[:, words.ids] + words.offsets
                targets = None if targets is None else torch.searchsorted(words.ids, targets)
            shares = scores.log_softmax(dim=-1)
            if bool(shares.isnan().any()):
                raise UserError("the scores of the model are NaN")
            yield shares.half() if shares.size(1) > _MANY else shares, targets


def _nats(samples: Samples, words: ScoredWords | None) -> list[Tensor]:
    """The negative log-probabilities ``(n,)`` of what follows in each part."""
    parts = _log_shares(samples, words)
    known = ((shares.float(), targets) for shares, targets in parts if targets is not None)
    return [F.nll_loss(shares, targets, reduction="none") for shares, targets in known]


def compare(
    before: Iterable[tuple[Tensor, Tensor | None]], after: Iterable[tuple[Tensor, Tensor | None]]
) -> dict[str, Any]:
    """Compare the log-probabilities ``(n, V)`` of two models, part by part, with what follows ``(n,)``.

    Returns:
        ``share``, ``sum_i p_i [a_i = b_i] / sum_i p_i`` for the most probable words a and b of both, and the
        probability p of a, with its ``margin`` by parts; ``kl``, the mean Kullback-Leibler divergence from
        the original, in nats; ``perplexity`` of what follows, or None.
    """
    rows = []  # of each part: its number of predictions, and sums over them
    has_targets = True
    for (old, targets), (new, _) in zip(before, after, strict=True):
        old, new = old.float(), new.float()
        best = old.max(dim=-1)
        weights = best.values.exp()
        is_same = best.indices == new.argmax(dim=-1)
        terms = (old.exp() * (old - new)).masked_fill_(old == -torch.inf, 0.0)
        has_targets &= targets is not None
        nats = [
            0.0 if targets is None else float(F.nll_loss(scores, targets, reduction="sum"))
            for scores in (old, new)
        ]
        kl = float(terms.sum(dtype=torch.float64))
        rows.append([len(old), float(weights.sum()), float(weights[is_same].sum()), kl, *nats])
    count, weight, same, divergence, first, second = torch.tensor(rows, dtype=torch.float64).T
    return {
        "share": float(same.sum() / weight.sum().clamp(min=1e-30)),
        "margin": margin(same, weight),
        "kl": max(0.0, float(divergence.sum() / count.sum())),
        "perplexity": Perplexity.of(first, second, count) if has_targets else None,
    }


def margin(sums: Tensor, sizes: Tensor) -> float:
    """Half of the 95 % interval of a mean, from the sums and the sizes ``(n,)`` of parts; infinite for one.

    With the quantile of Student's distribution, by its expansion around the normal one.
    """
    free = len(sums) - 1
    if not free or not float(sizes.sum()):
        return math.inf
    sums, sizes = sums.double(), sizes.double()
    rest = sums - sizes * (sums.sum() / sizes.sum())
    error = math.sqrt(float(rest.square().sum()) * len(sums) / free) / float(sizes.sum())
    z = _QUANTILE
    wider = (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return (z + wider) * error


def _plus_minus(margin: float) -> str:
    """A margin in percent, with a space before it; empty if it is unknown."""
    return f" ± {100 * margin:,.1f}" if math.isfinite(margin) else ""


def sampled_lines(texts: Sequence[Path], seed: int, number: int = LINES) -> list[str]:
    """Sample nonempty lines of texts uniformly, in random order.

    Only one text is in memory at a time (Vitter, "Random sampling with a reservoir", 1985, algorithm R).
    """
    draw = random.Random(seed)
    sample: list[str] = []
    for index, line in enumerate(line for path in texts for line in _lines_of(path)):
        if index < number:
            sample.append(line)
        elif (chosen := draw.randrange(index + 1)) < number:
            sample[chosen] = line
    if not sample:
        raise UserError(f"text {names_of(texts)}: has no tokens; use another text")
    draw.shuffle(sample)
    return sample


def split_lines(texts: Sequence[Path], folder: Path) -> tuple[Sequence[Path], Sequence[Path]] | None:
    """Write copies of texts with lines to calibrate with, and with a few others to measure with.

    Every n-th line of each text is measured, of parallel texts the same ones: at most a fifth of them, but at
    least one. Lines that are equal to one of those are in no copy. None if no others are left.
    """
    numbers, characters = [0] * len(texts), 0
    for place, text in enumerate(texts):
        for line in _lines_of(text):
            numbers[place] += 1
            characters += len(line)
    if not any(numbers):
        raise UserError(f"text {', '.join(map(str, texts))}: has no tokens; use another text")
    steps = [min(max(_FIFTH, characters // _MEASURED), number) for number in numbers]
    folders = [folder / kind / str(place) for kind in ("rest", "measured") for place in range(len(texts))]
    copies = [place / text.name.removesuffix(".gz") for place, text in zip(folders, [*texts, *texts])]
    rest, measured = copies[: len(texts)], copies[len(texts) :]
    held_out: set[str] = set()
    for text, step, copy in zip(texts, steps, measured):
        lines = [line for number, line in enumerate(_lines_of(text)) if number % step == step // 2]
        held_out.update(lines)
        write_lines(copy, lines)
    for text, copy in zip(texts, rest):
        write_lines(copy, (line for line in read_lines(text) if line not in held_out))
    if not all(any(_lines_of(copy)) for copy in rest):
        return None
    return rest, measured


def _lines_of(text: Path) -> Iterator[str]:
    """Yield the lines of a text that are not empty."""
    return (line for line in read_lines(text) if line.strip())


def names_of(texts: Sequence[Path]) -> str:
    """The names of texts, for a message."""
    first = texts[0].name
    return first if len(texts) == 1 else f"{first} and {len(texts) - 1} more"


@contextlib.contextmanager
def in_float32(
    model: nn.Module, dtypes: Collection[torch.dtype] = (torch.bfloat16, torch.float16)
) -> Iterator[None]:
    """Within this context, tensors of these dtypes on the CPU are copies in float32; tied ones stay tied."""
    places = [place for part in model.modules() for place in (part._parameters, part._buffers)]
    old: list[tuple[dict[str, Any], str, Tensor]] = [
        (place, name, tensor)
        for place in places
        for name, tensor in place.items()
        if tensor is not None and tensor.dtype in dtypes and tensor.device.type == "cpu"
    ]
    new: dict[int, Tensor] = {}
    for place, name, tensor in old:
        if id(tensor) not in new:
            wide = tensor.detach().float()
            is_parameter = isinstance(tensor, nn.Parameter)
            new[id(tensor)] = nn.Parameter(wide, tensor.requires_grad) if is_parameter else wide
        place[name] = new[id(tensor)]
    try:
        yield
    finally:
        for place, name, tensor in old:
            place[name] = tensor
