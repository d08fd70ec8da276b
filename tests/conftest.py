"""What every test shares: a fixed seed, so that a failure shows again."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Start every test from the same random state, whatever ran before it."""
    torch.manual_seed(20201119)
