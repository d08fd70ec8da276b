"""The language models by kind, and how one is built. Each registers itself; no list is kept by hand."""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

import shared_embeddings as se
from lm.models.interface import REGISTERED, LanguageModel, Output, State
from shared_embeddings.errors import UserError
from shared_embeddings.options import parse_options

__all__ = ["LanguageModel", "Output", "State", "build", "kinds", "options_class"]

# What the model says of its embedding: the vocabulary and a model option set these.
_SET_BY_THE_MODEL = ("num_embeddings", "embedding_dim", "padding_idx", "words")


def kinds() -> list[str]:
    """The names of all kinds of models, sorted."""
    _discover()
    return sorted(REGISTERED)


def options_class(kind: str) -> type:
    """The options dataclass of a kind: its fields are the options, their defaults and types.

    Raises:
        UserError: there is no such kind.
    """
    return _model_class(kind).options_class


def build(
    kind: str, words: Sequence[str], embedding: Mapping[str, Any], options: Mapping[str, Any]
) -> LanguageModel:
    """Build a language model, its parameters drawn from torch's random numbers.

    Args:
        kind: one of `kinds()`.
        words: the V words in the order of their ids.
        embedding: the `method` and its options, as in ``shared_embeddings.build``.
        options: the options of the kind, as in `options_class(kind)`.

    Raises:
        UserError: an unknown kind, or an embedding that a language model cannot use.
        shared_embeddings.OptionError: an unknown method or option, a wrong type, an impossible size.
    """
    model_class = _model_class(kind)
    parsed: Any = parse_options(kind, model_class.options_class, options)
    model = model_class(_build_embedding(words, embedding, parsed.embedding_dim), parsed)
    model.reset_parameters()
    return model


def _build_embedding(
    words: Sequence[str], settings: Mapping[str, Any], embedding_dim: int
) -> se.SharedEmbedding:
    """The embedding of `words` in `embedding_dim` dimensions, with an output side."""
    method = settings.get("method")
    if not isinstance(method, str):
        raise UserError(
            f"embedding: 'method' is {method!r}, but it must be one of {', '.join(se.methods())}; name one"
        )
    options = {name: value for name, value in settings.items() if name != "method"}
    for name in options:
        if not isinstance(name, str):
            raise UserError(f"embedding: {name!r} is no name of an option; write 'name: value'")
    for name in _SET_BY_THE_MODEL:
        if name in options:
            raise UserError(
                f"embedding: '{name}' follows from the vocabulary and the model; leave it out of 'embedding'"
            )
    built = se.build(method, num_embeddings=len(words), embedding_dim=embedding_dim, words=words, **options)
    if not built.has_output:
        raise UserError(
            f"embedding: this {method} embedding has no output side, which a language model predicts words "
            "with; leave 'output' out or change it"
        )
    return built


def _model_class(kind: str) -> type[LanguageModel]:
    """The class registered as `kind`, or `UserError`."""
    names = kinds()
    if kind not in REGISTERED:
        close = difflib.get_close_matches(str(kind), names, n=1)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        raise UserError(f"unknown model {kind!r}.{hint} Models: {', '.join(names)}")
    return REGISTERED[kind]


@functools.cache
def _discover() -> None:
    """Import every module of this package; each registers what it holds."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
