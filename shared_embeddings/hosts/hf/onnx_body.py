"""Trace a transformers model for ONNX with the exporter of transformers.

Encoders take ``input_ids`` and ``attention_mask``; decoders also the keys and values of earlier tokens, and
return those of all tokens, under the names that Optimum gives them; encoder-decoders take
``decoder_input_ids`` and have no cache.

Axes: ``B`` batch, ``T`` time.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared_embeddings.export.onnx import Example, OnnxBody, StandIn, quiet, rename_values
from shared_embeddings.hosts.hf.word_layers import ENTRY, InputSide, OutputSide
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.extras import require
from shared_embeddings.utils.files import first_line

# Sizes of the batch and of the texts with which a model is traced; no two axes have the same size.
_BATCH, _PAST, _NEW = 2, 5, 3
# Words of an example.
_EXAMPLE = 12


@torch.no_grad()
def trace(model: Any, checkpoint_bytes: int) -> OnnxBody:
    """The graph of a compressed model on the CPU, which becomes float32 and cannot be used afterwards.

    Raises:
        ModuleNotFoundError: onnxscript or the exporter of transformers is not installed.
        UserError: the model cannot be traced.
    """
    require("onnxscript")
    exporters = require("transformers.exporters.exporter_onnx")
    model.float().eval()
    embeddings = dict(getattr(model, ENTRY).items())
    has_cache = model.can_generate() and not model.config.is_encoder_decoder
    examples = _cached_examples(model) if has_cache else _plain_examples(model)
    ids = torch.arange(_BATCH * (_PAST + _NEW)).view(_BATCH, -1) % model.config.vocab_size
    sample = _inputs(model, ids)
    if has_cache:
        past = _empty_cache()
        for layer, (keys, values) in enumerate(_heads(model)):
            shape = _BATCH, keys.size(1), _PAST
            past.update(torch.zeros(*shape, keys.size(3)), torch.zeros(*shape, values.size(3)), layer)
        sample = {**_inputs(model, ids[:, _PAST:], _PAST), "past_key_values": past, "use_cache": True}
    stand_ins = {id(embedding): StandIn(name, embedding) for name, embedding in embeddings.items()}
    for side in model.modules():
        if isinstance(side, (InputSide, OutputSide)):
            object.__setattr__(side, "embedding", stand_ins[id(side.embedding)])
    try:
        with quiet():
            settings = exporters.OnnxConfig(dynamic=True)
            found = exporters.OnnxExporter().export(model, sample, config=settings)
    except Exception as error:  # each operator fails in its own way
        raise UserError(
            f"{type(model).__name__}: cannot be traced ({first_line(error)}); use --format onnx-embeddings"
        ) from error
    program = require("onnx_ir").to_proto(found.program)
    _rename(program.graph, examples[-1])
    return OnnxBody(program, embeddings, examples, checkpoint_bytes)


def _inputs(model: Any, ids: Tensor, past: int = 0) -> dict[str, Any]:
    """The inputs of a model for ids ``(B, T)`` after earlier ones."""
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": ids.new_ones(len(ids), past + ids.size(1))}
    if getattr(model.config, "type_vocab_size", 1) > 1:
        inputs["token_type_ids"] = torch.zeros_like(ids)
    if model.config.is_encoder_decoder:
        inputs.update(decoder_input_ids=ids[:, :-1], use_cache=False)
    return inputs


def _empty_cache() -> Any:
    """A cache that keeps every token of every layer; models with sliding windows mask those outside."""
    return require("transformers").DynamicCache()


def _heads(model: Any) -> list[tuple[Tensor, Tensor]]:
    """The keys and values ``(1, heads, 1, D)`` of each layer for one token.

    Raises:
        UserError: the model has another memory of earlier tokens.
    """
    cache = model(torch.zeros(1, 1, dtype=torch.long), use_cache=True).past_key_values
    layers = getattr(cache, "layers", [None])
    if any(getattr(layer, "keys", None) is None for layer in layers):
        raise UserError(
            f"{type(model).__name__}: ONNX has keys and values of earlier tokens only, but this model has "
            "another state; use --format onnx-embeddings"
        )
    return [(layer.keys, layer.values) for layer in layers]


def _texts(model: Any) -> list[Tensor]:
    """The ids ``(B, T)`` of three texts, and of the first of them."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (3, _EXAMPLE), generator=generator)
    return [ids, ids[:1]]


def _arrays(tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


def _plain_examples(model: Any) -> list[Example]:
    """What a model without a cache computes in float32 for some texts, then for one text."""
    examples = []
    for ids in _texts(model):
        inputs = _inputs(model, ids)
        found = model(**inputs)
        names = ("logits", "last_hidden_state", "pooler_output")
        outputs = {name: found[name] for name in names if found.get(name) is not None}
        examples.append(Example(_arrays(inputs), _arrays(outputs)))
    return examples


def _cached_examples(model: Any) -> list[Example]:
    """What a model with a cache computes in float32 for some texts, then for the last token of one text."""
    examples, heads = [], _heads(model)
    for ids in _texts(model):
        inputs = _inputs(model, ids)
        found = model(**inputs, past_key_values=_empty_cache(), use_cache=True)
        outputs = {"logits": found.logits}
        for number, ((keys, values), layer) in enumerate(zip(heads, found.past_key_values.layers)):
            for name, empty, tensor in (("key", keys, layer.keys), ("value", values, layer.values)):
                shape = len(ids), empty.size(1), 0, empty.size(3)
                inputs[f"past_key_values.{number}.{name}"] = torch.zeros(shape)
                outputs[f"present.{number}.{name}"] = tensor
        examples.append(Example(_arrays(inputs), _arrays(outputs)))
    texts, one = examples
    last = dict(one.inputs)
    for name in one.inputs:
        if name in ("input_ids", "token_type_ids"):
            last[name] = one.inputs[name][:, -1:]
        elif name.startswith("past_key_values"):
            last[name] = one.outputs[name.replace("past_key_values", "present")][:, :, :-1]
    return [texts, Example(last, {**one.outputs, "logits": one.outputs["logits"][:, -1:]})]


def _rename(graph: Any, example: Example) -> None:
    """Give the inputs, the outputs and their axes the names that Optimum gives them, or their sizes."""
    new = {}
    for prefix, values in (("past_key_values", graph.input), ("present", graph.output)):
        for value in values:
            found = re.fullmatch(r"(?:\w+\.)?past_key_values\.layers\.(\d+)\.(key|value)s", value.name)
            if found:
                new[value.name] = f"{prefix}.{found[1]}.{found[2]}"
                value.name = new[value.name]
    rename_values(graph, new)
    names = {"input_ids": "sequence", "token_type_ids": "sequence", "decoder_input_ids": "decoder_sequence"}
    names["attention_mask"] = "total" if new else "sequence"
    for value in graph.input:
        first, second, *sizes = value.type.tensor_type.shape.dim
        first.dim_param = "batch"
        if value.name in names:
            second.dim_param = names[value.name]
            continue
        _, heads, _, width = example.inputs[value.name].shape
        second.dim_value, sizes[0].dim_param, sizes[1].dim_value = heads, "past", width
    # Their axes follow from those of the inputs.
    for value in graph.output:
        value.type.tensor_type.ClearField("shape")
