"""Language models by name; the modules of this package register their models."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

import shared_embeddings as se
from lm.models.interface import REGISTERED, LanguageModel, Output, State
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import check_known, parse_options

__all__ = ["LanguageModel", "Output", "State", "build", "kinds", "options_class"]

# Embedding options that follow from the vocabulary and the model.
_SET_BY_THE_MODEL = ("num_embeddings", "embedding_dim", "padding_idx", "words")


def kinds() -> list[str]:
    """Sorted names of all models."""
    _discover()
    return sorted(REGISTERED)


def options_class(kind: str) -> type:
    """The options dataclass of a model.

    Raises:
        UserError: there is no such model.
    """
    return _model_class(kind).options_class


def build(
    kind: str, words: Sequence[str], embedding: Mapping[str, Any], options: Mapping[str, Any]
) -> LanguageModel:
    """Build and initialize a language model.

    Args:
        kind: one of `kinds()`.
        words: the V words in the order of their ids.
        embedding: `method` and options for ``shared_embeddings.build``.
        options: fields of `options_class(kind)`.

    Raises:
        UserError: the model is unknown, or the embedding cannot be used by a language model.
        shared_embeddings.OptionError: the method or an option is unknown, or a value is invalid.
    """
    model_class = _model_class(kind)
    parsed: Any = parse_options(kind, model_class.options_class, options)
    model = model_class(_build_embedding(words, embedding, parsed.embedding_dim), parsed)
    model.reset_parameters()
    return model


def _build_embedding(
    words: Sequence[str], settings: Mapping[str, Any], embedding_dim: int
) -> se.SharedEmbedding:
    """Build the embedding, which must have an output side."""
    method = settings.get("method")
    if not isinstance(method, str):
        raise UserError(f"embedding: 'method' is {method!r}, but it must be one of {', '.join(se.methods())}")
    options = {name: value for name, value in settings.items() if name != "method"}
    for name in options:
        if not isinstance(name, str):
            raise UserError(f"embedding: {name!r} is not an option name; write 'name: value'")
    for name in _SET_BY_THE_MODEL:
        if name in options:
            raise UserError(
                f"embedding: '{name}' follows from the vocabulary and the model; remove it from 'embedding'"
            )
    built = se.build(method, num_embeddings=len(words), embedding_dim=embedding_dim, words=words, **options)
    if not built.has_output:
        raise UserError(
            f"embedding: this {method} embedding has no output side, which language models need; remove or "
            "change 'output'"
        )
    return built


def _model_class(kind: str) -> type[LanguageModel]:
    """The class registered as `kind`; raises `UserError` if there is none."""
    check_known("model", kind, kinds())
    return REGISTERED[kind]


@functools.cache
def _discover() -> None:
    """Import all modules of this package so that they register their models."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
