"""Trimming without a host, with a tokenizer that changes when it is trimmed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from shared_embeddings.checkpoints import trim as trimming
from shared_embeddings.checkpoints.adapter import Vocabulary
from shared_embeddings.checkpoints.report import Sizes
from shared_embeddings.checkpoints.token_counts import text_lines


class Letters:
    """A model of the letters a to e, which cuts "bb" otherwise once it is trimmed."""

    def __init__(self) -> None:
        self.kept: list[int] = []

    def vocabularies(self) -> list[Vocabulary]:
        return [Vocabulary("letters", "abcde", frozenset({0}), None)]

    def encode(self, vocabulary: str, lines: Sequence[str]) -> list[list[int]]:
        return [["abcde".index(letter) for letter in line] for line in lines]

    def used(self, vocabulary: str, lines: Sequence[str]) -> Counter[int]:
        return Counter("abcde".index(letter) for line in lines for letter in line)

    def closed(self, vocabulary: str, ids: set[int]) -> set[int]:
        return ids

    def trim(self, kept: Mapping[str, Tensor]) -> list[str]:
        self.kept = kept["letters"].tolist()
        return []

    def encode_trimmed(self, vocabulary: str, lines: Sequence[str]) -> list[list[int]]:
        cut = self.encode(vocabulary, [line.replace("bb", "b") for line in lines])
        return [[self.kept.index(letter) for letter in line if letter in self.kept] for line in cut]

    def weight_bytes(self) -> int:
        return 8

    def sources(self) -> list[Path]:
        return []

    def files(self, output: Path) -> list[Path]:
        return [output]

    def write_trimmed(self, output: Path) -> None:
        output.write_text("model")


class LettersAdapter:
    """Its adapter."""

    def read_trimmable(self, path: Path) -> Letters:
        return Letters()


@pytest.mark.parametrize(("text", "works"), [("ab\ncb\n", True), ("ab\ncbb\n", False)])
def test_a_covered_line_that_is_cut_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, works: bool
) -> None:
    monkeypatch.setattr(trimming, "find_host", lambda model: ("letters", LettersAdapter()))
    path, output = tmp_path / "text", tmp_path / "out"
    path.write_text(text)
    texts = trimming.Texts([path])
    if works:
        report = trimming.trim(tmp_path, texts, output, trimming.Keep(words=["e"]))
        assert report.vocabularies[0].rows == Sizes(5, 4)
        assert (tmp_path / "out.ids.tsv").read_text() == "0\t0\n1\t1\n2\t2\n4\t3\n"
        return
    with pytest.raises(ValueError, match="would tokenize line 2 differently"):
        trimming.trim(tmp_path, texts, output)
    assert not output.exists() and not (tmp_path / "out.ids.tsv").exists()


def test_the_mark_before_a_text_is_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("\ufeffone\r\ntwo \ufeff\n".encode())
    assert list(text_lines(tmp_path / "text")) == ["one", "two \ufeff"]
