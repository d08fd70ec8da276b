"""ONNX graphs of embeddings, as small as their checkpoints, and of whole models around them.

Inputs of an embedding: ``ids`` ``(n,)`` int64 and ``hidden`` ``(m, S)``; outputs: ``vectors`` ``(n, D)`` and,
for embeddings with an output side, ``scores`` ``(m, V)``. Numbers that 16 bits hold exactly are stored in 16
bits.

- `standard`, and tables that are a product of two factors: Gather and MatMul;
- matrices in 4 or 8 bits, which are `quantized` with codec uniform, int8 and int4: see `GraphBuilder`;
- `structured` and `compositional_code`: Gather of centroids;
- all others: the dense table.

A model's body is traced with a `StandIn` for each embedding: look-ups and output layers are nodes ``Lookup``
and ``Scores`` of the domain `DOMAIN`, wherever they are in the model. `joined` replaces them by the nodes of
an embedding's graph; all uses of an embedding share its initializers.

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

from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.export.builder import Blocks, GraphBuilder, block_size, finished
from shared_embeddings.methods.compositional_code import CompositionalCodeEmbedding
from shared_embeddings.methods.quantized import QuantizedEmbedding
from shared_embeddings.methods.standard import StandardEmbedding
from shared_embeddings.methods.structured import StructuredEmbedding
from shared_embeddings.quant.packed_tensor import dense
from shared_embeddings.utils.extras import require


class TableGraph(NamedTuple):
    """The graph of an embedding, see the module.

    Attributes:
        builder: its nodes and initializers.
        form: how the table is stored.
        widths: the outputs, "vectors" and maybe "scores", and their last axis.
        score_dim: S.
    """

    builder: GraphBuilder
    form: str
    widths: dict[str, int]
    score_dim: int


@torch.no_grad()
def table_graph(module: SharedEmbedding | nn.Embedding) -> TableGraph:
    """The graph of an embedding on the CPU.

    Raises:
        ModuleNotFoundError: onnx is not installed.
    """
    graph = GraphBuilder()
    has_output = isinstance(module, SharedEmbedding) and module.has_output and module.has_linear_scores
    if isinstance(module, QuantizedEmbedding) and _is_packable(module):
        form = _add_blocks(graph, module, has_output)
    elif isinstance(module, (StructuredEmbedding, CompositionalCodeEmbedding)):
        form = _add_centroids(graph, module, has_output)
    else:
        form = _add_factors(graph, module, has_output)
    widths = {"vectors": module.embedding_dim}
    if not has_output:
        return TableGraph(graph, form, widths, module.embedding_dim)
    assert isinstance(module, SharedEmbedding)
    bias = module.output_bias()
    if bias is None:
        graph.node("Identity", "products", "scores")
    else:
        graph.numbers("bias", bias)
        graph.node("Add", "products bias", "scores")
    return TableGraph(graph, form, {**widths, "scores": module.num_embeddings}, module.score_dim)


def serialized(table: TableGraph) -> bytes:
    """The graph of an embedding as an ONNX model."""
    inputs: dict[str, tuple[int, list[Any]]] = {"ids": (7, ["n"])}
    outputs: dict[str, list[Any]] = {"vectors": ["n", table.widths["vectors"]]}
    if "scores" in table.widths:
        inputs["hidden"] = (1, ["m", table.score_dim])
        outputs["scores"] = ["m", table.widths["scores"]]
    return table.builder.model(inputs, outputs)


def _is_packable(module: QuantizedEmbedding) -> bool:
    """Whether ONNX Runtime reads the codes of an embedding."""
    rates = list(module.word_counts)
    has_size = block_size(module.embedding_dim, module.options.group_size) > 0
    return len(rates) == 1 and rates[0] in module.codec.onnx_rates and has_size


def _add_blocks(graph: GraphBuilder, module: QuantizedEmbedding, has_output: bool) -> str:
    """Packed codes, which both sides share."""
    (rate,) = module.word_counts
    codes, scales = module.codes(rate), dense(module.get_parameter("scales"))
    group, dim = module.options.group_size, module.embedding_dim
    given = Blocks(codes, scales.view(len(codes), -1), int(rate), dim, group)
    table = graph.blocks("table", given, module.padding_idx)
    graph.gathered(table, "ids", "vectors")
    if has_output:
        graph.products("hidden", table, "products")
    return table.form


def _add_centroids(
    graph: GraphBuilder, module: StructuredEmbedding | CompositionalCodeEmbedding, has_output: bool
) -> str:
    """Codes and centroids, whose pieces are joined or added; scores decode the whole table for each run."""
    is_structured = isinstance(module, StructuredEmbedding)
    centroids = dense(module.get_parameter("centroids" if is_structured else "codebooks"))
    groups, clusters = centroids.shape[:2]
    kind = np.uint8 if clusters <= 256 else np.uint16 if clusters <= 65536 else np.int32
    graph.constant("codes", module.get_buffer("codes").long().numpy().astype(kind))
    graph.constant("starts", (torch.arange(groups) * clusters).numpy())
    graph.numbers("centroids", centroids.flatten(0, 1))
    graph.node("Gather", "codes ids", "row_codes", axis=0)
    for codes, name in (("row_codes", "vectors"), ("codes", "table"))[: 1 + has_output]:
        graph.node("Cast", codes, f"{name}_codes", to=7)
        graph.node("Add", f"{name}_codes starts", f"{name}_places")
        graph.node("Gather", f"centroids {name}_places", f"{name}_pieces", axis=0)
        if is_structured:
            graph.constant("row_shape", np.array([-1, module.embedding_dim]))
            graph.node("Reshape", f"{name}_pieces row_shape", f"{name}_rows")
        else:
            graph.constant("axis", np.array([1]))
            graph.node("ReduceSum", f"{name}_pieces axis", f"{name}_rows", keepdims=0)
    _mask_padding(graph, module.padding_idx)
    if has_output:
        graph.node("Gemm", "hidden table_rows", "products", transB=1)
    return f"codes of {groups} centroids"


def _mask_padding(graph: GraphBuilder, padding_idx: int | None) -> None:
    """The vectors of the looked-up rows, zero for the padding word."""
    if padding_idx is None:
        graph.node("Identity", "vectors_rows", "vectors")
        return
    graph.constant("padding", np.array(padding_idx))
    graph.constant("axis", np.array([1]))
    graph.node("Equal", "ids padding", "is_padding")
    graph.node("Not", "is_padding", "is_word")
    graph.node("Cast", "is_word", "word_factors", to=1)
    graph.node("Unsqueeze", "word_factors axis", "row_factors")
    graph.node("Mul", "vectors_rows row_factors", "vectors")


def _add_factors(graph: GraphBuilder, module: SharedEmbedding | nn.Embedding, has_output: bool) -> str:
    """The table or two factors, if both sides use the same ones, or the dense tables of the sides."""
    table, factors = _factors(module)
    left = graph.matrix("left", factors[0], module.padding_idx)
    if len(factors) == 1:
        form = f"{left.form} table"
        if isinstance(module, SharedEmbedding) and not (left.bits or isinstance(module, StandardEmbedding)):
            form += f", since ONNX has no smaller form of '{module.method}' with these options"
        graph.gathered(left, "ids", "vectors")
    else:
        right = graph.matrix("right", factors[1])
        form = f"two factors of rank {left.width}" + (f" in {left.form}" if left.bits else "")
        graph.gathered(left, "ids", "codes")
        graph.node("MatMul", f"codes {graph.whole(right)}", "vectors")
    if has_output:
        assert isinstance(module, SharedEmbedding)
        scored = module.output_table().detach().float()
        if scored.shape != table.shape or not torch.allclose(scored, table, atol=1e-5):
            graph.products("hidden", graph.matrix("output_table", scored), "products")
        elif len(factors) == 1:
            graph.products("hidden", left, "products")
        else:
            graph.node("Gemm", f"hidden {right.name}", "projected", transB=1)
            graph.products("projected", left, "products")
    return form


def _factors(module: SharedEmbedding | nn.Embedding) -> tuple[Tensor, list[Tensor]]:
    """The input table, and its stored form: itself, or two smaller matrices whose product it is."""
    if isinstance(module, nn.Embedding):
        return module.weight.detach().float(), [module.weight]
    table = module.table().detach().float()
    factors = [part for part in module.output_factors() if part is not None]
    if sum(part.numel() for part in factors) > table.numel():
        return table, [table]
    left, *right = (dense(part).detach().float() for part in factors)
    product = module.without_padding(left @ right[0] if right else left, module.all_ids(left.device))
    is_same = product.shape == table.shape and torch.allclose(product, table, atol=1e-5)
    return table, factors if is_same else [table]


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
