"""Import transformers, which only Hugging Face models require."""

from __future__ import annotations

import importlib
from typing import Any


def transformers() -> Any:
    """Import the library.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            f"Hugging Face models require the library transformers ({error}): "
            'pip install "shared-embeddings[hf]"'
        ) from error
