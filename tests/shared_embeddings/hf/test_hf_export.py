"""`shared-embeddings export`: whole models for ONNX Runtime, and dense folders with the same scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from safetensors.torch import load_file

import shared_embeddings.hf as hf
from tests.helpers import main
from tests.shared_embeddings.hf.models import FAMILIES, IDS, KINDS, build, compress, scores, shrink, write

# The graphs of these tiny models are not small compared to their weights.
GRAPH_BYTES = 15_000
DENSE = ("--format", "dense")
UNIFORM = {"method": "quantized", "bits": 4, "codec": "uniform", "group_size": 16}


@pytest.fixture(autouse=True)
def _no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared_embeddings.export.onnx._SECONDS", 0.0)


def export(model: Path, output: Path, *more: str) -> int:
    return main(["export", "--model", str(model), "--output", str(output), *more])


def opened(path: Path) -> Any:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def test_encoder_with_dynamic_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, output = tmp_path / "model", tmp_path / "model.onnx"
    shrink("bert", model, store="fp16", **UNIFORM)
    assert export(model, output) == 0
    printed = capsys.readouterr()
    assert "words: 4-bit blocks of 16 numbers" in printed.out and "tokens per second" in printed.out
    assert not printed.err
    # fp16 scales are stored with 4-bit codes, and both sides share them.
    assert output.stat().st_size < (model / "model.safetensors").stat().st_size + GRAPH_BYTES
    names = [tensor.name for tensor in onnx.load(output).graph.initializer]
    assert [name for name in names if "codes" in name] == ["words.table_codes"]
    torch_model = hf.load(model)
    for ids in (IDS, IDS[:1], IDS[:, :2]):
        mask = torch.ones_like(ids)
        mask[-1, -1] = 0
        (logits,) = opened(output).run(
            ["logits"],
            {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), "token_type_ids": 0 * ids.numpy()},
        )
        with torch.no_grad():
            wanted = torch_model(ids, attention_mask=mask).logits
        torch.testing.assert_close(torch.from_numpy(logits), wanted, rtol=1e-3, atol=1e-3)

    assert export(model, output) == 2 and "--force" in capsys.readouterr().err
    assert export(model, output, "--format", "onnx-embeddings", "--force") == 0


@pytest.mark.slow
def test_a_decoder_with_its_cache(tmp_path: Path) -> None:
    """Greedy generation token by token gives what torch generates."""
    model, output = tmp_path / "model", tmp_path / "model.onnx"
    shrink("llama", model)
    assert export(model, output) == 0
    session = opened(output)
    past = {
        node.name: np.zeros((2, node.shape[1], 0, node.shape[3]), np.float32)
        for node in session.get_inputs()
        if node.name.startswith("past")
    }
    texts = step = IDS.numpy()
    for _ in range(5):
        mask = np.ones_like(texts)
        logits, *present = session.run(None, {"input_ids": step, "attention_mask": mask, **past})
        past = dict(zip(past, present))
        step = logits[:, -1:].argmax(-1)
        texts = np.concatenate([texts, step], axis=1)
    wanted = hf.load(model).generate(
        IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=5, do_sample=False, eos_token_id=None
    )
    assert texts.tolist() == wanted.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("bert", "llama")])
def test_every_family(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, output = tmp_path / "model", tmp_path / "model.onnx"
    shrink(kind, model)
    assert export(model, output) == 0
    assert "two factors of rank 6" in capsys.readouterr().out


@pytest.mark.slow
def test_a_plain_model_in_bfloat16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tied table is stored once, and the weights in 16 bits."""
    model, output = tmp_path / "model", tmp_path / "model.onnx"
    build("qwen2").bfloat16().save_pretrained(model)
    assert export(model, output) == 0
    assert "words: dense table" in capsys.readouterr().out
    assert output.stat().st_size < (model / "model.safetensors").stat().st_size + GRAPH_BYTES
    tables = [tensor for tensor in onnx.load(output).graph.initializer if list(tensor.dims) == [300, 16]]
    # Small numbers in bfloat16 are exact in fp16, too.
    assert len(tables) == 1 and tables[0].data_type in (onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT16)


def test_models_that_cannot_be_traced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.exporters.exporter_onnx import OnnxExporter

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such operator\nand a long trace")

    model, output = tmp_path / "model", tmp_path / "model.onnx"
    write("gpt2", model)
    monkeypatch.setattr(OnnxExporter, "export", fail)
    assert export(model, output) == 2
    error = capsys.readouterr().err
    assert "no such operator" in error and "onnx-embeddings" in error and error.count("\n") == 1
    assert not output.exists()


@pytest.mark.parametrize("kind", ["gemma3", "t5_untied", "marian_two_vocabularies", "bert"])
def test_dense_export_keeps_names_and_scores(kind: str, tmp_path: Path) -> None:
    model, plain, original = (tmp_path / f"{kind}_{name}" for name in ("model", "plain", "original"))
    shrink(kind, model)
    build(kind).save_pretrained(original)
    assert export(model, plain, *DENSE) == 0
    weights, wanted = (load_file(folder / "model.safetensors") for folder in (plain, original))
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        name: tensor.shape for name, tensor in wanted.items()
    }
    loaded = getattr(transformers, KINDS[kind][0]).from_pretrained(plain)
    torch.testing.assert_close(scores(loaded), scores(hf.load(model)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dense_export_of_rotated_codes(dtype: torch.dtype, tmp_path: Path) -> None:
    """Both sides of one table round differently, here with a width that is not that of the model."""
    model, small, plain = (tmp_path / f"{dtype}_{name}" for name in ("model", "small", "plain"))
    settings = {**FAMILIES["ElectraForMaskedLM"], "embedding_size": 24}
    whole = transformers.ElectraForMaskedLM(transformers.ElectraConfig(**settings)).to(dtype)
    whole.save_pretrained(model)
    assert compress(model, "quantized", small, "--bits", 3, "--codec", "trellis", "--no-check") == 0
    assert export(small, plain, *DENSE) == 0
    wanted = hf.load(small)
    loaded, info = transformers.ElectraForMaskedLM.from_pretrained(plain, output_loading_info=True)
    assert not any(info.values()) and loaded.dtype == dtype
    table = wanted.shared_embeddings["words"].table()
    assert torch.equal(loaded.get_input_embeddings().weight, table)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.03}[dtype]
    torch.testing.assert_close(scores(loaded), scores(wanted), rtol=tolerance, atol=tolerance)


def test_different_tables_of_two_sides_are_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = {"map_dim": 4, "expand_dim": 32, "depth": 3, "max_groups": 4}
    shrink("gemma3", tmp_path / "small", method="define", output="map", output_projection=True, **unit)
    assert export(tmp_path / "small", tmp_path / "plain", *DENSE) == 2
    assert "input and output tables of its define embedding differ" in capsys.readouterr().err


def test_dense_export_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, plain, other = tmp_path / "model", tmp_path / "plain", tmp_path / "other"
    shrink("gpt2", model)
    assert export(model, plain, *DENSE) == 0 and export(model, plain, *DENSE) == 2
    assert "--force" in capsys.readouterr().err
    assert export(model, plain, *DENSE, "--force") == 0
    assert export(plain, other, *DENSE) == 2 and "is not compressed" in capsys.readouterr().err
    other.mkdir()
    (other / "thesis.txt").touch()
    assert export(model, other, *DENSE, "--force") == 2 and "is not replaced" in capsys.readouterr().err
    assert (other / "thesis.txt").is_file()
    assert export(model, plain, "--force") == 2
    assert "Is a directory" in capsys.readouterr().err
