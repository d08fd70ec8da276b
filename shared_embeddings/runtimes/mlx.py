"""MLX's affine grids, in a folder that mlx-lm loads.

A row is a stream of codes, lowest bits first, in words of 32 bits; each group has a scale and an offset,
which MLX calls bias. mlx-lm quantizes the layers that have scales. A tied output layer uses the tensors of
the input layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared_embeddings.runtimes.base import CodedTable, FolderRuntime, Grid, little_endian_bits, register


@register("mlx")
class MlxRuntime(FolderRuntime):
    """See the module. The first grid of each size is the default of mlx-lm."""

    about = "a folder for mlx_lm.load"
    library = "mlx"
    ties_layers = True
    loading = 'from mlx_lm import load\n\nmodel, tokenizer = load("DIR")'
    grids = {
        f"{bits}_{group}": Grid("affine", bits, group) for bits in (2, 3, 4, 6, 8) for group in (64, 32, 128)
    }

    def layer_tensors(self, path: str, is_output: bool, table: CodedTable, grid: Grid) -> dict[str, Any]:
        import numpy as np

        codes = little_endian_bits(table.codes, grid.bits)
        return {
            f"{path}.weight": np.ascontiguousarray(codes).view("<u4"),
            f"{path}.scales": table.scales,
            f"{path}.biases": table.offsets,
        }

    def settings(self, paths: Sequence[str], grid: Grid) -> dict[str, Any]:
        return {"quantization": {"group_size": grid.group_size, "bits": grid.bits}}
