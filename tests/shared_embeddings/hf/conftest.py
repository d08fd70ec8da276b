"""Fixtures of all tests of Hugging Face models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


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
