"""One ONNX graph for the look-up and the output layer of an embedding, as small as its checkpoint.

Inputs: ``ids`` ``(n,)`` int64 and ``hidden`` ``(m, S)``; outputs: ``vectors`` ``(n, D)`` and, for embeddings
with an output side, ``scores`` ``(m, V)``. Numbers that 16 bits hold exactly are stored in 16 bits.

- `standard`, and tables that are a product of two factors: Gather and MatMul;
- matrices in 4 or 8 bits, which are `quantized` with codec uniform, int8 and int4: GatherBlockQuantized and
  MatMulNBits of ONNX Runtime on one initializer;
- `structured` and `compositional_code`: Gather of centroids;
- all others: the dense table.

Axes: ``V`` vocabulary, ``D`` dimensions, ``S`` width of hidden states, ``N`` rows of a matrix, ``K`` its
width, ``B`` blocks of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.errors import UserError
from shared_embeddings.layers.packed_tensor import PackedTensor, dense
from shared_embeddings.methods.compositional_code import CompositionalCodeEmbedding
from shared_embeddings.methods.quantized import QuantizedEmbedding
from shared_embeddings.methods.standard import StandardEmbedding
from shared_embeddings.methods.structured import StructuredEmbedding
from shared_embeddings.utils.extras import require

OPSET, IR_VERSION = 18, 10
MICROSOFT = "com.microsoft"
# Block sizes of ONNX Runtime, the fastest first.
_BLOCK_SIZES = (256, 128, 64, 32, 16)
_INT4_GROUP = 32
# Smaller initializers stay in 32 bits.
_LEAST_VALUES = 256
# A protocol buffer is limited to this size.
_MOST_BYTES = 2**31 - 1


class Matrix(NamedTuple):
    """A matrix ``(N, K)`` of a graph.

    Attributes:
        name: its initializers start with it; a dense matrix has this name.
        rows, width: N and K.
        block, bits: of its codes; 0 for a dense matrix.
    """

    name: str
    rows: int
    width: int
    block: int = 0
    bits: int = 0

    @property
    def form(self) -> str:
        """How it is stored."""
        return f"{self.bits}-bit blocks of {self.block} numbers" if self.bits else "dense"


class Blocks(NamedTuple):
    """A matrix ``(N, K)`` in few bits.

    Attributes:
        codes: ``(N, bytes)``; of 4 bits, the first number of a byte is in its upper half.
        scales: ``(N, groups)``.
        bits: 4 or 8.
        width: K.
        group: numbers of a row that share a scale.
    """

    codes: Tensor
    scales: Tensor
    bits: int
    width: int
    group: int


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
        if name not in {one.name for one in self.initializers}:
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
        if isinstance(values, PackedTensor) and values.form.name != "fp16" and values.dim() == 2:
            codes, scales = (part.reshape(len(values), -1) for part in values.packed if part is not None)
            width = values.size(1)
            if values.form.name == "int8":
                return self.blocks(name, Blocks(codes.int() + 128, scales, 8, width, width), padding_idx)
            return self.blocks(name, Blocks(codes, scales, 4, width, _INT4_GROUP), padding_idx)
        table = dense(values).detach().float().clone()
        if padding_idx is not None:
            table[padding_idx] = 0
        self.numbers(name, table)
        return Matrix(name, *table.shape)

    def blocks(self, name: str, given: Blocks, padding_idx: int | None) -> Matrix:
        """Store a matrix in few bits; the row `padding_idx` is zero."""
        codes, scales, bits, width, group = given
        size = block_size(width, group)
        count = -(-width // size)
        values = codes.to(torch.uint8).numpy()
        if bits == 4:
            # ONNX Runtime reads the low bits of a byte first.
            values = values >> 4 | values << 4
            values[:, width // 2 :] |= 0x80
        # The last block is filled up with zeros.
        stored = np.full((len(values), count * size * bits // 8), 0x80 if bits == 8 else 0x88, np.uint8)
        stored[:, : values.shape[1]] = values
        self.constant(f"{name}_codes", stored.reshape(len(values), count, -1))
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
        self.node("Unsqueeze", f"{name}_factors last_axis", f"{name}_block_factors")
        return Matrix(name, len(values), width, size, bits)

    def gathered(self, matrix: Matrix, ids: str, output: str) -> str:
        """The rows ``(n, K)`` of ids ``(n,)``."""
        if not matrix.bits:
            return self.node("Gather", f"{matrix.name} {ids}", output, axis=0)
        name, filled = matrix.name, -(-matrix.width // matrix.block) * matrix.block
        self.node(
            "GatherBlockQuantized",
            f"{name}_codes {ids} {name}_block_factors",
            f"{output}_blocks",
            gather_axis=0,
            quantize_axis=2,
            block_size=matrix.block,
            bits=matrix.bits,
        )
        self.constant(f"{name}_row", np.array([-1, filled]))
        if filled == matrix.width:
            return self.node("Reshape", f"{output}_blocks {name}_row", output)
        self.node("Reshape", f"{output}_blocks {name}_row", f"{output}_filled")
        for key, value in {"zero": 0, f"{name}_width": matrix.width, "axis": 1}.items():
            self.constant(key, np.array([value]))
        return self.node("Slice", f"{output}_filled zero {name}_width axis", output)

    def whole(self, matrix: Matrix) -> str:
        """The name of the dense matrix ``(N, K)``."""
        if not matrix.bits:
            return matrix.name
        self.constant(f"{matrix.name}_all", np.arange(matrix.rows, dtype=np.int32))
        return self.gathered(matrix, f"{matrix.name}_all", matrix.name)

    def products(self, hidden: str, matrix: Matrix, output: str) -> str:
        """The products ``(m, N)`` of hidden states ``(m, K)`` with all rows."""
        if not matrix.bits:
            return self.node("Gemm", f"{hidden} {matrix.name}", output, transB=1)
        return self.node(
            "MatMulNBits",
            f"{hidden} {matrix.name}_codes {matrix.name}_factors",
            output,
            K=matrix.width,
            N=matrix.rows,
            block_size=matrix.block,
            bits=matrix.bits,
        )

    def model(self, inputs: dict[str, tuple[int, list[Any]]], outputs: dict[str, list[Any]]) -> bytes:
        """The serialized model.

        Args:
            inputs: the type and the shape of each input.
            outputs: the shape of each output, in float32.
        """
        make = self.helper.make_tensor_value_info
        given = [make(name, kind, shape) for name, (kind, shape) in inputs.items()]
        found = [make(name, 1, shape) for name, shape in outputs.items()]
        graph = self.helper.make_graph(self.nodes, "shared_embedding", given, found, self.initializers)
        opset = self.helper.make_opsetid("", OPSET)
        return finished(self.helper.make_model(graph, opset_imports=[opset]))


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


def finished(model: Any) -> bytes:
    """Serialize a model without what nobody reads, and with weights in 16 bits where these are exact.

    Raises:
        UserError: it is larger than an ONNX file can be.
    """
    helper, graph = require("onnx.helper"), model.graph
    _store_16_bits(graph)
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
    content: bytes = model.SerializeToString()
    return content


def _shorten_names(graph: Any) -> None:
    """Number the values between nodes, whose names take more bytes than the nodes."""
    kept = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    new: dict[str, str] = {}
    for node in graph.node:
        node.ClearField("name")
        if any(attribute.HasField("g") for attribute in node.attribute):
            return
        for name in node.output:
            if name and name not in kept:
                new[name] = f"{len(new):x}"
    for node in graph.node:
        node.input[:] = [new.get(name, name) for name in node.input]
        node.output[:] = [new.get(name, name) for name in node.output]


def _store_16_bits(graph: Any) -> None:
    """Store initializers in 16 bits where that loses nothing: the checkpoint has them so."""
    onnx, numpy_helper = require("onnx"), require("onnx.numpy_helper")
    casts = []
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
        stored = f"{name}_16"
        initializer.CopyFrom(onnx.helper.make_tensor(stored, kind, values.shape, raw, raw=True))
        casts.append(onnx.helper.make_node("Cast", [stored], [name], to=onnx.TensorProto.FLOAT))
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def _is_packable(module: QuantizedEmbedding) -> bool:
    """Whether ONNX Runtime reads the codes of an embedding."""
    options, widths = module.options, list(module.word_counts)
    has_size = block_size(module.embedding_dim, options.group_size) > 0
    return options.codec == "uniform" and widths in ([4], [8]) and has_size


def _add_blocks(graph: GraphBuilder, module: QuantizedEmbedding, has_output: bool) -> str:
    """Packed codes, which both sides share."""
    (width,) = module.word_counts
    codes, scales = module.get_buffer(f"codes{width}"), dense(module.get_parameter("scales"))
    group, dim = module.options.group_size, module.embedding_dim
    given = Blocks(codes, scales.view(len(codes), -1), width, dim, group)
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
    """The input table, and what is stored of it: itself, or two smaller matrices whose product it is."""
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
