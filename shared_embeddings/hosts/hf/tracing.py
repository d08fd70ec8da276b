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

from shared_embeddings.export.graph import Example, OnnxBody, StandIn, quiet
from shared_embeddings.hosts.hf.entry import ENTRY, InputSide, OutputSide
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.extras import require
from shared_embeddings.utils.files import first_line

# Sizes of the batch and of the texts with which a model is traced; no two axes have the same size.
_BATCH, _PAST, _NEW = 2, 5, 3
# Words of an example.
_EXAMPLE = 12


@torch.no_grad()
def traced(model: Any, checkpoint_bytes: int) -> OnnxBody:
    """The graph of a compressed model on the CPU, which becomes float32 and cannot be used afterwards.

    Args:
        model: the model.
        checkpoint_bytes: see `OnnxBody`.

    Raises:
        ModuleNotFoundError: onnxscript or the exporter of transformers is not installed.
        UserError: the model cannot be traced.
    """
    require("onnxscript")
    exporters = require("transformers.exporters.exporter_onnx")
    model.float().eval()
    embeddings = dict(getattr(model, ENTRY).items())
    examples = _examples(model)
    stand_ins = {id(embedding): StandIn(name, embedding) for name, embedding in embeddings.items()}
    for side in model.modules():
        if isinstance(side, (InputSide, OutputSide)):
            object.__setattr__(side, "embedding", stand_ins[id(side.embedding)])
    sample, settings = _sample(model), exporters.OnnxConfig(dynamic=True)
    try:
        with quiet():
            found = exporters.OnnxExporter().export(model, sample, config=settings)
    except Exception as error:  # each operator fails in its own way
        raise UserError(
            f"{type(model).__name__}: cannot be traced ({first_line(error)}); use --format onnx-embeddings"
        ) from error
    program = require("onnx_ir").to_proto(found.program)
    _rename(program.graph, examples[-1])
    return OnnxBody(program, embeddings, examples, checkpoint_bytes)


def _has_cache(model: Any) -> bool:
    """Whether a model reads a text token by token."""
    return bool(model.can_generate()) and not model.config.is_encoder_decoder


def _inputs(model: Any, ids: Tensor, past: int = 0) -> dict[str, Any]:
    """The inputs of a model for ids ``(B, T)`` after earlier ones."""
    inputs = {"input_ids": ids, "attention_mask": ids.new_ones(len(ids), past + ids.size(1))}
    if getattr(model.config, "type_vocab_size", 1) > 1:
        inputs["token_type_ids"] = torch.zeros_like(ids)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :-1]
    return inputs


def _sample(model: Any) -> dict[str, Any]:
    """The inputs with which a model is traced."""
    ids = torch.arange(_BATCH * (_PAST + _NEW)).view(_BATCH, -1) % model.config.vocab_size
    if not _has_cache(model):
        more = {"use_cache": False} if model.config.is_encoder_decoder else {}
        return {**_inputs(model, ids), **more}
    past = _empty_cache()
    for layer, (keys, values) in enumerate(_heads(model)):
        shape = _BATCH, keys.size(1), _PAST
        past.update(torch.zeros(*shape, keys.size(3)), torch.zeros(*shape, values.size(3)), layer)
    return {**_inputs(model, ids[:, _PAST:], _PAST), "past_key_values": past, "use_cache": True}


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


def _examples(model: Any) -> list[Example]:
    """What a model computes in float32: for some texts, then for one text, or its last token with a cache."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (3, _EXAMPLE), generator=generator)
    texts = [_example(model, _inputs(model, ids))]
    one = _example(model, _inputs(model, ids[:1]))
    if not _has_cache(model):
        return [*texts, one]
    last = {name: values[:, -1:] if name == "input_ids" else values for name, values in one.inputs.items()}
    if "token_type_ids" in last:
        last["token_type_ids"] = last["token_type_ids"][:, -1:]
    past = {
        name.replace("present", "past_key_values"): values[:, :, :-1]
        for name, values in one.outputs.items()
        if name.startswith("present")
    }
    return [*texts, Example({**last, **past}, {**one.outputs, "logits": one.outputs["logits"][:, -1:]})]


def _example(model: Any, inputs: dict[str, Any]) -> Example:
    """An example without earlier tokens."""
    arrays = {name: values.numpy() for name, values in inputs.items()}
    if not _has_cache(model):
        found = model(**inputs, **({"use_cache": False} if model.config.is_encoder_decoder else {}))
        names = ("logits", "last_hidden_state", "pooler_output")
        return Example(arrays, {name: found[name].numpy() for name in names if found.get(name) is not None})
    found = model(**inputs, past_key_values=_empty_cache(), use_cache=True)
    outputs = {"logits": found.logits.numpy()}
    for number, (keys, values) in enumerate(_heads(model)):
        layer = found.past_key_values.layers[number]
        for name, empty, tensor in (("key", keys, layer.keys), ("value", values, layer.values)):
            shape = len(inputs["input_ids"]), empty.size(1), 0, empty.size(3)
            arrays[f"past_key_values.{number}.{name}"] = np.zeros(shape, np.float32)
            outputs[f"present.{number}.{name}"] = tensor.numpy()
    return Example(arrays, outputs)


def _rename(graph: Any, example: Example) -> None:
    """Give the inputs, the outputs and their axes the names that Optimum gives them, or their sizes."""
    new = {}
    for prefix, values in (("past_key_values", graph.input), ("present", graph.output)):
        for value in values:
            found = re.fullmatch(r"(?:\w+\.)?past_key_values\.layers\.(\d+)\.(key|value)s", value.name)
            if found:
                new[value.name] = f"{prefix}.{found[1]}.{found[2]}"
                value.name = new[value.name]
    for node in graph.node:
        node.input[:] = [new.get(name, name) for name in node.input]
        node.output[:] = [new.get(name, name) for name in node.output]
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
