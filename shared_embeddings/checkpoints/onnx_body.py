"""ONNX models that consist of a traced body and the compact graphs of its embeddings.

A body is traced with a `StandIn` for each embedding: look-ups and output layers are nodes ``Lookup`` and
``Scores`` of the domain `DOMAIN`, wherever they are in the model. `joined` replaces them by the nodes of
`onnx_graph`; all uses of an embedding share its initializers.

Axes: ``V`` vocabulary, ``D`` dimensions, ``S`` width of hidden states.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shared_embeddings.checkpoints.onnx_builder import finished
from shared_embeddings.checkpoints.onnx_graph import TableGraph
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.utils.extras import require

DOMAIN = "shared_embeddings"
_LOOKUP, _SCORES = "Lookup", "Scores"
# Of each kind of node: what it reads and computes in the graph of an embedding.
_SIDES = {_LOOKUP: ("ids", "vectors"), _SCORES: ("hidden", "scores")}


class Example(NamedTuple):
    """Inputs of a model, and what torch computes from them, by name."""

    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]


@dataclass(frozen=True)
class OnnxBody:
    """A traced model.

    Attributes:
        program: the ``ModelProto``, with a node of `DOMAIN` for every use of an embedding.
        tables: the embeddings by the name that these nodes have as their attribute ``table``.
        examples: to check it; the first input has the ids. Speed is measured with the last one.
        checkpoint_bytes: the size of the model's weights in its checkpoint.
    """

    program: Any
    tables: Mapping[str, SharedEmbedding]
    examples: list[Example]
    checkpoint_bytes: int


class StandIn(nn.Module):
    """Replaces an embedding while a model is traced.

    Args:
        name: of the embedding in `OnnxBody.tables`.
        embedding: the embedding.
    """

    def __init__(self, name: str, embedding: SharedEmbedding) -> None:
        super().__init__()
        self.name = name
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        # Hosts read the device and the dtype of an embedding from its parameters.
        self.device_marker = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Vectors ``(..., D)`` of ids ``(...)``."""
        return self._node(_LOOKUP, ids, [*ids.shape, self.embedding_dim])

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores ``(..., V)`` of hidden states ``(..., S)``."""
        return self._node(_SCORES, hidden, [*hidden.shape[:-1], self.num_embeddings])

    def _node(self, kind: str, given: Tensor, shape: list[int]) -> Tensor:
        """A node of the traced graph."""
        return torch.onnx.ops.symbolic(
            f"{DOMAIN}::{kind}", [given], {"table": self.name}, dtype=torch.float32, shape=shape, version=1
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the progress of tracing, and warnings about operators that the model does not use."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def joined(body: OnnxBody, tables: Mapping[str, TableGraph]) -> bytes:
    """The serialized model of a body and the graphs of its embeddings.

    Raises:
        UserError: it is larger than an ONNX file can be.
    """
    model = require("onnx").ModelProto()
    model.CopyFrom(body.program)
    graph = model.graph
    names = _Names(tables)
    nodes = [new for node in graph.node for new in (names.inline(node) if node.domain == DOMAIN else [node])]
    del graph.node[:]
    graph.node.extend([*names.constant_nodes, *nodes])
    graph.initializer.extend(names.initializers())
    opsets = [opset for opset in model.opset_import if opset.domain != DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend(opsets)
    return finished(model)


class _Names:
    """Copies nodes of embeddings into a model, under names that are unique in it.

    Args:
        tables: the graphs.

    Attributes:
        constant_nodes: nodes that depend on no input, each once.
    """

    def __init__(self, tables: Mapping[str, TableGraph]) -> None:
        self.tables = tables
        self.helper, self.numpy_helper = require("onnx.helper"), require("onnx.numpy_helper")
        self.constant_nodes: list[Any] = []
        self._initializers: dict[str, Any] = {}
        self._uses = 0

    def initializers(self) -> list[Any]:
        """Those of the nodes that were copied."""
        return list(self._initializers.values())

    def inline(self, call: Any) -> list[Any]:
        """The nodes that replace a node of `DOMAIN`."""
        table = call.attribute[0].s.decode()
        builder = self.tables[table].builder
        source, result = _SIDES[call.op_type]
        self._uses += 1
        use = f"{DOMAIN}.{self._uses}"
        weights = {one.name: one for one in builder.initializers}
        # Names in the graph of the embedding -> names in the model; at first, those that depend on the input.
        names = {source: f"{use}.{source}"}
        nodes = []
        for node in _needed(builder.nodes, result):
            is_constant = not names.keys() & set(node.input)
            copied = type(node)()
            copied.CopyFrom(node)
            for name in node.input:
                if name in weights and f"{table}.{name}" not in self._initializers:
                    self._initializers[f"{table}.{name}"] = _renamed(weights[name], f"{table}.{name}")
            if not is_constant:
                names.update({name: f"{use}.{name}" for name in node.output})
            copied.input[:] = [names.get(name, f"{table}.{name}") for name in node.input]
            copied.output[:] = [names.get(name, f"{table}.{name}") for name in node.output]
            if not is_constant:
                nodes.append(copied)
            elif copied not in self.constant_nodes:
                self.constant_nodes.append(copied)
        return self._reshaped(call, nodes, names[source], names[result])

    def _reshaped(self, call: Any, nodes: list[Any], source: str, result: str) -> list[Any]:
        """Nodes for matrices, between nodes that flatten the input and unflatten the output."""
        given, wanted, table = call.input[0], call.output[0], self.tables[call.attribute[0].s.decode()]
        is_lookup = call.op_type == _LOOKUP
        flat, width = f"{source}_shape", f"{result}_width"
        self._constant(flat, [-1] if is_lookup else [-1, table.score_dim])
        self._constant(width, [table.widths[_SIDES[call.op_type][1]]])
        outer = {} if is_lookup else {"end": -1}
        make = self.helper.make_node
        return [
            make("Reshape", [given, flat], [source]),
            *nodes,
            make("Shape", [given], [f"{result}_axes"], **outer),
            make("Concat", [f"{result}_axes", width], [f"{result}_shape"], axis=0),
            make("Reshape", [result, f"{result}_shape"], [wanted]),
        ]

    def _constant(self, name: str, values: list[int]) -> None:
        """Add an initializer of integers."""
        self._initializers[name] = self.numpy_helper.from_array(np.array(values), name)


def _needed(nodes: list[Any], result: str) -> list[Any]:
    """The nodes that an output depends on, in order."""
    wanted, found = {result}, []
    for node in reversed(nodes):
        if wanted & set(node.output):
            wanted.update(node.input)
            found.append(node)
    return found[::-1]


def _renamed(initializer: Any, name: str) -> Any:
    """A copy of an initializer."""
    copied = type(initializer)()
    copied.CopyFrom(initializer)
    copied.name = name
    return copied
