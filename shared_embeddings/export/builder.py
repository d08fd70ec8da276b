"""Build ONNX graphs: nodes, initializers, and matrices in few bits.

Matrices in 4 bits are read by GatherBlockQuantized and MatMulNBits of ONNX Runtime from the same initializer.
Those in 8 bits are two halves of 4 bits: with 8 bits, MatMulNBits takes 10 times as long as a dense matrix,
unless it rounds the hidden states.

Axes: ``N`` rows of a matrix, ``K`` its width, ``n`` looked-up rows, ``m`` hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shared_embeddings.quant.packed_tensor import PackedTensor, dense
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.extras import require

OPSET, IR_VERSION = 18, 10
MICROSOFT = "com.microsoft"
# Block sizes of ONNX Runtime, the fastest first.
_BLOCK_SIZES = (128, 64, 32, 16)
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
    def blocks(self) -> int:
        """The blocks of a row."""
        return -(-self.width // self.block)

    @property
    def form(self) -> str:
        """How it is stored."""
        return f"{self.bits}-bit blocks of {self.block} numbers" if self.bits else "dense"


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
            is_int8 = values.form.name == "int8"
            bits, group = (8, width) if is_int8 else (4, _INT4_GROUP)
            codes = codes.int() + 128 if is_int8 else codes
            return self.blocks(name, codes, scales, bits, width, group, padding_idx)
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
        """Store a matrix ``(N, K)`` in few bits.

        Args:
            name: its initializers start with it.
            codes: ``(N, bytes)``; of 4 bits, the first number of a byte is in its upper half.
            scales: ``(N, groups)``.
            bits: 4 or 8.
            width: K.
            group: numbers of a row that share a scale.
            padding_idx: a row that becomes zero.
        """
        size = block_size(width, group)
        count = -(-width // size)
        values = codes.to(torch.uint8).numpy()
        if bits == 4:
            values = np.stack([values >> 4, values & 15], axis=2).reshape(len(values), -1)[:, :width]
        # The last block is filled up with zeros.
        values = np.pad(values, ((0, 0), (0, count * size - width)), constant_values=1 << bits - 1)
        values = values.reshape(len(values), count, size)
        groups = np.arange(count) * size // group
        if bits == 8:
            # Blocks of upper and of lower halves take turns.
            values = np.stack([values >> 4, values & 15], axis=2).reshape(len(values), 2 * count, size)
            groups = groups.repeat(2)
        # ONNX Runtime reads the low bits of a byte first.
        self.constant(f"{name}_codes", values[..., ::2] | values[..., 1::2] << 4)
        factors = scales.detach().float().clone()
        if padding_idx is not None:
            factors[padding_idx] = 0
        if factors.size(1) == len(groups):
            self.numbers(f"{name}_factors", factors)
        else:
            self.numbers(f"{name}_scales", factors)
            self.constant(f"{name}_groups", groups)
            self.node("Gather", f"{name}_scales {name}_groups", f"{name}_factors", axis=1)
        self.constant("last_axis", np.array([2]))
        self.node("Unsqueeze", f"{name}_factors last_axis", f"{name}_block_factors")
        return Matrix(name, len(values), width, size, bits)

    def gathered(self, matrix: Matrix, ids: str, output: str) -> str:
        """The rows ``(n, K)`` of ids ``(n,)``."""
        if not matrix.bits:
            return self.node("Gather", f"{matrix.name} {ids}", output, axis=0)
        name, filled = matrix.name, matrix.blocks * matrix.block
        settings = {"gather_axis": 0, "quantize_axis": 2, "block_size": matrix.block, "bits": 4}
        inputs, blocks = f"{name}_codes {ids} {name}_block_factors", f"{output}.blocks"
        if matrix.bits == 4:
            self.node("GatherBlockQuantized", inputs, blocks, **settings)
        else:
            zeros = np.array([8, 0] * matrix.blocks, np.uint8).reshape(1, -1, 1)
            self.constant(f"{name}_zero_points", zeros)
            self.constant(f"{name}_zeros_shape", np.array([matrix.rows, 2 * matrix.blocks, 1]))
            self.node("Expand", f"{name}_zero_points {name}_zeros_shape", f"{output}.zeros")
            self.node("GatherBlockQuantized", f"{inputs} {output}.zeros", f"{output}.halves", **settings)
            self.constant(f"{name}_pairs", np.array([-1, matrix.blocks, 2, matrix.block]))
            self.node("Reshape", f"{output}.halves {name}_pairs", f"{output}.pairs")
            self.constant("places", np.array([[16], [1]], np.float32))
            self.node("Mul", f"{output}.pairs places", f"{output}.placed")
            self.constant("last_axis", np.array([2]))
            self.node("ReduceSum", f"{output}.placed last_axis", blocks, keepdims=0)
        self.constant(f"{name}_row", np.array([-1, filled]))
        if filled == matrix.width:
            return self.node("Reshape", f"{blocks} {name}_row", output)
        self.node("Reshape", f"{blocks} {name}_row", f"{output}.filled")
        for key, value in {"zero": 0, f"{name}_width": matrix.width, "axis": 1}.items():
            self.constant(key, np.array([value]))
        return self.node("Slice", f"{output}.filled zero {name}_width axis", output)

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
        name, settings = matrix.name, {"N": matrix.rows, "block_size": matrix.block, "bits": 4}
        inputs = f"{name}_codes {name}_factors"
        if matrix.bits == 4:
            return self.node("MatMulNBits", f"{hidden} {inputs}", output, K=matrix.width, **settings)
        filled = matrix.blocks * matrix.block
        if filled > matrix.width:
            self.constant(f"{name}_padding", np.array([0, 0, 0, filled - matrix.width]))
            hidden = self.node("Pad", f"{hidden} {name}_padding", f"{output}.padded")
        # Each block of a hidden state for the upper halves, times 16, and for the lower ones.
        self.constant(f"{name}_blocks", np.array([-1, matrix.blocks, 1, matrix.block]))
        self.constant(f"{name}_states", np.array([-1, 2 * filled]))
        self.node("Reshape", f"{hidden} {name}_blocks", f"{output}.blocks")
        self.constant("places", np.array([[16], [1]], np.float32))
        self.node("Mul", f"{output}.blocks places", f"{output}.placed")
        self.node("Reshape", f"{output}.placed {name}_states", f"{output}.states")
        # The zero points of a pair of blocks, 8 and 0, are a byte.
        self.constant(f"{name}_bytes_shape", np.array([matrix.rows, matrix.blocks]))
        byte = self.numpy_helper.from_array(np.array([8], np.uint8))
        self.node("ConstantOfShape", f"{name}_bytes_shape", f"{output}.zeros", value=byte)
        inputs = f"{output}.states {inputs} {output}.zeros"
        return self.node("MatMulNBits", inputs, output, K=2 * filled, **settings)


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
    return bytes(model.SerializeToString())


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
        initializer.CopyFrom(onnx.helper.make_tensor(f"{name}_16", kind, values.shape, raw, raw=True))
        casts.append(onnx.helper.make_node("Cast", [f"{name}_16"], [name], to=onnx.TensorProto.FLOAT))
    replace_nodes(graph, [*casts, *graph.node])


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
    rename_values(graph, new)


def rename_values(graph: Any, new: Mapping[str, str]) -> None:
    """Rename inputs and outputs of the nodes of a graph."""
    for node in graph.node:
        node.input[:] = [new.get(name, name) for name in node.input]
        node.output[:] = [new.get(name, name) for name in node.output]


def replace_nodes(graph: Any, nodes: Sequence[Any]) -> None:
    """Give a graph other nodes, some of which may be its own."""
    found = list(nodes)
    del graph.node[:]
    graph.node.extend(found)
