"""Word vectors are compressed, read with numpy alone, and written as text."""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path

import numpy as np
import pytest

from shared_embeddings.analysis.vectors import WordVectors, read_vectors, write_vectors
from shared_embeddings.checkpoints.compress import compress
from shared_embeddings.word_vectors.adapter import Adapter

WORDS, DIM = 200, 16


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Vectors near a subspace of four dimensions, as text."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((WORDS, 4)) @ rng.standard_normal((4, DIM))
    rows += 0.01 * rng.standard_normal((WORDS, DIM))
    path = tmp_path / "vectors.vec"
    write_vectors(path, WordVectors([f"w{word}" for word in range(WORDS)], rows.astype(np.float32)))
    return path


@pytest.mark.parametrize("method", ["quantized", "standard"])
def test_the_loader_reads_what_the_library_reads(text: Path, tmp_path: Path, method: str) -> None:
    """The file beside the vectors needs no other module of the project."""
    small = tmp_path / "small.safetensors"
    options = {"bits": 2.0, "codec": "principal"} if method == "quantized" else {}
    report = compress(text, method, small, options=options, store="fp16")
    assert report.kept.share is not None and report.kept.share > 0.5
    spec = importlib.util.spec_from_file_location("loader", tmp_path / "load_vectors.py")
    assert spec is not None and spec.loader is not None
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    found = loader.load(small)
    model = Adapter().read(small)
    np.testing.assert_allclose(found.vectors, model.module.table().detach().numpy(), atol=1e-4)
    original = read_vectors(text).vectors
    error = np.linalg.norm(found.vectors - original) / np.linalg.norm(original)
    assert error < (0.3 if method == "quantized" else 0.001)
    assert np.array_equal(found["w7"], found.vectors[7])


def test_bits_go_to_directions_with_large_variance(text: Path, tmp_path: Path) -> None:
    """Rotations that know nothing of the table need more bits for the same error."""
    errors = {}
    for codec in ("principal", "lloyd_max"):
        report = compress(
            text, "quantized", tmp_path / f"{codec}.safetensors", options={"bits": 2.0, "codec": codec}
        )
        errors[codec] = report.tables[0].fit.relative_error
    assert errors["principal"] < 0.5 * errors["lloyd_max"]


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "vectors.kv"
    path.write_bytes(pickle.dumps({"class": "gensim.models.keyedvectors KeyedVectors"}))
    with pytest.raises(ValueError, match="save_word2vec_format"):
        read_vectors(path)
