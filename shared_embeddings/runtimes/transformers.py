"""The codes of transformers' own quantizer "gemma", which it loads for any model, without another package.

Whole numbers with an fp32 scale for each row: int8, or 4 or 2 bits with an offset, lowest bits first. Input
and output layers do not share tensors there, so a tied table is stored twice. See
``integrations/gemma_quant.py`` of transformers (5.23).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from shared_embeddings.runtimes.base import CodedTable, FolderRuntime, Grid, little_endian_bits, register


@register("transformers")
class TransformersRuntime(FolderRuntime):
    """See the module."""

    about = "a folder for transformers 5.23 without this package"
    library = "transformers"
    scales_in_float32 = True
    loading = (
        'from transformers import AutoModel  # or another class\n\nmodel = AutoModel.from_pretrained("DIR")'
    )
    grids = {f"int{bits}": Grid("uniform", bits, None) for bits in (8, 4, 2)}

    def layer_tensors(self, path: str, is_output: bool, table: CodedTable, grid: Grid) -> dict[str, Any]:
        import numpy as np

        # The zero point is as here, 2**(bits - 1).
        codes = little_endian_bits(table.codes, grid.bits)
        codes = (codes ^ 128).view(np.int8) if grid.bits == 8 else codes
        if not is_output:
            return {f"{path}.embedding_quantized": codes, f"{path}.embedding_scale": table.scales}
        zero = np.zeros((), np.float32)  # activations are not rounded
        ranges = {f"{path}.{side}_activation_scale": zero for side in ("input", "output")}
        return {f"{path}.weight": codes, f"{path}.weight_scale": table.scales, **ranges}

    def settings(self, paths: Sequence[str], grid: Grid) -> dict[str, Any]:
        # Classes for other tasks have other prefixes.
        names = "|".join(re.escape(path.removeprefix("model.")) for path in paths)
        quantization = {
            "quant_method": "gemma",
            "num_bits": grid.bits,
            "quantize_embeddings": True,
            "modules_to_not_convert": [rf"(?!(?:\w+\.)?(?:{names})$).*"],
        }
        return {"quantization_config": quantization, "tie_word_embeddings": False}
