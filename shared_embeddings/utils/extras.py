"""Optional dependencies: which extra of this package installs a module, and the advice if it is missing."""

from __future__ import annotations

import importlib
from typing import Any

# The top-level modules that each extra installs beyond the dependencies of the library (pyproject.toml).
EXTRAS = {
    "classes": ("gensim", "matplotlib", "sklearn"),
    "fast": ("numba",),
    "gguf": ("gguf",),
    "hf": ("accelerate", "huggingface_hub", "tokenizers", "transformers"),
    "lm": ("tensorboard", "torchtext"),
    "nmt": tuple(
        "ahocorasick configargparse ctranslate2 flask nltk rapidfuzz rouge_score sacrebleu sentencepiece "
        "six subword_nmt waitress".split()
    ),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "recipes": ("babel", "num2words", "pandas", "sacremoses"),
    "transforms": ("fasttext", "pyonmttok", "spacy"),
    "wandb": ("wandb",),
}
# Packages that are not named like their module.
_PACKAGES = {
    "sklearn": "scikit-learn",
    "ahocorasick": "pyahocorasick",
}
# OpenNMT-py caps torch below 2.3, so no extra can install it. It has commands of the same names, which the
# last step replaces.
OPENNMT = (
    "pip install 'shared-embeddings[nmt]' && pip install --no-deps OpenNMT-py==3.5.1 && "
    "pip install --no-deps --force-reinstall shared-embeddings"
)


def missing_module(name: str) -> str | None:
    """How to install a missing module, in one line; None for a module that is in no extra.

    Args:
        name: the module, as in `ModuleNotFoundError.name`.
    """
    top = name.partition(".")[0]
    if top == "onmt":
        return f"OpenNMT-py is not installed: {OPENNMT}"
    found = next((extra for extra, modules in EXTRAS.items() if top in modules), None)
    package = _PACKAGES.get(top, top)
    return found and f"the package {package} is not installed: pip install 'shared-embeddings[{found}]'"


def require(name: str) -> Any:
    """Import an optional module; ModuleNotFoundError says how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        advice = missing_module(error.name or name)
        if advice is None:
            raise
        raise ModuleNotFoundError(advice, name=error.name) from None
