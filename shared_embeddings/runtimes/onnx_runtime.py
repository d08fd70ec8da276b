"""ONNX Runtime's blocks of 2, 4 and 8 bits, see `shared_embeddings.export.onnx`."""

from __future__ import annotations

from shared_embeddings.runtimes.base import Grid, Runtime, register


@register("onnx")
class OnnxRuntime(Runtime):
    """See the module."""

    about = "the whole model as one file for ONNX Runtime"
    grids = {
        f"int{bits}_{group}": Grid("uniform", bits, group) for bits in (8, 4, 2) for group in (32, 64, 128)
    }
