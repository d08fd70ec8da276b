"""Corpora made of texts: their tokens, when they are rebuilt, and detected damage."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm.data import corpus
from lm.data import vocabulary as reading
from lm.data.corpus import SPLITS, Published, load_corpus, prepare, read_tokens
from lm.data.vocabulary import Limits
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import sha256, write_text

TEXT = {"train": "the cat sat\n\non the mat\n", "valid": "the dog sat\n", "test": "a cat\n"}


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, list[Path]]:
    paths = {split: [tmp_path / f"{split}.txt"] for split in SPLITS}
    for split, text in TEXT.items():
        paths[split][0].write_text(text)
    return paths


def decoded(tokens: np.ndarray, words: list[str]) -> str:
    return " ".join(words[token] for token in tokens)


def test_tokens_represent_the_text(texts: dict[str, list[Path]], tmp_path: Path) -> None:
    prepare(texts, tmp_path / "data", "cats")
    found = load_corpus(tmp_path / "data")
    words = found.vocabulary.words
    assert words == ["<eos>", "the", "cat", "mat", "on", "sat", "<unk>"]
    assert found.vocabulary.counts == [3, 2, 1, 1, 1, 1, 0]
    assert decoded(found.train, words) == "the cat sat <eos> <eos> on the mat <eos>"
    assert decoded(found.valid, words) == "the <unk> sat <eos>"
    assert decoded(found.test, words) == "<unk> cat <eos>"
    assert isinstance(found.train, np.memmap) and found.train.dtype == np.int32
    assert not found.train.flags.writeable
    description = found.description
    assert description["tokens"] == {"train": 9, "valid": 4, "test": 3}
    assert description["unknown"] == {"train": 0, "valid": 1, "test": 1}
    assert (description["name"], description["types"]) == ("cats", 7)
    assert description["files"]["test.npy"] == sha256(tmp_path / "data" / "test.npy")


def test_several_texts_are_concatenated(texts: dict[str, list[Path]], tmp_path: Path) -> None:
    prepare({**texts, "train": texts["train"] + texts["valid"]}, tmp_path / "data")
    found = load_corpus(tmp_path / "data")
    expected = "the cat sat <eos> <eos> on the mat <eos> the dog sat <eos>"
    assert decoded(found.train, found.vocabulary.words) == expected


def test_limits_and_lower_case_are_applied(texts: dict[str, list[Path]], tmp_path: Path) -> None:
    write_text(texts["train"][0], "The cat\nthe CAT\n")
    description = prepare(texts, tmp_path / "data", limits=Limits(max_size=3), lower=True)
    assert load_corpus(tmp_path / "data").vocabulary.words == ["<eos>", "<unk>", "cat"]
    assert description["unknown"]["train"] == 2


class Counting:
    """Counts how often texts are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes, self._read = 0, corpus.word_blocks
        monkeypatch.setattr(corpus, "word_blocks", self.read)

    def read(self, *arguments: Any) -> Any:
        self.passes += 1
        return self._read(*arguments)


def test_second_run_does_not_read_the_text(
    texts: dict[str, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = Counting(monkeypatch)
    first = prepare(texts, tmp_path / "data")
    assert reading.passes == 6
    assert prepare(texts, tmp_path / "data") == first
    assert reading.passes == 6


@pytest.mark.parametrize("change", ["text", "limits", "lower", "tokens", "description"])
def test_any_change_rebuilds_the_corpus(
    texts: dict[str, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    folder = tmp_path / "data"
    prepare(texts, folder)
    settings: dict[str, Any] = {}
    if change == "text":
        write_text(texts["valid"][0], "a mat\n")
    elif change == "limits":
        settings = {"limits": Limits(min_frequency=2)}
    elif change == "lower":
        settings = {"lower": True}
    elif change == "tokens":
        (folder / "test.npy").unlink()
    else:
        (folder / "data.json").write_text("{")
    reading = Counting(monkeypatch)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    if change != "tokens":  # otherwise it is the same corpus, damaged
        with pytest.raises(UserError, match="already exists; add --force"):
            prepare(texts, folder, **settings)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before and not reading.passes
        settings["force"] = True
    description = prepare(texts, folder, **settings)
    assert reading.passes == 6
    assert load_corpus(folder).description == description


def test_interrupted_run_keeps_the_old_corpus_and_the_next_one_cleans_up(
    texts: dict[str, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    before = prepare(texts, folder)
    write_text(texts["train"][0], "other words\n")

    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(corpus, "_write_tokens", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(texts, folder, force=True)
    assert load_corpus(folder).description == before
    (folder / ".train.npy.12345.tmp").write_bytes(b"half")
    prepare(texts, folder, force=True)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["data.json", "vocabulary.tsv", *(f"{split}.npy" for split in SPLITS)]
    )


def test_text_that_changes_during_preparation_fails(
    texts: dict[str, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = corpus._count

    def count_then_change(*arguments: Any) -> Any:
        counted = count(*arguments)
        write_text(texts["train"][0], "shorter\n")
        return counted

    monkeypatch.setattr(corpus, "_count", count_then_change)
    with pytest.raises(UserError, match="train text changed"):
        prepare(texts, tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("split", "content", "printed"),
    [
        ("train", b"", "train.txt: 0 tokens; the train text needs at least 2"),
        ("valid", b"\n", "valid.txt: 1 tokens; the valid text needs at least 2"),
        ("test", b"caf\xe9 au lait\n", "test.txt: not UTF-8 at byte 3"),
        ("valid", None, "-valid: no such file: .*valid.txt"),
    ],
)
def test_unusable_texts_fail(
    texts: dict[str, list[Path]], tmp_path: Path, split: str, content: bytes | None, printed: str
) -> None:
    if content is None:
        texts[split][0].unlink()
    else:
        texts[split][0].write_bytes(content)
    with pytest.raises(UserError, match=printed):
        prepare(texts, tmp_path / "data")
    assert not (tmp_path / "data" / "data.json").exists()


def test_published_sizes_are_checked(texts: dict[str, list[Path]], tmp_path: Path) -> None:
    tokens = {"train": 9, "valid": 4, "test": 3}
    with pytest.raises(UserError, match="the test text has 3 tokens, the published text 30"):
        prepare(texts, tmp_path / "data", published=Published({**tokens, "test": 30}, 7))
    with pytest.raises(UserError, match="the vocabulary has 7 words, the published text 8"):
        prepare(texts, tmp_path / "data", published=Published(tokens, 8))
    prepare(texts, tmp_path / "data", published=Published(tokens, 8), limits=Limits(min_frequency=2))
    prepare(texts, tmp_path / "data", published=Published(tokens, 7), force=True)


def damage(path: Path, kind: str) -> None:
    if kind == "missing":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(path.read_bytes()[:-4])
    elif kind == "flipped":
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    else:
        np.save(path, np.zeros(9, dtype=np.int64))


@pytest.mark.parametrize("kind", ["missing", "truncated", "flipped", "other dtype"])
def test_damaged_corpus_fails_in_one_line(texts: dict[str, list[Path]], tmp_path: Path, kind: str) -> None:
    prepare(texts, tmp_path / "data")
    damage(tmp_path / "data" / "train.npy", kind)
    with pytest.raises(UserError, match="train.npy .*run lm_prepare again"):
        load_corpus(tmp_path / "data")


def test_vocabulary_without_unk_fails(texts: dict[str, list[Path]], tmp_path: Path) -> None:
    folder = tmp_path / "data"
    description = prepare(texts, folder)
    kept = [line for line in (folder / "vocabulary.tsv").read_text().splitlines() if "<unk>" not in line]
    write_text(folder / "vocabulary.tsv", "\n".join(kept) + "\n")
    description["files"]["vocabulary.tsv"] = sha256(folder / "vocabulary.tsv")
    description["checksum"] = corpus._checksum(description["files"])
    write_text(folder / "data.json", json.dumps(description))
    with pytest.raises(UserError, match="vocabulary.tsv: the vocabulary has no <unk>"):
        load_corpus(folder)


@pytest.mark.parametrize("content", [None, "", "[]", '{"format": "other"}', '{"files": {}}'])
def test_folder_without_a_corpus_fails(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "data"
    with pytest.raises(UserError, match="no such folder; create it with lm_prepare"):
        load_corpus(folder)
    folder.mkdir()
    if content is not None:
        write_text(folder / "data.json", content)
    with pytest.raises(UserError, match="has no valid data.json"):
        load_corpus(folder)


def test_corpus_of_another_version_fails(texts: dict[str, list[Path]], tmp_path: Path) -> None:
    description = prepare(texts, tmp_path / "data")
    write_text(tmp_path / "data" / "data.json", json.dumps({**description, "version": 99}))
    with pytest.raises(UserError, match="of this version"):
        load_corpus(tmp_path / "data")


@pytest.mark.parametrize(
    ("array", "printed"),
    [
        (np.zeros(3), "float64 of shape"),
        (np.zeros(3, np.int64), "int64"),
        (np.zeros((3, 1), np.int32), "shape"),
        (np.array([{}], dtype=object), "not a token file"),
    ],
)
def test_arrays_of_another_type_fail(tmp_path: Path, array: np.ndarray, printed: str) -> None:
    np.save(tmp_path / "tokens.npy", array)
    with pytest.raises(UserError, match=printed):
        read_tokens(tmp_path / "tokens.npy", 3, 7)


@pytest.mark.parametrize("content", [b"", b"not an array", b"\x93NUMPY\x01\x00"])
def test_files_without_an_array_fail(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokens.npy").write_bytes(content)
    with pytest.raises(UserError, match="tokens.npy: not a token file"):
        read_tokens(tmp_path / "tokens.npy", 3, 7)


def test_archives_fail(tmp_path: Path) -> None:
    with (tmp_path / "tokens.npy").open("wb") as file:
        np.savez(file, tokens=np.zeros(3, np.int32))
    with pytest.raises(UserError, match="an archive"):
        read_tokens(tmp_path / "tokens.npy", 3, 7)


def test_memory_does_not_grow_with_the_text(
    texts: dict[str, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Checksums read a mebibyte at a time; this text, a single line, is no larger.
    monkeypatch.setattr(corpus, "sha256", lambda path: "")
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1 << 12)
    texts["train"][0].write_text("some words of a line " * 40_000)
    tracemalloc.start()
    try:
        prepare(texts, tmp_path / "data")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < texts["train"][0].stat().st_size / 4


def described(folder: Path, change: dict[str, Any]) -> None:
    """Change entries of ``data.json``; None removes one."""
    path = folder / "data.json"
    content = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


ODD_DESCRIPTIONS = [
    {key: value}
    for key in ("checksum", "tokens", "unknown", "types", "files", "name")
    for value in (None, [], 5.5, "odd", {"a": 1}, True)
    if (key, value) != ("name", "odd")
]


@pytest.mark.parametrize("change", ODD_DESCRIPTIONS, ids=str)
def test_incomplete_description(texts: dict[str, list[Path]], tmp_path: Path, change: dict[str, Any]) -> None:
    prepare(texts, tmp_path / "data")
    described(tmp_path / "data", change)
    with pytest.raises(UserError, match=r"data.json.*run lm_prepare"):
        load_corpus(tmp_path / "data")


@pytest.mark.parametrize(
    ("tokens", "printed"),
    [
        ([0, 3, 7, 0], "token 2 is 7, but the vocabulary has the ids 0 to 6"),
        ([0, 3, 1, -1], "token 3 is -1"),
        ([0, 3, 2**31 - 1, 2], "token 2 is 2147483647"),
        ([0, 3, 2], r"int32 of shape \(3,\); expected int32 of shape \(4,\)"),
        ([], r"int32 of shape \(0,\)"),
    ],
)
@pytest.mark.parametrize("block", [1, 3, 1 << 22])
def test_ids_beyond_the_vocabulary(
    texts: dict[str, list[Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokens: list[int],
    printed: str,
    block: int,
) -> None:
    """Checked once, when a corpus is opened: training would fail with an IndexError after hours."""
    monkeypatch.setattr(corpus, "_BLOCK", block)
    folder = tmp_path / "data"
    prepare(texts, folder)
    np.save(folder / "valid.npy", np.array(tokens, dtype=np.int32))
    files = json.loads((folder / "data.json").read_text())["files"]
    files["valid.npy"] = sha256(folder / "valid.npy")
    described(folder, {"files": files, "checksum": corpus._checksum(files)})
    with pytest.raises(UserError, match=printed) as error:
        load_corpus(folder)
    assert str(folder / "valid.npy") in str(error.value)
