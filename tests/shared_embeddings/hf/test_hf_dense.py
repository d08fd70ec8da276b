"""`shared-embeddings export --format dense`: a plain folder with the same scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import shared_embeddings.hf as hf
from shared_embeddings.cli.main import main
from tests.helpers import in_turn
from tests.shared_embeddings.hf.models import KINDS, build, scores, shrink


def export(model: Path, output: Path, *more: str) -> int:
    return main(["export", "--format", "dense", "--model", str(model), "--output", str(output), *more])


@in_turn("kind", ["gemma3", "t5_untied", "marian_two_vocabularies", "bert"])
def test_dense_export_keeps_names_and_scores(kind: str, tmp_path: Path) -> None:
    model, plain, original = (tmp_path / f"{kind}_{name}" for name in ("model", "plain", "original"))
    shrink(kind, model)
    build(kind).save_pretrained(original)
    assert export(model, plain) == 0
    weights, wanted = (load_file(folder / "model.safetensors") for folder in (plain, original))
    assert {name: one.shape for name, one in weights.items()} == {
        name: one.shape for name, one in wanted.items()
    }
    loaded = getattr(transformers, KINDS[kind][0]).from_pretrained(plain)
    torch.testing.assert_close(scores(loaded), scores(hf.load(model)), rtol=1e-4, atol=1e-4)


def test_quantized_rows_in_gguf(tmp_path: Path) -> None:
    """4-bit blocks of 32 become Q4_0 and Q8_0 with the error of their own scales."""
    quants = pytest.importorskip("gguf.quants")
    from gguf import MODEL_ARCH, GGMLQuantizationType, get_tensor_name_map

    model, plain = tmp_path / "model", tmp_path / "plain"
    shrink("llama", model, method="quantized", bits=8, codec="uniform")
    assert export(model, plain) == 0
    weights = load_file(plain / "model.safetensors")
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, 1)
    assert all(names.get_name(name, try_suffixes=(".weight",)) for name in weights)
    table = weights["model.embed_tokens.weight"].repeat(1, 2).numpy()  # whole blocks
    stored = quants.quantize(table, GGMLQuantizationType.Q8_0)
    error = abs(quants.dequantize(stored, GGMLQuantizationType.Q8_0) - table).max()
    assert error < 0.01 * abs(table).max()


def test_dense_export_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, plain, other = tmp_path / "model", tmp_path / "plain", tmp_path / "other"
    shrink("gpt2", model)
    assert export(model, plain) == 0 and export(model, plain) == 2
    assert "--force" in capsys.readouterr().err
    assert export(model, plain, "--force") == 0
    assert export(plain, other) == 2 and "is not compressed" in capsys.readouterr().err
    other.mkdir()
    (other / "thesis.txt").touch()
    assert export(model, other, "--force") == 2 and "is not replaced" in capsys.readouterr().err
    assert (other / "thesis.txt").is_file()
    assert main(["export", "--model", str(model), "--output", str(plain), "--force"]) == 2
    assert "is a folder" in capsys.readouterr().err
