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
from shared_embeddings.export.builder import OPSET, GraphBuilder, block_size, finished, replace_nodes
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
    graph, dim = GraphBuilder(), module.embedding_dim
    has_output = isinstance(module, SharedEmbedding) and module.has_output and module.has_linear_scores
    if isinstance(module, QuantizedEmbedding) and _is_packable(module):
        # Both sides share the codes.
        (rate,) = module.word_counts
        codes, scales = module.codes(rate), dense(module.get_parameter("scales"))
        scales, group = scales.view(len(codes), -1), module.options.group_size
        table = graph.blocks("table", codes, scales, int(rate), dim, group, module.padding_idx)
        graph.gathered(table, "ids", "vectors")
        if has_output:
            graph.products("hidden", table, "products")
        form = table.form
    elif isinstance(module, (StructuredEmbedding, CompositionalCodeEmbedding)):
        form = _add_centroids(graph, module, has_output)
    else:
        form = _add_factors(graph, module, has_output)
    if not has_output:
        return TableGraph(graph, form, {"vectors": dim}, dim)
    assert isinstance(module, SharedEmbedding)
    bias = module.output_bias()
    if bias is None:
        graph.node("Identity", "products", "scores")
    else:
        graph.numbers("bias", bias)
        graph.node("Add", "products bias", "scores")
    return TableGraph(graph, form, {"vectors": dim, "scores": module.num_embeddings}, module.score_dim)


def serialized(table: TableGraph) -> bytes:
    """The graph of an embedding as an ONNX model."""
    helper = table.builder.helper
    make = helper.make_tensor_value_info
    inputs = [make("ids", 7, ["n"])]
    outputs = [make("vectors", 1, ["n", table.widths["vectors"]])]
    if "scores" in table.widths:
        inputs.append(make("hidden", 1, ["m", table.score_dim]))
        outputs.append(make("scores", 1, ["m", table.widths["scores"]]))
    nodes, initializers = table.builder.nodes, table.builder.initializers
    graph = helper.make_graph(nodes, "shared_embedding", inputs, outputs, initializers)
    return finished(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)]))


def _is_packable(module: QuantizedEmbedding) -> bool:
    """Whether ONNX Runtime reads the codes of an embedding."""
    rates = list(module.word_counts)
    has_size = block_size(module.embedding_dim, module.options.group_size) > 0
    return len(rates) == 1 and rates[0] in module.codec.onnx_rates and has_size


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
    if module.padding_idx is None:
        graph.node("Identity", "vectors_rows", "vectors")
    else:  # the vector of the padding word is zero
        graph.constant("padding", np.array(module.padding_idx))
        graph.constant("axis", np.array([1]))
        graph.node("Equal", "ids padding", "is_padding")
        graph.node("Not", "is_padding", "is_word")
        graph.node("Cast", "is_word", "word_factors", to=1)
        graph.node("Unsqueeze", "word_factors axis", "row_factors")
        graph.node("Mul", "vectors_rows row_factors", "vectors")
    if has_output:
        graph.node("Gemm", "hidden table_rows", "products", transB=1)
    return f"codes of {groups} centroids"


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
    inliner, nodes = _Inliner(tables), []
    for node in model.graph.node:
        nodes += inliner.inline(node) if node.domain == DOMAIN else [node]
    replace_nodes(model.graph, [*inliner.constant_nodes, *nodes])
    model.graph.initializer.extend(inliner.initializers.values())
    opsets = [opset for opset in model.opset_import if opset.domain != DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend(opsets)
    return finished(model)


class _Inliner:
    """Copies nodes of embeddings into a model, under names that are unique in it.

    Args:
        tables: the graphs.

    Attributes:
        constant_nodes: nodes that depend on no input, each once.
        initializers: those of the nodes that were copied, by name.
    """

    def __init__(self, tables: Mapping[str, TableGraph]) -> None:
        self.tables = tables
        self.helper, self.numpy_helper = require("onnx.helper"), require("onnx.numpy_helper")
        self.constant_nodes: list[Any] = []
        self.initializers: dict[str, Any] = {}
        self._uses = 0

    def inline(self, call: Any) -> list[Any]:
        """The nodes that replace a node of `DOMAIN`, between nodes that flatten its input and unflatten its
        output.
        """
        name, is_lookup = call.attribute[0].s.decode(), call.op_type == _LOOKUP
        table, (source, result) = self.tables[name], _SIDES[call.op_type]
        self._uses += 1
        use = f"{DOMAIN}.{self._uses}"
        nodes = self._copied(name, use, source, result)
        given, found = f"{use}.{source}", f"{use}.{result}"
        flat = [-1] if is_lookup else [-1, table.score_dim]
        for own, values in ((f"{given}_shape", flat), (f"{found}_width", [table.widths[result]])):
            self.initializers[own] = self.numpy_helper.from_array(np.array(values), own)
        make, outer = self.helper.make_node, {} if is_lookup else {"end": -1}
        return [
            make("Reshape", [call.input[0], f"{given}_shape"], [given]),
            *nodes,
            make("Shape", [call.input[0]], [f"{found}_axes"], **outer),
            make("Concat", [f"{found}_axes", f"{found}_width"], [f"{found}_shape"], axis=0),
            make("Reshape", [found, f"{found}_shape"], [call.output[0]]),
        ]

    def _copied(self, table: str, use: str, source: str, result: str) -> list[Any]:
        """The nodes from an input to an output of a table, for one use of it."""
        builder = self.tables[table].builder
        wanted, needed = {result}, []
        for node in reversed(builder.nodes):
            if wanted & set(node.output):
                wanted.update(node.input)
                needed.append(node)
        weights = {one.name: one for one in builder.initializers}
        # Names in the graph of the embedding -> names in the model; at first, those that depend on the input.
        names = {source: f"{use}.{source}"}
        nodes = []
        for node in reversed(needed):
            is_constant = not names.keys() & set(node.input)
            for name in node.input:
                own = f"{table}.{name}"
                if name in weights and own not in self.initializers:
                    self.initializers[own] = copied = type(weights[name])()
                    copied.CopyFrom(weights[name])
                    copied.name = own
            if not is_constant:
                names.update({name: f"{use}.{name}" for name in node.output})
            copy = type(node)()
            copy.CopyFrom(node)
            copy.input[:] = [names.get(name, f"{table}.{name}") for name in node.input]
            copy.output[:] = [names.get(name, f"{table}.{name}") for name in node.output]
            if not is_constant:
                nodes.append(copy)
            elif copy not in self.constant_nodes:
                self.constant_nodes.append(copy)
        return nodes
