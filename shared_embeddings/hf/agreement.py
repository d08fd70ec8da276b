"""What a model of Hugging Face that is compressed predicts.

Axes: ``B`` texts side by side, ``T`` tokens of each, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from shared_embeddings.checkpoints.agreement import PREDICTIONS, Predictions, Probe, names_of, sampled_lines
from shared_embeddings.hf.positions import first_position
from shared_embeddings.hf.words import Vocabulary
from shared_embeddings.utils.files import first_line

# Tokens of a row, at most, and of a random question to a model that answers.
_LONGEST, _RANDOM = 50, 4
# Tokens of an answer for every one of the longest question, and more, before it is cut.
_RATIO, _MORE = 1.5, 5
# One in so many tokens is masked for a masked language model (BERT: 15 %).
_MASKED = 7
# Texts that are scored at a time.
_TEXTS = 4


class _Asked(NamedTuple):
    """What a model reads, and where it is asked what it predicts.

    Attributes:
        inputs: of its ``forward``, each ``(B, T)``.
        places: ``(B, T)`` of its scores.
        of: what the tokens are.
    """

    inputs: dict[str, Tensor]
    places: Tensor
    of: str


def probe(model: Any, vocabulary: Vocabulary, texts: Sequence[Path] | None, seed: int) -> Probe:
    """What a model predicts after every token; in the place of masked tokens where it is for these.

    A model that answers, such as a translator, is asked after every token of its greedy answers.

    Args:
        model: of transformers; is changed later.
        vocabulary: of the model.
        texts: for the tokenizer; None for what a causal model writes itself, and random tokens for others.
        seed: of the choice of lines, or of tokens.

    Raises:
        ValueError: the model takes something else than tokens, or the texts have none.
    """
    try:
        asked = _asked(model.eval(), vocabulary, texts, seed)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        # What a model does with tokens alone, its class knows.
        raise ValueError(f"a {type(model).__name__} cannot be asked: {first_line(error)}") from error
    of = f"of {names_of(texts)}" if texts else f"{asked.of}; --text names a real text"
    if texts and asked.of:
        of = f"{asked.of} {of}"
    return Probe(f"{int(asked.places.sum()):,} tokens {of}", lambda: _predictions(model, asked))


@torch.no_grad()
def _predictions(model: Any, asked: _Asked) -> Predictions:
    """What a model predicts in the places that it is asked about."""
    found = []
    for first in range(0, len(asked.places), _TEXTS):
        rows = slice(first, first + _TEXTS)
        scores = model.eval()(**{name: part[rows] for name, part in asked.inputs.items()}).logits
        found.append(Predictions.of(scores[asked.places[rows]], lambda part: part))
    return Predictions(*map(torch.cat, zip(*found)))


def _asked(model: Any, vocabulary: Vocabulary, texts: Sequence[Path] | None, seed: int) -> _Asked:
    """What a model is asked, by its kind."""
    longest = getattr(model.config, "max_position_embeddings", None) or _LONGEST
    longest = min(_LONGEST, int(longest) - first_position(model))
    if model.config.is_encoder_decoder:
        return _questions(model, vocabulary, texts, seed, longest)
    if texts is not None:
        ids = _windows(vocabulary, texts, seed, longest)
    elif model.can_generate():
        ids = _written(model, seed, longest)
    else:
        ids = _random_ids(model, (PREDICTIONS // longest, longest), seed)
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    if model.can_generate():
        return _Asked({"input_ids": ids}, everywhere, "" if texts else "that it wrote itself")
    mask = vocabulary.mask()
    if texts is None or mask is None:
        return _Asked({"input_ids": ids}, everywhere, "" if texts else "drawn at random")
    draw = torch.Generator().manual_seed(seed)
    places = torch.rand(ids.shape, generator=draw) < 1 / _MASKED
    places[:, -1] |= ~places.any(dim=1)
    return _Asked({"input_ids": ids.masked_fill(places, mask)}, places, "masked")


def _windows(vocabulary: Vocabulary, texts: Sequence[Path], seed: int, longest: int) -> Tensor:
    """The ids ``(B, T)`` of lines of texts, one after the other, in rows that begin as texts do."""
    lines = sampled_lines(texts, seed)
    begin, ids = vocabulary.encode("\n".join(lines))
    ids = ids[:PREDICTIONS]
    width = min(longest - len(begin), len(ids))
    rows = torch.tensor(ids[: len(ids) // width * width]).view(-1, width)
    return torch.cat([torch.tensor(begin, dtype=torch.int64).expand(len(rows), -1), rows], dim=1)


def _random_ids(model: Any, shape: tuple[int, int], seed: int) -> Tensor:
    """Ids that are drawn from all words alike."""
    words = model.get_input_embeddings().num_embeddings
    return torch.randint(words, shape, generator=torch.Generator().manual_seed(seed))


def _written(model: Any, seed: int, length: int) -> Tensor:
    """The ids ``(B, T)`` of texts that a model writes behind one random word each."""
    start = _random_ids(model, (PREDICTIONS // length, 1), seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _generated(model, start, length - 1, do_sample=True, top_k=0, min_new_tokens=length - 1)


def _questions(
    model: Any, vocabulary: Vocabulary, texts: Sequence[Path] | None, seed: int, longest: int
) -> _Asked:
    """Lines of texts, or random words, with the model's greedy answers."""
    if texts is None:
        read = list(_random_ids(model, (PREDICTIONS // _RANDOM, _RANDOM), seed))
    else:
        read = []
        for sentence in vocabulary.sentences(sampled_lines(texts, seed), longest):
            read.append(torch.tensor(sentence))
            if sum(map(len, read)) >= PREDICTIONS:
                break
    padding = model.config.pad_token_id or 0
    ids = pad_sequence(read, batch_first=True, padding_value=padding)
    mask = pad_sequence([torch.ones_like(row) for row in read], batch_first=True)
    length = min(longest - 1, int(_RATIO * ids.size(1)) + _MORE)
    answers = _generated(model, ids, length, attention_mask=mask, do_sample=False)
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": answers[:, :-1]}
    return _Asked(
        inputs,
        _before_the_end(model, answers[:, 1:]),
        "of its answers" if texts else "of its answers to random tokens",
    )


def _before_the_end(model: Any, answers: Tensor) -> Tensor:
    """Which tokens ``(B, T)`` of answers come before the mark of their end, or are that."""
    end = model.generation_config.eos_token_id
    if end is None:
        return torch.ones_like(answers, dtype=torch.bool)
    is_end = torch.isin(answers, torch.as_tensor(end))
    return is_end.cumsum(dim=1) - is_end.long() == 0


def _generated(model: Any, ids: Tensor, length: int, **how: Any) -> Tensor:
    """What a model says to ids ``(B, T)``."""
    settings = {"attention_mask": torch.ones_like(ids), "num_beams": 1, **how}
    said: Tensor = model.generate(
        ids, max_new_tokens=length, pad_token_id=model.config.pad_token_id or 0, **settings
    )
    return said
