"""Rank correlation, word similarity and correlation maps, against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shared_embeddings.analysis import similarity as analysis
from shared_embeddings.analysis.correlation import layer_correlations
from shared_embeddings.analysis.similarity import (
    CorrelationMap,
    WordPair,
    WordPairs,
    spearman,
    word_similarity,
)
from shared_embeddings.checkpoints.adapter import WordEmbedding
from tests.shared_embeddings.cases import PADDING, Case, by_name
from tests.shared_embeddings.contract.checks import each_case

WORDS = ["cat", "dog", "car", "Paris", "zero"]
VECTORS = np.array([[1.0, 0.0], [2.0, 2.0], [0.0, 3.0], [1.0, 1.0], [0.0, 0.0]], dtype=np.float32)


def test_spearman_with_ties_by_hand() -> None:
    # Ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4: covariance 4.5, variances 4.5 and 5.
    assert spearman([10, 20, 20, 30], [0.1, 0.2, 0.3, 0.4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert spearman([1, 2, 3], [30, 20, 10]) == pytest.approx(-1.0)


def test_spearman_that_is_not_defined() -> None:
    assert spearman([], []) is None and spearman([1.0], [2.0]) is None
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    with pytest.raises(ValueError, match="3 and 2 values"):
        spearman([1, 2, 3], [1, 2])


def test_spearman_is_that_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    draw = np.random.default_rng(3)
    first, second = draw.integers(0, 9, 60), draw.integers(0, 9, 60)
    assert spearman(first, second) == pytest.approx(stats.spearmanr(first, second).statistic)


def test_word_similarity_counts_what_it_knows() -> None:
    pairs = [
        WordPair("cat", "dog", 8.0),  # cosine 0.71
        WordPair("cat", "car", 2.0),  # 0
        WordPair("CAT", "Cat", 9.0),  # 1, in lower case
        WordPair("dog", "Paris", 1.0),  # 1
        WordPair("cat", "horse", 5.0),  # unknown
        WordPair("cat", "paris", 5.0),  # known in upper case only
        WordPair("cat", "zero", 5.0),  # without a direction
    ]
    found = word_similarity(WORDS, VECTORS, WordPairs("set", pairs))
    assert (found.known, found.pairs, found.lower_cased) == (4, 7, 1)
    assert found.coverage == pytest.approx(4 / 7)
    # Ranks 2, 1, 3.5, 3.5 against 3, 2, 4, 1: covariance 0, 1.5 and -0.5 twice.
    covariance = (-0.5 * 0.5) + (-1.5 * -0.5) + (1.0 * 1.5) + (1.0 * -1.5)
    assert found.rho == pytest.approx(covariance / math.sqrt(4.5 * 5.0))


def test_first_of_words_that_are_there_twice_counts() -> None:
    pairs = WordPairs("set", [WordPair("a", "b", 1.0), WordPair("a", "c", 2.0)])
    vectors = np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [-1.0, 0.0]])
    assert word_similarity(["a", "c", "b", "c"], vectors, pairs).rho == pytest.approx(1.0)


def test_correlation_of_three_dimensions_by_hand() -> None:
    # Means 2, 2, 5; around them -1, 0, 1 and -1, 1, 0, so that r = 1 / 2; the third is constant.
    vectors = torch.tensor([[1.0, 1.0, 5.0], [2.0, 3.0, 5.0], [3.0, 2.0, 5.0]])
    found = CorrelationMap(3)
    found.add(vectors[:1])
    found.add(vectors[:0])
    found.add(vectors[1:])
    correlations = found.matrix()
    torch.testing.assert_close(correlations[:2, :2], torch.tensor([[1.0, 0.5], [0.5, 1.0]]).double())
    assert correlations[2].isnan().all() and correlations[:, 2].isnan().all()
    assert analysis.constant_dimensions(correlations) == 1
    assert analysis.mean_off_diagonal(correlations) == pytest.approx(0.5)


def test_blocks_of_words_give_what_all_words_give() -> None:
    # Means far beyond the deviations: sums of squares in 64 bits would lose them.
    vectors = torch.randn(500, 4).double() * torch.tensor([1.0, 3.0, 0.1, 1.0]) + 1e4
    vectors[:, 3] = 0.5 * vectors[:, 3] - vectors[:, 1]
    found = CorrelationMap(4)
    for block in vectors.split(64):
        found.add(block)
    expected = torch.from_numpy(np.corrcoef(vectors.numpy().T))
    torch.testing.assert_close(found.matrix(), expected, atol=1e-6, rtol=0)


def test_a_constant_that_is_rounded_is_constant() -> None:
    found = CorrelationMap(2)
    found.add(torch.tensor([[0.1, 1.0], [0.1 + 1e-9, 2.0], [0.1, 3.0]], dtype=torch.float64))
    assert analysis.constant_dimensions(found.matrix()) == 1


def test_groups_by_hand() -> None:
    correlations = torch.tensor(
        [[1.0, 0.2, 0.4, -0.4], [0.2, 1.0, 0.4, 0.4], [0.4, 0.4, 1.0, -0.6], [-0.4, 0.4, -0.6, 1.0]]
    )
    assert analysis.mean_between_groups(correlations, 2) == pytest.approx(0.4)
    within = [analysis.mean_off_diagonal(block) for block in analysis.blocks_of_groups(correlations, 2)]
    assert within == [pytest.approx(0.2), pytest.approx(0.6)]
    assert analysis.mean_off_diagonal(torch.ones(1, 1)) is None


def _embedding(case: Case) -> WordEmbedding:
    built = case.build().eval()
    return WordEmbedding("words", [str(n) for n in range(case.num_embeddings)], case.padding_idx, built)


@each_case
def test_layers_of_every_method(case: Case) -> None:
    embedding = _embedding(case)
    ids = torch.tensor([5, 1, 30, 5])
    layers = embedding.layers(ids)
    names = [layer.name for layer in layers]
    assert names[-1] == "output" and len(set(names)) == len(names)
    torch.testing.assert_close(layers[-1].values, embedding.module(ids))
    assert all(len(layer.values) <= 4 and layer.values.size(1) % layer.groups == 0 for layer in layers)
    found = layer_correlations(embedding, progress=False)
    assert [layer.layer for layer in found] == names
    rows = np.delete(embedding.table().numpy(), [] if case.padding_idx is None else case.padding_idx, axis=0)
    assert found[-1].words == len(rows)
    with np.errstate(invalid="ignore"):
        expected = torch.from_numpy(np.corrcoef(rows.astype(np.float64).T))
    kept = ~found[-1].correlations.isnan()
    torch.testing.assert_close(found[-1].correlations[kept], expected[kept], atol=1e-5, rtol=0)


def test_layers_of_define_lead_to_its_output() -> None:
    embedding = _embedding(by_name("define-hgt-mixer"))
    layers = {layer.name: layer for layer in embedding.layers(torch.arange(7))}
    assert [(name, layer.groups) for name, layer in layers.items()] == [
        ("map", 1),
        ("entry", 1),
        ("layer 1", 4),
        ("layer 2", 2),
        ("layer 3", 1),
        ("output", 1),
    ]
    module = embedding.module
    with torch.no_grad():
        torch.testing.assert_close(module.entry(layers["map"].values), layers["entry"].values)
        torch.testing.assert_close(module.reduction(layers["layer 3"].values), layers["output"].values)


@pytest.mark.parametrize("name", ["alone-real", "alone-binary"])
def test_hidden_units_of_alone_lead_to_its_output(name: str) -> None:
    embedding = _embedding(by_name(name))
    filtered, hidden, output = embedding.layers(torch.arange(9))
    module = embedding.module
    with torch.no_grad():
        torch.testing.assert_close(hidden.values @ module.second.t(), output.values)
        torch.testing.assert_close(torch.relu(filtered.values @ module.first.t()), hidden.values)
        if "binary" in name:
            masks = filtered.values / module.base
            assert set(masks.unique().tolist()) == {0.0, 1.0}


def test_words_of_a_band_or_a_group_are_counted() -> None:
    bands = {layer.layer: layer for layer in layer_correlations(_embedding(by_name("adaptive")), False)}
    assert [bands[f"band {band}"].words for band in range(3)] == [9 - 1, 11, 37 - 20]
    assert PADDING < 9
    groups = layer_correlations(_embedding(by_name("group-reduce")), False)
    assert sum(layer.words for layer in groups[:-1]) == groups[-1].words == 36


def test_plain_embedding_has_one_layer() -> None:
    module = torch.nn.Embedding(10, 3)
    (found,) = layer_correlations(WordEmbedding("words", list("abcdefghij"), None, module), False)
    assert found.layer == "output" and found.words == 10
