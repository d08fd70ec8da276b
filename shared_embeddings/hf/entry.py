"""The entry of ``config.json`` that describes the embeddings of a model, and inserting them into a model.

Axes: ``V`` vocabulary, ``D`` model dimension.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import nn

from shared_embeddings.checkpoints.storage import HEADER, hold
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.hf.sides import InputSide, OutputSide
from shared_embeddings.registry import build

# The name of the model's submodule that contains the embeddings, and of the quantizer that loads them.
ENTRY = "shared_embeddings"
VERSION = 1
# Where the entry is in config.json: transformers looks there for the name of a quantizer.
KEY = "quantization_config"


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
    return {"quant_method": ENTRY, "version": VERSION, "tables": tables}


def find_entry(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The entry in the content of ``config.json``; None for a plain model, or one of another quantizer."""
    entry = settings.get(KEY)
    return entry if isinstance(entry, dict) and entry.get("quant_method") == ENTRY else None


def from_entry(
    entry: Mapping[str, Any],
) -> tuple[dict[str, SharedEmbedding], dict[str, Placement]]:
    """Build embeddings without their weights, and their placements.

    Raises:
        ValueError: the entry has another version, is incomplete, or its embeddings cannot be built.
    """
    if entry.get("version") != VERSION:
        raise ValueError(
            f"entry '{KEY}' of config.json has version {entry.get('version')!r}, but this program supports "
            f"{VERSION}; use the program that wrote it"
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
        raise ValueError(f"entry '{KEY}' of config.json is incomplete ({error!r}); copy it again") from error
    return embeddings, placements


def place(model: Any, embeddings: Mapping[str, SharedEmbedding], placements: Mapping[str, Placement]) -> None:
    """Insert embeddings into a transformers model and its configuration.

    Output layers keep their biases.
    """
    placeholders: set[str] = set()
    for name, embedding in embeddings.items():
        placement = placements[name]
        placeholders.update(f"{path}.weight" for path in (*placement.inputs, *placement.outputs))
        for path, scale in placement.inputs.items():
            _replace(model, path, InputSide(embedding, scale))
        for path in placement.outputs:
            bias = getattr(model.get_submodule(path), "bias", None)
            _replace(model, path, OutputSide(embedding, bias))
    # accelerate takes tied tensors without memory for any tensor that it has offloaded.
    model.all_tied_weights_keys = {
        name: tied for name, tied in model.all_tied_weights_keys.items() if name not in placeholders
    }
    setattr(model, ENTRY, nn.ModuleDict(embeddings))
    setattr(model.config, KEY, entry_of(embeddings, placements))
    model.resize_token_embeddings = _resizing_fails
    model.register_load_state_dict_pre_hook(_hold_packed)


def placements_in(model: Any, placements: Mapping[str, Placement]) -> dict[str, Placement]:
    """The placements in a model of the same architecture, but maybe for another task.

    A task changes the prefix of paths and the output layers. Embeddings that the model does not use are
    left out.

    Raises:
        ValueError: the model has other word embeddings, or an output layer that was not compressed.
    """
    found = {}
    for name, placement in placements.items():
        inputs = {_path_in(model, path): scale for path, scale in placement.inputs.items()}
        outputs = {_path_in(model, path) for path in placement.outputs}
        here = Placement(
            {path: scale for path, scale in inputs.items() if path}, tuple(filter(None, outputs))
        )
        if here.inputs or here.outputs:
            found[name] = here
    replaced = {path for one in found.values() for path in (*one.inputs, *one.outputs)}
    modules = {id(model.get_submodule(path)) for path in replaced}
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if layer is not None and id(layer) not in modules:
            raise ValueError(
                f"entry '{KEY}' of config.json does not describe the {type(layer).__name__} layer for words "
                f"of {type(model).__name__}; load the class of model that was compressed"
            )
    return found


def _path_in(model: Any, path: str) -> str | None:
    """The path of a module in a model whose paths may have a prefix more or less; None if it has none."""
    prefix = f"{model.base_model_prefix}."
    modules = dict(model.named_modules(remove_duplicate=False))
    return next((one for one in (path, path.removeprefix(prefix), prefix + path) if one in modules), None)


def _replace(model: nn.Module, path: str, new: nn.Module) -> None:
    """Replace the module at a path."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, new)


def _hold_packed(model: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Prepare the packed content of a file for ``load_state_dict``, as Trainer calls it to resume."""
    if not prefix and HEADER in state:
        held = hold(state)
        state.clear()
        state.update(held)


def _resizing_fails(*arguments: object, **named: object) -> NoReturn:
    """Replaces `resize_token_embeddings` of a model with shared embeddings."""
    raise ValueError(
        "the vocabulary of a model with shared embeddings cannot be resized: resize the plain model, then "
        "compress it"
    )
