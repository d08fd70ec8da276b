"""The layers of embeddings: correlation maps and cosines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.layers import LayerCorrelation, Moments, layer_correlations, layers
from shared_embeddings.embedding import WordEmbedding
from shared_embeddings.words.vectors import WordVectors, write_vectors
from tests.shared_embeddings.cases import PADDING, by_name


def correlations(vectors: torch.Tensor) -> torch.Tensor:
    """The correlations of vectors in blocks of two."""
    moments = Moments(vectors[:2])
    for block in vectors.split(2):
        moments.add(block)
    return moments.correlations()


def test_correlation_of_three_dimensions_by_hand() -> None:
    # Means 2, 2, 5; around them -1, 0, 1 and -1, 1, 0, so that r = 1 / 2; the third is constant.
    found = correlations(torch.tensor([[1.0, 1.0, 5.0], [2.0, 3.0, 5.0], [3.0, 2.0, 5.0]]))
    torch.testing.assert_close(found[:2, :2], torch.tensor([[1.0, 0.5], [0.5, 1.0]]).double())
    assert found[2].isnan().all() and found[:, 2].isnan().all()
    assert LayerCorrelation("output", 3, found, 1).means()[0] == pytest.approx(0.5)
    rounded = torch.tensor([[0.1, 1.0], [0.1 + 1e-9, 2.0], [0.1, 3.0]], dtype=torch.float64)
    assert correlations(rounded)[0].isnan().all()


def test_blocks_equal_all_vectors() -> None:
    # Means far larger than the deviations: sums of squares in 64 bits would lose them.
    vectors = torch.randn(500, 4).double() * torch.tensor([1.0, 3.0, 0.1, 1.0]) + 1e4
    vectors[:, 3] = 0.5 * vectors[:, 3] - vectors[:, 1]
    expected = torch.from_numpy(np.corrcoef(vectors.numpy().T))
    torch.testing.assert_close(correlations(vectors), expected, atol=1e-6, rtol=0)


def test_groups_by_hand() -> None:
    found = torch.tensor(
        [[1.0, 0.2, 0.4, -0.4], [0.2, 1.0, 0.4, 0.4], [0.4, 0.4, 1.0, -0.6], [-0.4, 0.4, -0.6, 1.0]]
    )
    assert LayerCorrelation("output", 3, found, 2).means()[1] == pytest.approx(0.4)


def embedding(name: str) -> WordEmbedding:
    case = by_name(name)
    words = [str(number) for number in range(case.num_embeddings)]
    return WordEmbedding("words", words, case.padding_idx, case.build().eval())


def test_tokens_of_a_band_or_a_group_are_counted() -> None:
    bands = {layer.layer: layer for layer in layer_correlations(embedding("adaptive"))}
    assert [bands[f"words: band {band}"].tokens for band in range(3)] == [9 - 1, 11, 37 - 20]
    assert PADDING < 9
    groups = layer_correlations(embedding("group-reduce"))
    assert sum(layer.tokens for layer in groups[:-1]) == groups[-1].tokens == 36


def test_layers_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vectors = np.array([[3, 4, 0, 0], [4, 3, 0, 0], [0, 0, 0, 0]], dtype=np.float32)
    write_vectors(tmp_path / "v.vec", WordVectors(["year", "month", "zero"], vectors))
    asked = ["--model", tmp_path / "v.vec", "--output", tmp_path / "maps", "--words", "year", "month", "zero"]
    layers([str(argument) for argument in asked])
    printed = capsys.readouterr().out
    assert "words: output" in printed and "0.9600" in printed and "year, zero" in printed
    assert (tmp_path / "maps" / "words-output.png").read_bytes().startswith(b"\x89PNG")
