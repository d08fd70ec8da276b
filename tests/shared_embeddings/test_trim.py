"""Trimming without a host: which programs offer models, and what a tokenizer that cuts otherwise leads to."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from shared_embeddings.checkpoints import trim as trimming
from shared_embeddings.checkpoints.trim_adapter import GROUP, Vocabulary, write_maps


def test_hosts_are_in_the_entry_points() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("tomllib is part of Python 3.11")
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][GROUP] == {
        "hf": "shared_embeddings.hf.trim:Host",
        "lm": "lm.trim:Host",
        "nmt": "nmt.trim:Host",
    }


class Letters:
    """A model of the letters a to e, which cuts "bb" otherwise once it is trimmed."""

    def __init__(self) -> None:
        self.kept: list[int] = []

    def vocabularies(self) -> list[Vocabulary]:
        return [Vocabulary("letters", "abcde", frozenset({0}), None)]

    def encoded(self, vocabulary: str, lines: Sequence[str]) -> list[list[int]]:
        return [["abcde".index(letter) for letter in line] for line in lines]

    def used(self, vocabulary: str, lines: Sequence[str]) -> Counter[int]:
        return Counter("abcde".index(letter) for line in lines for letter in line)

    def closed(self, vocabulary: str, ids: set[int]) -> set[int]:
        return ids

    def trim(self, kept: Mapping[str, Tensor]) -> list[str]:
        self.kept = kept["letters"].tolist()
        return []

    def encoded_anew(self, vocabulary: str, lines: Sequence[str]) -> list[list[int]]:
        cut = self.encoded(vocabulary, [line.replace("bb", "b") for line in lines])
        return [[self.kept.index(letter) for letter in line if letter in self.kept] for line in cut]

    def weight_bytes(self) -> int:
        return 8

    def sources(self) -> list[Path]:
        return []

    def files(self, output: Path) -> list[Path]:
        return [output]

    def map_files(self, output: Path) -> dict[str, Path]:
        return {"letters": output.with_suffix(".ids")}

    def write(self, output: Path, maps: Mapping[Path, str]) -> None:
        output.write_text("model")
        write_maps(maps)


class LettersHost:
    """The host of it."""

    def read(self, path: Path) -> Letters:
        return Letters()


@pytest.mark.parametrize(("text", "works"), [("ab\ncb\n", True), ("ab\ncbb\n", False)])
def test_a_covered_line_that_is_cut_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, works: bool
) -> None:
    monkeypatch.setattr(trimming, "find_host", lambda model, group: ("letters", LettersHost()))
    path, output = tmp_path / "text", tmp_path / "out"
    path.write_text(text)
    texts = trimming.Texts([path])
    if works:
        report = trimming.trim(tmp_path, texts, output, trimming.Keep(words=["e"]))
        assert report.vocabularies[0].rows == (5, 4)
        assert output.with_suffix(".ids").read_text() == "0\t0\n1\t1\n2\t2\n4\t3\n"
        return
    with pytest.raises(ValueError, match="line 2 would be cut into other words"):
        trimming.trim(tmp_path, texts, output)
    assert not output.exists() and not output.with_suffix(".ids").exists()


def test_the_mark_before_a_text_is_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("\ufeffone\r\ntwo \ufeff\n".encode())
    assert list(trimming.text_lines(tmp_path / "text")) == ["one", "two \ufeff"]
