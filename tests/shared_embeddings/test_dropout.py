"""Dropout from masks of random words."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shared_embeddings.layers.dropout import Dropout, dropout, keep_mask


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.65])
def test_masks_are_random_numbers_with_the_right_mean(probability: float) -> None:
    torch.manual_seed(0)
    mask = keep_mask(torch.zeros(()), (301, 997), probability)
    values, counts = mask.unique(return_counts=True)
    torch.testing.assert_close(values, torch.tensor([0.0, 1 / (1 - probability)]))
    # Four standard deviations of a binomial share.
    noise = 4 * (probability * (1 - probability) / mask.numel()) ** 0.5
    assert counts[0] / mask.numel() == pytest.approx(probability, abs=noise)
    dropped = (mask == 0).float().flatten() - probability
    for lag in (1, 2, 3, 4, 997):
        assert (dropped[lag:] * dropped[:-lag]).mean().item() == pytest.approx(0, abs=noise)


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 3), (4, 1, 2)])
def test_masks_have_the_shape_and_type_asked_for(shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        mask = keep_mask(torch.zeros((), dtype=dtype), shape, 0.5)
        assert mask.shape == shape and mask.dtype == dtype
        assert ((mask == 0) | (mask == 2)).all()


def test_extreme_probabilities_of_masks() -> None:
    torch.manual_seed(0)
    assert (keep_mask(torch.zeros(()), (1000,), 0.0) == 1).all()
    assert (keep_mask(torch.zeros(()), (1000,), 1 - 1e-9) == 0).all()


def test_what_is_kept_is_scaled_and_so_are_its_gradients() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(50, 60, requires_grad=True)
    outputs = Dropout(0.2)(inputs)
    outputs.sum().backward()
    kept = outputs != 0
    torch.testing.assert_close(outputs[kept], inputs[kept] / 0.8)
    assert inputs.grad is not None
    torch.testing.assert_close(inputs.grad, kept / 0.8)


def test_masks_are_new_every_time_and_those_of_the_seed() -> None:
    layer, ones = Dropout(0.5), torch.ones(200)
    torch.manual_seed(1)
    first, second = layer(ones), layer(ones)
    torch.manual_seed(1)
    assert torch.equal(layer(ones), first) and not torch.equal(first, second)


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_evaluation_drops_nothing(probability: float) -> None:
    inputs = torch.randn(4, 5)
    assert torch.equal(Dropout(probability).eval()(inputs), inputs)


@pytest.mark.parametrize(("probability", "left"), [(0.0, 1.0), (1.0, 0.0)])
def test_all_or_nothing_is_dropped(probability: float, left: float) -> None:
    assert torch.equal(dropout(torch.ones(9), probability, training=True), torch.full((9,), left))


@pytest.mark.parametrize("probability", [-0.1, 1.1])
def test_impossible_probabilities_are_refused(probability: float) -> None:
    with pytest.raises(ValueError, match="probability"):
        dropout(torch.ones(3), probability, training=True)
    with pytest.raises(ValueError, match="probability"):
        Dropout(probability)


def test_other_devices_use_their_own_kernel() -> None:
    inputs = torch.ones(3, 4, device="meta")
    assert dropout(inputs, 0.5, training=True).shape == F.dropout(inputs, 0.5).shape


def test_a_step_under_autocast_keeps_the_type_of_its_layer() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), Dropout(0.5))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 8)).dtype == torch.bfloat16
