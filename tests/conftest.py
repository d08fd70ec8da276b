"""What every test shares: a fixed seed, so that a failure shows again."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Start every test from the same random state, whatever ran before it."""
    torch.manual_seed(20201119)


@pytest.fixture(autouse=True)
def _no_handlers_left() -> Iterator[None]:
    """Take away the handlers of OpenNMT's logger, which would write into the closed streams of a test."""
    yield
    logging.getLogger("onmt").handlers.clear()
