"""What every test shares: a fixed seed, so that a failure shows again."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import yaml

from shared_embeddings.checkpoints import adapter
from tests.loops import SEED

# A shell that runs the tests in the background has interrupts ignored, and so would what the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


SLOW = yaml.safe_load(Path(__file__).with_name("slow.yaml").read_text(encoding="utf-8"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of slow.yaml."""
    for item in items:
        functions = SLOW.get(item.path.relative_to(config.rootpath).as_posix(), {})
        quick = functions.get(getattr(item, "originalname", item.name))
        if quick is not None and getattr(getattr(item, "callspec", None), "id", "") not in quick:
            item.add_marker(pytest.mark.slow)


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
