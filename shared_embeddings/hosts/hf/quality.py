"""The predictions of a Hugging Face model before and after compression, and the perplexity of a causal one.

Axes: ``B`` texts of a batch, ``T`` tokens of each or of a window, ``V`` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from shared_embeddings.compress.measure import (
    LINES,
    PREDICTIONS,
    Batch,
    Predictions,
    Probe,
    Quality,
    Validation,
    names_of,
    sampled_lines,
)
from shared_embeddings.hosts.hf.tokenizer import Vocabulary
from shared_embeddings.hosts.hf.word_layers import first_position
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.extras import require
from shared_embeddings.utils.files import first_line

# The maximum number of tokens of a row, and the number of tokens of a random encoder input.
_LONGEST, _RANDOM = 50, 4
# The maximum length of an output: _RATIO times the longest encoder input, plus _MORE.
_RATIO, _MORE = 1.5, 5
# One in _MASKED tokens is masked for a masked language model (BERT: 15 %).
_MASKED = 7
# Texts per forward pass.
_TEXTS = 4
# For `batches`: tokens of a row, at least so many of a line, and texts that are neighbors of each other.
_LONG, _WORDS, _NEIGHBORS = 256, 10, 32
# The factor of cosines in the softmax over neighbors, that of sentence encoders in training.
_SHARPNESS = 20.0
# The longest window, limited by the memory for the scores of all words.
_LONGEST_WINDOW = 1024


# The arguments of ``forward``, each ``(B, T)``, a mask ``(B, T)`` of the scores to compare, and their name.
_Inputs = tuple[dict[str, Tensor], Tensor, str]


def probe(model: Any, vocabulary: Vocabulary, texts: Sequence[Path] | None, seed: int) -> Probe:
    """Probe the predictions of a model after every token, or at masked tokens for a masked language model.

    An encoder-decoder model is probed after every token of its own greedy outputs. A model that does not
    score words is probed for the nearest neighbors among texts, by the mean of their last hidden states.

    Without texts, the input of a causal model are samples of it, that of other models random tokens.

    Raises:
        UserError: the model needs other inputs than tokens, or the texts have no tokens.
    """
    model.eval()
    try:
        if model.get_output_embeddings() is None:
            return _probe_neighbors(model, vocabulary, texts, seed)
        inputs, positions, of = _inputs(model, vocabulary, texts, seed)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        # Each model class fails in its own way without its other inputs.
        raise UserError(f"a {type(model).__name__} cannot be probed: {first_line(error)}") from error
    of = f"{of} of {names_of(texts)}".lstrip() if texts else f"{of}; pass a real text with --text"

    @torch.no_grad()
    def predict() -> Predictions:
        found = []
        for first in range(0, len(positions), _TEXTS):
            rows = slice(first, first + _TEXTS)
            scores = model.eval()(**{name: part[rows] for name, part in inputs.items()}).logits
            found.append(Predictions.of(scores[positions[rows]], lambda part: part))
        return Predictions.joined(found)

    return Probe(f"{int(positions.sum()):,} tokens {of}", predict)


def batches(
    model: Any, vocabulary: Vocabulary, texts: Sequence[Path] | None, seed: int, tokens: int
) -> Iterator[Batch]:
    """About so many predictions of `probe` with the hidden states of its output layer, in longer texts.

    A model that does not score words is read for the neighbors among the texts of a batch.
    """
    model.eval()
    output = model.get_output_embeddings()
    if output is None:
        read, _ = _sentences(model, vocabulary, texts, seed, tokens // _WORDS)
        for first in range(0, len(read) - 1, _NEIGHBORS):
            yield Batch(_similarities(model, read[first : first + _NEIGHBORS]), None)
        return
    # What an encoder-decoder model generates together is in memory together.
    parts = max(1, tokens // PREDICTIONS) if model.config.is_encoder_decoder else 1
    states: list[Tensor] = []
    for part in range(parts):
        inputs, positions, _ = _inputs(model, vocabulary, texts, seed + part, tokens // parts, _LONG)
        for row, where in enumerate(positions):
            hook = output.register_forward_pre_hook(lambda _, given: states.append(given[0]))
            try:
                scores = model(**{name: own[row : row + 1] for name, own in inputs.items()}).logits
            finally:
                hook.remove()
            yield Batch(scores[0][where], states.pop().reshape(len(where), -1)[where])


def _inputs(
    model: Any,
    vocabulary: Vocabulary,
    texts: Sequence[Path] | None,
    seed: int,
    tokens: int = PREDICTIONS,
    longest: int = _LONGEST,
) -> _Inputs:
    """About so many tokens of texts, or without texts of what the model generates."""
    make = _encoder_decoder_inputs if model.config.is_encoder_decoder else _decoder_or_encoder_inputs
    return make(model, vocabulary, texts, seed, tokens, longest)


def _probe_neighbors(model: Any, vocabulary: Vocabulary, texts: Sequence[Path] | None, seed: int) -> Probe:
    """Probe which text is nearest to each text; UserError for fewer than two texts."""
    read, how = _sentences(model, vocabulary, texts, seed)

    @torch.no_grad()
    def predict(texts: Sequence[Tensor] = read) -> Predictions:
        """The nearest neighbor of each text, and its share of all neighbors."""
        return Predictions.of(_similarities(model, texts), lambda part: part)

    predict(read[:2])  # fails here for models that need more than ids
    return Probe(how, predict)


def _sentences(
    model: Any,
    vocabulary: Vocabulary,
    texts: Sequence[Path] | None,
    seed: int,
    number: int = PREDICTIONS // _RANDOM,
) -> tuple[list[Tensor], str]:
    """The ids of sampled lines, or without texts of random words, and what they are; UserError for one."""
    if texts is None:
        read = list(_random_ids(model, (number, _RANDOM), seed))
        how = f"nearest neighbors of {len(read)} texts of random tokens; pass a real text with --text"
    else:
        lines = sampled_lines(texts, seed, max(number, LINES))
        read = [torch.tensor(ids) for ids in vocabulary.sentences(lines, _LONGEST)]
        how = f"nearest neighbors of {len(read)} lines of {names_of(texts)}"
    if len(read) < 2:
        raise UserError("one line has no neighbors; pass a longer text")
    return read, how


def _similarities(model: Any, texts: Sequence[Tensor]) -> Tensor:
    """How similar each text is to the others ``(n, n)``, to itself minus infinitely."""
    found = []
    for ids in texts:
        states = model.eval()(input_ids=ids[None], output_hidden_states=True).hidden_states[-1]
        found.append(states[0].float().mean(dim=0))
    vectors = F.normalize(torch.stack(found), dim=-1)
    return (_SHARPNESS * vectors @ vectors.T).fill_diagonal_(-torch.inf)


def _decoder_or_encoder_inputs(
    model: Any, vocabulary: Vocabulary, texts: Sequence[Path] | None, seed: int, tokens: int, limit: int
) -> _Inputs:
    """Concatenated lines of texts in rows that each start with the beginning marks, samples, or random words;
    some of them masked for a masked language model.
    """
    longest = _longest(model, limit)
    if texts is not None:
        lines = sampled_lines(texts, seed, max(LINES, tokens // _WORDS))
        begin, words = vocabulary.encode("\n".join(lines))
        words = words[:tokens]
        width = min(longest - len(begin), len(words))
        rows = torch.tensor(words[: len(words) // width * width]).view(-1, width)
        ids = torch.cat([torch.tensor(begin, dtype=torch.int64).expand(len(rows), -1), rows], dim=1)
    elif model.can_generate():
        start = _random_ids(model, (tokens // longest, 1), seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            ids = _generate(model, start, longest - 1, do_sample=True, top_k=0, min_new_tokens=longest - 1)
    else:
        ids = _random_ids(model, (tokens // longest, longest), seed)
    mask = None if model.can_generate() or texts is None else vocabulary.mask()
    if mask is None:
        drawn = "that it generated" if model.can_generate() else "drawn at random"
        return {"input_ids": ids}, torch.ones_like(ids, dtype=torch.bool), "" if texts else drawn
    draw = torch.Generator().manual_seed(seed)
    positions = torch.rand(ids.shape, generator=draw) < 1 / _MASKED
    positions[:, -1] |= ~positions.any(dim=1)
    return {"input_ids": ids.masked_fill(positions, mask)}, positions, "masked"


def _encoder_decoder_inputs(
    model: Any, vocabulary: Vocabulary, texts: Sequence[Path] | None, seed: int, tokens: int, limit: int
) -> _Inputs:
    longest = _longest(model, limit)
    if texts is None:
        read = list(_random_ids(model, (tokens // _RANDOM, _RANDOM), seed))
    else:
        read = []
        for sentence in vocabulary.sentences(
            sampled_lines(texts, seed, max(LINES, tokens // _WORDS)), longest
        ):
            read.append(torch.tensor(sentence))
            if sum(map(len, read)) >= tokens:
                break
    ids = pad_sequence(read, batch_first=True, padding_value=model.config.pad_token_id or 0)
    mask = pad_sequence([torch.ones_like(row) for row in read], batch_first=True)
    length = min(longest - 1, int(_RATIO * ids.size(1)) + _MORE)
    outputs = _generate(model, ids, length, attention_mask=mask, do_sample=False)
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": outputs[:, :-1]}
    end, wanted = model.generation_config.eos_token_id, outputs[:, 1:]
    positions = torch.ones_like(wanted, dtype=torch.bool)
    if end is not None:  # up to the end of each output
        is_end = torch.isin(wanted, torch.as_tensor(end))
        positions = is_end.cumsum(dim=1) - is_end.long() == 0
    return inputs, positions, "of its outputs" if texts else "of its outputs for random tokens"


def _longest(model: Any, limit: int) -> int:
    """How many tokens a model can read, at most `limit`."""
    positions = getattr(model.config, "max_position_embeddings", None) or limit
    return min(limit, int(positions) - first_position(model))


def _random_ids(model: Any, shape: tuple[int, int], seed: int) -> Tensor:
    words = model.get_input_embeddings().num_embeddings
    return torch.randint(words, shape, generator=torch.Generator().manual_seed(seed))


def _generate(model: Any, ids: Tensor, length: int, **options: Any) -> Tensor:
    options = {"attention_mask": torch.ones_like(ids), "num_beams": 1, **options}
    outputs: Tensor = model.generate(
        ids, max_new_tokens=length, pad_token_id=model.config.pad_token_id or 0, **options
    )
    return outputs


def perplexity(model: Any, vocabulary: Vocabulary, validation: Validation) -> Quality:
    """The perplexity of a text, over every token; except the first, if the tokenizer has no beginning mark.

    Each window has half a window of context followed by half a window of new tokens, which are scored. Every
    window starts with the tokenizer's beginning mark, if any.

    Raises:
        UserError: the model is not causal, there is no tokenizer, or the text is too short.
    """
    names = require("transformers").models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    kind = type(model).__name__
    if model.config.is_encoder_decoder or kind not in set(names.values()):
        raise UserError(
            f"{kind} does not predict the next word from the previous ones, so it has no perplexity; omit "
            "--validation"
        )
    path = validation.one_text()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text (byte {error.start}); convert it") from error
    begin, ids = vocabulary.encode(text)
    if len(begin) + len(ids) < 2:
        raise UserError(f"{path}: has {len(ids)} tokens, too few to predict one; give a longer text")
    window = _longest(model, _LONGEST_WINDOW) - len(begin)
    nats = negative_log_likelihoods(model.eval(), begin, ids, window)
    how = f"{path}: {len(nats):,} tokens, in windows of {window + len(begin):,}, at least half of it context"
    return Quality("perplexity", math.exp(min(float(nats.mean()), 700.0)), how)


@torch.no_grad()
def negative_log_likelihoods(model: Any, begin: list[int], ids: list[int], window: int) -> Tensor:
    """Those ``(T,)`` of ids after a beginning mark, if any, in nats; of all but the first id without one."""
    stride = max(window // 2, 1)
    found: list[Tensor] = []
    done = 0 if begin else 1
    while done < len(ids):
        # The first window is all new; later ones have context.
        end = min(len(ids), done + stride if found else window)
        read = begin + ids[max(0, end - window) : end]
        scores = model(input_ids=torch.tensor([read]), use_cache=False).logits[0]  # (T, V)
        new = scores[done - end - 1 : -1].float()
        found.append(F.cross_entropy(new, torch.tensor(ids[done:end]), reduction="none").double())
        done = end
    return torch.cat(found)
