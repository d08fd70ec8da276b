"""Trace a language model for ONNX.

Inputs: ``ids`` ``(B, T)`` and ``state.N``; outputs: ``logits`` ``(B, T, V)`` and ``next_state.N``, the state
for the next ids. An LSTM starts with zeros, Transformer-XL with memories of length 0.

Axes: ``B`` batch, ``T`` time, ``V`` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lm.models import LanguageModel, State
from lm.models.awd_lstm import AWDLSTM, LSTMLayer
from lm.models.transformer_xl import TransformerXL
from shared_embeddings.export.onnx import Example, OnnxBody, StandIn, quiet
from shared_embeddings.quant.packed_tensor import unfreeze
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.extras import require
from shared_embeddings.utils.files import first_line

# Words of an example; sizes with which a model is traced, no two of them the same.
_EXAMPLE, _BATCH, _PAST, _NEW = 12, 2, 5, 3
_OPSET = 20


class _Step(nn.Module):
    """A model that returns scores instead of hidden states."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        """Scores ``(B, T, V)`` and the next state."""
        found = self.model(ids, state)
        return self.model.embedding.logits(found.hidden), found.state


class _OnnxLSTM(nn.Module):
    """Replaces an LSTM layer while a model is traced, by the operator LSTM of ONNX."""

    def __init__(self, layer: LSTMLayer) -> None:
        super().__init__()
        self.width = layer.hidden_size
        # The gates of torch are i, f, g, o; those of ONNX i, o, f, g.
        weights = (layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0)
        given, recurrent, *biases = (
            part.unflatten(0, (4, -1))[[0, 3, 1, 2]].flatten(0, 1) for part in weights
        )
        self.given, self.recurrent, self.biases = given[None], recurrent[None], torch.cat(biases)[None]

    def forward(self, inputs: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        states = (1, inputs.size(1), self.width)
        outputs, hidden, cell = torch.onnx.ops.symbolic_multi_out(
            "LSTM",
            [inputs, self.given, self.recurrent, self.biases, None, hidden, cell],
            {"hidden_size": self.width},
            dtypes=(torch.float32,) * 3,
            shapes=((inputs.size(0), *states), states, states),
            version=_OPSET,
        )
        return outputs.squeeze(1), hidden, cell


@torch.no_grad()
def traced(model: LanguageModel, name: str, checkpoint_bytes: int) -> OnnxBody:
    """The graph of a model on the CPU with an embedding of this name; the model cannot be used afterwards.

    Raises:
        ModuleNotFoundError: onnxscript is not installed.
        UserError: the model cannot be traced.
    """
    require("onnxscript")
    embedding, step = model.embedding, _Step(model).eval()
    # What the model computes: for some texts, for another part of them, and for one token.
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(embedding.num_embeddings, (3, 2 * _EXAMPLE), generator=generator)
    _, state = step(ids[:, :_EXAMPLE], start := model.initial_state(3))
    one = tuple(part[:, :1].contiguous() for part in state)
    parts = ((ids[:, :_EXAMPLE], start), (ids[:, _EXAMPLE:], state), (ids[:1, _EXAMPLE : _EXAMPLE + 1], one))
    examples = [_example(step, *part) for part in parts]
    state = step(torch.zeros(_BATCH, _PAST, dtype=torch.long), model.initial_state(_BATCH))[1]
    tables = {}
    # The two steps of a softmax with classes are traced like the rest of the model.
    if not embedding.has_linear_scores:
        unfreeze(embedding)
    else:
        tables[name] = embedding
        model.embedding = StandIn(name, embedding)  # type: ignore[assignment]
    if isinstance(model, AWDLSTM):
        model.layers = nn.ModuleList(map(_OnnxLSTM, model.layers))  # type: ignore[arg-type]
    try:
        program = _exported(step, state)
    except Exception as error:  # each operator fails in its own way
        raise UserError(
            f"{model.kind}: cannot be traced ({first_line(error)}); use --format onnx-embeddings"
        ) from error
    return OnnxBody(program, tables, examples, checkpoint_bytes)


def _exported(step: _Step, state: State) -> Any:
    """The ``ModelProto`` of a model, for any batch, length, and length of the memory."""
    any_size = torch.export.Dim.DYNAMIC
    ids = torch.zeros(_BATCH, _NEW, dtype=torch.long)
    is_memory = isinstance(step.model, TransformerXL)
    axes = {0: any_size, 1: any_size} if is_memory else {1: any_size}
    names = [f"state.{number}" for number in range(len(state))]
    with quiet():
        found = torch.onnx.export(
            step,
            (ids, state),
            dynamo=True,
            opset_version=_OPSET,
            dynamic_shapes=({0: any_size, 1: any_size}, (axes,) * len(state)),
            input_names=["ids", *names],
            output_names=["logits", *(f"next_{name}" for name in names)],
            verbose=False,
        )
    assert found is not None
    program = require("onnx_ir").to_proto(found.model)
    for value in program.graph.input:
        first, second, *_ = value.type.tensor_type.shape.dim
        second.dim_param = "time" if value.name == "ids" else "batch"
        if value.name == "ids" or is_memory:
            first.dim_param = "batch" if value.name == "ids" else "memory"
    # Their axes follow from those of the inputs.
    for value in program.graph.output:
        value.type.tensor_type.ClearField("shape")
    return program


def _example(step: _Step, ids: Tensor, state: State) -> Example:
    """An example of ids after a state."""
    logits, after = step(ids, state)
    given = {f"state.{number}": part.numpy() for number, part in enumerate(state)}
    found = {f"next_state.{number}": part.numpy() for number, part in enumerate(after)}
    return Example({"ids": ids.numpy(), **given}, {"logits": logits.numpy(), **found})
