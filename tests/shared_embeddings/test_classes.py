"""Semantic classes: word vectors, clusters, vocabularies, their file, and rows of new words."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shared_embeddings as se
import shared_embeddings.words.classes as classes_module
from shared_embeddings.cli.main import main
from shared_embeddings.words.classes import (
    WordClasses,
    class_of_unseen,
    cluster,
    describe_sizes,
    make_classes,
    read_vocabulary,
    regroup,
    train_word_vectors,
)

ANIMALS = ["cat", "dog", "horse", "mouse", "cow", "sheep"]
NUMBERS = ["one", "two", "three", "four", "five", "six"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Sentences about animals and sentences about numbers, which share no word but one."""
    random = np.random.default_rng(0)
    lines = []
    for number in range(400):
        topic = ANIMALS if number % 2 else NUMBERS
        lines.append(" ".join(["the", *random.choice(topic, size=6)]))
    path = tmp_path / "text.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def vocabulary_file(tmp_path: Path) -> Path:
    """The words of the text with counts, and a marker that never occurs."""
    path = tmp_path / "words.vocab"
    words = ["the", *ANIMALS, *NUMBERS]
    path.write_text("".join(f"{word}\t{100 - place}\n" for place, word in enumerate(words)) + "<rare>\t0\n")
    return path


def example_classes(classes: list[int] | None = None, **changes: Any) -> WordClasses:
    """Classes of five words with vectors of two dimensions."""
    parts: dict[str, Any] = {
        "words": ("a", "b", "c", "d", "e"),
        "classes": np.array([0, 1, 1, 0, 2] if classes is None else classes),
        "centers": np.array([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]]),
        "vectors": np.array([[2.0, 0.0], [0.0, 1.0], [3.0, 4.0], [1.0, 0.1], [-2.0, 0.0]]),
        "settings": {"dim": 2, "texts": ["text"]},
    }
    return WordClasses(**(parts | changes))


# Word vectors


def test_vectors_of_a_vocabulary(text: Path, tmp_path: Path) -> None:
    """From every text, and from the seed."""
    second = tmp_path / "second.txt"
    second.write_text("late later late\n" * 20)
    words = ["cat", "never", "six", "late"]
    first, again, other = (train_word_vectors([text, second], words, 7, 2, 2, seed) for seed in (3, 3, 4))
    assert first.shape == (4, 7) and first.dtype == np.float32
    assert first[[0, 2, 3]].any(axis=1).all() and not first[1].any()
    assert np.array_equal(first, again) and not np.allclose(first, other)


def test_long_lines_are_split_not_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classes_module, "_LONGEST_SENTENCE", 4)
    path = tmp_path / "long.txt"
    path.write_text("a b c d e f g h i\n\nj\n")
    assert list(classes_module._Sentences([path], list("abcdefghij"))) == [
        list("abcd"),
        list("efgh"),
        ["i"],
        ["j"],
    ]


@pytest.mark.parametrize(
    ("content", "named"),
    [(b"\xff\xfe\n", "UTF-8"), (b"", "no word"), (b"other words\n", "no word")],
)
def test_unusable_texts(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=named) as error:
        train_word_vectors([path], ["cat"], 4)
    assert "\n" not in str(error.value)


def test_missing_gensim_is_named(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gensim.models", None)
    with pytest.raises(ImportError, match=r"gensim.*classes"):
        train_word_vectors([text], ["cat"], 4)


# The file


def test_file_round_trip(tmp_path: Path) -> None:
    words = ("straße", "猫", "a\u00a0b", "\u2028", " ")
    saved = example_classes(words=words)
    path = tmp_path / "deep" / "classes"
    saved.save(path)
    loaded = WordClasses.load(path)
    assert loaded.words == words and loaded.settings == saved.settings
    for name in ("classes", "centers", "vectors"):
        assert np.array_equal(getattr(loaded, name), getattr(saved, name))
    assert loaded.vocabulary_hash == saved.vocabulary_hash
    assert loaded.num_classes == 3
    assert [file.name for file in path.parent.iterdir()] == ["classes"]


def rewritten(path: Path, **changes: np.ndarray | None) -> None:
    """Change or remove arrays of a class file."""
    with np.load(path) as arrays:
        contents = {name: arrays[name] for name in arrays.files} | changes
    np.savez(path, **{name: value for name, value in contents.items() if value is not None})


def truncated(path: Path) -> None:
    """Keep the first half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path: Path) -> None:
    """Change one byte of the stored vectors."""
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("vectors.npy")
    content = bytearray(path.read_bytes())
    content[info.header_offset + 30 + len(info.filename) + info.file_size - 1] ^= 0x55
    path.write_bytes(content)


BROKEN = {
    "missing": lambda path: path.unlink(),
    "truncated": truncated,
    "flipped": flipped,
    "one array": lambda path: np.save(path.open("wb"), np.arange(5)),
    "no centers": lambda path: rewritten(path, centers=None),
    "other words": lambda path: rewritten(path, words=np.frombuffer(b"a\nb\nc\nd\nf", dtype=np.uint8)),
    "broken classes": lambda path: rewritten(path, classes=np.array([0.0, 1, 2, 1, 0])),
    "a later format": lambda path: rewritten(path, format=np.array(2)),
}


@pytest.mark.parametrize("break_it", BROKEN.values(), ids=BROKEN)
def test_unreadable_files(tmp_path: Path, break_it: Any) -> None:
    path = tmp_path / "classes.npz"
    example_classes().save(path)
    break_it(path)
    with pytest.raises(ValueError) as error:
        WordClasses.load(path)
    text = str(error.value)
    assert text.startswith(f"classes {path}: ") and "\n" not in text
    assert len(text) < 300 + len(str(path)) and "shared-embeddings classes" in text
    with pytest.raises(se.OptionError, match="option 'classes'"):
        se.build("uncle", num_embeddings=5, embedding_dim=4, unique_dim=2, classes=str(path))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"words": ("a", "b", "c", "d", "a")}, "'a' is repeated"),
        ({"classes": np.zeros(4, dtype=int)}, "5 words"),
        ({"classes": np.array([0, 1, 2, 3, 0])}, "0 to 2"),
        ({"vectors": np.zeros((4, 2))}, "do not fit"),
    ],
)
def test_inconsistent_parts_fail(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        example_classes(**changes)


# Sizes


def sized(*sizes: int) -> WordClasses:
    """Classes of the given sizes."""
    classes = np.repeat(np.arange(len(sizes)), sizes)
    words = tuple(str(number) for number in range(len(classes)))
    return WordClasses(words, classes, np.ones((len(sizes), 2)), np.ones((len(classes), 2)))


def test_sizes_in_text() -> None:
    made = sized(1, 1, 3, 0, 9)
    assert made.sizes().tolist() == [1, 1, 3, 0, 9]
    lines = describe_sizes(made).splitlines()
    assert lines[0] == "14 words in 5 classes: smallest 0, median 1, largest 9 words"
    table = [(line.split()[0], int(line.split()[2]), line.count("#")) for line in lines[1:]]
    assert table == [("0", 1, 20), ("1", 2, 40), ("2-3", 1, 20), ("4-7", 0, 0), ("8-15", 1, 20)]
    assert describe_sizes(sized(2, 2)).splitlines()[1].split()[0] == "1"


# End to end


def test_from_text_to_embedding(
    text: Path, vocabulary_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, figure = tmp_path / "run" / "classes.npz", tmp_path / "run" / "sizes.png"
    asked = ["--text", text, "--vocab", vocabulary_file, "--num-classes", 3, "--output", output]
    assert main(["classes", *map(str, [*asked, "--dim", 10, "--epochs", 20, "--figure", figure])]) == 0
    report = capsys.readouterr().out
    made = WordClasses.load(output)
    assert made.words == ("the", *ANIMALS, *NUMBERS, "<rare>")
    of = dict(zip(made.words, made.classes.tolist()))
    assert len({of[word] for word in ANIMALS}) == 1 == len({of[word] for word in NUMBERS})
    assert of["cat"] != of["six"]
    assert "14 words in 3 classes" in report and "do not occur in the texts: 1," in report
    assert str(output) in report and str(figure) in report
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert made.settings["epochs"] == 20 and made.settings["texts"] == ["text.txt"]
    emb = se.build("uncle", num_embeddings=14, embedding_dim=8, unique_dim=2, classes=str(output))
    cat, dog, six = emb(torch.tensor([made.words.index(word) for word in ("cat", "dog", "six")]))
    assert torch.equal(cat[2:], dog[2:]) and not torch.equal(cat[2:], six[2:])


def test_another_number_of_classes_without_the_texts(
    text: Path, vocabulary_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    three, four, regrouped = (tmp_path / f"{name}.npz" for name in ("three", "four", "regrouped"))
    for number, path in ((3, three), (4, four)):
        make_classes([text], vocabulary_file, number, path, dim=5, epochs=1, seed=2)
    asked = ["--vectors-of", three, "--num-classes", 4, "--output", regrouped, "--seed", 2]
    assert main(["classes", *map(str, asked)]) == 0
    report = capsys.readouterr().out
    made, wanted = WordClasses.load(regrouped), WordClasses.load(four)
    assert "14 words in 4 classes" in report and str(regrouped) in report
    assert made.words == wanted.words and made.settings == wanted.settings
    for part in ("classes", "centers", "vectors"):
        assert np.array_equal(getattr(made, part), getattr(wanted, part)), part
    with pytest.raises(ValueError, match="but only 13 words"):
        regroup(three, 15, regrouped, force=True)
    with pytest.raises(ValueError, match="seed is -1"):
        regroup(three, 3, regrouped, seed=-1, force=True)
    with pytest.raises(ValueError, match="already exists"):
        regroup(three, 3, regrouped)
    with pytest.raises(ValueError, match="none.npz"):
        regroup(tmp_path / "none.npz", 3, regrouped)


def test_invalid_settings_fail_before_training(
    text: Path, vocabulary_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*arguments: Any) -> None:
        pytest.fail("the training was started")

    monkeypatch.setattr("shared_embeddings.words.classes.train_word_vectors", train)
    output = tmp_path / "classes.npz"
    before = text.read_bytes()
    for number, path, changes, named in (
        (15, output, {}, "more than the 14 words"),
        (0, output, {}, "num_classes is 0"),
        (3, output, {"seed": -1}, "seed is -1"),
        (3, output, {"seed": 2**32}, f"seed is {2**32}"),
        (3, text, {"force": True}, "would replace an input"),
        (3, output, {"figure": output}, "would replace"),
    ):
        with pytest.raises(ValueError, match=named):
            make_classes([text], vocabulary_file, number, path, **changes)
    assert text.read_bytes() == before
    for module, named in (("matplotlib.figure", "matplotlib"), ("sklearn.cluster", "scikit-learn")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ImportError, match=named):
            make_classes([text], vocabulary_file, 3, output, figure=tmp_path / "sizes.png")
        monkeypatch.delitem(sys.modules, module)


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
    assert all(np.array_equal(array, again) for array, again in zip(first, second, strict=True))
    assert not np.array_equal(first[0], other[0])
    assert np.bincount(first[0], minlength=20).min() > 0


@pytest.mark.parametrize(
    ("vectors", "num_classes", "named"),
    [
        (np.eye(3), 4, "num_classes is 4, but only 3"),
        (np.array([[1.0, 0], [2, 0], [0, 0], [0, 1]]), 3, "only 2"),
        (np.array([[1.0, np.nan], [0, 1]]), 1, "NaN or infinity"),
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


@pytest.mark.parametrize("options", [{"unique_dim": 2, "classes": "missing.npz"}, {"classes": "missing.npz"}])
def test_errors_name_the_method_once(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="^uncle: option") as error:
        se.fit("uncle", torch.randn(3, 4), words=["a", "b", "c"], **options)
    assert str(error.value).count("uncle") == 1


def test_a_mostly_unknown_vocabulary_fails() -> None:
    with pytest.raises(ValueError, match="3 of the 5 words"):
        example_classes().for_vocabulary(["x", "y", "z", "a", "b"])
    with pytest.raises(ValueError, match="is repeated"):
        example_classes().for_vocabulary(["a", "b", "a"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        *(
            (content, ("cat", "dog", "six"))
            for content in (
                "cat\ndog\nsix\n",
                "cat\t9\ndog\t8\nsix\t1\n",
                "cat 9\ndog 8\nsix 1\n",
            )
        ),
        # Numbers are words too, and only a line feed ends a line.
        (
            "7\t3\n12\na\u2028b\t1\nc\x0bd\n\u00a0\t2\n",
            ("7", "12", "a\u2028b", "c\x0bd", "\u00a0"),
        ),
    ],
)
def test_vocabulary_files(tmp_path: Path, content: str, words: tuple[str, ...]) -> None:
    path = tmp_path / "vocab"
    path.write_bytes(content.encode())
    assert read_vocabulary(path) == words


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "is empty"),
        (b"cat\n\ndog\n", "line 2"),
        (b"cat\ndog\ncat\n", "line 3 repeats 'cat' of line 1"),
        (b"cat\n\xff\n", "UTF-8"),
    ],
)
def test_unreadable_vocabulary_files(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "vocab"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=named) as error:
        read_vocabulary(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
