"""Errors that the user can fix, and optional dependencies: which extra installs a missing module."""

from __future__ import annotations

import importlib
from typing import Any

# The top-level modules that each extra installs beyond the dependencies of the library (pyproject.toml).
EXTRAS = {
    "classes": ("gensim", "matplotlib", "sklearn"),
    "fast": ("numba",),
    "gguf": ("gguf",),
    "hf": ("accelerate", "huggingface_hub", "transformers"),
    "lm": ("tensorboard", "torchtext"),
    "nmt": tuple(
        "ahocorasick configargparse ctranslate2 flask nltk rapidfuzz rouge_score sacrebleu sentencepiece "
        "six subword_nmt waitress".split()
    ),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "static": ("tokenizers",),
    "recipes": ("babel", "num2words", "pandas", "sacremoses"),
    "transforms": ("fasttext", "pyonmttok", "spacy"),
    "wandb": ("wandb",),
}
_INSTALL = "pip install '.[{}]' in a clone of shared-embeddings"
# Packages that are not named like their module.
_PACKAGES = {"sklearn": "scikit-learn", "ahocorasick": "pyahocorasick"}


class UserError(ValueError):
    """Something the user can fix; the message names what was wrong, what was expected and what to do."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, truncated; the error's class name if it is empty."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:160]


def missing_module(name: str) -> str | None:
    """Return how to install a missing module, in one line; None for a module that is in no extra."""
    top = name.partition(".")[0]
    if top == "onmt":
        # It caps torch below 2.3, so no extra can install it. This project's commands replace its own.
        opennmt = "pip install --no-deps -r requirements/opennmt.txt"
        return f"OpenNMT-py is not installed: {opennmt} && {_INSTALL.format('nmt')}"
    for extra, modules in EXTRAS.items():
        if top in modules:
            package = _PACKAGES.get(top, top)
            return f"the package {package} is not installed: {_INSTALL.format(extra)}"
    return None


def require(name: str) -> Any:
    """Import an optional module; ModuleNotFoundError says how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        advice = missing_module(error.name or name)
        if advice is None:
            raise
        raise ModuleNotFoundError(advice, name=error.name) from None
