"""Perplexity and predictions of a language model before and after compression.

Axes: ``B`` parallel texts, ``T`` tokens of each, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from lm.data.vocabulary import Vocabulary
from lm.evaluate.evaluation import Reading, evaluate, evaluating, read_data
from lm.models import LanguageModel
from shared_embeddings.compress.measure import (
    PREDICTIONS,
    Predictions,
    Probe,
    Quality,
    names_of,
    sampled_lines,
)
from shared_embeddings.utils.errors import UserError


def perplexity(model: LanguageModel, words: Sequence[str], path: Path) -> Quality:
    """Compute the perplexity of a text, as ``lm_eval`` does by default.

    Args:
        model: the model, with the memory settings of training.
        words: its words in the order of their ids.
        path: a tokenized text, or a folder written by ``lm_prepare``, whose validation text is used.

    Raises:
        shared_embeddings.utils.errors.UserError: the text is missing, too short, or has another vocabulary.
    """
    text = read_data(path, "valid" if path.is_dir() else None, words)
    reading = Reading()
    score = evaluate(model, text.tokens, *reading)
    how = (
        f"{text.name}: {score.tokens:,} targets, {text.unknown:,} <unk>, segments of {reading.target_length} "
        "tokens"
    )
    return Quality("perplexity", score.perplexity, how)


# Texts in a batch.
_TEXTS = 20


def probe(model: LanguageModel, words: Sequence[str], texts: Sequence[Path] | None, seed: int) -> Probe:
    """Prepare to compare the predictions of a model on lines of texts, or on samples from the model.

    Args:
        model: the model, which is compressed later.
        words: its words in the order of their ids.
        texts: tokenized texts; None to sample from the model.
        seed: seed for choosing lines or sampling.

    Raises:
        UserError: the scores of the model are not finite, or the texts have no words.
    """
    vocabulary = Vocabulary(words, [0] * len(words))
    if texts is None:
        ids = _sampled(model, vocabulary.eos, seed)
        how = f"{ids.numel():,} tokens sampled from the model; use --text for real ones"
    else:
        ids = _read(vocabulary, texts, seed)
        how = f"{ids.numel():,} tokens of {names_of(texts)}"
    return Probe(how, lambda: _predictions(model, ids))


def _read(vocabulary: Vocabulary, texts: Sequence[Path], seed: int) -> Tensor:
    """The ids ``(B, T)`` of lines of texts."""
    lines = map(vocabulary.encode, sampled_lines(texts, seed))
    ids = list(chain.from_iterable(lines))[:PREDICTIONS]
    columns = min(_TEXTS, len(ids))
    return torch.tensor(ids[: len(ids) // columns * columns]).view(columns, -1)


@torch.no_grad()
def _sampled(model: LanguageModel, eos: int, seed: int) -> Tensor:
    """The ids ``(B, T)`` of texts sampled from a model."""
    draw = torch.Generator().manual_seed(seed)
    written = [torch.full((_TEXTS,), eos)]
    with evaluating(model):
        state = model.initial_state(_TEXTS)
        while len(written) < PREDICTIONS // _TEXTS:
            output = model(written[-1][:, None], state)
            state = output.state
            probabilities = model.embedding.log_prob(output.hidden[:, -1]).float().exp()  # (B, V)
            if not probabilities.isfinite().all():
                raise UserError("the model scores are not finite: training diverged; use another checkpoint")
            written.append(torch.multinomial(probabilities, 1, generator=draw)[:, 0])
    return torch.stack(written, dim=1)


@torch.no_grad()
def _predictions(model: LanguageModel, ids: Tensor) -> Predictions:
    """The predictions of a model after each token of texts ``(B, T)``."""
    with evaluating(model):
        hidden = model(ids, model.initial_state(len(ids))).hidden
        return Predictions.of(hidden.flatten(0, 1), model.embedding.log_prob)
