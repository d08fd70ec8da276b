"""Words by frequency, markers, limits, and files that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from lm.data.vocabulary import Limits, Vocabulary
from shared_embeddings.errors import UserError

COUNTS = {"a": 5, "b": 3, "d": 3, "c": 3, "e": 1, "<eos>": 4}


def pairs(vocabulary: Vocabulary) -> list[tuple[str, int]]:
    return list(zip(vocabulary.words, vocabulary.counts))


def test_most_frequent_first_and_equal_ones_by_code_point() -> None:
    vocabulary = Vocabulary.from_counts(COUNTS)
    assert pairs(vocabulary) == [
        ("a", 5),
        ("<eos>", 4),
        ("b", 3),
        ("c", 3),
        ("d", 3),
        ("e", 1),
        ("<unk>", 0),
    ]
    assert (len(vocabulary), vocabulary.eos, vocabulary.unk) == (7, 1, 6)
    assert [vocabulary.index[word] for word in vocabulary.words] == list(range(7))


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (Limits(min_frequency=2), [("a", 5), ("<eos>", 4), ("b", 3), ("c", 3), ("d", 3), ("<unk>", 1)]),
        (Limits(max_size=4), [("<unk>", 7), ("a", 5), ("<eos>", 4), ("b", 3)]),
        (Limits(min_frequency=4, max_size=5), [("<unk>", 10), ("a", 5), ("<eos>", 4)]),
    ],
)
def test_what_limits_leave_out_is_counted_for_unk(limits: Limits, kept: list[tuple[str, int]]) -> None:
    assert pairs(Vocabulary.from_counts(COUNTS, limits)) == kept


def test_unk_of_the_text_keeps_its_count_under_any_limit() -> None:
    vocabulary = Vocabulary.from_counts({"<unk>": 2, "a": 9, "b": 1}, Limits(min_frequency=3))
    assert pairs(vocabulary) == [("a", 9), ("<unk>", 3), ("<eos>", 0)]


def test_line_is_encoded_with_eos_and_unk() -> None:
    vocabulary = Vocabulary(["x", "<unk>", "<eos>"], [3, 2, 1])
    assert vocabulary.encode(" x\tnew  x\n") == [0, 1, 0, 2]
    assert vocabulary.encode("") == [2]


def test_saved_vocabulary_comes_back(tmp_path: Path) -> None:
    vocabulary = Vocabulary.from_counts({**COUNTS, "Straße": 2, "\\n": 1})
    vocabulary.save(tmp_path / "vocabulary.tsv")
    assert (tmp_path / "vocabulary.tsv").read_bytes().startswith(b"a\t5\n<eos>\t4\n")
    assert pairs(Vocabulary.load(tmp_path / "vocabulary.tsv")) == pairs(vocabulary)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a\t1\n<eos>\t1\n", "has no <unk>"),
        (b"a\t1\n<unk>\t1\n", "has no <eos>"),
        (b"", "has no <unk>"),
        (b"a\t1\n<unk>\t0\n<eos>\t1\na\t1\n", "'a' is repeated"),
        (b"a\t1\nb 2\n", "line 2 is 'b 2'"),
        (b"a\t1\n\n", "line 2 is ''"),
        (b"a\t-1\n", "line 1"),
        (b"a b\t1\n", "line 1"),
        (b"a\xff\t1\n", "not UTF-8 at byte 1"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "vocabulary.tsv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=said) as refusal:
        Vocabulary.load(path)
    assert str(path) in str(refusal.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent.tsv: No such file"):
        Vocabulary.load(tmp_path / "absent.tsv")


def test_every_word_needs_a_count() -> None:
    with pytest.raises(UserError, match="2 words, but 1 counts"):
        Vocabulary(["<unk>", "<eos>"], [1])
