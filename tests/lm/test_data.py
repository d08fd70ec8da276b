"""Data of language models: datasets, texts, vocabularies and batches."""

from __future__ import annotations

import re
import zipfile
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm.data import corpus as reading
from lm.data import datasets
from lm.data.corpus import SPLITS, Columns, Limits, Vocabulary
from lm.data.datasets import SOURCES, DownloadError, Source, locate
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import sha256

TEXT = {split: f" \n some {split} <unk> text \n" for split in SPLITS}


def fill(folder: Path, source: Source) -> None:
    folder.mkdir(parents=True)
    for split, name in source.files.items():
        (folder / name).write_text(TEXT[split])


def texts_of(files: dict[str, list[Path]]) -> dict[str, str]:
    return {split: "".join(path.read_text() for path in paths) for split, paths in files.items()}


class Server:
    """A folder that corpora are downloaded from."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.asked = folder, list[str]()
        self._download = datasets.download
        monkeypatch.setattr(datasets, "download", self.download)
        monkeypatch.setattr(datasets.time, "sleep", lambda seconds: None)

    def download(self, url: str, *arguments: Any) -> None:
        name = url.rsplit("/", 1)[-1]
        self.asked.append(name)
        self._download((self.folder / name).as_uri(), *arguments)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Offers a small PTB and a small WikiText-2; checksums are those of the small ones."""
    folder = tmp_path / "server"
    fill(folder, SOURCES["ptb"])
    names = SOURCES["ptb"].files.values()
    checksums = {name: sha256(folder / name) for name in names}
    monkeypatch.setitem(datasets.SOURCES, "ptb", SOURCES["ptb"]._replace(sha256=checksums))
    archive_name = "wikitext-2-v1.zip"
    with zipfile.ZipFile(folder / archive_name, "w") as archive:
        for split, name in SOURCES["wikitext2"].files.items():
            archive.writestr(f"wikitext-2/{name}", TEXT[split])
    small = SOURCES["wikitext2"]._replace(sha256={archive_name: sha256(folder / archive_name)})
    monkeypatch.setitem(datasets.SOURCES, "wikitext2", small)
    return Server(folder, monkeypatch)


@pytest.mark.parametrize("name", ["ptb", "wikitext2"])
def test_corpus_is_downloaded_once(server: Server, tmp_path: Path, name: str) -> None:
    downloads = tmp_path / "downloads"
    assert texts_of(locate(name, None, downloads)) == TEXT
    asked = list(server.asked)
    assert len(asked) == len(SOURCES[name].urls)
    assert texts_of(locate(name, None, downloads)) == TEXT
    assert server.asked == asked
    assert list(downloads.rglob(".*")) == list(downloads.rglob("*.zip")) == []


@pytest.mark.parametrize("folder", ["wikitext-2", "wikitext-2/wikitext-2", "."])
def test_data_dir_is_searched_first_and_never_written(server: Server, tmp_path: Path, folder: str) -> None:
    data_dir = tmp_path / "given"
    fill(data_dir / folder, SOURCES["wikitext2"])
    files = locate("wikitext2", data_dir, tmp_path / "downloads")
    assert texts_of(files) == TEXT and server.asked == []
    assert all(path.is_relative_to(data_dir) for [path] in files.values())
    assert not (tmp_path / "downloads").exists()


def test_incomplete_data_dir_is_skipped(server: Server, tmp_path: Path) -> None:
    data_dir = tmp_path / "given"
    fill(data_dir / "ptb", SOURCES["ptb"])
    (data_dir / "ptb" / "ptb.test.txt").unlink()
    files = locate("ptb", data_dir, tmp_path / "downloads")
    assert all(path.is_relative_to(tmp_path / "downloads") for [path] in files.values())


def test_interrupted_download_keeps_complete_files_only(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (server.folder / "ptb.valid.txt").rename(server.folder / "away")
    with pytest.raises(DownloadError, match=r"into \$DATA_DIR/ptb"):
        locate("ptb", None, tmp_path / "downloads")
    (server.folder / "away").rename(server.folder / "ptb.valid.txt")
    server.asked.clear()
    assert texts_of(locate("ptb", None, tmp_path / "downloads")) == TEXT
    assert server.asked == ["ptb.valid.txt", "ptb.test.txt"]


def test_wrong_content_fails_anywhere(server: Server, tmp_path: Path) -> None:
    downloads = tmp_path / "downloads"
    [path] = locate("ptb", None, downloads)["train"]
    path.write_text("changed")
    with pytest.raises(DownloadError, match=r"ptb.train.txt: SHA-256 is .* replace the file"):
        locate("ptb", None, downloads)


ADVICE = r"to skip the download, put wiki.train.tokens, .* \$DATA_DIR/wikitext-2"


@pytest.mark.parametrize("is_left_by_a_killed_run", [False, True])
def test_archives_with_a_wrong_checksum_fail_and_are_replaced(
    server: Server, tmp_path: Path, is_left_by_a_killed_run: bool
) -> None:
    path = server.folder / "wikitext-2-v1.zip"
    whole = path.read_bytes()
    if is_left_by_a_killed_run:
        path = tmp_path / "downloads" / ".wikitext-2.partial" / path.name
        path.parent.mkdir(parents=True)
    path.write_bytes(whole[:-30])
    reason = "not the expected archive" if is_left_by_a_killed_run else "SHA-256 is .*, expected"
    with pytest.raises(UserError, match=rf"wikitext-2-v1.zip: {reason} .*; {ADVICE}"):
        locate("wikitext2", None, tmp_path / "downloads")
    (server.folder / path.name).write_bytes(whole)
    assert texts_of(locate("wikitext2", None, tmp_path / "downloads")) == TEXT


def test_every_download_has_a_checksum() -> None:
    for source in SOURCES.values():
        for url in source.urls:
            assert re.fullmatch("[0-9a-f]{64}", source.sha256[url.rsplit("/", 1)[-1]])


def test_user_errors_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'wikitext' is unknown; choose one of ptb, wikitext2, wikitext103"):
        locate("wikitext", None, tmp_path)
    with pytest.raises(UserError, match="DATA_DIR is .*absent: no such folder"):
        locate("ptb", tmp_path / "absent", tmp_path)


@pytest.mark.parametrize("name", list(SOURCES))
def test_sources_agree_with_torchtext(name: str) -> None:
    import inspect

    import torchtext.datasets

    source = SOURCES[name]
    dataset = getattr(torchtext.datasets, source.dataset)
    names = inspect.signature(dataset.splits).parameters
    files = [names[split].default for split in ("train", "validation", "test")]
    assert [source.files[split] for split in SPLITS] == files
    archives = {url.rsplit("/", 1)[-1] for url in dataset.urls}
    assert {url.rsplit("/", 1)[-1] for url in source.urls} == archives


def words_of(path: Path, lower: bool = False) -> list[str]:
    return list(chain.from_iterable(reading.word_blocks(path, lower)))


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
    monkeypatch.setattr(reading, "BLOCK_BYTES", block_bytes)
    path = tmp_path / "text"
    path.write_bytes(text.encode())
    assert words_of(path) == expected.split()


@pytest.mark.parametrize("block_bytes", [1, 5, 1 << 20])
def test_lowercasing_does_not_depend_on_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", block_bytes)
    path = tmp_path / "text"
    path.write_text("The ΟΔΟΣ <UNK>\n", encoding="utf-8")
    assert words_of(path, lower=True) == ["the", "οδος", "<unk>", "<eos>"]


@pytest.mark.parametrize("block_bytes", [1, 3, 1 << 20])
@pytest.mark.parametrize(("content", "place"), [(b"ab c\xffd\n", 4), ("ab €".encode()[:-1], 3)])
def test_position_of_bad_utf8_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, place: int, block_bytes: int
) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", block_bytes)
    path = tmp_path / "text"
    with pytest.raises(UserError, match="text: No such file"):
        words_of(path)
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"text: not UTF-8 at byte {place};"):
        words_of(path)


TOKENS = np.arange(23, dtype=np.int32)


def test_columns_are_contiguous_and_targets_are_the_next_tokens() -> None:
    stream = Columns(TOKENS, batch_size=3)
    assert stream.length == 7
    ids, targets = stream.segment(2, 3)
    assert ids.tolist() == [[2, 3, 4], [9, 10, 11], [16, 17, 18]]
    assert targets.tolist() == [[3, 4, 5], [10, 11, 12], [17, 18, 19]]
    assert ids.dtype == targets.dtype == torch.int64
    assert ids.is_contiguous() and targets.is_contiguous()


def test_processes_share_the_columns_of_the_larger_batch() -> None:
    whole = Columns(TOKENS, batch_size=4).segment(1, 2)
    shares = [Columns(TOKENS, batch_size=2, rank=rank, world_size=2).segment(1, 2) for rank in (0, 1)]
    assert torch.equal(torch.cat([ids for ids, _ in shares]), whole[0])
    assert torch.equal(torch.cat([targets for _, targets in shares]), whole[1])


@pytest.mark.parametrize(
    ("tokens", "batch_size", "printed"),
    [
        (23, 12, "23 tokens are too few for 12 columns"),
        (0, 1, "0 tokens"),
    ],
)
def test_too_short_texts_fail(tokens: int, batch_size: int, printed: str) -> None:
    with pytest.raises(UserError, match=printed):
        Columns(TOKENS[:tokens], batch_size)


COUNTS = {"a": 5, "b": 3, "d": 3, "c": 3, "e": 1, "<eos>": 4}


def pairs(vocabulary: Vocabulary) -> list[tuple[str, int]]:
    return list(zip(vocabulary.words, vocabulary.counts))


def test_words_are_sorted_by_count_then_code_point() -> None:
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
    assert (len(vocabulary.words), vocabulary.eos, vocabulary.unk) == (7, 1, 6)
    assert [vocabulary.index[word] for word in vocabulary.words] == list(range(7))


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (Limits(min_frequency=2), [("a", 5), ("<eos>", 4), ("b", 3), ("c", 3), ("d", 3), ("<unk>", 1)]),
        (Limits(max_size=4), [("<unk>", 7), ("a", 5), ("<eos>", 4), ("b", 3)]),
        (Limits(min_frequency=4, max_size=5), [("<unk>", 10), ("a", 5), ("<eos>", 4)]),
    ],
)
def test_words_beyond_limits_count_as_unk(limits: Limits, expected: list[tuple[str, int]]) -> None:
    assert pairs(Vocabulary.from_counts(COUNTS, limits)) == expected


def test_unk_in_the_text_is_counted_with_any_limit() -> None:
    vocabulary = Vocabulary.from_counts({"<unk>": 2, "a": 9, "b": 1}, Limits(min_frequency=3))
    assert pairs(vocabulary) == [("a", 9), ("<unk>", 3), ("<eos>", 0)]


def test_line_is_encoded_with_eos_and_unk() -> None:
    vocabulary = Vocabulary(["x", "<unk>", "<eos>"], [3, 2, 1])
    assert vocabulary.encode(" x\tnew  x\n") == [0, 1, 0, 2]
    assert vocabulary.encode("") == [2]


def test_vocabulary_round_trip(tmp_path: Path) -> None:
    vocabulary = Vocabulary.from_counts({**COUNTS, "Straße": 2, "\\n": 1})
    vocabulary.save(tmp_path / "vocabulary.tsv")
    assert (tmp_path / "vocabulary.tsv").read_bytes().startswith(b"a\t5\n<eos>\t4\n")
    assert pairs(Vocabulary.load(tmp_path / "vocabulary.tsv")) == pairs(vocabulary)


@pytest.mark.parametrize(
    ("content", "printed"),
    [
        (b"a\t1\n<eos>\t1\n", "has no <unk>"),
        (b"a\t1\n<unk>\t0\n<eos>\t1\na\t1\n", "'a' is repeated"),
        (b"a\t1\nb 2\n", "line 2 is 'b 2'"),
        (b"a\xff\t1\n", "not UTF-8 at byte 1"),
    ],
)
def test_invalid_files_fail_by_name(tmp_path: Path, content: bytes, printed: str) -> None:
    path = tmp_path / "vocabulary.tsv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=printed) as error_line:
        Vocabulary.load(path)
    assert str(path) in str(error_line.value)
