"""Embeddings in ONNX Runtime: the numbers of torch, the size of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shared_embeddings as se
from shared_embeddings.checkpoints import onnx_file
from shared_embeddings.checkpoints.adapter import WordEmbedding
from shared_embeddings.checkpoints.onnx_file import Exported, export_embedding
from shared_embeddings.checkpoints.storage import hold, pack
from shared_embeddings.layers.packed_tensor import install
from tests.helpers import in_turn
from tests.shared_embeddings.cases import CASES, Case

pytest.importorskip("onnxruntime")
WORDS, DIM = 200, 64


def exported(module: Any, output: Path) -> Exported:
    words = [f"w{number}" for number in range(module.num_embeddings)]
    return export_embedding(WordEmbedding("words", words, module.padding_idx, module), output)


def fitted(method: str, dim: int = DIM, **options: Any) -> se.SharedEmbedding:
    table = torch.randn(WORDS, dim, generator=torch.Generator().manual_seed(1))
    return se.fit(method, table, padding_idx=3, progress=False, **options)[0]


def held(module: se.SharedEmbedding, store: str) -> se.SharedEmbedding:
    """An embedding with the numbers of a checkpoint."""
    state = module.state_dict()
    module.load_state_dict(install(module, hold(pack(state, state, store))), strict=False)
    return module


@in_turn("case", CASES)
def test_every_method(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_file, "_SECONDS", 0.0)
    found = exported(case.build(), tmp_path / "embedding.onnx")
    assert found.error < 2e-3 and found.bytes == (tmp_path / "embedding.onnx").stat().st_size


def test_what_is_compact(tmp_path: Path) -> None:
    output = tmp_path / "embedding.onnx"
    for module, form, numbers in (
        (
            held(fitted("quantized", bits=4, codec="uniform"), "fp16"),
            "4-bit blocks of 32",
            WORDS * (32 + 2 * 2),
        ),
        (
            held(fitted("quantized", bits=8, codec="uniform", group_size=64), "fp16"),
            "8-bit blocks of 64",
            WORDS * (64 + 2),
        ),
        # Smaller blocks than the groups, and rows that are filled up to whole blocks.
        (
            held(fitted("quantized", 40, bits=4, codec="uniform"), "fp16"),
            "4-bit blocks of 16",
            WORDS * (24 + 2 * 2),
        ),
        (held(fitted("standard"), "int8"), "8-bit blocks of 64 numbers table", WORDS * (64 + 2)),
        (held(fitted("standard"), "int4"), "4-bit blocks of 32 numbers table", WORDS * (32 + 2 * 2)),
        (
            held(fitted("projective", rank=16), "int8"),
            "two factors of rank 16 in 8-bit",
            WORDS * (16 + 2) + 16 * 66,
        ),
        (
            held(fitted("projective", rank=16), "int4"),
            "two factors of rank 16 in 4-bit",
            WORDS * (8 + 2) + 16 * 36,
        ),
        (fitted("projective", rank=8), "two factors of rank 8", 4 * 8 * (WORDS + DIM)),
        (
            held(fitted("structured", num_groups=8, num_clusters=16), "fp16"),
            "codes of 8 centroids",
            8 * WORDS + 2 * 16 * DIM,
        ),
        (fitted("standard"), "dense table", 4 * WORDS * DIM),
        (nn.Embedding(WORDS, DIM), "dense table", 4 * WORDS * DIM),
    ):
        found = exported(module, output)
        assert found.form.startswith(form)
        assert numbers <= found.bytes <= 1.02 * numbers + 2700, form
        assert (found.tokens_per_second is None) == isinstance(module, nn.Embedding)


def test_a_file_that_differs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = fitted("standard")
    monkeypatch.setattr(type(module), "forward", lambda self, ids: torch.ones(len(ids), DIM))
    with pytest.raises(ValueError, match="ONNX Runtime differs from torch"):
        exported(module, tmp_path / "embedding.onnx")
    assert not list(tmp_path.iterdir())
