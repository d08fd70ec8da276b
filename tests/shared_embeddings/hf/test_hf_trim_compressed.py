"""Models of Hugging Face are trimmed and compressed in both orders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from safetensors.torch import load_file  # noqa: E402

from shared_embeddings import hf  # noqa: E402
from shared_embeddings.checkpoints.storage import HEADER  # noqa: E402
from shared_embeddings.hf.folder import INDEX  # noqa: E402
from tests.shared_embeddings.hf.models import compress  # noqa: E402
from tests.shared_embeddings.hf.trimming import (  # noqa: E402
    log_probabilities,
    refused,
    said,
    save,
    sentences,
    trim,
)

COMPRESSED = [
    ("gpt2", ["projective", "--rank", 4]),
    ("llama", ["projective", "--rank", 4, "--store", "int8"]),
    ("llama", ["projective", "--rank", 4, "--store", "int4"]),
    ("marian", ["structured", "--num-groups", 4, "--num-clusters", 16, "--fit-steps", 5]),
]


def new_ids(output: Path) -> dict[int, int]:
    """The new id of every word that was kept."""
    lines = (output / "ids.tsv").read_text().splitlines()
    return {int(old): int(new) for old, new in (line.split("\t") for line in lines)}


@pytest.mark.slow_except("gpt2-method0")
@pytest.mark.parametrize(("kind", "method"), COMPRESSED)
def test_compressed_models(kind: str, method: list[Any], tmp_path: Path, text: Path) -> None:
    """Probabilities are those of the compressed model, over the kept words."""
    model, small, output = save(tmp_path / "model", kind), tmp_path / "small", tmp_path / "trimmed"
    assert compress(model, method[0], small, *method[1:]) == 0
    assert trim("--model", small, "--text", text, "--output", output) == 0
    ids_after = new_ids(output)
    old, new = hf.load(small), hf.load(output)
    ids = transformers.AutoTokenizer.from_pretrained(small)(sentences(1, 1)[0])["input_ids"]
    expected = said(old, ids)[:, list(ids_after)].log_softmax(dim=-1)
    found = said(new, [ids_after[token] for token in ids])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    before, after = (load_file(folder / "model.safetensors") for folder in (small, output))
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        if name != HEADER:
            assert tensor.dtype == before[name].dtype
    assert {table.num_embeddings for table in new.shared_embeddings.values()} == {len(ids_after)}
    assert new.config.vocab_size == len(ids_after)


def test_trimmed_models_are_compressed(tmp_path: Path, text: Path) -> None:
    """The other order: rows that are left out before the fit do not change a full-rank one."""
    model, output, small = save(tmp_path / "model", "llama"), tmp_path / "trimmed", tmp_path / "small"
    assert trim("--model", model, "--text", text, "--output", output) == 0
    assert compress(output, "projective", small, "--rank", 16) == 0
    ids = transformers.AutoTokenizer.from_pretrained(small)(sentences(1, 1)[0])["input_ids"]
    expected = log_probabilities(output, "llama", ids)
    torch.testing.assert_close(said(hf.load(small), ids), expected, rtol=0, atol=1e-4)


def test_words_without_rows_of_their_own_stay(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, small, output = save(tmp_path / "model", "gpt2"), tmp_path / "small", tmp_path / "trimmed"
    options = ["--vocab-shape", "20,30", "--dim-shape", "4,4", "--rank", 2, "--fit-steps", 5]
    assert compress(model, "tensor_train", small, *options) == 0
    line = refused(capsys, "--model", small, "--text", text, "--output", output)
    assert "trim the plain model first" in line and not output.exists()


def test_shards_of_a_compressed_model(tmp_path: Path, text: Path) -> None:
    model, small, output = save(tmp_path / "model", "llama"), tmp_path / "small", tmp_path / "trimmed"
    assert compress(model, "projective", tmp_path / "one", "--rank", 4) == 0
    old = hf.load(tmp_path / "one")
    old.save_pretrained(small, max_shard_size="6KB")
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(small)
    assert trim("--model", small, "--text", text, "--output", output) == 0
    shards = sorted(output.glob("*.safetensors"))
    where = json.loads((output / INDEX).read_text())["weight_map"]
    assert len(shards) > 1
    assert where == {name: shard.name for shard in shards for name in load_file(shard)}
    kept = list(new_ids(output))
    expected = said(old, kept[:5])[:, kept].log_softmax(dim=-1)
    torch.testing.assert_close(said(hf.load(output), list(range(5))), expected, rtol=0, atol=1e-5)
