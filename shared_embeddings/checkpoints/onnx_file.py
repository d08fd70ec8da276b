"""Exports the embeddings of a trained model to ONNX, and checks them in ONNX Runtime."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from shared_embeddings.checkpoints.adapter import WordEmbedding
from shared_embeddings.checkpoints.onnx_graph import onnx_graph
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.utils.extras import require
from shared_embeddings.utils.files import replacing

_WORDS, _STATES = 64, 4
_SECONDS = 0.5


@dataclass(frozen=True)
class Exported:
    """What was exported.

    Attributes:
        output: the file.
        form: how the table is stored.
        bytes: the size of the file.
        error: the largest difference from torch, relative to the largest value.
        tokens_per_second: of the output layer for one token at a time; None without an output layer.
    """

    output: Path
    form: str
    bytes: int
    error: float
    tokens_per_second: float | None

    def described(self) -> str:
        """One or two lines for the user."""
        text = f"wrote {self.output}: {self.form}, {self.bytes:,} bytes, within {self.error:.1e} of torch"
        if self.tokens_per_second is None:
            return text
        return f"{text}\noutput layer, a token at a time: {self.tokens_per_second:,.0f} tokens per second"


def export_embedding(embedding: WordEmbedding, output: Path) -> Exported:
    """Write an embedding and its output layer as an ONNX file, after a check in ONNX Runtime.

    Raises:
        ModuleNotFoundError: onnx or onnxruntime is not installed.
        ValueError: ONNX Runtime computes something else than torch.
        OSError: the file cannot be written.
    """
    module = embedding.module.eval()
    store = module.default_store if isinstance(module, SharedEmbedding) else "fp32"
    content, form = onnx_graph(module, store)
    error, speed = _checked(content, module)
    if error > 1e-2:
        raise ValueError(f"ONNX Runtime differs from torch by {error:.1e}; report this as a bug")
    with replacing(output) as temporary:
        temporary.write_bytes(content)
    return Exported(output, form, len(content), error, speed)


@torch.no_grad()
def _checked(content: bytes, module: SharedEmbedding | nn.Embedding) -> tuple[float, float | None]:
    """The largest relative difference from torch, and the speed of the output layer."""
    session = require("onnxruntime").InferenceSession(content, providers=["CPUExecutionProvider"])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(module.num_embeddings, (_WORDS,), generator=generator)
    outputs = [output.name for output in session.get_outputs()]
    feeds = {"ids": ids.numpy()}
    wanted = [module(ids)]
    if "scores" in outputs:
        assert isinstance(module, SharedEmbedding)
        hidden = torch.randn(_STATES, module.score_dim, generator=generator)
        feeds["hidden"] = hidden.numpy()
        wanted.append(module.logits(hidden))
    found = session.run(outputs, feeds)
    padding = module.padding_idx
    errors = []
    for one, other in zip(found, wanted):
        right = other.float().numpy()
        difference = np.abs(one - right)
        if padding is not None and right.shape[1] == module.num_embeddings:
            difference[:, padding] = 0
        errors.append(float(difference.max() / max(float(np.abs(right).max()), 1e-30)))
    if "scores" not in outputs:
        return max(errors), None
    one_token = {"ids": np.zeros(0, np.int64), "hidden": feeds["hidden"][:1]}
    runs, start = 0, time.perf_counter()
    while time.perf_counter() - start < _SECONDS:
        session.run(["scores"], one_token)
        runs += 1
    return max(errors), runs / (time.perf_counter() - start)
