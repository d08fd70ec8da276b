"""What is written follows from the model, the prompt and the seed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lm.evaluate.generate import Sampling, choose, generate
from shared_embeddings.errors import UserError
from tests.lm.tiny_models import TinyLSTM, TinyMemory


def words(
    model: torch.nn.Module, prompt: list[int], length: int = 30, seed: int = 1, **how: Any
) -> list[int]:
    return list(generate(model, prompt, length, Sampling(**how), seed))


def test_greedy_is_the_best_word_after_all_that_came_before() -> None:
    model = TinyLSTM()
    ids = [3, 1, 4]
    for _ in range(12):
        with torch.no_grad():
            hidden = model(torch.tensor([ids]), model.initial_state(1)).hidden[0, -1]
            ids.append(int((hidden @ model.embedding.output_table().T).argmax()))
    assert words(model, ids[:3], 12, temperature=0.0) == ids[3:]
    # The same after more of it was read at once.
    assert words(model, ids[:9], 6, temperature=0.0) == ids[9:]


def test_seeds() -> None:
    model = TinyLSTM()
    assert words(model, [0], seed=1) == words(model, [0], seed=1) != words(model, [0], seed=2)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    words(model, [0])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_with_a_memory_that_grows() -> None:
    assert len(words(TinyMemory(), [0, 1, 2, 3, 4, 5], 20)) == 20


LOG_PROBS = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()


def frequencies(number: int = 2000, **how: Any) -> list[float]:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.tensor([choose(LOG_PROBS, Sampling(**how), generator) for _ in range(number)])
    return (drawn.bincount(minlength=4) / number).tolist()


@pytest.mark.slow_except("how6-expected6")
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 9}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 0.5}, [p * p / 0.345 for p in (0.5, 0.25, 0.15, 0.1)]),
        ({"temperature": 1e-9}, [1, 0, 0, 0]),
        ({"temperature": 1e-300}, [1, 0, 0, 0]),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
        ({"forbidden": (0,)}, [0, 0.5, 0.3, 0.2]),
        ({"forbidden": (0,), "top_k": 1}, [0, 1, 0, 0]),
        ({"forbidden": (0, 1), "temperature": 0.0}, [0, 0, 1, 0]),
    ],
)
def test_how_often_each_word_is_chosen(how: dict[str, Any], expected: list[float]) -> None:
    found = frequencies(**how)
    assert found == pytest.approx(expected, abs=0.04)
    assert [frequency > 0 for frequency in found] == [share > 0 for share in expected]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 3, "temperature": 0.0}, "no effect"),
        ({"forbidden": tuple(range(11))}, "no word can be generated"),
    ],
)
def test_what_cannot_be(how: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        words(TinyLSTM(), [0], **how)


def test_no_length() -> None:
    with pytest.raises(UserError, match="length is 0"):
        words(TinyLSTM(), [0], 0)


def test_a_model_that_diverged() -> None:
    model = TinyLSTM()
    torch.nn.init.constant_(model.lstm.weight_hh_l0, math.nan)
    with pytest.raises(UserError, match="not finite"):
        words(model, [0, 1])
