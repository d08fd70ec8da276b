"""Clustering: k-means, class vectors, vocabularies of classes, and new words."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import shared_embeddings as se
from shared_embeddings.fitting import clustering, codes
from shared_embeddings.fitting.clustering import class_centers, kmeans, nearest
from shared_embeddings.fitting.codes import learn_codes
from shared_embeddings.words.classes import (
    WordClasses,
    class_of_unseen,
    cluster,
    out_of_vocabulary_row,
    read_vocabulary,
)
from tests.shared_embeddings.test_classes import example_classes


def islands(points: int = 3000, clusters: int = 40) -> tuple[Tensor, Tensor]:
    """Points ``(n, 6)`` around centers ``(K, 6)`` that are far from each other."""
    generator = torch.Generator().manual_seed(0)
    centers = 20 * torch.randn(clusters, 6, generator=generator)
    chosen = torch.arange(points) % clusters
    return centers[chosen] + 0.1 * torch.randn(points, 6, generator=generator), centers


def test_every_island_is_a_cluster() -> None:
    points, centers = islands()
    codes, found = kmeans(points, 40, seed=1, products=2**40)
    assert float((found[codes] - points).square().sum(1).mean()) < 1.1 * 6 * 0.01
    assert nearest(centers, found)[0].unique().numel() == 40
    again = kmeans(points, 40, seed=1, products=2**40)
    assert torch.equal(codes, again[0]) and torch.equal(found, again[1])


def test_parts_and_samples_find_the_islands_too(monkeypatch: pytest.MonkeyPatch) -> None:
    points, _ = islands()
    monkeypatch.setattr(clustering, "_DRAWN_DISTANCES", 3000 * 40 // 3)
    monkeypatch.setattr(clustering, "_LEAST_SAMPLE", 0)
    monkeypatch.setattr(clustering, "_PER_CLUSTER", 30)
    codes, found = kmeans(points, 40, seed=1, products=2**40)
    assert codes.shape == (3000,) and found.shape == (40, 6)
    variance = points.var(dim=0).sum()
    assert float((found[codes] - points).square().sum(1).mean()) < 0.1 * variance
    torch.testing.assert_close(codes, nearest(points, found)[0])


def test_codes_outside_the_sample_are_as_accurate(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    books = torch.randn(6, 8, 12, generator=generator)
    words = torch.randint(8, (2000, 6), generator=generator)
    table = sum(book[code] for book, code in zip(books, words.unbind(1)))
    assert isinstance(table, Tensor)

    def error() -> float:
        codes, entries = learn_codes(table, 6, 8)
        rows = sum(book[code] for book, code in zip(entries, codes.long().unbind(1)))
        return float((rows - table).norm() / table.norm())

    of_all = error()
    monkeypatch.setattr(codes, "_SAMPLE", 1500)
    monkeypatch.setattr(codes, "_ROWS", 64)
    assert error() < 1.1 * of_all < 0.6


def test_class_vectors_have_the_least_mean_distance() -> None:
    """One level: the geometric median of each class, where the gradient of the distances is zero."""
    generator = torch.Generator().manual_seed(0)
    part = torch.randn(200, 5, generator=generator) ** 3
    classes = torch.randint(4, (200, 1), generator=generator)
    words = torch.arange(1, 200)
    (found,) = class_centers([part], classes, words, [4])
    for number in range(4):
        members = words[classes[words, 0] == number]
        missed = part[members] - found[number]
        pull = (missed / missed.norm(dim=1, keepdim=True)).mean(dim=0)
        assert float(pull.norm()) < 0.02
        mean = part[members].mean(dim=0)
        assert missed.norm(dim=1).mean() <= (part[members] - mean).norm(dim=1).mean()


# Clusters


def test_vectors_are_grouped_by_direction() -> None:
    """Two directions, lengths from 0.1 to 50."""
    vectors = np.array([[0.1, 0], [50, 1], [0, 30.0], [5, 0], [0.1, 7]])
    classes, centers = cluster(vectors, 2, seed=1)
    assert classes[0] == classes[1] == classes[3] != classes[2] == classes[4]
    assert np.linalg.norm(centers[classes[0]] - [1, 0]) < 0.05
    assert centers.shape == (2, 2)


def test_unseen_words_go_to_the_center_nearest_to_zero() -> None:
    assert class_of_unseen(np.array([[3.0, 0], [0.5, 0.5], [0, -2]])) == 1
    vectors = np.array([[1.0, 0], [0, 0], [0, 1], [-1, 1], [1, 1], [0, 0]])
    classes, centers = cluster(vectors, 2)
    shorter = np.linalg.norm(centers, axis=1).argmin()
    assert classes[1] == classes[5] == shorter
    seen, _ = cluster(vectors[vectors.any(axis=1)], 2)
    assert np.array_equal(classes[vectors.any(axis=1)], seen)


def test_clusters_come_from_the_seed() -> None:
    vectors = np.random.default_rng(0).normal(size=(200, 5))
    first, second, other = (cluster(vectors, 20, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.classes, second.classes) and np.array_equal(first.centers, second.centers)
    assert not np.array_equal(first.classes, other.classes)
    assert np.bincount(first.classes, minlength=20).min() > 0


@pytest.mark.parametrize(
    ("vectors", "num_classes", "named"),
    [
        (np.eye(3), 4, "num_classes is 4, but only 3"),
        (np.eye(3), 0, "num_classes is 0"),
        (np.array([[1.0, 0], [2, 0], [0, 0], [0, 1]]), 3, "only 2"),
        (np.zeros((4, 2)), 1, "only 0"),
        (np.array([[1.0, np.nan], [0, 1]]), 1, "NaN or infinity"),
        (np.array([[1.0, np.inf], [0, 1]]), 1, "NaN or infinity"),
    ],
)
def test_invalid_clusters(vectors: np.ndarray, num_classes: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        cluster(vectors, num_classes)


# Vocabularies


def test_the_hash_distinguishes_vocabularies() -> None:
    hashes = {
        example_classes(words=words).vocabulary_hash
        for words in [("a", "b", "c", "d", "e"), ("b", "a", "c", "d", "e"), ("ab", "c", "d", "e", "f")]
    }
    assert len(hashes) == 3
    assert example_classes(classes=[0, 0, 0, 0, 0]).vocabulary_hash in hashes


def test_classes_follow_the_words_of_another_vocabulary() -> None:
    """A translation host adds special tokens first and filler words last, and may drop words."""
    words = ["<unk>", "<blank>", "e", "c", "a", "filler0"]
    made = example_classes(centers=np.array([[1.0, 0.0], [0.0, 0.5], [-1.0, 0.0]]))
    resolved = made.for_vocabulary(words)
    assert resolved.words == tuple(words)
    assert resolved.classes.tolist() == [1, 1, 2, 1, 0, 1]
    assert resolved.vectors.tolist() == [[0, 0], [0, 0], [-2, 0], [3, 4], [2, 0], [0, 0]]
    assert np.array_equal(resolved.centers, made.centers)
    emb = se.build("uncle", num_embeddings=6, embedding_dim=4, unique_dim=2, classes=resolved.classes)
    assert emb.classes.flatten().tolist() == [1, 1, 2, 1, 0, 1]


def test_a_mostly_unknown_vocabulary_fails() -> None:
    with pytest.raises(ValueError, match="3 of the 5 words"):
        example_classes().for_vocabulary(["x", "y", "z", "a", "b"])
    with pytest.raises(ValueError, match="is repeated"):
        example_classes().for_vocabulary(["a", "b", "a"])


@pytest.mark.parametrize(
    "content",
    [
        "cat\ndog\nsix\n",
        "cat\ndog\nsix",
        "cat\t9\ndog\t8\nsix\t1\n",
        "cat 9\ndog 8\nsix 1\n",
        "cat\r\ndog\r\nsix\r\n",
    ],
)
def test_vocabulary_files(tmp_path: Path, content: str) -> None:
    path = tmp_path / "vocab"
    path.write_bytes(content.encode())
    assert read_vocabulary(path) == ("cat", "dog", "six")


def test_unusual_words_in_a_vocabulary_file(tmp_path: Path) -> None:
    """Numbers are words too, and only a line feed ends a line."""
    path = tmp_path / "vocab"
    path.write_text("7\t3\n12\na\u2028b\t1\nc\x0bd\n\u00a0\t2\n", encoding="utf-8")
    assert read_vocabulary(path) == ("7", "12", "a\u2028b", "c\x0bd", "\u00a0")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "check the path"),
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"cat\n\ndog\n", "line 2"),
        (b"cat\t3\n\t4\n", "line 2"),
        (b"cat\ndog\ncat\n", "line 3 repeats 'cat' of line 1"),
        (b"cat\n\xff\n", "UTF-8"),
    ],
)
def test_unreadable_vocabulary_files(tmp_path: Path, content: bytes | None, named: str) -> None:
    path = tmp_path / "vocab"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=named) as error:
        read_vocabulary(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


# New words


def trained(classes: WordClasses, padding_idx: int | None = None) -> se.SharedEmbedding:
    """An embedding of five words: unique parts (1, 10) to (5, 50), class vectors 100, 200 and 300."""
    emb = se.build(
        "uncle",
        num_embeddings=5,
        embedding_dim=3,
        unique_dim=2,
        classes=classes.classes,
        num_classes=3,
        padding_idx=padding_idx,
    )
    with torch.no_grad():
        emb.unique.copy_(torch.arange(1.0, 6.0).unsqueeze(1) * torch.tensor([1.0, 10.0]))
        emb.class_tables[0].copy_(torch.tensor([[100.0], [200.0], [300.0]]))
    return emb


def test_a_new_word_takes_the_nearest_class_and_a_mix_of_its_words() -> None:
    """(0, 5) is nearest to center 1; its words b = (0, 1) and c = (3, 4) have cosines 1 and 0.8."""
    classes = example_classes()
    row = out_of_vocabulary_row(trained(classes), classes, np.array([0.0, 5.0]))
    first = (2 * 1.0 + 3 * 0.8) / 1.8
    assert row.tolist() == pytest.approx([first, 10 * first, 200])
    assert not row.requires_grad


def test_nearness_is_an_angle() -> None:
    """(4, 1) is nearer to the center (0, 2) by distance than to a far one in its direction."""
    classes = example_classes(centers=np.array([[90.0, 0.0], [0.0, 2.0], [-1.0, 0.0]]))
    row = out_of_vocabulary_row(trained(classes), classes, np.array([4.0, 1.0]))
    assert row[2].item() == 100


def test_words_on_the_other_side_have_no_weight() -> None:
    """Of class 0's words a = (2, 0) and d = (-1, 0.1), only a is on the side of (3, 0.1)."""
    vectors = example_classes().vectors.copy()
    vectors[3] = [-1, 0.1]
    classes = example_classes(vectors=vectors)
    row = out_of_vocabulary_row(trained(classes), classes, np.array([3.0, 0.1]))
    assert row.tolist() == pytest.approx([1, 10, 100])
    vectors[0] = [-3, 0]
    classes = example_classes(vectors=vectors)
    row = out_of_vocabulary_row(trained(classes), classes, np.array([3.0, 0.1]))
    assert row.tolist() == pytest.approx([2.5, 25, 100])


def test_padding_is_ignored() -> None:
    """Word 4 alone has class 2; as padding it leaves the class without words."""
    classes = example_classes()
    row = out_of_vocabulary_row(trained(classes, padding_idx=4), classes, np.array([-1.0, 0.2]))
    assert row[2].item() == 200
    row = out_of_vocabulary_row(trained(classes, padding_idx=0), classes, np.array([1.0, 0.0]))
    assert row.tolist() == pytest.approx([4, 40, 100])


def test_a_known_word_alone_in_its_class_gets_its_own_row() -> None:
    classes = example_classes()
    emb = trained(classes)
    row = out_of_vocabulary_row(emb, classes, classes.vectors[4])
    assert row.tolist() == emb(torch.tensor(4)).tolist()


def test_words_without_a_row() -> None:
    classes = example_classes()
    emb = trained(classes)
    for vector, named in [
        ([0.0, 0.0], "zero"),
        ([1.0, math.nan], "finite"),
        ([1.0, 2.0, 3.0], "2 dimensions"),
    ]:
        with pytest.raises(ValueError, match=named):
            out_of_vocabulary_row(emb, classes, np.array(vector))
    with pytest.raises(ValueError, match="not the classes of the embedding"):
        out_of_vocabulary_row(emb, example_classes([0, 0, 0, 1, 2]), np.array([1.0, 0.0]))
    two = se.build("uncle", num_embeddings=5, embedding_dim=4, unique_dim=2, classes=[[0, 1, 1, 0, 2]] * 2)
    with pytest.raises(ValueError, match="one level"):
        out_of_vocabulary_row(two, classes, np.array([1.0, 0.0]))
