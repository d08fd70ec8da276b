"""Well-known corpora: where they are found, and downloads from a server that is a folder."""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lm.data import datasets
from lm.data.corpus import prepare
from lm.data.datasets import SOURCES, Source, locate
from lm.data.texts import SPLITS
from shared_embeddings.errors import UserError
from shared_embeddings.utils import download as downloading
from shared_embeddings.utils.download import DownloadError
from shared_embeddings.utils.files import sha256

TEXT = {split: f" \n some {split} <unk> text \n" for split in SPLITS}


def fill(folder: Path, source: Source) -> None:
    folder.mkdir(parents=True)
    for split, name in source.files.items():
        (folder / name).write_text(TEXT[split])


def texts_of(found: dict[str, list[Path]]) -> dict[str, str]:
    return {split: "".join(path.read_text() for path in paths) for split, paths in found.items()}


class Server:
    """A folder that corpora are downloaded from."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.asked = folder, list[str]()
        self._download = datasets.download
        monkeypatch.setattr(datasets, "download", self.download)
        monkeypatch.setattr(downloading.time, "sleep", lambda seconds: None)

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
def test_data_dir_comes_first_and_is_not_written_to(server: Server, tmp_path: Path, folder: str) -> None:
    data_dir = tmp_path / "given"
    fill(data_dir / folder, SOURCES["wikitext2"])
    found = locate("wikitext2", data_dir, tmp_path / "downloads")
    assert texts_of(found) == TEXT and server.asked == []
    assert all(path.is_relative_to(data_dir) for [path] in found.values())
    assert not (tmp_path / "downloads").exists()


def test_incomplete_data_dir_is_passed_over(server: Server, tmp_path: Path) -> None:
    data_dir = tmp_path / "given"
    fill(data_dir / "ptb", SOURCES["ptb"])
    (data_dir / "ptb" / "ptb.test.txt").unlink()
    found = locate("ptb", data_dir, tmp_path / "downloads")
    assert all(path.is_relative_to(tmp_path / "downloads") for [path] in found.values())


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


def test_another_content_is_refused_wherever_it_is(server: Server, tmp_path: Path) -> None:
    downloads = tmp_path / "downloads"
    [path] = locate("ptb", None, downloads)["train"]
    path.write_text("changed")
    with pytest.raises(DownloadError, match=r"ptb.train.txt: SHA-256 is .* replace the file"):
        locate("ptb", None, downloads)


def wrong_archives(whole: bytes) -> dict[str, bytes]:
    """What a server may send in place of an archive."""
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("readme", "text")
    return {"html": b"<html>moved", "other archive": other.getvalue(), "damaged": whole[:-30]}


ADVICE = r"to skip the download, put wiki.train.tokens, .* \$DATA_DIR/wikitext-2"


@pytest.mark.parametrize("content", ["html", "other archive", "damaged"])
def test_answers_of_another_checksum_are_refused_and_not_kept(
    server: Server, tmp_path: Path, content: str
) -> None:
    path = server.folder / "wikitext-2-v1.zip"
    whole = path.read_bytes()
    path.write_bytes(wrong_archives(whole)[content])
    with pytest.raises(DownloadError, match=rf"wikitext-2-v1.zip: SHA-256 is .*, expected .*; {ADVICE}"):
        locate("wikitext2", None, tmp_path / "downloads")
    path.write_bytes(whole)
    assert texts_of(locate("wikitext2", None, tmp_path / "downloads")) == TEXT


@pytest.mark.parametrize("content", ["html", "other archive", "damaged"])
def test_an_archive_that_a_killed_run_left_is_replaced_where_it_is_none(
    server: Server, tmp_path: Path, content: str
) -> None:
    left = tmp_path / "downloads" / ".wikitext-2.partial" / "wikitext-2" / "wikitext-2-v1.zip"
    left.parent.mkdir(parents=True)
    left.write_bytes(wrong_archives((server.folder / "wikitext-2-v1.zip").read_bytes())[content])
    with pytest.raises(UserError, match=ADVICE):
        locate("wikitext2", None, tmp_path / "downloads")
    assert texts_of(locate("wikitext2", None, tmp_path / "downloads")) == TEXT


def test_every_download_has_a_checksum() -> None:
    for source in SOURCES.values():
        for url in source.urls:
            assert re.fullmatch("[0-9a-f]{64}", source.sha256[url.rsplit("/", 1)[-1]])


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'wikitext' is unknown; choose one of ptb, wikitext2, wikitext103"):
        locate("wikitext", None, tmp_path)
    with pytest.raises(UserError, match="DATA_DIR is .*absent: no such folder"):
        locate("ptb", tmp_path / "absent", tmp_path)


def test_other_sizes_than_the_published_ones_are_refused(tmp_path: Path) -> None:
    source = SOURCES["wikitext103"]
    fill(tmp_path / "wikitext-103", source)
    texts = locate("wikitext103", tmp_path, tmp_path)
    with pytest.raises(
        UserError, match="wikitext103: the train text has 6 tokens, the published text 103,227,021"
    ):
        prepare(texts, tmp_path / "data", "wikitext103", published=source.published)


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
