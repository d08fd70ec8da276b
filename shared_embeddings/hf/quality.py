"""The predictions of a Hugging Face model before and after compression, and the perplexity of a causal one.

Axes: ``B`` texts of a batch, ``T`` tokens of each or of a window, ``V`` vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from shared_embeddings.compress.measure import (
    LINES,
    PREDICTIONS,
    SHARPNESS,
    Batch,
    Samples,
    in_float32,
    names_of,
    sampled_lines,
)
from shared_embeddings.hf.sentences import SentenceEncoder
from shared_embeddings.hf.tokenizer import TokenVocabulary
from shared_embeddings.hf.word_layers import first_position
from shared_embeddings.utils.errors import UserError, first_line

# The maximum number of tokens of a row and of a sentence, and that of a random encoder input.
_LONGEST, _SENTENCE, _RANDOM = 256, 50, 4
# Tokens that are read together, in short rows.
_TOGETHER = 256
# The maximum length of an output: _RATIO times the longest encoder input, plus _MORE.
_RATIO, _MORE = 1.5, 5
# Tokens of which look-ups are counted: more than are predicted, since the layers after them do not run.
_COUNTED = 100_000
# One in _MASKED tokens is masked for a masked language model (BERT: 15 %).
_MASKED = 7
# At least so many tokens of a line are expected; of many texts, so many are neighbors of each other.
_WORDS, _NEIGHBORS = 10, 32
# The longest window, limited by the memory for the scores of all words.
LONGEST_WINDOW = 1024


# The arguments of ``forward``, each ``(B, T)``, a mask ``(B, T)`` of the scores to compare, and their name.
_Inputs = tuple[dict[str, Tensor], Tensor, str]


def computing(model: nn.Module) -> AbstractContextManager[None]:
    """Compute in float32 where the CPU has no arithmetic in the dtype of a tensor, which takes 4 to 100 times
    as long; the tensors are as before afterwards.
    """
    can = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    slow = {kind for kind, name in can.items() if not getattr(torch.ops.mkldnn, name)()}
    if (
        torch.backends.cpu.get_cpu_capability().startswith("AVX")
        and not torch.cpu._is_avx512_bf16_supported()
    ):
        slow.add(torch.bfloat16)
    return in_float32(model, slow)


def samples(
    model: Any,
    vocabulary: TokenVocabulary,
    texts: Sequence[Path] | None,
    seed: int,
    tokens: int,
    encoder: SentenceEncoder | None = None,
) -> Samples:
    """About so many predictions of a model: after every token, or at masked tokens for a masked language
    model.

    An encoder-decoder model predicts every token of its own greedy outputs. An `encoder` of sentences, or a
    model that does not score words, predicts the nearest neighbors among texts, by their vectors or the means
    of their last hidden states.

    Without texts, the input of a causal model are samples of it, that of other models random tokens.
    """
    model.eval()
    with _probing(model), computing(model):
        if encoder is not None or model.get_output_embeddings() is None:
            return _neighbors(model, vocabulary, texts, seed, tokens, encoder)
        make = _encoder_decoder_inputs if model.config.is_encoder_decoder else _decoder_or_encoder_inputs
        inputs, positions, of = make(model, vocabulary, texts, seed, tokens)
    of = f"{of} of {names_of(texts)}".lstrip() if texts else f"{of}; pass a real text"
    how = f"{int(positions.sum()):,} tokens {of}"
    # What follows the last token of a row is not there.
    has_targets = texts is not None and model.can_generate() and not model.config.is_encoder_decoder
    if has_targets:
        positions[:, -1] = False
    if not positions.any():
        raise UserError(f"{names_of(texts or ())}: is too short to predict a token of it; use a longer text")
    states: list[Tensor] = []

    def predict(part: tuple[dict[str, Tensor], Tensor]) -> Batch:
        arguments, places = part
        where, output = places.flatten(), model.get_output_embeddings()
        hook = output.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
        with _probing(model):
            with hook:
                result = model.eval()(**arguments)
            # With a second task beside the words, as BertForPreTraining has, they have another name.
            scores = result.logits if "logits" in result else result.prediction_logits
            scores, hidden = (tensor.reshape(-1, tensor.size(-1))[where] for tensor in (scores, states.pop()))
        targets = arguments["input_ids"].roll(-1, 1).flatten()[where] if has_targets else None
        return Batch(scores, hidden, targets)

    rows = max(1, _TOGETHER // positions.size(1))
    split = {name: tensor.split(rows) for name, tensor in inputs.items()}
    parts = [
        ({name: blocks[number] for name, blocks in split.items()}, places)
        for number, places in enumerate(positions.split(rows))
    ]
    read = torch.cat([tensor.flatten() for name, tensor in inputs.items() if name.endswith("input_ids")])
    running = functools.partial(computing, model)
    return Samples(
        how,
        parts,
        predict,
        words=read.unique(),
        running=running,
        tokens=positions.numel() if texts else 0,
        has_targets=has_targets,
    )


class _AllRead(Exception):
    """All tables have been read, so that the rest of a model need not run."""


@torch.no_grad()
def count_lookups(
    model: Any,
    vocabulary: TokenVocabulary,
    layers: Mapping[str, nn.Module],
    texts: Sequence[Path] | None,
    seed: int,
) -> dict[str, Tensor]:
    """Return how often layers look up each row ``(V,)``, by name, when a model reads texts.

    After a first batch, the model stops at the last of these look-ups.
    """
    counts = {name: torch.zeros(int(module.num_embeddings)) for name, module in layers.items()}  # type: ignore[arg-type]
    calls, calls_of_batch = 0, 0

    def count(name: str, ids: Tensor) -> None:
        nonlocal calls
        counts[name].index_add_(0, ids.flatten().cpu(), torch.ones(ids.numel()))
        calls += 1
        if calls == calls_of_batch:
            raise _AllRead

    inputs, _, _ = _decoder_or_encoder_inputs(
        model, vocabulary, texts, seed, PREDICTIONS if texts is None else _COUNTED
    )
    ids = inputs["input_ids"]
    hooks = [
        module.register_forward_hook(lambda _, inputs, __, name=name: count(name, inputs[0]))
        for name, module in layers.items()
    ]
    try:
        with computing(model):
            for block in ids.split(max(1, _TOGETHER // ids.size(1))):
                calls = 0
                with suppress(_AllRead):
                    model.eval()(input_ids=block)
                calls_of_batch = calls
    finally:
        for hook in hooks:
            hook.remove()
    return counts


@contextmanager
def _probing(model: Any) -> Iterator[None]:
    """Each model class fails in its own way, without its other inputs for example: as a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise UserError(f"a {type(model).__name__} cannot be probed: {first_line(error)}") from error


def _neighbors(
    model: Any,
    vocabulary: TokenVocabulary,
    texts: Sequence[Path] | None,
    seed: int,
    tokens: int,
    encoder: SentenceEncoder | None,
) -> Samples:
    """Which text is nearest to each text; UserError for fewer than two texts."""
    of_prompt = 0
    if texts is None:
        read = list(_random_ids(model, (tokens // _RANDOM, _RANDOM), seed))
        how = f"nearest neighbors of {len(read)} texts of random tokens; pass a real text"
    else:
        lines = sampled_lines(texts, seed, max(tokens // _WORDS, LINES))
        how = f"nearest neighbors of {len(lines)} lines of {names_of(texts)}"
        if encoder is not None and encoder.prompt:
            of_prompt = vocabulary.length(encoder.prompt)
            lines = [encoder.prompt + line for line in lines]
            how += f" after prompt {encoder.prompt_name!r}"
        read = [torch.tensor(ids) for ids in vocabulary.sentences(lines, of_prompt + _SENTENCE)]
    if encoder is not None:
        how += f", by {encoder.described}"
    if len(read) < 2:
        raise UserError("one line has no neighbors; pass a longer text")

    def predict(texts: Sequence[Tensor]) -> Batch:
        """How similar each text is to the others ``(n, n)``, to itself minus infinitely."""
        of_texts = []
        for ids in texts:
            states = model.eval()(input_ids=ids[None], output_hidden_states=True).hidden_states[-1][0]
            of_texts.append(states.float().mean(dim=0) if encoder is None else encoder(states, of_prompt))
        vectors = F.normalize(torch.stack(of_texts), dim=-1)
        return Batch((SHARPNESS * vectors @ vectors.T).fill_diagonal_(-torch.inf))

    with torch.no_grad():
        predict(read[:2])  # fails here for models that need more than ids
    # With gradients, a few texts fit in memory.
    size = len(read) if tokens <= PREDICTIONS else _NEIGHBORS
    parts = [read[first : first + size] for first in range(0, len(read) - 1, size)]
    ids = torch.cat(read)
    running = functools.partial(computing, model)
    once = len(ids) // len(read)
    return Samples(how, parts, predict, words=ids.unique(), running=running, read=once, tokens=len(ids))


def _decoder_or_encoder_inputs(
    model: Any, vocabulary: TokenVocabulary, texts: Sequence[Path] | None, seed: int, tokens: int
) -> _Inputs:
    """Concatenated lines of texts in rows that each start with the beginning marks, samples, or random words;
    some of them masked for a masked language model.
    """
    longest = most_tokens(model, _LONGEST)
    if texts is not None:
        lines = sampled_lines(texts, seed, max(LINES, tokens // _WORDS))
        begin, words = vocabulary.encode("\n".join(lines))
        words = words[:tokens]
        width = min(longest - len(begin), len(words))
        if width < 1:
            raise UserError(f"{names_of(texts)}: has no tokens for this model; use another text")
        rows = torch.tensor(words[: len(words) // width * width]).view(-1, width)
        ids = torch.cat([torch.tensor(begin, dtype=torch.int64).expand(len(rows), -1), rows], dim=1)
    elif model.can_generate():
        start = _random_ids(model, (-(-tokens // longest), 1), seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            ids = _generate(model, start, longest - 1, do_sample=True, top_k=0, min_new_tokens=longest - 1)
    else:
        ids = _random_ids(model, (-(-tokens // longest), longest), seed)
    is_masked = texts is not None and not model.can_generate()
    mask = getattr(vocabulary.tokenizer, "mask_token_id", None) if is_masked else None
    if mask is None:
        drawn = "that it generated" if model.can_generate() else "drawn at random"
        return {"input_ids": ids}, torch.ones_like(ids, dtype=torch.bool), "" if texts else drawn
    draw = torch.Generator().manual_seed(seed)
    positions = torch.rand(ids.shape, generator=draw) < 1 / _MASKED
    positions[:, -1] |= ~positions.any(dim=1)
    return {"input_ids": ids.masked_fill(positions, mask)}, positions, "masked"


def _encoder_decoder_inputs(
    model: Any, vocabulary: TokenVocabulary, texts: Sequence[Path] | None, seed: int, tokens: int
) -> _Inputs:
    longest = most_tokens(model, _LONGEST)
    if texts is None:
        read = list(_random_ids(model, (tokens // _RANDOM, _RANDOM), seed))
    else:
        read = []
        lines = sampled_lines(texts, seed, max(LINES, tokens // _WORDS))
        for sentence in vocabulary.sentences(lines, longest):
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


def most_tokens(model: Any, limit: int) -> int:
    """How many tokens a model can read, at most `limit`."""
    positions = int(getattr(model.config, "max_position_embeddings", None) or limit)
    return limit if positions < 0 else min(limit, positions - first_position(model))  # XLNet says -1


def _random_ids(model: Any, shape: tuple[int, int], seed: int) -> Tensor:
    words = model.get_input_embeddings().num_embeddings
    return torch.randint(words, shape, generator=torch.Generator().manual_seed(seed))


def _generate(model: Any, ids: Tensor, length: int, **options: Any) -> Tensor:
    options = {"attention_mask": torch.ones_like(ids), "num_beams": 1, **options}
    outputs: Tensor = model.generate(
        ids, max_new_tokens=length, pad_token_id=model.config.pad_token_id or 0, **options
    )
    return outputs


@torch.no_grad()
def negative_log_likelihoods(model: Any, begin: list[int], ids: list[int], window: int) -> Tensor:
    """Those ``(T,)`` of ids after a beginning mark, if any, in nats; of all but the first id without one."""
    stride = max(window // 2, 1)
    losses: list[Tensor] = []
    done = 0 if begin else 1
    while done < len(ids):
        # The first window is all new; later ones have context.
        end = min(len(ids), done + stride if losses else window)
        read = begin + ids[max(0, end - window) : end]
        scores = model(input_ids=torch.tensor([read]), use_cache=False).logits[0]  # (T, V)
        new = scores[done - end - 1 : -1].float()
        losses.append(F.cross_entropy(new, torch.tensor(ids[done:end]), reduction="none").double())
        done = end
    return torch.cat(losses)
