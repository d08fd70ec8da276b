"""UnClE: sources of classes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

import shared_embeddings as se
from shared_embeddings.words.classes import WordClasses
from tests.shared_embeddings.test_uncle import build

# Sources of classes


@pytest.mark.parametrize(
    "given",
    [
        [4, 0, 2, 2, 0],
        (4, 0, 2, 2, 0),
        np.array([4, 0, 2, 2, 0], dtype=np.uint8),
        list(np.array([4, 0, 2, 2, 0])),
        torch.tensor([4, 0, 2, 2, 0]),
        [torch.tensor([4, 0, 2, 2, 0])],
    ],
    ids=["list", "tuple", "array", "list of numpy numbers", "tensor", "one level"],
)
def test_classes_may_be_given_in_any_container(given: Any) -> None:
    emb = build(given)
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


def test_classes_come_from_a_file(tmp_path: Path) -> None:
    path = save_classes(tmp_path / "classes.npz", [1, 0, 4, 4, 1], 5)
    for given in (path, Path(path), [path]):
        emb = build(given)
        assert emb.classes.flatten().tolist() == [1, 0, 4, 4, 1]
        assert emb.class_tables[0].shape == (5, 3)
    assert build(path, num_classes=5).num_classes == (5,)
    sizes = {"num_embeddings": 5, "embedding_dim": 4, "unique_dim": 1}
    assert se.num_parameters("uncle", **sizes, classes=path) == 5 + 5 * 3


def test_a_model_with_another_vocabulary_finds_classes_by_word(tmp_path: Path) -> None:
    """The class of word1 is 0, of word2 4; the marker gets the class of the center nearest to zero."""
    path = save_classes(tmp_path / "classes.npz", [1, 0, 4, 4, 1], 5)
    unseen = int(np.linalg.norm(WordClasses.load(path).centers, axis=1).argmin())
    words = ["<blank>", "word2", "word1", "word4", "word0", "word3"]
    given = {"unique_dim": 1, "classes": path, "class_dims": [3]}
    options = se.UncleOptions.for_vocabulary(given, words)
    assert options["class_dims"] == [3] and given["classes"] == path
    emb = se.build("uncle", num_embeddings=6, embedding_dim=4, **options)
    assert emb.classes.flatten().tolist() == [unseen, 4, 0, 1, 1, 4]
    assert emb.num_classes == (5,)


def test_levels_by_word_and_by_position(tmp_path: Path) -> None:
    path = save_classes(tmp_path / "classes.npz", [1, 0, 1], 2)
    given = {"unique_dim": 1, "classes": [path, [2, 0, 1]]}
    options = se.UncleOptions.for_vocabulary(given, ["word1", "word0", "word2"])
    assert options["classes"] == [[0, 1, 1], [2, 0, 1]] and options["num_classes"] == [2, 3]


@pytest.mark.parametrize(
    "given", [{"random_classes": True, "num_classes": 2}, {"classes": "stored", "num_classes": 2}], ids=str
)
def test_options_without_class_files_are_unchanged(given: dict[str, Any]) -> None:
    given = {"unique_dim": 1} | given
    assert se.UncleOptions.for_vocabulary(given, ["a", "b"]) == given


def test_class_files_of_another_vocabulary_are_named(tmp_path: Path) -> None:
    path = save_classes(tmp_path / "classes.npz", [1, 0, 1], 3)
    for given, words, named in [
        ({"classes": path}, ["x", "y", "word1"], "2 of the 3 words"),
        ({"classes": path, "num_classes": 4}, ["word0", "word1"], "num_classes"),
        ({"classes": str(tmp_path / "none.npz")}, ["word0"], "no such file"),
        ({"classes": [0, 1]}, ["word0"], "2 words"),
        ({}, ["word0"], "projective"),
    ]:
        with pytest.raises(se.OptionError, match=named) as error:
            se.UncleOptions.for_vocabulary({"unique_dim": 1} | given, words)
        assert "\n" not in str(error.value)
        if isinstance(given.get("classes"), str):
            assert str(given["classes"]) in str(error.value)


def test_levels_come_from_several_files(tmp_path: Path) -> None:
    first = save_classes(tmp_path / "coarse.npz", [1, 0, 1, 1, 1], 2)
    second = save_classes(tmp_path / "fine.npz", [2, 0, 1, 2, 1], 3)
    for given in ([first, second], [first, [2, 0, 1, 2, 1]], [first, np.array([2, 0, 1, 2, 1])]):
        emb = build(given, class_dims=[1, 2])
        assert emb.classes.tolist() == [[1, 2], [0, 0], [1, 1], [1, 2], [1, 1]]
        assert [table.shape for table in emb.class_tables] == [(2, 1), (3, 2)]


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


def test_placeholder_classes_are_valid_and_deterministic() -> None:
    emb = build("stored", num_classes=[2, 3])
    assert emb.classes.tolist() == [[0, 0], [1, 1], [0, 2], [1, 0], [0, 1]]


@pytest.mark.parametrize("assign", [True, False])
def test_loaded_classes_outlive_a_reset(assign: bool) -> None:
    saved = build([2, 2, 0, 1, 0]).state_dict()
    emb = build("stored", num_classes=3)
    emb.load_state_dict(saved, assign=assign)
    before = emb.unique.clone()
    emb.reset_parameters()
    assert emb.classes.flatten().tolist() == [2, 2, 0, 1, 0]
    assert not torch.equal(emb.unique, before)
    if not assign:  # with it, the buffer is the given tensor
        saved["classes"].zero_()
    emb.reset_parameters()
    assert emb.classes.flatten().tolist() == [2, 2, 0, 1, 0]


def test_random_classes_come_from_their_own_seed() -> None:
    def drawn(**options: Any) -> Tensor:
        return build(None, num_embeddings=500, num_classes=10, random_classes=True, **options).classes

    torch.manual_seed(1)
    first, after = drawn(), torch.rand(1)
    torch.manual_seed(1)
    second, other = drawn(), drawn(seed=7)
    assert torch.equal(first, second) and not torch.equal(first, other)
    torch.manual_seed(1)
    drawn(seed=7)
    assert torch.equal(torch.rand(1), after)


def test_can_be_the_map_of_define() -> None:
    emb = se.build(
        "define",
        **{"num_embeddings": 12, "embedding_dim": 10, "map_dim": 8, "expand_dim": 16, "depth": 2},
        **{"max_groups": 2, "map": "uncle", "unique_dim": 3, "num_classes": 4, "random_classes": True},
    )
    hidden, targets = torch.randn(5, 8), torch.randint(12, (5,))
    torch.testing.assert_close(
        emb.cross_entropy(hidden, targets), F.cross_entropy(hidden @ emb.output_table().T, targets)
    )
