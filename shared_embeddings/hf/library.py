"""The library transformers, which only models of Hugging Face need."""

from __future__ import annotations

import importlib
from typing import Any


def transformers() -> Any:
    """The imported library.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            f"models of Hugging Face need the library transformers ({error}): "
            'pip install "shared-embeddings[hf]"'
        ) from error
