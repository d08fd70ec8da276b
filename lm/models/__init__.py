"""The language models, one file for each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import shared_embeddings as se
from lm.models.interface import LanguageModel
from lm.models.transformer_xl import TransformerXL, TransformerXLOptions
from shared_embeddings.options import parse_options


def kinds() -> list[str]:
    """The kinds of models there are."""
    return ["transformer_xl"]


def options_class(kind: str) -> type:
    """The options of a kind."""
    return {"transformer_xl": TransformerXLOptions}[kind]


def build(
    kind: str, words: Sequence[str], embedding: Mapping[str, Any], options: Mapping[str, Any]
) -> LanguageModel:
    """A model of `kind` over `words`, its parameters drawn."""
    resolved = parse_options(kind, TransformerXLOptions, options)
    given = dict(embedding)
    if given["method"] == "define":
        given.setdefault("output", "map")
    built = se.build(
        given.pop("method"),
        num_embeddings=len(words),
        embedding_dim=resolved.embedding_dim,
        words=words,
        **given,
    )
    model = TransformerXL(built, resolved)
    model.reset_parameters()
    return model
