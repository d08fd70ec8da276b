"""Every token but the first counts once, with the context that was asked for, whatever goes side by side."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lm.evaluate.evaluation import Reading, Score, chunk_spans, evaluate
from shared_embeddings.errors import UserError
from tests.lm.tiny_models import Output, TinyLSTM, TinyMemory, text


def tokens(length: int) -> np.ndarray:
    return text(length).numpy().astype(np.int32)


@torch.no_grad()
def nats_of_one_target(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """The loss of the last of the ids, predicted from the others, which are read at once."""
    output = model(ids[None, :-1], model.initial_state(1))
    scores = output.hidden[0, -1] @ model.embedding.output_table().T
    return float(F.cross_entropy(scores.double(), ids[-1]))


def brute_force(model: torch.nn.Module, ids: torch.Tensor, context: int, chunk: int) -> float:
    """Every target on its own, from the beginning of its chunk's context on."""
    total = 0.0
    for target in range(1, len(ids)):
        chunk_begin = (target - 1) // chunk * chunk
        total += nats_of_one_target(model, ids[max(0, chunk_begin - context) : target + 1])
    return total


@pytest.mark.slow_except("0-7")
@pytest.mark.parametrize(("context", "chunk"), [(0, None), (0, 7), (5, 7), (9, 4), (40, 1), (3, 31), (3, 32)])
def test_every_target_once_with_its_context(context: int, chunk: int | None) -> None:
    model = TinyLSTM()
    expected = brute_force(model, text(33), context, chunk or 32)
    for target_length, batch_size in itertools.product([1, 4, 70], [1, 3, 50]):
        score = evaluate(model, tokens(33), target_length, context, chunk, batch_size, progress=False)
        assert score.tokens == 32
        assert score.nats == pytest.approx(expected, rel=1e-5), (target_length, batch_size)


@pytest.mark.parametrize("method", ["adaptive", "projective"])
def test_other_softmaxes(method: str) -> None:
    options: dict[str, Any] = {"adaptive": {"cutoffs": [4], "factor": 2}, "projective": {"rank": 3}}[method]
    model = TinyLSTM(method=method, **options)
    ids = text(20)
    with torch.no_grad():
        log_probs = model.embedding.log_prob(model(ids[None, :-1], model.initial_state(1)).hidden[0])
    expected = -log_probs.gather(1, ids[1:, None]).sum().item()
    assert evaluate(model, ids.numpy(), 6, progress=False).nats == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("context", "chunk"), [(0, 7), (5, 7), (9, 4)])
def test_batch_size_does_not_matter_to_a_model_with_a_short_memory(context: int, chunk: int) -> None:
    model = TinyMemory()
    scores = [evaluate(model, tokens(61), 3, context, chunk, size, progress=False) for size in (1, 2, 5, 90)]
    assert [score.tokens for score in scores] == [60] * 4
    assert [score.nats for score in scores] == pytest.approx([scores[0].nats] * 4, rel=1e-6)
    assert scores[0].nats != pytest.approx(evaluate(model, tokens(61), 4, progress=False).nats, rel=1e-4)


def test_segments_within_the_memory_are_one_long_segment() -> None:
    model = TinyMemory(memory=100)
    whole = evaluate(model, tokens(50), 100, progress=False)
    assert evaluate(model, tokens(50), 7, progress=False).nats == pytest.approx(whole.nats, rel=1e-6)


def test_spans_of_a_short_text() -> None:
    # Ten tokens 0..9: targets 1-4, 5-8, 9, and three tokens of context before 4 and 8 where there are any.
    spans = chunk_spans(10, Reading(context_length=3, chunk_length=4))
    assert [tuple(span) for span in spans] == [(0, 4, 0), (1, 7, 3), (5, 4, 3)]


def test_perplexity_by_hand() -> None:
    score = Score(nats=6 * math.log(2.0), tokens=3)
    assert score.perplexity == pytest.approx(4.0)
    assert score.perplexity_per(2) == pytest.approx(8.0)
    assert Score(1e9, 1).perplexity == math.inf


class UniformLSTM(TinyLSTM):
    def forward(self, ids: torch.Tensor, state: tuple[torch.Tensor, ...]) -> Output:
        output = super().forward(ids, state)
        return output._replace(hidden=torch.zeros_like(output.hidden))


def test_a_model_that_knows_nothing_has_the_perplexity_of_the_vocabulary() -> None:
    assert evaluate(UniformLSTM(), tokens(40), chunk_length=6, progress=False).perplexity == pytest.approx(
        11.0
    )


@pytest.mark.parametrize("mode", [True, False])
def test_the_mode_of_the_model_comes_back(mode: bool) -> None:
    model = TinyLSTM().train(mode)
    evaluate(model, tokens(5), progress=False)
    assert model.training is mode
    with pytest.raises(UserError):
        evaluate(model, tokens(5)[:1], progress=False)
    assert model.training is mode


@pytest.mark.parametrize("length", [0, 1])
def test_too_short_a_text(length: int) -> None:
    with pytest.raises(UserError, match=f"has {length} tokens"):
        evaluate(TinyLSTM(), tokens(length), progress=False)


@pytest.mark.parametrize(
    ("name", "value"), [("target_length", 0), ("context_length", -1), ("chunk_length", 0), ("batch_size", 0)]
)
def test_impossible_lengths(name: str, value: int) -> None:
    with pytest.raises(UserError, match=f"{name} is {value}"):
        evaluate(TinyLSTM(), tokens(5), progress=False, **{name: value})
