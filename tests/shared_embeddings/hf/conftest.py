"""What all tests of models of Hugging Face need."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from shared_embeddings import compression_hosts


@pytest.fixture(autouse=True)
def installed_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of this source tree, whichever one is installed."""
    point = EntryPoint("hf", "shared_embeddings.hf.host:Host", "shared_embeddings.hosts")
    monkeypatch.setattr(compression_hosts, "entry_points", lambda group: [point])


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
