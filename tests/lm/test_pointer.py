"""The cache pointer against a loop over words, positions and the whole vocabulary."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lm.evaluate import pointer
from lm.evaluate.evaluation import Reading, evaluate
from lm.evaluate.pointer import CachePointer, PointerOptions, evaluate_with_pointer
from shared_embeddings.errors import UserError
from tests.lm.runs import TinyLSTM, text


@torch.no_grad()
def brute_force(model: TinyLSTM, ids: torch.Tensor, options: PointerOptions, scored_from: int = 1) -> float:
    """The mixture written out: a probability for every word of the vocabulary, position by position."""
    hidden = model(ids[None, :-1], model.initial_state(1)).hidden[0].double()
    model_probs = (hidden @ model.embedding.output_table().double().T).softmax(dim=-1)
    nats = 0.0
    for now in range(len(ids) - 1):
        cache = [0.0] * model.embedding.num_embeddings
        places = range(max(0, now - options.window), now)
        for place in places:
            cache[ids[place + 1]] += math.exp(options.theta * float(hidden[now] @ hidden[place]))
        probability = float(model_probs[now, ids[now + 1]])
        if len(places):
            share = cache[ids[now + 1]] / sum(cache)
            probability = (1 - options.weight) * probability + options.weight * share
        if now + 1 >= scored_from:
            nats -= math.log(probability)
    return nats


@pytest.mark.parametrize("target_length", [1, 7, 100])
@pytest.mark.parametrize("window", [1, 5, 200])
@pytest.mark.parametrize(("theta", "weight"), [(0.7, 0.13), (0.0, 0.5), (3.0, 0.9)])
def test_against_the_loop(theta: float, weight: float, window: int, target_length: int) -> None:
    model, ids, options = TinyLSTM(), text(45), PointerOptions(window, theta, weight)
    plain, mixed = evaluate_with_pointer(model, ids.numpy(), options, Reading(target_length), progress=False)
    assert mixed.tokens == plain.tokens == 44
    assert mixed.nats == pytest.approx(brute_force(model, ids, options), rel=1e-5)
    assert plain.nats == pytest.approx(evaluate(model, ids.numpy(), progress=False).nats, rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_each_chunk_has_a_cache_of_its_own_which_its_context_fills(batch_size: int) -> None:
    model, ids, options = TinyLSTM(), text(41), PointerOptions(9, 0.5, 0.3)
    reading = Reading(4, context_length=6, chunk_length=10, batch_size=batch_size)
    expected = 0.0
    for begin in range(0, 40, 10):
        context = min(6, begin)
        expected += brute_force(model, ids[begin - context : begin + 11], options, scored_from=context + 1)
    _, mixed = evaluate_with_pointer(model, ids.numpy(), options, reading, progress=False)
    assert mixed.nats == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("queries", "scores"), [(3, 2**24), (256, 1)])
def test_blocks_of_any_size_give_the_same(queries: int, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, options = TinyLSTM(), text(60), PointerOptions(7, 0.5, 0.3)
    whole = evaluate_with_pointer(model, ids.numpy(), options, progress=False)[1]
    monkeypatch.setattr(pointer, "_QUERIES", queries)
    monkeypatch.setattr(pointer, "_SCORES", scores)
    in_blocks = evaluate_with_pointer(model, ids.numpy(), options, progress=False)[1]
    assert in_blocks.nats == pytest.approx(whole.nats)


def test_by_hand() -> None:
    # Two positions in the cache: scores 0 and ln 3, the second was followed by the word that comes now.
    cache = CachePointer(PointerOptions(window=2, theta=1.0, weight=0.25))
    hidden = torch.tensor([[[0.0, 1.0], [math.log(3.0), 0.0], [1.0, 0.0]]])
    log_probs, has_cache = cache.log_probabilities(hidden, torch.tensor([[5, 6, 6]]))
    assert log_probs[0].tolist() == pytest.approx([-math.inf, -math.inf, math.log(0.75)])
    assert has_cache.tolist() == [False, True, True]
    losses = cache.mixed_losses(torch.tensor([0.5, 0.5]).log().neg(), log_probs[0, [0, 2]], has_cache[[0, 2]])
    assert losses.exp().reciprocal().tolist() == pytest.approx([0.5, 0.75 * 0.5 + 0.25 * 0.75])


def test_no_more_than_the_window_is_kept() -> None:
    cache = CachePointer(PointerOptions(3, 1.0, 0.5))
    cache.log_probabilities(torch.randn(2, 50, 4), torch.zeros(2, 50, dtype=torch.int64))
    assert cache._hidden is not None and cache._hidden.untyped_storage().nbytes() == 2 * 3 * 4 * 4


def test_settings_from_a_mapping() -> None:
    given = {"window": 3785, "theta": 0.66, "lambda": 0.13}
    assert PointerOptions.parse(given) == PointerOptions(3785, 0.66, 0.13)
    assert PointerOptions.parse(given).plain() == given


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"window": 0}, "window is 0"),
        ({"window": 2.5}, "window is 2.5"),
        ({"window": True}, "window is True"),
        ({"theta": -1}, "theta is -1"),
        ({"theta": float("nan")}, "theta is nan"),
        ({"theta": "x"}, "theta is 'x'"),
        ({"lambda": 0}, "lambda is 0"),
        ({"lambda": 1}, "lambda is 1"),
        ({"lambda": None}, "lambda is None"),
        ({"bptt": 5}, "unknown key 'bptt'"),
    ],
)
def test_impossible_settings(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PointerOptions.parse({"window": 5, "theta": 1.0, "lambda": 0.1, **changed})


@pytest.mark.parametrize("given", [None, 3, [1, 2, 3]])
def test_no_mapping(given: Any) -> None:
    with pytest.raises(UserError, match="pointer is"):
        PointerOptions.parse(given)
