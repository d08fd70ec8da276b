"""Learning rates at points of a training run, against values computed by hand."""

from __future__ import annotations

import pytest

from lm.train.optim import (
    SCHEDULES,
    ConstantOptions,
    CosineOptions,
    PlateauOptions,
    Progress,
    StepOptions,
)
from shared_embeddings import OptionError


def at(done: float = 0.0, epochs: float = 0.0, scores: tuple[float, ...] = ()) -> Progress:
    return Progress(done, epochs, scores)


def test_constant() -> None:
    assert ConstantOptions().factor(at(0.9, 3, (1.0, 2.0))) == 1.0


@pytest.mark.parametrize(
    ("done", "factor"), [(0.0, 1.0), (1 / 3, 0.775), (0.5, 0.55), (1.0, 0.1), (1.2, 0.1)]
)
def test_cosine_falls_to_its_minimum(done: float, factor: float) -> None:
    assert CosineOptions(min_lr_ratio=0.1).factor(at(done)) == pytest.approx(factor)


def test_step_divides_after_each_of_its_epochs() -> None:
    schedule = StepOptions(decay_epochs=(2.0, 3.5), decay_factor=4.0)
    factors = [schedule.factor(at(epochs=epochs)) for epochs in (0, 1.9, 2.0, 3.4, 3.5, 9)]
    assert factors == pytest.approx([1, 1, 1 / 4, 1 / 4, 1 / 16, 1 / 16])


def test_plateau_divides_whenever_validation_does_not_improve() -> None:
    schedule = PlateauOptions(decay_factor=2.0, decay_patience=1)
    scores = (5.0, 4.0, 4.0, 4.5, 3.0, 3.1)
    factors = [schedule.factor(at(scores=scores[:count])) for count in range(len(scores) + 1)]
    assert factors == [1, 1, 1, 0.5, 0.25, 0.25, 0.125]


def test_plateau_waits_for_its_patience_and_then_anew() -> None:
    schedule = PlateauOptions(decay_factor=10.0, decay_patience=2)
    scores = (5.0, 6.0, 6.0, 6.0, 6.0, 4.0, 6.0)
    factors = [schedule.factor(at(scores=scores[:count])) for count in range(len(scores) + 1)]
    assert factors == pytest.approx([1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.01])


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("cosine", {"min_lr_ratio": 1.5}, "min_lr_ratio"),
        ("step", {"decay_epochs": (1.0,), "decay_factor": 1.0}, "decay_factor"),
        ("plateau", {"decay_factor": 0.5}, "decay_factor"),
        ("plateau", {"decay_patience": 0}, "decay_patience"),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, options: dict[str, object], key: str) -> None:
    with pytest.raises(OptionError, match=f"'{key}'"):
        SCHEDULES[name](**options)
