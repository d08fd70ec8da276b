"""`shared-embeddings export`: whole models for ONNX Runtime, and dense folders with the same scores."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import gguf
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


def gguf_file(
    path: Path, model: Any, *, tied: bool = True, words: int | None = None, **how: Any
) -> dict[str, Any]:
    """A GGUF file with some fields, a plain table or two, and a layer; returns its tensors."""
    table = model.get_input_embeddings().weight.detach().float().numpy()[:words]
    tensors = {"token_embd.weight": table, "blk.0.ffn_up.weight": np.ones((4, 32), np.float16)}
    if not tied:
        tensors["output.weight"] = model.get_output_embeddings().weight.detach().float().numpy()
    writer = gguf.GGUFWriter(path, "llama", **how)
    writer.add_name("a model")
    writer.add_context_length(64)
    writer.add_token_list(["a", "b", "ü"])
    writer.add_token_scores([0.5, 1.5, 2.5])
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def gguf_tables(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    """The types and the values of all tensors of a GGUF file."""
    return {
        tensor.name: (tensor.tensor_type.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        for tensor in gguf.GGUFReader(path).tensors
    }


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"method": "quantized", "codec": "uniform", "bits": 4, "count_exponent": 0}, "Q4_0"),
        ({"method": "quantized", "codec": "uniform", "bits": 8, "count_exponent": 0}, "Q8_0"),
        ({"method": "quantized", "bits": 4}, "Q8_0"),
        ({"method": "projective", "rank": 8}, "Q8_0"),
    ],
    ids=["4", "8", "trellis", "projective"],
)
def test_gguf_has_the_codes_of_the_table(
    options: dict[str, Any], kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is read by the package of llama.cpp; uniform codes are exact, others rounded to Q8_0."""
    torch.manual_seed(0)
    source, small, output = tmp_path / "source.gguf", tmp_path / "small", tmp_path / "small.gguf"
    plain = build("qwen2", width=64)
    before = gguf_file(source, plain)
    shrink("qwen2", small, store="fp16", width=64, **options)
    assert export(small, output, "--format", "gguf", "--gguf", str(source)) == 0
    assert f"token_embd.weight in {kind}" in capsys.readouterr().out
    tensors = gguf_tables(output)
    assert [*tensors] == [*before] and tensors["token_embd.weight"][0] == kind
    (embedding,) = hf.load(small).shared_embeddings.values()
    wanted = embedding.table().detach().float().numpy()
    tolerance = 0.0 if options.get("codec") == "uniform" else 0.005 * np.abs(wanted).max()
    np.testing.assert_allclose(tensors["token_embd.weight"][1], wanted, rtol=0, atol=tolerance)
    np.testing.assert_array_equal(tensors["blk.0.ffn_up.weight"][1], 1)
    fields = gguf.GGUFReader(output).fields
    assert fields["general.name"].contents() == "a model"
    assert fields["llama.context_length"].contents() == 64
    assert fields["tokenizer.ggml.tokens"].contents() == ["a", "b", "ü"]
    assert fields["tokenizer.ggml.scores"].contents() == [0.5, 1.5, 2.5]


def test_gguf_of_two_tables(tmp_path: Path) -> None:
    source, small, output = tmp_path / "source.gguf", tmp_path / "small", tmp_path / "small.gguf"
    gguf_file(source, build("llama", width=64), tied=False)
    shrink("llama", small, width=64, method="projective", rank=8)
    assert export(small, output, "--format", "gguf", "--gguf", str(source)) == 0
    tables = hf.load(small).shared_embeddings
    stored = gguf_tables(output)
    for name, wanted in (
        ("token_embd.weight", tables["input_words"].table()),
        ("output.weight", tables["output_words"].output_table()),
    ):
        values = wanted.detach().float().numpy()
        np.testing.assert_allclose(stored[name][1], values, rtol=0, atol=0.005 * np.abs(values).max())


def test_gguf_of_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, small, output = tmp_path / "source.gguf", tmp_path / "small", tmp_path / "small.gguf"
    plain = build("qwen2", width=64)
    shrink("qwen2", small, width=64, method="projective", rank=8)
    gguf_file(source, plain, words=100)
    assert export(small, output, "--format", "gguf", "--gguf", str(source)) == 2
    assert "is [100, 64], but the model's table is [300, 64]" in capsys.readouterr().err
    source.write_bytes(b"GGUF" + bytes(40))
    assert export(small, output, "--format", "gguf", "--gguf", str(source)) == 2
    assert "not a readable GGUF file" in capsys.readouterr().err
    assert export(small, output, "--format", "gguf") == 2
    assert "--gguf FILE" in capsys.readouterr().err
    assert export(small, source, "--format", "gguf", "--gguf", str(source), "--force") == 2
    assert not output.exists() and len(capsys.readouterr().err.splitlines()) == 1


def test_a_full_disk_names_the_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, small, output = tmp_path / "source.gguf", tmp_path / "small", tmp_path / "small.gguf"
    shrink("qwen2", small, width=64, method="projective", rank=8)
    gguf_file(source, build("qwen2", width=64))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        assert export(small, output, "--format", "gguf", "--gguf", str(source)) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capsys.readouterr().err
    assert f"{output}: " in error and "free disk space" in error and not output.exists()


@pytest.mark.parametrize("parts", [1, 2])
def test_gguf_in_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str], parts: int) -> None:
    """A part lacks the tensors of the others: it is refused; a single part is a whole model."""
    source, small, output = tmp_path / "source.gguf", tmp_path / "small", tmp_path / "small.gguf"
    shrink("qwen2", small, width=64, method="projective", rank=8)
    writer = gguf.GGUFWriter(source, "llama", split_max_tensors=0)
    writer.add_uint16("split.no", 0)
    writer.add_uint16("split.count", parts)
    writer.add_int32("split.tensors.count", parts)
    writer.add_tensor("token_embd.weight", np.ones((300, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    status = export(small, output, "--format", "gguf", "--gguf", str(source))
    assert status == (0 if parts == 1 else 2) and output.exists() == (parts == 1)
    if parts == 1:
        assert not [name for name in gguf.GGUFReader(output).fields if name.startswith("split.")]
    else:
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{source}: is one of 2 parts" in line and "gguf-split --merge" in line


def test_gguf_that_cannot_be_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the package gguf would write with other bytes, or not at all."""
    source, small, output = tmp_path / "source.gguf", tmp_path / "small", tmp_path / "small.gguf"
    shrink("qwen2", small, width=64, method="projective", rank=8)
    gguf_file(source, build("qwen2", width=64))
    content = source.read_bytes()
    gguf_file(source, build("qwen2", width=64), endianess=gguf.GGUFEndian.BIG)
    for changed, reason in (
        (source.read_bytes(), "big-endian"),
        (content.replace("ü".encode(), b"\xff\xfe"), "can't decode"),
        (content.replace(b"general.architecture", b"general.architextura"), "has no general.architecture"),
    ):
        source.write_bytes(changed)
        assert export(small, output, "--format", "gguf", "--gguf", str(source)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert reason in line and not output.exists()


def test_gguf_has_no_output_bias(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, small, output = tmp_path / "source.gguf", tmp_path / "small", tmp_path / "small.gguf"
    gguf_file(source, build("qwen2", width=64))
    shrink("qwen2", small, width=64, method="projective", rank=8, output_bias=True)
    assert export(small, output, "--format", "gguf", "--gguf", str(source)) == 2
    assert "no single dense table replaces it" in capsys.readouterr().err and not output.exists()
