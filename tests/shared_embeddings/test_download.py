"""Files that are downloaded completely or not at all."""

from __future__ import annotations

import io
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path
from urllib.response import addinfourl

import pytest

from shared_embeddings.utils import download
from shared_embeddings.utils.download import DownloadError
from shared_embeddings.utils.files import sha256


def test_download_checks_the_content(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "folder" / "target"
    source.write_text("content")
    with pytest.raises(DownloadError, match=f"^{source.as_uri()}: SHA-256 is .*, expected 0000.*; ask$"):
        download.download(source.as_uri(), target, "0" * 64, "ask")
    assert not list(target.parent.iterdir())
    download.download(source.as_uri(), target, sha256(source), "ask")
    assert target.read_text() == "content"


def test_download_tries_again_and_says_what_to_do_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    def offline(url: str, path: Path) -> None:
        attempts.append(url)
        path.write_text("half")
        raise OSError("no route")

    monkeypatch.setattr(download, "_fetch", offline)
    with pytest.raises(
        DownloadError, match="target.gz: cannot be downloaded .no route. after 3 attempts; ask"
    ):
        download.download(
            "https://example.org/target.gz", tmp_path / "target.gz", None, "ask", wait_seconds=0
        )
    assert len(attempts) == download.ATTEMPTS
    assert not list(tmp_path.iterdir())


def test_server_is_told_who_asks_and_its_refusal_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(request: urllib.request.Request, timeout: float) -> None:
        asked.append(request.get_header("User-agent"))
        raise urllib.error.HTTPError(request.full_url, 404, "Not Found", Message(), None)

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(DownloadError, match="the server returned 404 Not Found"):
        download.download("https://example.org/a", tmp_path / "a", None, "ask", wait_seconds=0)
    assert asked == [download.USER_AGENT] * 3
    assert not list(tmp_path.iterdir())


def test_answer_cut_short_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = Message()
    headers["Content-Length"] = "10"
    monkeypatch.setattr(
        urllib.request, "urlopen", lambda *_, **__: addinfourl(io.BytesIO(b"short"), headers, "")
    )
    with pytest.raises(DownloadError, match="closed after 5 of 10 bytes"):
        download.download("https://example.org/a", tmp_path / "a", None, "ask", wait_seconds=0)
    assert not list(tmp_path.iterdir())
