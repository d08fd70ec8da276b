"""Writes trained models and their embeddings as ONNX, after a check in ONNX Runtime."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shared_embeddings.embedding import SharedEmbedding, WordEmbedding
from shared_embeddings.export.graph import Example, OnnxBody, joined, serialized, table_graph
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.extras import require
from shared_embeddings.utils.files import replacing

_WORDS, _STATES = 64, 4
_SECONDS = 0.5
_MOST_ERROR = 1e-2


@dataclass(frozen=True)
class Exported:
    """What was exported.

    Attributes:
        form: how the tables are stored.
        error: the largest difference from torch, relative to the largest value.
        timed: what `tokens_per_second` measures.
        tokens_per_second: one text at a time; None without an output layer.
    """

    output: Path
    form: str
    bytes: int
    error: float
    timed: str
    tokens_per_second: float | None

    def described(self) -> str:
        """One or two lines for the user."""
        text = f"wrote {self.output}: {self.form}, {self.bytes:,} bytes, within {self.error:.1e} of torch"
        if self.tokens_per_second is None:
            return text
        return f"{text}\n{self.timed}: {self.tokens_per_second:,.0f} tokens per second"


@torch.no_grad()
def export_embedding(embedding: WordEmbedding, output: Path) -> Exported:
    """Write an embedding and its output layer as an ONNX file.

    Raises:
        ModuleNotFoundError: onnx or onnxruntime is not installed.
        UserError: ONNX Runtime computes something else than torch.
        OSError: the file cannot be written.
    """
    module = embedding.module.eval()
    table = table_graph(module)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(module.num_embeddings, (_WORDS,), generator=generator)
    inputs, outputs = {"ids": ids.numpy()}, {"vectors": module(ids).float().numpy()}
    if "scores" in table.widths:
        assert isinstance(module, SharedEmbedding)
        hidden = torch.randn(_STATES, module.score_dim, generator=generator)
        scores = module.logits(hidden).float().numpy()
        if module.padding_idx is not None:
            scores[:, module.padding_idx] = np.nan  # they do not matter
        inputs["hidden"], outputs["scores"] = hidden.numpy(), scores
    return _write(serialized(table), output, table.form, [Example(inputs, outputs)])


def export_model(body: OnnxBody, output: Path) -> Exported:
    """Write a traced model as an ONNX file.

    Raises:
        ModuleNotFoundError: onnx or onnxruntime is not installed.
        UserError: ONNX Runtime computes something else than torch, or the file would be too large.
        OSError: the file cannot be written.
    """
    tables = {name: table_graph(module) for name, module in body.tables.items()}
    content = joined(body, tables)
    forms = ", ".join(f"{name}: {table.form}" for name, table in tables.items()) or "embedding in 32 bits"
    share = f"{forms}, {len(content) / body.checkpoint_bytes:.2f} times its checkpoint"
    return _write(content, output, share, body.examples)


def _write(content: bytes, output: Path, form: str, examples: Sequence[Example]) -> Exported:
    """Write a model after a check of its examples, in which NaN is ignored; the last one is timed."""
    session = require("onnxruntime").InferenceSession(content, providers=["CPUExecutionProvider"])
    error = 0.0
    for example in examples:
        for found, wanted in zip(
            session.run(list(example.outputs), example.inputs), example.outputs.values()
        ):
            if wanted.size:
                largest = max(np.nanmax(np.abs(wanted)), 1e-30)
                error = max(error, float(np.nanmax(np.abs(found - wanted)) / largest))
    if error > _MOST_ERROR:
        raise UserError(f"ONNX Runtime differs from torch by {error:.1e}; report this as a bug")
    with replacing(output) as temporary:
        temporary.write_bytes(content)
    timed, speed = _measure_speed(session, examples[-1])
    return Exported(output, form, len(content), error, timed, speed)


def _measure_speed(session: Any, example: Example) -> tuple[str, float | None]:
    """What is measured with an example, and the tokens per second."""
    inputs, outputs, timed = dict(example.inputs), list(example.outputs), "one text at a time"
    tokens = next(iter(inputs.values())).size
    if "hidden" in inputs:
        inputs.update(ids=np.zeros(0, np.int64), hidden=inputs["hidden"][:1])
        outputs, tokens, timed = ["scores"], 1, "output layer, a token at a time"
    elif outputs == ["vectors"]:
        return timed, None
    runs, start = 0, time.perf_counter()
    while time.perf_counter() - start < _SECONDS:
        session.run(outputs, inputs)
        runs += 1
    return timed, tokens * runs / (time.perf_counter() - start)
