"""`shared-embeddings export` on language models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lm.checkpoint import load_model
from shared_embeddings.cli.main import main
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
