"""Compressed folders are read with ``trust_remote_code`` by transformers alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import shared_embeddings as se  # noqa: E402
from shared_embeddings import hf  # noqa: E402
from shared_embeddings.hf import remote_code  # noqa: E402
from tests.shared_embeddings.hf.models import DIM, IDS, WORDS, scores, shrink  # noqa: E402
from tests.shared_embeddings.hf.test_hf_from_pretrained import auto_class  # noqa: E402

# Kind of model, storage, method and options.
FOLDERS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "low_rank": ("llama", "int8", "projective", {"rank": 6}),
    "int4": ("gpt2", "int4", "standard", {}),
    "uniform": ("gemma3", "fp16", "quantized", {"bits": 4, "codec": "uniform", "group_size": 5}),
    "uniform_1bit": ("bert", "fp16", "quantized", {"bits": 1, "codec": "uniform"}),
    "lloyd_max": ("qwen2", "fp16", "quantized", {"bits": 3, "codec": "lloyd_max"}),
    "residual": ("t5", "fp32", "quantized", {"bits": 2, "codec": "residual"}),
    "trellis": ("marian", "fp16", "quantized", {"bits": 2.5}),
    "trellis_5bits": ("bart", "int8", "quantized", {"bits": 5}),
    "two_tables": ("t5_untied", "fp16", "quantized", {"bits": 1.5}),
}

# Loads a folder, saves it, loads the plain model, and writes the scores of both.
PROGRAM = """
import json, sys, torch, transformers
from pathlib import Path
found = {}
for folder, auto, ids in json.loads(sys.argv[1]):
    ids = torch.tensor(ids)
    scores = []
    for name, trusted in ((folder, True), (folder + "_saved", False)):
        model, info = getattr(transformers, auto).from_pretrained(
            name, trust_remote_code=trusted, output_loading_info=True
        )
        assert not any(info.values()), (folder, info)
        given = {"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {}
        with torch.no_grad():
            scores.append(model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits)
        if trusted:
            model.save_pretrained(folder + "_saved")
    found[folder] = scores
assert "shared_embeddings" not in sys.modules
torch.save(found, sys.argv[2])
"""


def test_without_the_library(tmp_path: Path) -> None:
    """The scores are those with the library; what is saved is a plain model."""
    given = []
    for name, (kind, store, method, options) in FOLDERS.items():
        shrink(kind, tmp_path / name, store, method, **options)
        given.append((str(tmp_path / name), auto_class(kind).__name__, IDS.tolist()))
    command = [sys.executable, "-c", PROGRAM, json.dumps(given), str(tmp_path / "scores.pt")]
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = torch.load(tmp_path / "scores.pt")
    for name in FOLDERS:
        for again in found[str(tmp_path / name)]:
            torch.testing.assert_close(again, scores(hf.load(tmp_path / name)), rtol=1e-4, atol=1e-4)


@pytest.mark.slow_except("*-3.0")
@pytest.mark.parametrize("bits", [1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0])
@pytest.mark.parametrize("codec", ["uniform", "lloyd_max", "residual", "trellis", "spectral", "principal"])
def test_tables(tmp_path: Path, codec: str, bits: float) -> None:
    """Every codec at every width."""
    shrink("bert", tmp_path / "small", "fp16", "quantized", bits=bits, codec=codec)
    model = hf.load(tmp_path / "small")
    entry = model.config.quantization_config.to_dict()
    state = remote_code._embedding_tensors(entry, [tmp_path / "small/model.safetensors"])
    own = {name.removeprefix("shared_embeddings.words."): tensor for name, tensor in state.items()}
    table = remote_code.decoded_table(entry["tables"]["words"], own)
    assert table.shape == (WORDS, DIM)
    torch.testing.assert_close(table, model.shared_embeddings["words"].table(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("codec", ["spectral", "principal"])
def test_bits_of_directions(tmp_path: Path, codec: str) -> None:
    """Codecs that fit the bits of directions to a table, with words of several widths, some without bits."""
    scales = torch.linspace(3.0, 0.1, DIM) * torch.linspace(4.0, 0.1, WORDS).unsqueeze(1)
    embedding, _ = se.fit("quantized", torch.randn(WORDS, DIM) * scales + 0.1, codec=codec, bits=1.3)
    options = embedding.stored_options()
    assert 0 < options["words_per_width"][0] < WORDS and options["directions"]
    described = {"method": "quantized", "num_embeddings": WORDS, "embedding_dim": DIM, "options": options}
    table = remote_code.decoded_table(described, embedding.state_dict())
    torch.testing.assert_close(table, embedding.table(), rtol=1e-5, atol=1e-5)


def test_other_methods_have_no_such_file(tmp_path: Path) -> None:
    shrink("gpt2", tmp_path / "small", method="funnel", rank=4)
    assert not list((tmp_path / "small").glob("*.py"))
    assert "auto_map" not in json.loads((tmp_path / "small/config.json").read_text())
