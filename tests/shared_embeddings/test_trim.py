"""Trimming without a host, with a tokenizer that changes when it is trimmed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from shared_embeddings.checkpoints import trim as trimming
from shared_embeddings.checkpoints.adapter import Vocabulary
from shared_embeddings.checkpoints.report import Sizes
from shared_embeddings.checkpoints.selection import Keep, Texts
from shared_embeddings.checkpoints.token_counts import text_lines


class Letters:
    """A model of the letters a to e, which cuts "bb" otherwise once it is trimmed."""

    def __init__(self, spells: bool = False) -> None:
        self.kept: list[int] = []
        self.spells = spells

    def vocabularies(self) -> list[Vocabulary]:
        return [Vocabulary("letters", "abcde", frozenset({0}), None)]

    def encode(self, vocabulary: str, lines: Sequence[str]) -> list[list[int]]:
        return [["abcde".index(letter) for letter in line] for line in lines]

    def used(self, vocabulary: str, lines: Sequence[str]) -> list[Counter[int]]:
        return [Counter("abcde".index(letter) for line in lines for letter in line)]

    def closed(self, vocabulary: str, ids: set[int]) -> set[int]:
        return ids

    def trim(self, kept: Mapping[str, Tensor]) -> list[str]:
        self.kept = kept["letters"].tolist()
        return []

    def encode_trimmed(self, vocabulary: str, lines: Sequence[str]) -> list[list[int]]:
        cut = self.encode(vocabulary, [line.replace("bb", "b") for line in lines])
        return [[self.kept.index(letter) for letter in line if letter in self.kept] for line in cut]

    def characters(self, vocabulary: str) -> set[int]:
        return {4} if self.spells else set()

    def restored(self, vocabulary: str, lines: Sequence[str], ids: Sequence[Sequence[int]]) -> int:
        return len(lines)

    def restored_trimmed(self, vocabulary: str, lines: Sequence[str], ids: Sequence[Sequence[int]]) -> int:
        return sum(len(line) == len(found) for line, found in zip(lines, ids, strict=True))

    def weight_bytes(self) -> int:
        return 8

    def sources(self) -> list[Path]:
        return []

    def files(self, output: Path) -> list[Path]:
        return [output]

    def write_trimmed(self, output: Path, card: str) -> None:
        output.write_text("model")


class LettersAdapter:
    """Its adapter."""

    def __init__(self, spells: bool = False) -> None:
        self.spells = spells

    def read_trimmable(self, path: Path) -> Letters:
        return Letters(self.spells)


@pytest.mark.parametrize(("text", "works"), [("ab\ncb\n", True), ("ab\ncbb\n", False)])
def test_a_covered_line_that_is_cut_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, works: bool
) -> None:
    monkeypatch.setattr(trimming, "find_host", lambda model: ("letters", LettersAdapter()))
    path, output = tmp_path / "text", tmp_path / "out"
    path.write_text(text)
    texts = Texts([path])
    if works:
        report = trimming.trim(tmp_path, texts, output, Keep(words=["e"]))
        assert report.vocabularies[0].rows == Sizes(5, 4)
        assert (tmp_path / "out.ids.tsv").read_text() == "0\t0\n1\t1\n2\t2\n4\t3\n"
        return
    with pytest.raises(ValueError, match="would tokenize line 2 differently"):
        trimming.trim(tmp_path, texts, output)
    assert not output.exists() and not (tmp_path / "out.ids.tsv").exists()


@pytest.mark.parametrize(
    ("keep", "letters"),
    [
        (Keep(), "abcde"),
        (Keep(characters=False), "abcd"),
        (Keep(top=1), "abe"),
        (Keep(top=1, characters=False), "ab"),
        # Of 20 letters, 10 are a, which is special; 6 are b, 3 are c, and 1 is d.
        (Keep(coverage=0.5, characters=False), "a"),
        (Keep(coverage=0.8, characters=False), "ab"),
        (Keep(coverage=0.81, characters=False), "abc"),
        (Keep(coverage=0.951, characters=False), "abcd"),
        (Keep(coverage=1.0, characters=False), "abcd"),
        (Keep(min_count=3, characters=False), "abc"),
        (Keep(top=2, first=4, characters=False), "abcd"),
    ],
)
def test_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: Keep, letters: str) -> None:
    monkeypatch.setattr(trimming, "find_host", lambda model: ("letters", LettersAdapter(spells=True)))
    (tmp_path / "text").write_text("abababababab\naaaacccd\n")
    (tmp_path / "other").write_text("a\nae\ne\n")
    report = trimming.trim(tmp_path, Texts([tmp_path / "text"], held_out=[tmp_path / "other"]), None, keep)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other", "text"]
    (found,) = report.vocabularies
    assert found.rows == Sizes(5, len(letters)) and sum(found.reasons.values()) == len(letters)
    assert found.texts[0].kept >= 20 * (keep.coverage or 0)
    assert found.texts[1].round_trips == Sizes(3, 3 if "e" in letters else 1)
    assert "nothing written" in report.described() and "of 3 lines, 3 round-trip before, " in report.card()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"top": 0}, "--top-k is 0"),
        ({"coverage": 0.0}, "--coverage is 0.0%"),
        ({"top": 3, "coverage": 0.5}, "--top-k and --coverage each limit"),
        ({"top": 3, "min_count": 2}, "--min-count and --top-k each limit"),
    ],
)
def test_limits_that_make_no_sense(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Keep(**wrong)


def test_held_out_texts_need_one_vocabulary() -> None:
    sides = [Vocabulary(side, "ab", frozenset(), None, (side,)) for side in ("source", "target")]
    with pytest.raises(ValueError, match="--held-out other: the model has a vocabulary for the source and"):
        Texts(source=[Path("a")], target=[Path("b")], held_out=[Path("other")]).of(sides)


def test_the_mark_before_a_text_is_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("\ufeffone\r\ntwo \ufeff\n".encode())
    assert list(text_lines(tmp_path / "text")) == ["one", "two \ufeff"]
