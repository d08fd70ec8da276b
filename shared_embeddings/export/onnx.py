"""ONNX graphs of embeddings, as small as their checkpoints, and of whole models around them.

Inputs of an embedding: ``ids`` ``(n,)`` int64 and ``hidden`` ``(m, S)``; outputs: ``vectors`` ``(n, D)`` and,
for embeddings with an output side, ``scores`` ``(m, V)``. Numbers that 16 bits hold exactly are stored in 16
bits.

- `standard`, and tables that are a product of two factors: Gather and MatMul;
- matrices in 2, 4 or 8 bits, which are `quantized` with codec uniform, and int8: GatherBlockQuantized and
  MatMulNBits on the same initializers;
- `structured` and `compositional_code`: Gather of centroids;
- all others: the dense table.

A model's body is traced with a `StandIn` for each embedding: look-ups and output layers are nodes ``Lookup``
and ``Scores`` of the domain `DOMAIN`, wherever they are in the model. `export_model` replaces them by the
nodes of an embedding's graph; all uses of an embedding share its initializers.

Axes: ``V`` vocabulary, ``D`` dimensions, ``S`` width of hidden states.
"""

from __future__ import annotations

import io
import itertools
import logging
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_embeddings.embedding import SharedEmbedding, WordEmbedding, without_padding
from shared_embeddings.modules.compositional_code import CompositionalCodeEmbedding
from shared_embeddings.modules.quantized import QuantizedEmbedding
from shared_embeddings.modules.standard import StandardEmbedding
from shared_embeddings.modules.structured import StructuredEmbedding
from shared_embeddings.quant.bits import unpack_bits
from shared_embeddings.quant.packed_tensor import PackedTensor, dense
from shared_embeddings.runtimes.base import little_endian_bits
from shared_embeddings.utils.errors import UserError, first_line, require
from shared_embeddings.utils.files import replacing


class TableGraph(NamedTuple):
    """The graph of an embedding, see the module."""

    builder: GraphBuilder  # its nodes and initializers
    form: str  # how the table is stored
    widths: dict[str, int]  # the outputs, "vectors" and maybe "scores", and their last axis
    score_dim: int  # S


@torch.no_grad()
def table_graph(module: SharedEmbedding | nn.Embedding) -> TableGraph:
    """The graph of an embedding on the CPU; ModuleNotFoundError without onnx."""
    graph, dim = GraphBuilder(), module.embedding_dim
    has_output = isinstance(module, SharedEmbedding) and module.has_output and module.has_linear_scores
    if (
        isinstance(module, QuantizedEmbedding)
        and len(module.word_counts) == 1
        and all(rate in module.codec.onnx_rates for rate in module.word_counts)
        and block_size(dim, module.options.group_size) > 0
    ):
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
    if isinstance(module, nn.Embedding):
        table, factors = module.weight.detach().float(), [module.weight]
    else:
        table = module.table().detach().float()
        factors = [part for part in module.output_factors() if part is not None]
        is_same = sum(part.numel() for part in factors) <= table.numel()
        if is_same:
            first, *second = (dense(part).detach().float() for part in factors)
            product = without_padding(first @ second[0] if second else first, module.padding_idx)
            is_same = product.shape == table.shape and torch.allclose(product, table, atol=1e-5)
        factors = factors if is_same else [table]
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
        if right.bits:  # the dense matrix
            graph.constant(f"{right.name}_all", np.arange(right.rows, dtype=np.int32))
            graph.gathered(right, f"{right.name}_all", right.name)
        graph.node("MatMul", f"codes {right.name}", "vectors")
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
    """A traced model."""

    program: Any  # the ``ModelProto``, with a node of `DOMAIN` for every use of an embedding
    # The embeddings by the name that these nodes have as their attribute ``table``.
    tables: Mapping[str, SharedEmbedding]
    examples: list[Example]  # to check it; the first input has the ids. Speed is measured with the last one
    checkpoint_bytes: int  # the size of the model's weights in its checkpoint


class StandIn(nn.Module):
    """Replaces an embedding, by its name in `OnnxBody.tables`, while a model is traced."""

    scored_words: Tensor | None = None  # all

    def __init__(self, name: str, embedding: SharedEmbedding) -> None:
        super().__init__()
        self.name = name
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        # Hosts read the device and the dtype of an embedding from its parameters.
        self.device_marker = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Vectors ``(..., D)`` of ids ``(...)``."""
        shape = [*ids.shape, self.embedding_dim]
        return torch.onnx.ops.symbolic(
            f"{DOMAIN}::{_LOOKUP}", [ids], {"table": self.name}, dtype=torch.float32, shape=shape, version=1
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores ``(..., V)`` of hidden states ``(..., S)``."""
        kind, shape = f"{DOMAIN}::{_SCORES}", [*hidden.shape[:-1], self.num_embeddings]
        return torch.onnx.ops.symbolic(
            kind, [hidden], {"table": self.name}, dtype=torch.float32, shape=shape, version=1
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


def _inlined(
    call: Any,
    tables: Mapping[str, TableGraph],
    prefix: str,
    constant_nodes: list[Any],
    initializers: dict[str, Any],
) -> list[Any]:
    """Return the nodes that replace a node of `DOMAIN`, and add what they need besides.

    The `prefix` is of names that depend on the input.
    """
    helper, from_array = require("onnx.helper"), require("onnx.numpy_helper").from_array
    table_name, is_lookup = call.attribute[0].s.decode(), call.op_type == _LOOKUP
    table, (source, result) = tables[table_name], _SIDES[call.op_type]
    wanted, needed = {result}, []
    for node in reversed(table.builder.nodes):
        if wanted & set(node.output):
            wanted.update(node.input)
            needed.append(node)
    weights = {weight.name: weight for weight in table.builder.initializers}
    # Names in the graph of the embedding -> names in the model, of values that depend on the input.
    names, nodes = {source: f"{prefix}.{source}"}, []
    for node in reversed(needed):
        is_constant = not names.keys() & set(node.input)
        for name in node.input:
            unique = f"{table_name}.{name}"
            if name in weights and unique not in initializers:
                initializers[unique] = copied = type(weights[name])()
                copied.CopyFrom(weights[name])
                copied.name = unique
        if not is_constant:
            names.update({name: f"{prefix}.{name}" for name in node.output})
        copy = type(node)()
        copy.CopyFrom(node)
        copy.input[:] = [names.get(name, f"{table_name}.{name}") for name in node.input]
        copy.output[:] = [names.get(name, f"{table_name}.{name}") for name in node.output]
        if not is_constant:
            nodes.append(copy)
        elif copy not in constant_nodes:
            constant_nodes.append(copy)
    inner, outer = f"{prefix}.{source}", f"{prefix}.{result}"
    flat = [-1] if is_lookup else [-1, table.score_dim]
    for name, values in ((f"{inner}_shape", flat), (f"{outer}_width", [table.widths[result]])):
        initializers[name] = from_array(np.array(values), name)
    return [
        helper.make_node("Reshape", [call.input[0], f"{inner}_shape"], [inner]),
        *nodes,
        helper.make_node("Shape", [call.input[0]], [f"{outer}_axes"], **({} if is_lookup else {"end": -1})),
        helper.make_node("Concat", [f"{outer}_axes", f"{outer}_width"], [f"{outer}_shape"], axis=0),
        helper.make_node("Reshape", [outer, f"{outer}_shape"], [call.output[0]]),
    ]


OPSET, IR_VERSION = 18, 10
MICROSOFT = "com.microsoft"
# Block sizes of ONNX Runtime, the fastest first.
_BLOCK_SIZES = (128, 64, 32, 16)
# The accuracy level with which MatMulNBits rounds hidden states to int8, a scale for each block.
_INT8_STATES = 4
# Smaller initializers stay in 32 bits.
_LEAST_VALUES = 256
# A protocol buffer is limited to this size.
_MOST_BYTES = 2**31 - 1


class Matrix(NamedTuple):
    """A matrix ``(N, K)`` of a graph."""

    name: str  # its initializers start with it; a dense matrix has this name
    rows: int  # N
    width: int  # K
    block: int = 0  # of its codes; 0 for a dense matrix
    bits: int = 0
    form: str = "dense"

    @property
    def filled(self) -> int:
        """K, rounded up to whole blocks."""
        return -(-self.width // self.block) * self.block


def block_size(width: int, group: int) -> int:
    """The numbers of a block in rows of `width` numbers with a scale for each `group`; 0 if none fits."""
    sizes = [size for size in _BLOCK_SIZES if group % size == 0 or group >= width]
    exact = [size for size in sizes if width % size == 0]
    return (exact or sizes[-1:] or [0])[0]


class GraphBuilder:
    """Nodes and initializers of a graph."""

    def __init__(self) -> None:
        self.helper, self.numpy_helper = require("onnx.helper"), require("onnx.numpy_helper")
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []

    def constant(self, name: str, values: Any) -> str:
        """An initializer, once for each name; returns the name."""
        if name not in {tensor.name for tensor in self.initializers}:
            self.initializers.append(self.numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def numbers(self, name: str, values: Tensor) -> str:
        """Floating-point numbers in float32; returns the name."""
        return self.constant(name, values.detach().float().cpu().numpy())

    def node(self, kind: str, inputs: str, output: str, **attributes: Any) -> str:
        """A node with inputs separated by spaces; returns the name of its output."""
        domain = MICROSOFT if kind in ("GatherBlockQuantized", "MatMulNBits") else ""
        self.nodes.append(self.helper.make_node(kind, inputs.split(), [output], domain=domain, **attributes))
        return output

    # Matrices.

    def matrix(self, name: str, values: Tensor, padding_idx: int | None = None) -> Matrix:
        """Store a matrix, packed ones in their bits; the row `padding_idx` is zero."""
        if isinstance(values, PackedTensor) and values.form.name == "int8" and values.dim() == 2:
            codes, scales = (part.reshape(len(values), -1) for part in values.packed if part is not None)
            width = values.size(1)
            return self.blocks(name, codes.int() + 128, scales, 8, width, width, padding_idx)
        table = dense(values).detach().float().clone()
        if padding_idx is not None:
            table[padding_idx] = 0
        self.numbers(name, table)
        return Matrix(name, *table.shape)

    def blocks(
        self,
        name: str,
        codes: Tensor,
        scales: Tensor,
        bits: int,
        width: int,
        group: int,
        padding_idx: int | None,
    ) -> Matrix:
        """Store a matrix ``(N, K)`` in 2, 4 or 8 bits.

        Args:
            codes: ``(N, bytes)``, see `pack_bits`.
            scales: ``(N, groups)``.
            width: K.
            group: numbers of a row that share a scale.
            padding_idx: a row that becomes zero.
        """
        size = block_size(width, group)
        count = -(-width // size)
        # The last block is filled up with zeros.
        padding, zero = (0, count * size - width), 1 << bits - 1
        values = F.pad(unpack_bits(codes.to(torch.uint8), width, bits), padding, value=zero)
        packed = little_endian_bits(values.numpy(), bits)
        self.constant(f"{name}_codes", packed.reshape(len(packed), count, -1))
        factors = scales.detach().float().clone()
        if padding_idx is not None:
            factors[padding_idx] = 0
        if factors.size(1) == count:
            self.numbers(f"{name}_factors", factors)
        else:
            self.numbers(f"{name}_scales", factors)
            self.constant(f"{name}_groups", np.arange(count) * size // group)
            self.node("Gather", f"{name}_scales {name}_groups", f"{name}_factors", axis=1)
        self.constant("last_axis", np.array([2]))
        self.constant(f"{name}_row", np.array([-1, count * size]))
        self.node("Unsqueeze", f"{name}_factors last_axis", f"{name}_block_factors")
        return Matrix(name, len(packed), width, size, bits, f"{bits}-bit blocks of {size} numbers")

    def gathered(self, matrix: Matrix, ids: str, output: str) -> str:
        """The rows ``(n, K)`` of ids ``(n,)``."""
        if not matrix.bits:
            return self.node("Gather", f"{matrix.name} {ids}", output, axis=0)
        name = matrix.name
        inputs, blocks = f"{name}_codes {ids} {name}_block_factors", f"{output}.blocks"
        settings = {"block_size": matrix.block, "bits": matrix.bits}
        self.node("GatherBlockQuantized", inputs, blocks, gather_axis=0, quantize_axis=2, **settings)
        if matrix.filled == matrix.width:
            return self.node("Reshape", f"{blocks} {name}_row", output)
        self.node("Reshape", f"{blocks} {name}_row", f"{output}.filled")
        for key, value in {"zero": 0, f"{name}_width": matrix.width, "axis": 1}.items():
            self.constant(key, np.array([value]))
        return self.node("Slice", f"{output}.filled zero {name}_width axis", output)

    def products(self, hidden: str, matrix: Matrix, output: str) -> str:
        """The products ``(m, N)`` of hidden states ``(m, K)`` with all rows.

        MatMulNBits with 2 and 8 bits is slow unless it rounds hidden states to int8. It does so here, and
        once more with what is left of them: as good as 15 bits.
        """
        if not matrix.bits:
            return self.node("Gemm", f"{hidden} {matrix.name}", output, transB=1)
        name, filled = matrix.name, matrix.filled
        codes = f"{name}_codes {name}_factors"
        sizes = {"N": matrix.rows, "K": matrix.width, "block_size": matrix.block, "bits": matrix.bits}
        if matrix.bits == 4:
            return self.node("MatMulNBits", f"{hidden} {codes}", output, **sizes)
        if filled > matrix.width:
            self.constant(f"{name}_padding", np.array([0, 0, 0, filled - matrix.width]))
            hidden = self.node("Pad", f"{hidden} {name}_padding", f"{output}.padded")
        for key, value in {"largest_code": 127, "least_step": 1e-30}.items():
            self.constant(key, np.array(value, np.float32))
        self.constant(f"{name}_blocks", np.array([-1, filled // matrix.block, matrix.block]))
        # The multiples of a step that a block of states is rounded to, and what is left of it.
        self.node("Reshape", f"{hidden} {name}_blocks", f"{output}.blocks")
        self.node("Abs", f"{output}.blocks", f"{output}.sizes")
        self.node("ReduceMax", f"{output}.sizes last_axis", f"{output}.largest")
        self.node("Div", f"{output}.largest largest_code", f"{output}.exact_steps")
        self.node("Max", f"{output}.exact_steps least_step", f"{output}.steps")
        self.node("Div", f"{output}.blocks {output}.steps", f"{output}.quotients")
        self.node("Round", f"{output}.quotients", f"{output}.multiples")
        self.node("Mul", f"{output}.multiples {output}.steps", f"{output}.coarse")
        self.node("Sub", f"{output}.blocks {output}.coarse", f"{output}.fine")
        sizes.update(K=filled, accuracy_level=_INT8_STATES)
        for part in (f"{output}.coarse", f"{output}.fine"):
            self.node("Reshape", f"{part} {name}_row", f"{part}_states")
            self.node("MatMulNBits", f"{part}_states {codes}", f"{part}_products", **sizes)
        return self.node("Add", f"{output}.coarse_products {output}.fine_products", output)


def finished(model: Any) -> bytes:
    """Serialize a model without what nobody reads, and with weights in 16 bits where these are exact.

    UserError if it is larger than an ONNX file can be.
    """
    onnx, helper, numpy_helper = (require(name) for name in ("onnx", "onnx.helper", "onnx.numpy_helper"))
    graph, casts = model.graph, []
    # The checkpoint has numbers in 16 bits where that loses nothing.
    for initializer in graph.initializer:
        if initializer.data_type != onnx.TensorProto.FLOAT or np.prod(initializer.dims) < _LEAST_VALUES:
            continue
        values = numpy_helper.to_array(initializer)
        name, bits = initializer.name, np.ascontiguousarray(values).view(np.uint32)
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16)
        if np.array_equal(halves.astype(np.float32), values):
            kind, raw = onnx.TensorProto.FLOAT16, halves.tobytes()
        elif not (bits & 0xFFFF).any():
            kind, raw = onnx.TensorProto.BFLOAT16, (bits >> 16).astype(np.uint16).tobytes()
        else:
            continue
        initializer.CopyFrom(helper.make_tensor(f"{name}_16", kind, values.shape, raw, raw=True))
        casts.append(helper.make_node("Cast", [f"{name}_16"], [name], to=onnx.TensorProto.FLOAT))
    casts += graph.node
    del graph.node[:]
    graph.node.extend(casts)
    # Names of the traced Python code.
    for node in graph.node:
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    graph.ClearField("value_info")
    _shorten_names(graph)
    if any(node.domain == MICROSOFT for node in graph.node):
        model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    model.ir_version, model.producer_name = IR_VERSION, "shared-embeddings"
    if model.ByteSize() > _MOST_BYTES:
        raise UserError(
            f"the model has {model.ByteSize():,} bytes, but an ONNX file can have {_MOST_BYTES:,}; export "
            "a model with 16-bit weights, or the embeddings alone (--format onnx-embeddings)"
        )
    return bytes(model.SerializeToString())


def _shorten_names(graph: Any) -> None:
    """Number the values between nodes, whose names take more bytes than the nodes."""
    fixed = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    new: dict[str, str] = {}
    for node in graph.node:
        node.ClearField("name")
        if any(attribute.HasField("g") for attribute in node.attribute):
            return
        for name in node.output:
            if name and name not in fixed:
                new[name] = f"{len(new):x}"
    rename_values(graph, new)


def rename_values(graph: Any, new: Mapping[str, str]) -> None:
    """Rename inputs and outputs of the nodes of a graph."""
    for node in graph.node:
        node.input[:] = [new.get(name, name) for name in node.input]
        node.output[:] = [new.get(name, name) for name in node.output]


_WORDS, _STATES = 64, 4
_SECONDS = 0.5
_MOST_ERROR = 1e-2


@dataclass(frozen=True)
class Exported:
    """What was exported."""

    output: Path
    form: str  # how the tables are stored
    bytes: int
    error: float  # the largest difference from torch, relative to the largest value
    timed: str  # what `tokens_per_second` measures
    tokens_per_second: float | None  # one text at a time; None without an output layer

    def described(self) -> str:
        """One or two lines for the user."""
        text = f"wrote {self.output}: {self.form}, {self.bytes:,} bytes, within {self.error:.1e} of torch"
        if self.tokens_per_second is None:
            return text
        return f"{text}\n{self.timed}: {self.tokens_per_second:,.0f} tokens per second"


@torch.no_grad()
def export_embedding(embedding: WordEmbedding, output: Path) -> Exported:
    """Write an embedding and its output layer as an ONNX file, if ONNX Runtime computes what torch does."""
    module = embedding.module.eval()
    table = table_graph(module)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(module.num_embeddings, (_WORDS,), generator=generator)
    inputs, outputs = {"ids": ids.numpy()}, {"vectors": module(ids).float().numpy()}
    helper = table.builder.helper
    make = helper.make_tensor_value_info
    named_inputs = [make("ids", 7, ["n"])]
    named_outputs = [make("vectors", 1, ["n", table.widths["vectors"]])]
    if "scores" in table.widths:
        assert isinstance(module, SharedEmbedding)
        named_inputs.append(make("hidden", 1, ["m", table.score_dim]))
        named_outputs.append(make("scores", 1, ["m", table.widths["scores"]]))
        hidden = torch.randn(_STATES, module.score_dim, generator=generator)
        scores = module.logits(hidden).float().numpy()
        if module.padding_idx is not None:
            scores[:, module.padding_idx] = np.nan  # they do not matter
        inputs["hidden"], outputs["scores"] = hidden.numpy(), scores
    nodes, initializers = table.builder.nodes, table.builder.initializers
    graph = helper.make_graph(nodes, "shared_embedding", named_inputs, named_outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    return _write(finished(model), output, table.form, [Example(inputs, outputs)])


def export_model(body: OnnxBody, output: Path) -> Exported:
    """Write a traced model as an ONNX file, see `export_embedding`; UserError if it would be too large."""
    tables = {name: table_graph(module) for name, module in body.tables.items()}
    model = require("onnx").ModelProto()
    model.CopyFrom(body.program)
    nodes: list[Any] = []
    constant_nodes: list[Any] = []  # which depend on no input, each once
    initializers: dict[str, Any] = {}  # of the nodes of embeddings, by name
    uses = itertools.count(1)
    for node in model.graph.node:
        if node.domain == DOMAIN:
            nodes += _inlined(node, tables, f"{DOMAIN}.{next(uses)}", constant_nodes, initializers)
        else:
            nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend([*constant_nodes, *nodes])
    model.graph.initializer.extend(initializers.values())
    opsets = [opset for opset in model.opset_import if opset.domain != DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend(opsets)
    content = finished(model)
    forms = ", ".join(f"{name}: {table.form}" for name, table in tables.items()) or "embedding in 32 bits"
    share = f"{forms}, {len(content) / body.checkpoint_bytes:.2f} times its checkpoint"
    return _write(content, output, share, body.examples)


def _write(content: bytes, output: Path, form: str, examples: Sequence[Example]) -> Exported:
    """Write a model after a check of its examples where their numbers are finite; the last one is timed."""
    runtime = require("onnxruntime")
    try:
        session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as failure:  # it has no base class of its own
        raise UserError(
            f"onnxruntime {runtime.__version__} does not load the model ({first_line(failure)}); install a "
            "newer one: 8 bits need 1.23, and 2 bits 1.27"
        ) from failure
    error = 0.0
    for example in examples:
        for computed, wanted in zip(
            session.run(list(example.outputs), example.inputs), example.outputs.values()
        ):
            known = np.isfinite(wanted)
            if known.any():
                largest = max(np.abs(wanted[known]).max(), 1e-30)
                differs = float(np.abs(computed - wanted)[known].max() / largest)
                if not differs <= _MOST_ERROR:  # also for NaN
                    raise UserError(f"ONNX Runtime differs from torch by {differs:.1e}; report this as a bug")
                error = max(error, differs)
    with replacing(output) as temporary:
        temporary.write_bytes(content)
    inputs, wanted_names, timed = dict(examples[-1].inputs), list(examples[-1].outputs), "one text at a time"
    tokens = next(iter(inputs.values())).size
    if "hidden" in inputs:
        inputs.update(ids=np.zeros(0, np.int64), hidden=inputs["hidden"][:1])
        wanted_names, tokens, timed = ["scores"], 1, "output layer, a token at a time"
    elif wanted_names == ["vectors"]:
        return Exported(output, form, len(content), error, timed, None)
    runs, start = 0, time.perf_counter()
    while time.perf_counter() - start < _SECONDS:
        session.run(wanted_names, inputs)
        runs += 1
    speed = tokens * runs / (time.perf_counter() - start)
    return Exported(output, form, len(content), error, timed, speed)
