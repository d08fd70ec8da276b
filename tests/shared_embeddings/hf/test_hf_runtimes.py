"""Tables in the codes of other runtimes, read back by these or by a reader written from their description."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import shared_embeddings.hf as hf
from shared_embeddings.compress.fit import fit
from shared_embeddings.runtimes.base import runtimes
from tests.helpers import main
from tests.shared_embeddings.hf.models import add_tokenizer, build, scores, shrink

FOLDERS = [(name, grid) for name in ("mlx", "transformers") for grid in runtimes()[name].grids]
# Of tables in other codes.
ROUNDED = ("--for", "llama.cpp", "--bits", "8")


def export(model: Path, output: Path, *more: str) -> int:
    return main(["export", "--model", str(model), "--output", str(output), *more])


def read_mlx(tensors: dict[str, Tensor], path: str, bits: int, group: int) -> np.ndarray:
    """The rows of a layer as MLX describes them: codes from the lowest bit on, times scale plus bias."""
    words, scales, biases = (tensors[f"{path}.{name}"] for name in ("weight", "scales", "biases"))
    rows = []
    for row in words.numpy():
        stream = sum(int(word) << 32 * place for place, word in enumerate(row))
        rows.append([stream >> bits * place & 2**bits - 1 for place in range(32 * len(row) // bits)])
    values = np.array(rows, np.float32).reshape(len(rows), -1, group)
    values = values * scales.float().numpy()[..., None] + biases.float().numpy()[..., None]
    return values.reshape(len(rows), -1)


@pytest.mark.parametrize(("runtime", "name"), FOLDERS)
@pytest.mark.parametrize("kind", ["gemma3", "llama"], ids=["tied", "untied"])
def test_folders_have_the_codes_of_the_table(kind: str, runtime: str, name: str, tmp_path: Path) -> None:
    grid = runtimes()[runtime].grids[name]
    small, output = tmp_path / "small", tmp_path / "output"
    shrink(kind, small, store="fp16", width=128, method="quantized", **grid.options([128]))
    assert export(small, output, "--for", runtime) == 0
    model = hf.load(small)
    layers = {"model.embed_tokens": model.get_input_embeddings(), "lm_head": model.get_output_embeddings()}
    if runtime == "mlx":
        tensors = load_file(output / "model.safetensors")
        settings = json.loads((output / "config.json").read_text())
        assert settings["quantization"] == {"group_size": grid.group_size, "bits": grid.bits}
        assert ("lm_head.scales" in tensors) == (kind == "llama") and "quantization_config" not in settings
        for path, layer in layers.items():
            if f"{path}.scales" in tensors:
                table = layer.embedding.table().detach().numpy()
                rows = read_mlx(tensors, path, grid.bits, grid.group_size or 0)
                np.testing.assert_allclose(rows, table, rtol=0, atol=2e-6 * np.abs(table).max())
    else:
        read = transformers.AutoModelForCausalLM.from_pretrained(output)
        assert not [name for name in read.state_dict() if "shared_embeddings" in name]
        torch.testing.assert_close(scores(read), scores(model), rtol=1e-4, atol=1e-4)


@pytest.mark.slow_except("BltForCausalLM")
@pytest.mark.parametrize("kind", ["BltForCausalLM", "Qwen4ExpForCausalLM", "neomme", "gemma4", "bert"])
def test_folders_of_transformers_have_all_tables(kind: str, tmp_path: Path) -> None:
    """Nothing is missing or left over, and no other layer is taken for one with codes."""
    small, output = tmp_path / "small", tmp_path / "output"
    shrink(
        kind,
        small,
        store="fp16",
        method="quantized",
        **runtimes()["transformers"].grids["int8"].options([16]),
    )
    assert export(small, output, "--for", "transformers") == 0
    model = hf.load(small)
    read, info = type(model).from_pretrained(output, output_loading_info=True)
    assert not any(info.values())
    torch.testing.assert_close(scores(read), scores(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("runtime", ["mlx", "transformers", "onnx"])
def test_compress_for_a_runtime(runtime: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, output, text = tmp_path / "model", tmp_path / "output", tmp_path / "text"
    build("qwen2", width=64).save_pretrained(model)
    add_tokenizer(model, eos_token="w1", pad_token="w2", bos_token="w3")
    text.write_text("\n".join(f"w{n % 300} w{7 * n % 300} w{n * n % 300}" for n in range(900)))
    asked = ["compress", "--model", model, "--for", runtime, "--bits", "4", "--output", output]
    asked += ["--text", text, "--only-text"]
    assert main([str(word) for word in asked]) == 0
    assert "calibrated on" in capsys.readouterr().out
    if runtime == "onnx":
        codes = {part.name: part.dims for part in onnx.load(output).graph.initializer if "codes" in part.name}
        assert codes == {"words.table_codes": [300, 2, 16]}
        return
    card = (output / "README.md").read_text()
    assert f"library_name: {runtime}" in card and "base_model_relation: quantized" in card
    assert "shared_embeddings.hf" not in card
    plain = load_file(model / "model.safetensors")
    for name, tensor in load_file(output / "model.safetensors").items():
        if "layers" in name:
            torch.testing.assert_close(tensor, plain[name], rtol=0, atol=0)


def test_compress_for_llama(tmp_path: Path) -> None:
    model, output, source = tmp_path / "model", tmp_path / "small.gguf", tmp_path / "source.gguf"
    text = tmp_path / "text"
    plain = build("qwen2", width=64)
    plain.save_pretrained(model)
    add_tokenizer(model, eos_token="w1", pad_token="w2", bos_token="w3")
    gguf_file(source, plain)
    text.write_text("w1 w2 w3\n" * 9)
    asked = ["compress", "--model", model, "--for", "llama.cpp", "--grid", "Q4_1", "--gguf", source]
    asked += ["--text", text, "--only-text", "--calibration", "none", "--output", output]
    assert main([str(word) for word in asked]) == 0
    kind, values = gguf_tables(output)["token_embd.weight"]
    table = plain.get_input_embeddings().weight.detach().numpy()
    assert kind == "Q4_1" and np.linalg.norm(values - table) < 0.1 * np.linalg.norm(table)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--for", "mlx", "--bits", "5"), "mlx has 2 and 3 and 4 and 6 and 8"),
        (("--for", "mlx"), "give exactly one of"),
        (("--for", "mlx", "--grid", "Q4_0"), "mlx has 2_64, 2_32"),
        (("--for", "mlx", "--grid", "4_128"), "not whole groups of 4_128; mlx also has 2_64, 2_32"),
        (("--for", "llama.cpp", "--bits", "4"), "needs a GGUF file"),
        (("--for", "mlx", "--bits", "4", "--method", "funnel"), "method has no effect with a runtime"),
        (("--for", "mlx", "--bits", "4", "--rank", "3"), "rank is an option of a method"),
        (("--bits", "4", "--grid", "Q4_0"), "also give the runtime"),
    ],
)
def test_what_a_runtime_lacks(
    words: tuple[str, ...], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    build("qwen2", width=64).save_pretrained(model)
    add_tokenizer(model, eos_token="w1", pad_token="w2", bos_token="w3")
    assert main(["compress", "--model", str(model), "--output", str(tmp_path / "small"), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line and not (tmp_path / "small").exists()


@pytest.mark.parametrize("words", [("--for", "onnx", "--bits", "4"), ("--gguf", "pyproject.toml")])
def test_options_that_an_export_does_not_use(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shrink("qwen2", tmp_path / "small", method="projective", rank=8)
    assert export(tmp_path / "small", tmp_path / "output", *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{words[-2]}: has no effect on onnx" in line and not (tmp_path / "output").exists()


def test_other_codes_are_rounded_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, output = tmp_path / "small", tmp_path / "output"
    model = shrink("qwen2", small, width=64, method="projective", rank=8)
    assert export(small, output, "--for", "mlx") == 2
    assert "give bits or a grid" in capsys.readouterr().err
    assert export(small, output, "--for", "mlx", "--bits", "8") == 0
    assert "rounded to the nearest codes" in capsys.readouterr().out
    rows = read_mlx(load_file(output / "model.safetensors"), "model.embed_tokens", 8, 64)
    table = model.get_input_embeddings().embedding.table().detach().numpy()
    assert np.linalg.norm(rows - table) < 0.01 * np.linalg.norm(table)


@pytest.mark.parametrize(("codec", "bits"), [("uniform", 4), ("affine", 3), ("affine", 2), ("iq4_nl", 4)])
def test_codes_of_runtimes_are_rounded_with_feedback(codec: str, bits: int) -> None:
    """Errors in a metric with few large directions are smaller than those of the nearest codes."""
    draw = torch.Generator().manual_seed(0)
    table, mix = torch.randn(200, 64, generator=draw), torch.randn(64, 64, generator=draw)
    metric = mix * torch.logspace(0, -2, 64) @ mix.t()
    errors = []
    for known in (None, metric):
        made, _ = fit("quantized", table, codec=codec, bits=bits, metric=known, progress=False)
        missed = made.table().detach() - table
        errors.append(float((missed @ metric * missed).sum()))
    assert errors[1] < 0.5 * errors[0]


def test_scales_are_the_best_ones_for_a_group() -> None:
    """By hand: 0 to 3 times 0.5 plus 1 is exact in 2 bits; so is a scale of -0.25 with levels -8 to 7."""
    rows = torch.tensor([[1.0, 2.5, 1.5, 2.0]])
    made, _ = fit("quantized", rows, codec="affine", bits=2, group_size=4, progress=False)
    torch.testing.assert_close(made.table(), rows, rtol=0, atol=0)
    assert made.get_parameter("scales").tolist() == [[0.5, 1.0]]
    rows = torch.tensor([[2.0, 0.25, -0.5, -1.75]])
    made, _ = fit("quantized", rows, codec="uniform", bits=4, group_size=4, progress=False)
    torch.testing.assert_close(made.table(), rows, rtol=0, atol=0)
    assert made.get_parameter("scales").tolist() == [[-0.25]]


# GGUF files.


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


@pytest.mark.parametrize("kind", runtimes()["llama.cpp"].grids)
def test_gguf_has_the_codes_of_the_table(kind: str, tmp_path: Path) -> None:
    """The file is read by the package of llama.cpp; other fields and tensors are those of the original."""
    source, small, output = tmp_path / "source.gguf", tmp_path / "small", tmp_path / "small.gguf"
    before = gguf_file(source, build("qwen2", width=64))
    options = runtimes()["llama.cpp"].grids[kind].options([64])
    shrink("qwen2", small, store="fp16", width=64, method="quantized", **options)
    assert export(small, output, "--for", "llama.cpp", "--gguf", str(source)) == 0
    tensors = gguf_tables(output)
    assert [*tensors] == [*before] and tensors["token_embd.weight"][0] == kind
    (embedding,) = hf.load(small).shared_embeddings.values()
    wanted = embedding.table().detach().float().numpy()
    np.testing.assert_allclose(tensors["token_embd.weight"][1], wanted, rtol=0, atol=1e-6)
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
    assert export(small, output, *ROUNDED, "--gguf", str(source)) == 0
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
    assert export(small, output, *ROUNDED, "--gguf", str(source)) == 2
    assert "is [100, 64], but the model's table is [300, 64]" in capsys.readouterr().err
    source.write_bytes(b"GGUF" + bytes(40))
    assert export(small, output, *ROUNDED, "--gguf", str(source)) == 2
    assert "not a readable GGUF file" in capsys.readouterr().err
    assert export(small, output, *ROUNDED) == 2
    assert "needs a GGUF file" in capsys.readouterr().err
    assert export(small, source, *ROUNDED, "--gguf", str(source), "--force") == 2
    assert not output.exists() and len(capsys.readouterr().err.splitlines()) == 1


def test_a_full_disk_names_the_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, small, output = tmp_path / "source.gguf", tmp_path / "small", tmp_path / "small.gguf"
    shrink("qwen2", small, width=64, method="projective", rank=8)
    gguf_file(source, build("qwen2", width=64))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        assert export(small, output, *ROUNDED, "--gguf", str(source)) == 2
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
    status = export(small, output, *ROUNDED, "--gguf", str(source))
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
        assert export(small, output, *ROUNDED, "--gguf", str(source)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert reason in line and not output.exists()


def test_gguf_has_no_output_bias(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, small, output = tmp_path / "source.gguf", tmp_path / "small", tmp_path / "small.gguf"
    gguf_file(source, build("qwen2", width=64))
    shrink("qwen2", small, width=64, method="projective", rank=8, output_bias=True)
    assert export(small, output, *ROUNDED, "--gguf", str(source)) == 2
    assert "no single dense table replaces it" in capsys.readouterr().err and not output.exists()
