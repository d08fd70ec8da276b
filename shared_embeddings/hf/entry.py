"""The entry of ``config.json`` that describes the embeddings of a model, and inserting them into a model.

Axes: ``V`` vocabulary, ``D`` model dimension.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import nn

from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.hf.sides import InputSide, OutputSide
from shared_embeddings.registry import build

# The name of the entry and of the model's submodule that contains the embeddings.
ENTRY = "shared_embeddings"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one embedding is used in a model.

    Attributes:
        inputs: paths of input layers -> the factor by which they multiply its vectors.
        outputs: paths of output layers.
    """

    inputs: dict[str, float]
    outputs: tuple[str, ...]


def entry_of(
    embeddings: Mapping[str, SharedEmbedding], placements: Mapping[str, Placement]
) -> dict[str, Any]:
    """The entry as plain values, from which `from_entry` rebuilds the embeddings without their weights."""
    tables = {}
    for name, embedding in embeddings.items():
        placement = placements[name]
        tables[name] = {
            "method": embedding.method,
            "num_embeddings": embedding.num_embeddings,
            "embedding_dim": embedding.embedding_dim,
            "options": embedding.stored_options(),
            "inputs": dict(placement.inputs),
            "outputs": list(placement.outputs),
        }
    return {"version": VERSION, "tables": tables}


def from_entry(
    entry: Mapping[str, Any],
) -> tuple[dict[str, SharedEmbedding], dict[str, Placement]]:
    """Build embeddings without their weights, and their placements.

    Raises:
        ValueError: the entry has another version, is incomplete, or its embeddings cannot be built.
    """
    if not isinstance(entry, Mapping) or entry.get("version") != VERSION:
        found = entry.get("version") if isinstance(entry, Mapping) else entry
        raise ValueError(
            f"entry '{ENTRY}' of config.json has version {found!r}, but this program supports {VERSION}; use "
            "the program that wrote it"
        )
    embeddings, placements = {}, {}
    try:
        for name, table in entry["tables"].items():
            embeddings[name] = build(
                table["method"],
                num_embeddings=table["num_embeddings"],
                embedding_dim=table["embedding_dim"],
                **table["options"],
            )
            placements[name] = Placement(dict(table["inputs"]), tuple(table["outputs"]))
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"entry '{ENTRY}' of config.json is incomplete ({error!r}); copy it again"
        ) from error
    return embeddings, placements


def place(model: Any, embeddings: Mapping[str, SharedEmbedding], placements: Mapping[str, Placement]) -> None:
    """Insert embeddings into a transformers model and its configuration.

    Output layers keep their biases.

    Raises:
        ValueError: the model has no module at a path.
    """
    for name, embedding in embeddings.items():
        placement = placements[name]
        for path, scale in placement.inputs.items():
            _replace(model, path, InputSide(embedding, scale))
        for path in placement.outputs:
            bias = getattr(_module(model, path), "bias", None)
            _replace(model, path, OutputSide(embedding, bias))
    setattr(model, ENTRY, nn.ModuleDict(embeddings))
    setattr(model.config, ENTRY, entry_of(embeddings, placements))
    model.resize_token_embeddings = _resizing_fails


def _module(model: nn.Module, path: str) -> nn.Module:
    """The module at a path; ValueError if there is none."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise ValueError(
            f"entry '{ENTRY}' of config.json names {path}, but {type(model).__name__} has no such module; "
            "load the class of model that was compressed"
        ) from None


def _replace(model: nn.Module, path: str, new: nn.Module) -> None:
    """Replace the module at a path."""
    _module(model, path)
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, new)


def _resizing_fails(*arguments: object, **named: object) -> NoReturn:
    """Replaces `resize_token_embeddings` of a model with shared embeddings."""
    raise ValueError(
        "the vocabulary of a model with shared embeddings cannot be resized: resize the plain model, then "
        "compress it"
    )
