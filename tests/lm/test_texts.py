"""Texts read block by block give the same words as texts read whole."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from lm.data import texts
from shared_embeddings.errors import UserError


def words_of(path: Path, lower: bool = False) -> list[str]:
    return list(chain.from_iterable(texts.word_blocks(path, lower)))


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 7, 1 << 20])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b\nc\n", "a b <eos> c <eos>"),
        ("a b\nc", "a b <eos> c <eos>"),
        ("a b ", "a b <eos>"),
        (" \n\n x  y \r\n", "<eos> <eos> x y <eos>"),
        ("\ufeffMünze €\u00a0𝄞\u2028z\n", "Münze € 𝄞 z <eos>"),
        ("", ""),
    ],
)
def test_words_and_line_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str, block_bytes: int
) -> None:
    monkeypatch.setattr(texts, "BLOCK_BYTES", block_bytes)
    path = tmp_path / "text"
    path.write_bytes(text.encode())
    assert words_of(path) == expected.split()


@pytest.mark.parametrize("block_bytes", [1, 5, 1 << 20])
def test_lower_case_does_not_depend_on_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(texts, "BLOCK_BYTES", block_bytes)
    path = tmp_path / "text"
    path.write_text("The ΟΔΟΣ <UNK>\n", encoding="utf-8")
    assert words_of(path, lower=True) == ["the", "οδος", "<unk>", "<eos>"]


@pytest.mark.parametrize("block_bytes", [1, 3, 1 << 20])
@pytest.mark.parametrize(("content", "place"), [(b"ab c\xffd\n", 4), ("ab €".encode()[:-1], 3)])
def test_place_of_bad_utf8_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, place: int, block_bytes: int
) -> None:
    monkeypatch.setattr(texts, "BLOCK_BYTES", block_bytes)
    path = tmp_path / "text"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"text: not UTF-8 at byte {place};"):
        words_of(path)


def test_all_bytes_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "BLOCK_BYTES", 4)
    path = tmp_path / "text"
    path.write_bytes(b"ab cd ef gh")
    reported: list[int] = []
    list(texts.word_blocks(path, progress=reported.append))
    assert reported == [4, 4, 3]


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent: No such file"):
        words_of(tmp_path / "absent")
