"""What a language model that is compressed predicts, in a text or in what it writes itself.

Axes: ``B`` texts side by side, ``T`` tokens of each, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from lm.data.vocabulary import Vocabulary
from lm.evaluate.evaluation import evaluating
from lm.models import LanguageModel
from shared_embeddings.checkpoints.agreement import PREDICTIONS, Predictions, Probe, names_of, sampled_lines
from shared_embeddings.errors import UserError

# Texts that the model writes or reads side by side.
_TEXTS = 20


def probe(model: LanguageModel, words: Sequence[str], texts: Sequence[Path] | None, seed: int) -> Probe:
    """What a model predicts after every word of lines of texts, or of what it writes itself.

    Args:
        model: is changed later.
        words: its words, in the order of their ids.
        texts: in words; None to let the model write.
        seed: of the choice of lines, or of the words that the model chooses.

    Raises:
        UserError: the model's scores are no numbers, or the texts have no words.
    """
    vocabulary = Vocabulary(words, [0] * len(words))
    if texts is None:
        ids = _written(model, vocabulary.eos, seed)
        how = f"{ids.numel():,} tokens that it wrote itself; --text names real ones"
    else:
        ids = _read(vocabulary, texts, seed)
        how = f"{ids.numel():,} tokens of {names_of(texts)}"
    return Probe(how, lambda: _predictions(model, ids))


def _read(vocabulary: Vocabulary, texts: Sequence[Path], seed: int) -> Tensor:
    """The ids ``(B, T)`` of lines of texts, one line after the other."""
    lines = map(vocabulary.encode, sampled_lines(texts, seed))
    ids = list(chain.from_iterable(lines))[:PREDICTIONS]
    columns = min(_TEXTS, len(ids))
    return torch.tensor(ids[: len(ids) // columns * columns]).view(columns, -1)


@torch.no_grad()
def _written(model: LanguageModel, eos: int, seed: int) -> Tensor:
    """The ids ``(B, T)`` of texts that a model writes; every word is drawn from its probabilities."""
    draw = torch.Generator().manual_seed(seed)
    written = [torch.full((_TEXTS,), eos)]
    with evaluating(model):
        state = model.initial_state(_TEXTS)
        while len(written) < PREDICTIONS // _TEXTS:
            output = model(written[-1][:, None], state)
            state = output.state
            probabilities = model.embedding.log_prob(output.hidden[:, -1]).float().exp()  # (B, V)
            if not probabilities.isfinite().all():
                raise UserError("the model's scores are no numbers: its training diverged; take another one")
            written.append(torch.multinomial(probabilities, 1, generator=draw)[:, 0])
    return torch.stack(written, dim=1)


@torch.no_grad()
def _predictions(model: LanguageModel, ids: Tensor) -> Predictions:
    """What a model predicts after every token of texts ``(B, T)``."""
    with evaluating(model):
        hidden = model(ids, model.initial_state(len(ids))).hidden
        return Predictions.of(hidden.flatten(0, 1), model.embedding.log_prob)
