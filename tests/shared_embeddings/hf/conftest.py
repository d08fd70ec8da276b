"""Fixtures of all tests of Hugging Face models."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from shared_embeddings.compress import host as host_module


@pytest.fixture(autouse=True)
def installed_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter of this source tree, whatever is installed."""
    point = EntryPoint("hf", "shared_embeddings.hosts.hf.adapter:Adapter", host_module.GROUP)
    monkeypatch.setattr(host_module, "entry_points", lambda group: [point])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Sentences from a small vocabulary."""
    from tests.shared_embeddings.hf.models import sentences

    path = tmp_path / "text"
    path.write_text("\n".join(sentences(30, 1)) + "\n", encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No progress bars and reports of transformers."""
    logging = pytest.importorskip("transformers").utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.set_verbosity(before)
    logging.enable_progress_bar()
