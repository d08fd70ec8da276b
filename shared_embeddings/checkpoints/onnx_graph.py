"""One ONNX graph for the look-up and the output layer of an embedding, as small as its checkpoint.

Inputs: ``ids`` ``(n,)`` int64 and ``hidden`` ``(m, S)``; outputs: ``vectors`` ``(n, D)`` and, for embeddings
with an output side, ``scores`` ``(m, V)``. Numbers that 16 bits hold exactly are stored in 16 bits.

- `standard`, and tables that are a product of two factors: Gather and MatMul;
- matrices in 4 or 8 bits, which are `quantized` with codec uniform, int8 and int4: see `onnx_builder`;
- `structured` and `compositional_code`: Gather of centroids;
- all others: the dense table.

Axes: ``V`` vocabulary, ``D`` dimensions, ``S`` width of hidden states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shared_embeddings.checkpoints.onnx_builder import Blocks, GraphBuilder, block_size
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.layers.packed_tensor import dense
from shared_embeddings.methods.compositional_code import CompositionalCodeEmbedding
from shared_embeddings.methods.quantized import QuantizedEmbedding
from shared_embeddings.methods.standard import StandardEmbedding
from shared_embeddings.methods.structured import StructuredEmbedding


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
