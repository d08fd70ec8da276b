"""`shared-embeddings export` on language models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm import models
from lm.checkpoint import load_model, save_state
from shared_embeddings.checkpoints import onnx_file
from shared_embeddings.checkpoints.storage import pack
from shared_embeddings.cli.main import main
from shared_embeddings.sizing.accounting import distinct_state
from tests.lm.test_compression import compress, wide_model

pytestmark = pytest.mark.usefixtures("installed_host")


def test_export_of_a_compressed_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model, small, output = (tmp_path / name for name in ("model.pt", "small.pt", "words.onnx"))
    wide_model(model)
    assert compress(model, "quantized", small, "--codec", "uniform", "--bits", 4, "--group_size", 16) == 0
    asked = ["export", "--model", str(small), "--output", str(output), "--format", "onnx-embeddings"]
    assert main(asked) == 0
    printed = capsys.readouterr().out
    assert "4-bit blocks of 16 numbers" in printed and "tokens per second" in printed
    assert output.stat().st_size < small.stat().st_size

    embedding = load_model(small).model.embedding.eval()
    session = onnxruntime.InferenceSession(str(output), providers=["CPUExecutionProvider"])
    hidden = torch.randn(2, embedding.score_dim)
    vectors, scores = session.run(
        ["vectors", "scores"], {"ids": np.array([1, 7, 7]), "hidden": hidden.numpy()}
    )
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(vectors), embedding(torch.tensor([1, 7, 7])))
        torch.testing.assert_close(torch.from_numpy(scores), embedding.logits(hidden), rtol=1e-4, atol=1e-4)

    assert main(asked) == 2
    assert "words.onnx" in capsys.readouterr().err
    assert main([*asked, "--force"]) == 0
    assert main(["export", "--model", str(small), "--output", str(small), "--force"]) == 2
    assert "--model" in capsys.readouterr().err


MODELS: dict[str, dict[str, Any]] = {
    "awd_lstm": {"hidden_dim": 24, "num_layers": 2},
    "transformer_xl": {
        "num_layers": 2,
        "num_heads": 2,
        "head_dim": 8,
        "feed_forward_dim": 32,
        "memory_length": 7,
        "same_length": True,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("embedding", [{"method": "standard"}, {"method": "adaptive", "cutoffs": [50, 150]}])
def test_whole_models(
    kind: str,
    embedding: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A text read in parts of any length, with the state of the part before, has the scores of torch."""
    onnxruntime = pytest.importorskip("onnxruntime")
    monkeypatch.setattr(onnx_file, "_SECONDS", 0.0)
    path, output = tmp_path / "model.pt", tmp_path / "model.onnx"
    words = ["<unk>", "<eos>", *(f"w{number}" for number in range(298))]
    config = {"model": kind, "embedding_dim": 16, **MODELS[kind], "embedding": embedding}
    model = models.build(kind, words, embedding, {"embedding_dim": 16, **MODELS[kind]}).eval()
    state = pack(distinct_state(model), ["embedding"], "int8")
    save_state(path, state, words, config, None)
    assert main(["export", "--model", str(path), "--output", str(output)]) == 0
    assert "tokens per second" in capsys.readouterr().out

    model = load_model(path).model.eval()
    session = onnxruntime.InferenceSession(str(output), providers=["CPUExecutionProvider"])
    ids = torch.randint(len(words), (3, 15), generator=torch.Generator().manual_seed(4))
    ours, theirs = model.initial_state(3), [part.numpy() for part in model.initial_state(3)]
    for part in ids.split([1, 9, 5], dim=1):
        given = {f"state.{number}": values for number, values in enumerate(theirs)}
        logits, *theirs = session.run(None, {"ids": part.numpy(), **given})
        with torch.no_grad():
            hidden, ours, _ = model(part, ours)
            wanted = model.embedding.logits(hidden)
        torch.testing.assert_close(torch.from_numpy(logits), wanted, rtol=1e-3, atol=1e-4)
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(torch.from_numpy(one), other, rtol=1e-3, atol=1e-4)
