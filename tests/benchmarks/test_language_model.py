"""The benchmark of the language model: both models take the same steps, and the ratios are theirs."""

from __future__ import annotations

import pytest
import torch

from benchmarks import language_model


@pytest.fixture
def small(monkeypatch) -> None:
    """Batches of a few tokens from few words."""
    for name, value in (("VOCABULARY", 50), ("BATCH", 2), ("TIME", 3)):
        monkeypatch.setattr(language_model, name, value)


@pytest.mark.slow
def test_both_models_are_of_one_shape_and_learn(small) -> None:
    regularized, plain = language_model.models("cpu")
    hidden = [part.shape for part in regularized.initial_state(2)]
    assert [part.shape for part in plain.initial_state(2)] == hidden
    assert plain.widths == [1150, 1150, 400]
    ids = language_model.batch("cpu")
    assert ids.shape == (2, 4)
    for model in (regularized, plain):
        before = [parameter.clone() for parameter in model.parameters()]
        language_model.training_step(model, ids)()
        changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(changed)


@pytest.mark.slow
def test_measuring_gives_both_clocks(small) -> None:
    found = language_model.measure("cpu", repeats=1)
    assert found["name"] == "CPU"
    for model in ("awd_lstm", "plain"):
        assert found[model]["seconds"] > 0 and found[model]["processor_seconds"] > 0


def test_the_table_shows_tokens_and_ratios() -> None:
    cpu = {
        "device": "cpu",
        "name": "CPU",
        "awd_lstm": {"seconds": 4.0, "processor_seconds": 2.5},
        "plain": {"seconds": 3.0, "processor_seconds": 2.0},
    }
    cpu_line, cuda_line = language_model.as_table([cpu]).splitlines()[-2:]
    # 20 x 70 tokens in 3 and in 4 seconds.
    assert cpu_line == "| CPU | 467 | 350 | 0.75 | 0.80 |"
    assert cuda_line == "| CUDA | not run | not run | not run | not run |"
