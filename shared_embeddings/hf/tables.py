"""Finding the word tables of a model of transformers, and every module that uses one.

Axes: ``V`` vocabulary, ``D`` model dimension.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from shared_embeddings.hf.entry import Placement

# The words whose vectors show what an input layer does with them.
_LOOKED_AT = 8


@dataclasses.dataclass(frozen=True)
class WordTable:
    """One table of a model.

    Attributes:
        name: "words" where there is one only, else after what it is for.
        weight: ``(V, D)``, the model's own parameter.
        placement: the modules that use it.
    """

    name: str
    weight: nn.Parameter
    placement: Placement


def find_tables(model: Any) -> list[WordTable]:
    """The tables of a language model: one where its input and its output are tied, else one for each.

    Raises:
        ValueError: the model is none that scores words, or uses a table in a way that an embedding cannot.
    """
    kind = type(model).__name__
    named = _layers(model)
    weights: dict[int, tuple[str, nn.Parameter]] = {}
    for name, layer in named:
        weight = getattr(layer, "weight", None)
        if not isinstance(layer, (nn.Embedding, nn.Linear)) or not isinstance(weight, nn.Parameter):
            raise ValueError(
                f"{kind}: its {name} layer is a {type(layer).__name__}, which no embedding can stand for; "
                "take a model with nn.Embedding and nn.Linear"
            )
        weights.setdefault(id(weight), (name, weight))
    found = []
    for name, weight in weights.values():
        table = WordTable("words" if len(weights) == 1 else name, weight, _uses(model, weight))
        _check_width(kind, table)
        found.append(table)
    return found


def _layers(model: Any) -> list[tuple[str, Any]]:
    """The layers of a model that take or score words, named after what they are for.

    Raises:
        ValueError: it has none, or takes more than text.
    """
    kind, config = type(model).__name__, model.config
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{kind}: its weights are quantised; compress the model that they were made from")
    other = [name for name in ("vision_config", "audio_config") if getattr(config, name, None) is not None]
    if other:
        raise ValueError(f"{kind}: takes more than text ({other[0]}); take a model of text alone")
    try:
        layers = [("input", model.get_input_embeddings()), ("output", model.get_output_embeddings())]
        if getattr(config, "is_encoder_decoder", False):
            layers.insert(1, ("decoder", model.get_decoder().get_input_embeddings()))
    except (NotImplementedError, AttributeError) as error:
        raise ValueError(
            f"{kind}: does not say where its word embeddings are; it is not supported"
        ) from error
    if layers[-1][1] is None:
        raise ValueError(
            f"{kind}: has no output embeddings; take a model that scores words, not a classifier"
        )
    return layers


@torch.no_grad()
def check_scoring(model: Any) -> None:
    """Raise ValueError where the model computes its scores otherwise than by calling its output layer.

    MobileBERT and newer DeBERTa multiply with its table themselves, which would be none.
    """
    layers = _layers(model)
    kind, output = type(model).__name__, layers[-1][1]
    calls: list[None] = []
    hook = output.register_forward_hook(lambda *_: calls.append(None))
    ids = torch.arange(min(_LOOKED_AT, *(len(layer.weight) for _, layer in layers)))[None]
    given = {"input_ids": ids, **({"decoder_input_ids": ids} if len(layers) == 3 else {})}
    try:
        scores = model(**given).logits
    except Exception:  # one that takes more than ids cannot be looked at so
        return
    finally:
        hook.remove()
    if not calls or scores.shape[-1] != len(output.weight):
        raise ValueError(
            f"{kind}: computes its scores by other means than its output layer ({type(output).__name__} "
            f"{tuple(output.weight.shape)}), where no embedding can stand; it is not supported"
        )


def _uses(model: nn.Module, weight: nn.Parameter) -> Placement:
    """Every module that has a parameter, under every path.

    Raises:
        ValueError: one of them is no plain layer.
    """
    inputs: dict[str, float] = {}
    outputs = []
    for path, module in model.named_modules(remove_duplicate=False):
        if not any(parameter is weight for parameter in module.parameters(recurse=False)):
            continue
        if isinstance(module, nn.Embedding):
            inputs[path] = _scale(path, module)
        elif type(module) is nn.Linear:
            outputs.append(path)
        else:
            raise ValueError(
                f"{type(model).__name__}: {path} is a {type(module).__name__} with the table of the words, "
                "which no embedding can stand for"
            )
    return Placement(inputs, tuple(outputs))


@torch.no_grad()
def _scale(path: str, layer: nn.Embedding) -> float:
    """What an input layer multiplies the rows of its table by; ValueError where it does something else."""
    given = getattr(layer, "embed_scale", 1.0)
    # Rounded as the layer rounds it, which is to the type of the table where it is a tensor.
    scale = float(given.to(layer.weight.dtype)) if isinstance(given, Tensor) else float(given)
    ids = torch.arange(min(_LOOKED_AT, layer.num_embeddings))
    if layer.max_norm is not None or not torch.allclose(layer(ids), layer.weight[ids] * scale, rtol=1e-2):
        raise ValueError(
            f"{path}: this {type(layer).__name__} does more than look rows up, so that no embedding can "
            "stand for it"
        )
    return scale


def _check_width(kind: str, table: WordTable) -> None:
    """Raise ValueError unless every use has the words and dimensions of the table."""
    if table.weight.dim() != 2 or not table.weight.is_floating_point():
        raise ValueError(
            f"{kind}: its table is {tuple(table.weight.shape)} of {table.weight.dtype}, no numbers"
        )
