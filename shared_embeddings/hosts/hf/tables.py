"""Find the word tables of a transformers model and the modules that use them.

Axes: ``V`` vocabulary, ``D`` model dimension.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from shared_embeddings.hosts.hf.entry import Placement
from shared_embeddings.utils.errors import UserError

# The number of words with which layers are tested.
_TESTED_WORDS = 8


@dataclasses.dataclass(frozen=True)
class WordTable:
    """One table of a model.

    Attributes:
        name: "words" for a single table, else "input_words", "decoder_words" or "output_words", by its layer.
            Layers of models have no such names, by which PEFT chooses those that it adapts.
        weight: ``(V, D)``, its values.
        placement: the modules that use it.
    """

    name: str
    weight: Tensor
    placement: Placement

    @property
    def path(self) -> str:
        """One of its names in the state of the model."""
        return f"{next(iter((*self.placement.inputs, *self.placement.outputs)))}.weight"


def find_tables(model: Any) -> list[WordTable]:
    """The tables of a model: one if input and output are tied or nothing scores words, else one for each.

    Raises:
        UserError: the model uses a table in an unsupported way.
    """
    kind = type(model).__name__
    named = _layers(model)
    weights: dict[int, tuple[str, nn.Parameter]] = {}
    for name, layer in named:
        weight = getattr(layer, "weight", None)
        if not isinstance(layer, (nn.Embedding, nn.Linear)) or not isinstance(weight, nn.Parameter):
            raise UserError(
                f"{kind}: its {name} layer is a {type(layer).__name__}, which cannot be replaced; use a "
                "model with nn.Embedding and nn.Linear"
            )
        weights.setdefault(id(weight), (name, weight))
    found = []
    for name, weight in weights.values():
        name = "words" if len(weights) == 1 else f"{name}_words"
        table = WordTable(name, weight, _uses(model, weight))
        _check_matrix(kind, table)
        found.append(table)
    return found


def _layers(model: Any) -> list[tuple[str, Any]]:
    """The input and output layers of a model, by name; encoders and classifiers have no output for words.

    Raises:
        UserError: it is quantized, or takes more than text.
    """
    kind, config = type(model).__name__, model.config
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(f"{kind}: its weights are quantized; compress the original model")
    other = [name for name in ("vision_config", "audio_config") if getattr(config, name, None) is not None]
    if other:
        raise UserError(f"{kind}: takes more than text ({other[0]}); use a text-only model")
    try:
        layers = [("input", model.get_input_embeddings())]
        if getattr(config, "is_encoder_decoder", False):
            layers.append(("decoder", model.get_decoder().get_input_embeddings()))
        if (output := model.get_output_embeddings()) is not None:
            layers.append(("output", output))
    except (NotImplementedError, AttributeError) as error:
        raise UserError(
            f"{kind}: does not define where its word embeddings are; it is not supported"
        ) from error
    return layers


@torch.no_grad()
def check_scoring(model: Any) -> bool:
    """Raise UserError if the model computes its scores without calling its output layer.

    MobileBERT and newer DeBERTa multiply by its table directly, which compression removes.

    Args:
        model: a transformers model, possibly on the meta device.

    Returns:
        Whether this could be tested.
    """
    layers = _layers(model)
    kind, (name, output) = type(model).__name__, layers[-1]
    if name != "output":
        return True
    calls: list[None] = []
    hook = output.register_forward_hook(lambda *_: calls.append(None))
    words = min(_TESTED_WORDS, *(len(layer.weight) for _, layer in layers))
    ids = torch.arange(words, device=output.weight.device)[None]
    given = {"input_ids": ids, **({"decoder_input_ids": ids} if len(layers) == 3 else {})}
    try:
        scores = model(**given).logits
    except Exception:  # models that take more than ids cannot be tested
        return False
    finally:
        hook.remove()
    if not calls or scores.shape[-1] != len(output.weight):
        raise UserError(
            f"{kind}: computes its scores without calling its output layer ({type(output).__name__} "
            f"{tuple(output.weight.shape)}), so that it cannot be replaced; it is not supported"
        )
    return True


def _uses(model: Any, weight: nn.Parameter) -> Placement:
    """Every module that has a parameter, by every path.

    Raises:
        UserError: one of them is neither an embedding nor a linear layer.
    """
    inputs: dict[str, float] = {}
    outputs = []
    for path, module in model.named_modules(remove_duplicate=False):
        if not any(parameter is weight for parameter in module.parameters(recurse=False)):
            continue
        if isinstance(module, nn.Embedding):
            inputs[path] = _scale(path, _with_few_values(model, module) if weight.is_meta else module)
        elif type(module) is nn.Linear:
            outputs.append(path)
        else:
            raise UserError(
                f"{type(model).__name__}: {path} is a {type(module).__name__} with the word table, which "
                "cannot be replaced"
            )
    return Placement(inputs, tuple(outputs))


@torch.no_grad()
def _with_few_values(model: Any, layer: nn.Embedding) -> nn.Embedding:
    """An input layer like one on the meta device, with few rows that the model initializes."""
    found = copy.deepcopy(layer)
    found.num_embeddings, found.padding_idx = min(_TESTED_WORDS, layer.num_embeddings), None
    found.weight = nn.Parameter(layer.weight[: found.num_embeddings])
    found.to_empty(device="cpu")
    model._init_weights(found)
    return found


@torch.no_grad()
def _scale(path: str, layer: nn.Embedding) -> float:
    """The factor by which an input layer multiplies rows; UserError if it does anything else."""
    given = getattr(layer, "embed_scale", 1.0)
    # Rounded like in the layer: to the dtype of the table if the factor is a tensor.
    scale = float(given.to(layer.weight.dtype)) if isinstance(given, Tensor) else float(given)
    ids = torch.arange(min(_TESTED_WORDS, layer.num_embeddings))
    if layer.max_norm is not None or not torch.allclose(layer(ids), layer.weight[ids] * scale, rtol=1e-2):
        raise UserError(
            f"{path}: this {type(layer).__name__} does more than look up rows, so that it cannot be replaced"
        )
    return scale


def _check_matrix(kind: str, table: WordTable) -> None:
    """Raise UserError unless the table is a floating-point matrix."""
    if table.weight.dim() != 2 or not table.weight.is_floating_point():
        raise UserError(
            f"{kind}: its table is {tuple(table.weight.shape)} of {table.weight.dtype}, not a "
            "floating-point matrix"
        )
