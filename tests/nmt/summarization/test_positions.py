"""Positional encodings against values worked out by hand from the formulas of Takase & Okazaki (2019)."""

from __future__ import annotations

import pytest
import torch
from onmt.modules.embeddings import PositionalEncoding
from torch import Tensor

from nmt.summarization.length_control import LengthControlledPositions

INTERLEAVED, CONCATENATED = "SinusoidalInterleaved", "SinusoidalConcat"

# Position 2 of an output of length 9, D = 4: the exponents 2i/D are 0 and 1/2.
BY_HAND = {
    "pe": [0.9092974268, -0.4161468365, 0.0199986667, 0.9998000067],  # 2/1, 2/100
    "ldpe": [0.6569865987, 0.7539022543, 0.0699428473, 0.9975510003],  # 7/1, 7/100
    "lrpe": [0.9092974268, -0.4161468365, 0.6183698031, 0.7858872608],  # 2/1, 2/3
}
# The same where sines come first and the exponents i/(D/2 - 1) are 0 and 1.
BY_HAND_CONCATENATED = {
    "pe": [0.9092974268, 0.0002000000, -0.4161468365, 0.9999999800],  # 2/1, 2/10000
    "ldpe": [0.6569865987, 0.0006999999, 0.7539022543, 0.9999997550],  # 7/1, 7/10000
    "lrpe": [0.9092974268, 0.2203977435, -0.4161468365, 0.9754100854],  # 2/1, 2/9
}


def added(
    encodings: list[str], lengths: list[int], size: int, dim: int = 4, layout: str = INTERLEAVED
) -> Tensor:
    """What the positions 0 to ``size`` - 1 add to embeddings of 0."""
    positions = LengthControlledPositions(dim, encodings, layout)
    positions.set_lengths(torch.tensor(lengths))
    return positions(torch.zeros(len(lengths), size, dim))


@pytest.mark.parametrize("name", BY_HAND)
def test_values_by_hand(name: str) -> None:
    torch.testing.assert_close(added([name], [9], 3)[0, 2], torch.tensor(BY_HAND[name]))
    found = added([name], [9], 3, layout=CONCATENATED)[0, 2]
    torch.testing.assert_close(found, torch.tensor(BY_HAND_CONCATENATED[name]))


def test_encodings_are_summed_and_embeddings_scaled() -> None:
    positions = LengthControlledPositions(4, ["pe", "lrpe"], INTERLEAVED)
    positions.set_lengths(torch.tensor([9]))
    found = positions(torch.ones(1, 3, 4))[0, 2]
    wanted = [2 + pe + lrpe for pe, lrpe in zip(BY_HAND["pe"], BY_HAND["lrpe"], strict=True)]  # sqrt(4) = 2
    torch.testing.assert_close(found, torch.tensor(wanted))


@pytest.mark.parametrize("layout", [INTERLEAVED, CONCATENATED])
def test_sinusoids_are_those_of_upstream(layout: str) -> None:
    emb = torch.randn(2, 30, 16, generator=torch.Generator().manual_seed(1))
    positions = LengthControlledPositions(16, ["pe"], layout)
    positions.set_lengths(torch.tensor([3, 4]))
    torch.testing.assert_close(positions(emb), PositionalEncoding(16, layout)(emb), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("encodings", [["ldpe"], ["lrpe"], ["pe", "ldpe"], ["pe", "ldpe", "lrpe"]])
def test_steps_are_the_positions_of_a_whole(encodings: list[str]) -> None:
    positions = LengthControlledPositions(8, encodings, INTERLEAVED)
    positions.set_lengths(torch.tensor([2, 40]))
    emb = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))
    steps = [positions(emb[:, step : step + 1], step=step) for step in range(6)]
    torch.testing.assert_close(torch.cat(steps, dim=1), positions(emb))


def test_difference_is_the_same_where_equally_much_is_left() -> None:
    short, long = added(["ldpe"], [3, 8], 9)
    torch.testing.assert_close(short[0:4], long[5:9])
    torch.testing.assert_close(short[3], torch.tensor([0.0, 1.0, 0.0, 1.0]))  # the end is due: sin 0, cos 0


def test_ratio_is_alike_where_the_same_share_is_written() -> None:
    """Half way through 100 and through 50, the slowest wave (exponent 14/16) is nearly as far."""
    one, two = added(["lrpe"], [100], 51, dim=16)[0, 50], added(["lrpe"], [50], 26, dim=16)[0, 25]
    assert float((one - two)[-2:].abs().max()) < 0.1
    assert float((one - two)[:2].abs().max()) > 0.1


def test_length_one_is_finite() -> None:
    assert torch.isfinite(added(["ldpe", "lrpe"], [1], 5)).all()


def test_precision_of_the_input_is_kept() -> None:
    positions = LengthControlledPositions(4, ["pe", "lrpe"], INTERLEAVED)
    positions.set_lengths(torch.tensor([300]))
    exact, coarse = (
        positions(torch.zeros(1, 301, 4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)
    )
    assert coarse.dtype == torch.bfloat16
    torch.testing.assert_close(coarse, exact.bfloat16())  # angles of 300 have no place in 8 bits


def test_lengths_follow_the_rows() -> None:
    positions = LengthControlledPositions(4, ["ldpe"], INTERLEAVED)
    positions.set_lengths(torch.tensor([5, 6, 7]))
    positions.start(6)
    assert positions.lengths is not None and positions.lengths.tolist() == [5, 5, 6, 6, 7, 7]
    positions.map_rows(lambda state, dim: state[torch.tensor([3, 2, 5, 5])])
    assert positions.lengths.tolist() == [6, 6, 7, 7]
    positions.start(3)
    assert positions.lengths.tolist() == [5, 6, 7]


def test_rows_of_another_batch_are_refused() -> None:
    positions = LengthControlledPositions(4, ["ldpe"], INTERLEAVED)
    with pytest.raises(RuntimeError, match="no lengths"):
        positions.start(2)
    positions.set_lengths(torch.tensor([5, 6]))
    with pytest.raises(RuntimeError, match="3 rows"):
        positions.start(3)
