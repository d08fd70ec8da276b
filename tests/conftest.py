"""Shared by all tests: a fixed seed, one thread, marks for slow parameters, and short recoveries."""

from __future__ import annotations

import fnmatch
import importlib.util
import logging
import signal
from collections.abc import Iterator

import pytest
import torch

from shared_embeddings.compress import host as host_module
from shared_embeddings.compress import recovery, session
from tests.helpers import SEED, hosts_of_this_tree

# These need what `make setup LIGHT=1` leaves out, such as OpenNMT-py.
if importlib.util.find_spec("onmt") is None:
    collect_ignore = ["benchmarks", "commands", "docker", "nmt", "recipes", "test_no_code.py"]
    collect_ignore += ["test_hosts.py", "shared_embeddings/hf/test_hf_export.py"]
    collect_ignore += ["shared_embeddings/hf/test_hf_runtimes.py"]
    collect_ignore += ["shared_embeddings/test_analysis.py", "shared_embeddings/test_classes.py"]

# A shell ignores interrupts in background jobs, and processes that the tests interrupt would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Apply the mark `slow_except`; if its ids do not exist, collecting the whole file fails."""
    has_quick: dict[str, bool] = {}
    for item in items:
        for mark in item.iter_markers("slow_except"):
            test, _, name = item.nodeid.removesuffix("]").partition("[")
            is_quick = any(name == pattern or fnmatch.fnmatchcase(name, pattern) for pattern in mark.args)
            has_quick[test] = has_quick.get(test, False) or is_quick
            if not is_quick:
                item.add_marker(pytest.mark.slow)
    missing = [test for test, quick in has_quick.items() if not quick]
    if missing and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"slow_except names no parameters of {', '.join(missing)}")


@pytest.fixture(autouse=True)
def _fresh_torch() -> None:
    """Start every test from the same random state, and on one thread, whatever ran before it."""
    # `torch.manual_seed` formats the stack for devices that have not started: half the time of a small test.
    torch.default_generator.manual_seed(SEED)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(SEED)
    torch.set_num_threads(1)  # more threads than free cores wait for each other: tests take 10 times as long


@pytest.fixture(autouse=True)
def installed_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands find the hosts of this source tree, whatever is installed."""
    monkeypatch.setattr(host_module, "entry_points", hosts_of_this_tree)


@pytest.fixture(autouse=True)
def few_languages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the words of two languages, not of all, which takes seconds."""
    monkeypatch.setattr(session, "languages", lambda: ["de", "en"])
    monkeypatch.setattr(session, "code_lines", lambda: ["import os", "print(os.name)"])


@pytest.fixture
def short_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens in a sample of `recovery`, and fewer in a step, at a rate for so few steps."""
    monkeypatch.setattr(recovery, "TOKENS", 600)
    monkeypatch.setattr(recovery, "STEP", 100)
    monkeypatch.setattr(recovery, "RATE", 1e-2)


@pytest.fixture(autouse=True)
def _no_handlers_left() -> Iterator[None]:
    """Remove the handlers of OpenNMT's logger, which would write to the closed streams of a test."""
    yield
    logging.getLogger("onmt").handlers.clear()
