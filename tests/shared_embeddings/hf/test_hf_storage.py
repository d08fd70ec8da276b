"""Models of Hugging Face in fewer bits: packed on the disk, as fitted in memory, and when written again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402
from torch import Tensor  # noqa: E402

from shared_embeddings import hf  # noqa: E402
from shared_embeddings.checkpoints.storage import HEADER  # noqa: E402
from shared_embeddings.hf.adapter import FolderModel  # noqa: E402
from tests.shared_embeddings.hf.models import DIM, WORDS, build, compress, scores, write  # noqa: E402

# Kind, method with its options, storage, and the type that a tensor of words has on the disk.
STORED = [
    ("gemma", ["projective", "--rank", 4], "int8", torch.int8),
    ("llama", ["projective", "--rank", 4], "int4", torch.uint8),
    ("t5_untied", ["projective", "--rank", 4], "fp16", torch.float16),
    ("marian", ["compositional_code", "--num-codebooks", 4, "--codebook-size", 8], "fp32", torch.uint8),
]


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """The scores of models as they are written, by the name of the folder."""
    found: dict[str, Tensor] = {}
    write_folder = FolderModel.write

    def remembering(self: FolderModel, path: Path, weights: dict[str, Tensor], card: str) -> None:
        found[path.name] = scores(self.module)
        write_folder(self, path, weights, card)

    monkeypatch.setattr(FolderModel, "write", remembering)
    return found


def tensor_bytes(file: Path) -> int:
    """The bytes of a safetensors file without its header."""
    with file.open("rb") as opened:
        return file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")


@pytest.mark.slow_except("gemma-method0-int8-stored_type0")
@pytest.mark.parametrize(("kind", "method", "store", "stored_type"), STORED)
def test_packed_on_the_disk(
    tmp_path: Path,
    in_memory: dict[str, Tensor],
    kind: str,
    method: list[Any],
    store: str,
    stored_type: torch.dtype,
) -> None:
    write(kind, tmp_path / "model")
    small, report_file = tmp_path / "small", tmp_path / "report.json"
    asked = [*method[1:], "--store", store, "--fit-steps", 5, "--report", report_file]
    assert compress(tmp_path / "model", method[0], small, *asked) == 0
    state = load_file(small / "model.safetensors")
    assert HEADER in state
    assert stored_type in {t.dtype for name, t in state.items() if name.startswith("shared_embeddings.")}
    weights = json.loads(report_file.read_text())["bytes_of_weights"]["after"]
    assert abs(tensor_bytes(small / "model.safetensors") - weights) < 0.02 * weights
    model = hf.load(small)
    torch.testing.assert_close(scores(model), in_memory["small"], rtol=0, atol=0)
    assert model.name_or_path == str(small)
    if model.can_generate():
        stored = json.loads((small / "generation_config.json").read_text())
        assert model.generation_config.pad_token_id == stored.get("pad_token_id")
    # What is written later has the same bytes, unless it was loaded to be trained.
    for trainable in (False, True):
        again = tmp_path / f"again_{trainable}"
        opened = hf.load(small, trainable=trainable)
        assert all(parameter.requires_grad for parameter in opened.shared_embeddings.parameters()) == (
            trainable or store == "fp32"
        )
        opened.save_pretrained(again)
        found = load_file(again / "model.safetensors")
        if trainable or store == "fp32":
            assert HEADER not in found
        else:
            assert found.keys() == state.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
        torch.testing.assert_close(scores(hf.load(again)), scores(model), rtol=1e-5, atol=1e-6)


def test_damaged_packed_tensors_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    write("qwen2", tmp_path / "model")
    small = tmp_path / "small"
    assert compress(tmp_path / "model", "projective", small, "--rank", 4, "--store", "int8") == 0
    state = load_file(small / "model.safetensors")
    del state["shared_embeddings.words.codes.scale"]
    save_file(state, small / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="shared_embeddings.words.codes does not match its description"):
        hf.load(small)


def test_models_in_16_bits(tmp_path: Path, in_memory: dict[str, Tensor]) -> None:
    model = build("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    assert compress(tmp_path / "model", "standard", tmp_path / "same") == 0
    same = hf.load(tmp_path / "same")
    assert {parameter.dtype for parameter in same.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(scores(same), scores(model))
    torch.testing.assert_close(scores(same), in_memory["same"], rtol=0, atol=0)
    asked = ["--target-ratio", 4, "--report", tmp_path / "report.json"]
    assert compress(tmp_path / "model", "projective", tmp_path / "small", *asked) == 0
    for table in json.loads((tmp_path / "report.json").read_text())["tables"]:
        before = 2 * WORDS * DIM
        # A rank more would be (300 + 16) * 4 numbers, and 2,528 bytes.
        assert table["stored_bytes"] == {"before": before, "after": 2 * (WORDS + DIM) * 3}
    torch.testing.assert_close(scores(hf.load(tmp_path / "small")), in_memory["small"], rtol=0, atol=0)
