"""UnClE: rows and scores by hand, the loss by loops, published sizes, and sources of classes."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import shared_embeddings as se
from shared_embeddings.words.classes import WordClasses

from .cases import by_name


def build(
    classes: Any, num_embeddings: int = 5, embedding_dim: int = 4, **options: Any
) -> se.SharedEmbedding:
    """An embedding with given classes and a unique part of one dimension."""
    options = {"unique_dim": 1} | options
    return se.build(
        "uncle", num_embeddings=num_embeddings, embedding_dim=embedding_dim, classes=classes, **options
    )


# Rows and scores


def small(padding_idx: int | None = None) -> se.SharedEmbedding:
    """Three words of classes 1, 0, 1 with unique parts 1, 2, 3 and class vectors (10, 20) and (30, 40)."""
    emb = se.build(
        "uncle",
        num_embeddings=3,
        embedding_dim=3,
        unique_dim=1,
        classes=[1, 0, 1],
        padding_idx=padding_idx,
    )
    with torch.no_grad():
        emb.unique.copy_(torch.tensor([[1.0], [2], [3]]))
        emb.class_tables[0].copy_(torch.tensor([[10.0, 20], [30, 40]]))
    return emb


def test_rows_join_and_scores_add_the_unique_and_the_class_part() -> None:
    """Eq. 1, and for h = (100, 1, 2) the scores 100 u + c1 + 2 c2."""
    emb = small()
    assert emb.table().tolist() == [[1, 30, 40], [2, 10, 20], [3, 30, 40]]
    assert emb(torch.tensor([[2, 1]])).tolist() == [[[3, 30, 40], [2, 10, 20]]]
    assert emb.logits(torch.tensor([100.0, 1, 2])).tolist() == [210, 250, 410]
    assert small(padding_idx=0).logits(torch.tensor([[100.0, 1, 2]])).tolist() == [[0, 250, 410]]


def test_bias_worked_by_hand() -> None:
    """Unique parts give the weights 2, 4, 8 and classes 27, 3, 27; with the bias they are 2, 12, 4 of 18."""
    plain = small()
    emb = build([1, 0, 1], num_embeddings=3, embedding_dim=3, output_bias=True)
    bias = {"bias": torch.tensor([-math.log(27), 0.0, -math.log(54)])}
    emb.load_state_dict(plain.state_dict() | bias)
    hidden = torch.tensor([[math.log(2), math.log(3) / 10, 0.0]])
    probabilities = [2 / 18, 12 / 18, 4 / 18]
    assert emb.log_prob(hidden).exp()[0].tolist() == pytest.approx(probabilities, rel=1e-4)
    logs = [-math.log(value) for value in probabilities]
    smoothed = emb.cross_entropy(hidden, torch.tensor([2]), label_smoothing=0.3)
    assert smoothed.item() == pytest.approx(0.7 * logs[2] + 0.1 * sum(logs), rel=1e-4)
    smoothed.backward()
    assert emb.bias.grad.tolist() == pytest.approx([2 / 18 - 0.1, 12 / 18 - 0.1, 4 / 18 - 0.8], rel=1e-3)


def test_rows_with_sub_classes() -> None:
    """Eq. 2: classes 0, 0, 1 with sub-classes 0, 1, 2."""
    emb = se.build("uncle", num_embeddings=3, embedding_dim=4, unique_dim=1, classes=[[0, 0, 1], [0, 1, 2]])
    assert [table.shape for table in emb.class_tables] == [(2, 2), (3, 1)]
    with torch.no_grad():
        emb.unique.copy_(torch.tensor([[1.0], [2], [3]]))
        emb.class_tables[0].copy_(torch.tensor([[10.0, 20], [30, 40]]))
        emb.class_tables[1].copy_(torch.tensor([[5.0], [6], [7]]))
    assert emb.table().tolist() == [[1, 10, 20, 5], [2, 10, 20, 6], [3, 30, 40, 7]]
    assert emb.logits(torch.tensor([1.0, 1, 1, 1])).tolist() == [36, 38, 80]


def test_words_of_a_class_share_the_gradient_of_its_vector() -> None:
    """Scores all zero, so p = 1/3: errors are 1/3, 1/3, -2/3, and classes 1, 0, 1 sum them up."""
    emb = small()
    with torch.no_grad():
        for parameter in emb.parameters():
            parameter.zero_()
    emb.cross_entropy(torch.tensor([[1.0, 1, 2]]), torch.tensor([2])).backward()
    assert emb.unique.grad.flatten().tolist() == pytest.approx([1 / 3, 1 / 3, -2 / 3])
    assert emb.class_tables[0].grad[0].tolist() == pytest.approx([1 / 3, 2 / 3])
    assert emb.class_tables[0].grad[1].tolist() == pytest.approx([-1 / 3, -2 / 3])


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_padding_gives_its_class_no_gradient(smoothing: float) -> None:
    """Class 2 holds the padding word alone; class 0 holds another word too."""
    emb = build([0, 1, 2, 1, 0], padding_idx=2)
    hidden = torch.randn(7, 4, requires_grad=True)
    loss = emb(torch.tensor([0, 1, 2, 2])).sum()
    loss = loss + emb.cross_entropy(hidden, torch.tensor([2, 2, 0, 1, 3, 4, 2]), label_smoothing=smoothing)
    (loss + emb.logits(hidden).square().sum()).backward()
    assert emb.class_tables[0].grad[2].abs().max() == 0
    assert emb.unique.grad[2].abs().max() == 0
    assert emb.class_tables[0].grad[0].abs().min() > 0


def test_a_class_without_words_counts_and_gets_no_gradient() -> None:
    emb = build([0, 1, 1, 0, 3], num_classes=5)
    assert emb.class_tables[0].shape == (5, 3)
    assert emb.counts()["total"] == 5 * 1 + 5 * 3
    hidden = torch.randn(4, 4)
    emb.cross_entropy(hidden, torch.tensor([0, 1, 2, 4]), label_smoothing=0.1).backward()
    touched = emb.class_tables[0].grad.abs().amax(1) > 0
    assert touched.tolist() == [True, True, False, True, False]


def test_a_second_derivative_fails() -> None:
    emb = by_name("uncle-classes").build()
    hidden = torch.randn(4, 24, requires_grad=True)
    loss = emb.cross_entropy(hidden, torch.tensor([1, 2, 4, 5]))
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def operations(emb: se.SharedEmbedding, hidden: Tensor, targets: Tensor) -> int:
    """Multiplications and additions of scores, loss and gradients."""
    with FlopCounterMode(display=False) as counter:
        emb.logits(hidden)
        emb.cross_entropy(hidden, targets).backward()
    return counter.get_total_flops()


def test_class_scores_scale_with_the_classes() -> None:
    """One product for the scores of `logits`, three for the loss; (V U_d + C C_d) each, not V D."""
    emb = build(None, 4000, 32, unique_dim=4, num_classes=100, random_classes=True)
    hidden, targets = torch.randn(64, 32, requires_grad=True), torch.randint(4000, (64,))
    expected = 4 * 2 * 64 * (4000 * 4 + 100 * (32 - 4))
    assert operations(emb, hidden, targets) <= 1.01 * expected


# Published sizes


@pytest.mark.parametrize(
    ("vocabulary", "dim", "rows"),
    [
        (40724, 512, {256: (10.7, 1.95), 128: (5.59, 3.73), 64: (3.05, 6.83), 32: (1.78, 11.69)}),
        (10000, 400, {200: (2.20, 1.82), 100: (1.30, 3.08), 50: (0.85, 4.71), 25: (0.625, 6.40)}),
        (33278, 400, {200: (6.86, 1.94), 100: (3.63, 3.67), 50: (2.01, 6.61), 25: (1.21, 11.03)}),
    ],
    ids=["WMT", "PTB", "WikiText-2"],
)
def test_sizes_of_the_paper(vocabulary: int, dim: int, rows: dict[int, tuple[float, float]]) -> None:
    """Tables 3, 4, 9 and 10: embedding parameters in millions and reduction ratios, with 1000 classes."""
    for unique_dim, (millions, ratio) in rows.items():
        count = se.num_parameters(
            "uncle",
            num_embeddings=vocabulary,
            embedding_dim=dim,
            unique_dim=unique_dim,
            num_classes=1000,
            random_classes=True,
        )
        assert count == vocabulary * unique_dim + 1000 * (dim - unique_dim)
        # The tables truncate digits instead of rounding.
        assert count / 1e6 == pytest.approx(millions, abs=0.06 if millions > 10 else 0.01)
        assert vocabulary * dim / count == pytest.approx(ratio, abs=0.011)


@pytest.mark.parametrize(
    ("num_classes", "bits", "dtype"),
    [
        (1, 0, torch.uint8),
        (2, 1, torch.uint8),
        (256, 8, torch.uint8),
        (257, 9, torch.int32),
        ([3, 20], 2 + 5, torch.uint8),
    ],
)
def test_bits_of_classes(num_classes: int | list[int], bits: int, dtype: torch.dtype) -> None:
    emb = build(None, num_embeddings=300, num_classes=num_classes, random_classes=True)
    assert emb.classes.dtype == dtype
    assert emb.counts()["stored_bits"] == 32 * emb.counts()["total"] + bits * 300


# Sources of classes


@pytest.mark.parametrize(
    "classes",
    [
        [4, 0, 2, 2, 0],
        np.array([4, 0, 2, 2, 0], dtype=np.uint8),
        torch.tensor([4, 0, 2, 2, 0]),
    ],
    ids=["list", "array", "tensor"],
)
def test_classes_may_be_given_in_any_container(classes: Any) -> None:
    emb = build(classes)
    assert emb.classes.flatten().tolist() == [4, 0, 2, 2, 0]
    assert emb.num_classes == (5,)
    assert "2, 2" not in repr(emb) and "2, 2" not in repr(emb.options)


def save_classes(path: Path, classes: list[int], num_classes: int) -> str:
    """A class file of generated words."""
    random = np.random.default_rng(0)
    vectors = random.normal(size=(len(classes), 3))
    centers = random.normal(size=(num_classes, 3))
    words = tuple(f"word{number}" for number in range(len(classes)))
    WordClasses(words, np.array(classes), centers, vectors).save(path)
    return str(path)


def test_a_model_with_another_vocabulary_finds_classes_by_word(tmp_path: Path) -> None:
    """The class of word1 is 0, of word2 4; the marker gets the class of the center nearest to zero."""
    path = save_classes(tmp_path / "classes.npz", [1, 0, 4, 4, 1], 5)
    unseen = int(np.linalg.norm(WordClasses.load(path).centers, axis=1).argmin())
    words = ["<blank>", "word2", "word1", "word4", "word0", "word3"]
    settings = {"unique_dim": 1, "classes": path, "class_dims": [3]}
    options = se.UncleOptions.normalize(settings, words)
    assert options["class_dims"] == [3] and settings["classes"] == path
    emb = se.build("uncle", num_embeddings=6, embedding_dim=4, **options)
    assert emb.classes.flatten().tolist() == [unseen, 4, 0, 1, 1, 4]
    assert emb.num_classes == (5,)
    for without_file in ({"random_classes": True}, {"classes": "stored"}):
        settings = {"unique_dim": 1, "num_classes": 2, **without_file}
        assert se.UncleOptions.normalize(settings, ["a", "b"]) == settings


def test_class_files_of_another_vocabulary_are_named(tmp_path: Path) -> None:
    path = save_classes(tmp_path / "classes.npz", [1, 0, 1], 3)
    for settings, words, named in [
        ({"classes": path}, ["x", "y", "word1"], "2 of the 3 words"),
        ({"classes": path, "num_classes": 4}, ["word0", "word1"], "num_classes"),
        ({"classes": str(tmp_path / "none.npz")}, ["word0"], "No such file"),
        ({"classes": [0, 1]}, ["word0"], "2 words"),
        ({}, ["word0"], "projective"),
    ]:
        with pytest.raises(se.OptionError, match=named) as error:
            se.UncleOptions.normalize({"unique_dim": 1} | settings, words)
        assert "\n" not in str(error.value)
        if isinstance(settings.get("classes"), str):
            assert str(settings["classes"]) in str(error.value)


def test_levels_come_from_files(tmp_path: Path) -> None:
    first = save_classes(tmp_path / "coarse.npz", [1, 0, 1, 1, 1], 2)
    second = save_classes(tmp_path / "fine.npz", [2, 0, 1, 2, 1], 3)
    for classes in (first, Path(first), [first]):
        assert build(classes).classes.flatten().tolist() == [1, 0, 1, 1, 1]
    for classes in ([first, second], [first, [2, 0, 1, 2, 1]], [first, np.array([2, 0, 1, 2, 1])]):
        emb = build(classes, class_dims=[1, 2])
        assert emb.classes.tolist() == [[1, 2], [0, 0], [1, 1], [1, 2], [1, 1]]
        assert [table.shape for table in emb.class_tables] == [(2, 1), (3, 2)]
    # For another vocabulary, levels of files go by word, others by position.
    options = se.UncleOptions.normalize(
        {"unique_dim": 1, "classes": [first, [2, 0, 1]]}, ["word1", "word0", "word2"]
    )
    assert options["classes"] == [[0, 1, 1], [2, 0, 1]] and options["num_classes"] == [2, 3]


def test_the_file_is_not_needed_later(tmp_path: Path) -> None:
    """The options in a checkpoint rebuild the module, and parameters can be reset without the file."""
    path = save_classes(tmp_path / "classes.npz", [1, 0, 4, 4, 1], 5)
    emb = build(path, padding_idx=3)
    Path(path).unlink()
    emb.reset_parameters()
    assert emb.classes.flatten().tolist() == [1, 0, 4, 4, 1]
    stored = yaml.safe_load(yaml.safe_dump(emb.stored_options()))
    file = io.BytesIO()
    torch.save({"options": stored, "state": emb.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    sizes = {"num_embeddings": 5, "embedding_dim": 4, "padding_idx": 3}
    twin = se.build("uncle", **sizes, **loaded["options"])
    twin.load_state_dict(loaded["state"])
    assert torch.equal(twin.table(), emb.table())
    assert torch.equal(twin.eval()(torch.arange(5)), emb(torch.arange(5)))
    assert twin.counts() == emb.counts()
    assert twin.stored_options() == stored


@pytest.mark.parametrize("assign", [True, False])
def test_loaded_classes_outlive_a_reset(assign: bool) -> None:
    saved = build([2, 2, 0, 1, 0]).state_dict()
    emb = build("stored", num_classes=3)
    assert emb.classes.flatten().tolist() == [0, 1, 2, 0, 1]  # placeholders
    emb.load_state_dict(saved, assign=assign)
    before = emb.unique.clone()
    emb.reset_parameters()
    assert emb.classes.flatten().tolist() == [2, 2, 0, 1, 0]
    assert not torch.equal(emb.unique, before)
    if not assign:  # with it, the buffer is the given tensor
        saved["classes"].zero_()
    emb.reset_parameters()
    assert emb.classes.flatten().tolist() == [2, 2, 0, 1, 0]
