"""One ONNX graph for the look-up and the output layer of an embedding, as small as its checkpoint.

Inputs: ``ids`` ``(n,)`` int64 and ``hidden`` ``(m, S)``; outputs: ``vectors`` ``(n, D)`` and, for embeddings
with an output side, ``scores`` ``(m, V)``. Numbers are stored in fp16 where the checkpoint stores them so.

- `quantized` with codec uniform and 4 or 8 bits for every word: GatherBlockQuantized and MatMulNBits of ONNX
  Runtime on one initializer;
- `structured`: Gather of centroids;
- tables that are a product of two factors: Gather and MatMul;
- all others: the dense table.

Axes: ``V`` vocabulary, ``D`` dimensions, ``S`` width of hidden states, ``B`` groups of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.methods.quantized import QuantizedEmbedding
from shared_embeddings.methods.structured import StructuredEmbedding
from shared_embeddings.utils.extras import require

OPSET, IR_VERSION = 18, 10
MICROSOFT = "com.microsoft"
_BLOCK_SIZES = (16, 32, 64, 128, 256)


class GraphBuilder:
    """Nodes and initializers of a graph.

    Args:
        store: fp16 stores floating-point initializers in 16 bits, anything else in 32.
    """

    def __init__(self, store: str) -> None:
        self.store = store
        self.helper, self.numpy_helper = require("onnx.helper"), require("onnx.numpy_helper")
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []

    def constant(self, name: str, values: Any) -> str:
        """An initializer; returns its name."""
        self.initializers.append(self.numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def numbers(self, name: str, values: Tensor) -> str:
        """Floating-point numbers; returns the name under which nodes read them in float32."""
        found = values.detach().float().cpu()
        if self.store != "fp16":
            return self.constant(name, found.numpy())
        self.constant(f"{name}_fp16", found.half().numpy())
        return self.node("Cast", f"{name}_fp16", name, to=1)

    def node(self, kind: str, inputs: str, output: str, **attributes: Any) -> str:
        """A node with inputs separated by spaces; returns the name of its output."""
        domain = MICROSOFT if kind in ("GatherBlockQuantized", "MatMulNBits") else ""
        self.nodes.append(self.helper.make_node(kind, inputs.split(), [output], domain=domain, **attributes))
        return output

    def model(self, inputs: dict[str, tuple[int, list[Any]]], outputs: dict[str, list[Any]]) -> bytes:
        """The serialized model.

        Args:
            inputs: the type and the shape of each input.
            outputs: the shape of each output, in float32.
        """
        helper = self.helper
        graph = helper.make_graph(
            self.nodes,
            "shared_embedding",
            [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
            [helper.make_tensor_value_info(name, 1, shape) for name, shape in outputs.items()],
            self.initializers,
        )
        opsets = [helper.make_opsetid("", OPSET)]
        if any(node.domain == MICROSOFT for node in self.nodes):
            opsets.append(helper.make_opsetid(MICROSOFT, 1))
        content: bytes = helper.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="shared-embeddings"
        ).SerializeToString()
        return content


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
    graph = GraphBuilder(module.default_store if isinstance(module, SharedEmbedding) else "fp32")
    has_output = isinstance(module, SharedEmbedding) and module.has_output and module.has_linear_scores
    if isinstance(module, QuantizedEmbedding) and _is_packable(module):
        form = _add_blocks(graph, module)
    elif isinstance(module, StructuredEmbedding):
        form = _add_centroids(graph, module)
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
        graph.constant("bias", bias.detach().float().numpy())
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
    options, widths = module.options, list(module.word_counts)
    has_size = options.group_size in _BLOCK_SIZES and module.embedding_dim % 2 == 0
    return options.codec == "uniform" and widths in ([4], [8]) and has_size


def _add_blocks(graph: GraphBuilder, module: QuantizedEmbedding) -> str:
    """Packed codes, which both sides share; the last block of a row is filled up with zeros."""
    ((width, words),) = module.word_counts.items()
    size, dim = module.options.group_size, module.embedding_dim
    blocks = -(-dim // size)
    # A byte of zeros; ONNX Runtime reads the low bits of a byte first.
    zeros, swapped = (0x88, lambda codes: codes >> 4 | codes << 4) if width == 4 else (0x80, np.asarray)
    codes = np.full((words, blocks * size * width // 8), zeros, np.uint8)
    codes[:, : dim * width // 8] = swapped(module.get_buffer(f"codes{width}").numpy())
    graph.constant("codes", codes.reshape(words, blocks, -1))
    scales = module.get_parameter("scales").detach().clone()
    if module.padding_idx is not None:
        scales[module.padding_idx] = 0
    graph.numbers("scales", scales.view(words, blocks, 1))
    attributes = {"block_size": size, "bits": width}
    graph.node(
        "GatherBlockQuantized", "codes ids scales", "blocks", gather_axis=0, quantize_axis=2, **attributes
    )
    for name, values in {"row_shape": [-1, blocks * size], "zero": [0], "dim": [dim], "axis": [1]}.items():
        graph.constant(name, np.array(values))
    graph.node("Reshape", "blocks row_shape", "whole_blocks")
    graph.node("Slice", "whole_blocks zero dim axis", "vectors")
    graph.constant("scale_shape", np.array([words, blocks]))
    graph.node("Reshape", "scales scale_shape", "row_scales")
    graph.node("MatMulNBits", "hidden codes row_scales", "products", K=dim, N=words, **attributes)
    return f"{width}-bit blocks of {size} numbers"


def _add_centroids(graph: GraphBuilder, module: StructuredEmbedding) -> str:
    """Codes and centroids; scores decode the whole table for each run."""
    groups, clusters = module.options.num_groups, module.options.num_clusters
    codes = module.get_buffer("codes").long()
    kind = np.uint8 if clusters <= 256 else np.uint16 if clusters <= 65536 else np.int32
    graph.constant("codes", codes.numpy().astype(kind))
    graph.constant("starts", (torch.arange(groups) * clusters).numpy())
    graph.numbers("centroids", module.get_parameter("centroids").flatten(0, 1))
    graph.constant("row_shape", np.array([-1, module.embedding_dim]))
    graph.node("Gather", "codes ids", "row_codes", axis=0)
    for rows, vectors in (("row_codes", "vectors"), ("codes", "table")):
        if vectors == "table" and not module.has_output:
            break
        graph.node("Cast", rows, f"{vectors}_codes", to=7)
        graph.node("Add", f"{vectors}_codes starts", f"{vectors}_places")
        graph.node("Gather", f"centroids {vectors}_places", f"{vectors}_pieces", axis=0)
        graph.node("Reshape", f"{vectors}_pieces row_shape", f"{vectors}_rows")
    _mask_padding(graph, module.padding_idx)
    if module.has_output:
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
    """Two factors, if the table is their product on both sides, or the dense tables."""
    left, right = _factors(module)
    graph.numbers("left", left)
    graph.node("Gather", "left ids", "vectors" if right is None else "codes", axis=0)
    if right is not None:
        graph.numbers("right", right)
        graph.node("MatMul", "codes right", "vectors")
    if has_output:
        assert isinstance(module, SharedEmbedding)
        scored = module.output_table()
        table = left if right is None else left @ right
        if scored.shape != table.shape or not torch.allclose(scored.float(), table, atol=1e-5):
            graph.numbers("output_table", scored)
            graph.node("Gemm", "hidden output_table", "products", transB=1)
        elif right is None:
            graph.node("Gemm", "hidden left", "products", transB=1)
        else:
            graph.node("Gemm", "hidden right", "projected", transB=1)
            graph.node("Gemm", "projected left", "products", transB=1)
    return "dense table" if right is None else f"two factors of rank {left.size(1)}"


def _factors(module: SharedEmbedding | nn.Embedding) -> tuple[Tensor, Tensor | None]:
    """Tables ``(V, r)`` and ``(r, D)`` whose product is the input table, or the table itself."""
    if isinstance(module, nn.Embedding):
        return module.weight.detach().float(), None
    table = module.table().detach().float()
    if not (module.has_output and module.has_linear_scores):
        return table, None
    left, right = (None if part is None else part.detach().float() for part in module.output_factors())
    assert left is not None
    is_product = right is not None and (left @ right).shape == table.shape
    smaller = right is not None and left.numel() + right.numel() < table.numel()
    if right is not None and is_product and smaller and torch.allclose(left @ right, table, atol=1e-5):
        return left, right
    return table, None
