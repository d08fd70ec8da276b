"""What every test shares: a fixed seed, so that a failure shows again."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest
import torch

from shared_embeddings.checkpoints import adapter
from tests.loops import SEED

# A shell that runs the tests in the background has interrupts ignored, and so would what the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Start every test from the same random state, whatever ran before it."""
    torch.manual_seed(SEED)


@pytest.fixture
def installed_host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `compress` and `trim` find the host that a folder of tests is about, of this source tree."""
    host = request.path.parent.name
    point = EntryPoint(host, f"{host}.adapter:Adapter", adapter.GROUP)
    monkeypatch.setattr(adapter, "entry_points", lambda group: [point])


@pytest.fixture(autouse=True)
def _no_handlers_left() -> Iterator[None]:
    """Take away the handlers of OpenNMT's logger, which would write into the closed streams of a test."""
    yield
    logging.getLogger("onmt").handlers.clear()
