"""Parallel text: reading it, and counting its tokens (``onmt_build_vocab``)."""

from __future__ import annotations

import os
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from onmt.inputters.text_corpus import ParallelCorpus
from onmt.utils.logging import logger

from shared_embeddings.utils import reading
from shared_embeddings.utils.errors import UserError

BYTE_ORDER_MARK = "\ufeff"


def clean_line(line: str) -> str:
    """Collapse whitespace of any kind to single spaces, and remove a byte order mark."""
    return " ".join(line.removeprefix(BYTE_ORDER_MARK).split())


def read_lines(path: str | os.PathLike[str]) -> Iterator[str]:
    """Return the lines of a UTF-8 file with normalized whitespace."""
    return map(clean_line, reading.read_lines(path))


def count_lines(path: str) -> int:
    """Count the lines of a file, including a last line without a line end."""
    with open(path, "rb") as file:
        return sum(1 for _ in file)


def check_parallel(name: str, paths: dict[str, str]) -> None:
    """Check that text files by side have the same number of lines."""
    counts = {side: count_lines(path) for side, path in paths.items()}
    if len(set(counts.values())) > 1:
        sizes = ", ".join(f"{paths[side]} has {number} lines" for side, number in counts.items())
        raise UserError(f"{name}: the files are not parallel: {sizes}; use equal numbers")


class CleanCorpus(ParallelCorpus):  # type: ignore[misc]
    """Parallel text with normalized whitespace; pairs with an empty side are skipped."""

    def load(self, offset: int = 0, stride: int = 1) -> Iterator[dict[str, Any]]:
        """Yield the examples of every ``stride``-th block of lines starting at ``offset``."""
        empty = 0
        try:
            for example in super().load(offset=offset, stride=stride):
                for key in ("src", "tgt", "src_original", "tgt_original"):
                    if isinstance(example[key], str):
                        example[key] = clean_line(example[key])
                if example["tgt"] is not None and not (example["src"] and example["tgt"]):
                    empty += 1
                    continue
                yield example
        except UnicodeDecodeError as error:
            raise UserError(f"data: {self.id}: {self.src} or {self.tgt} is not UTF-8 ({error})") from error
        if empty:
            logger.warning(f"{self.id}: skipped {empty} pairs with an empty side")


def build_vocabularies(opt: Namespace, count: Callable[[Namespace], None]) -> None:
    """Count the tokens of the corpora with OpenNMT-py's `count`, and write each vocabulary atomically.

    A vocabulary of word features, which OpenNMT-py names after that of the source, is written next to it.
    """
    sides = ["src_vocab"] if opt.share_vocab else ["src_vocab", "tgt_vocab"]
    targets = {side: Path(path) for side in sides if (path := getattr(opt, side))}
    for side, target in targets.items():
        if target.exists() and not opt.overwrite:
            raise UserError(f"{side}: {target} already exists; add -overwrite, or name another file")
        target.parent.mkdir(parents=True, exist_ok=True)
    folders = {side: tempfile.TemporaryDirectory(dir=target.parent) for side, target in targets.items()}
    try:
        for side, target in targets.items():
            setattr(opt, side, os.path.join(folders[side].name, target.name))
        count(opt)
        for side, target in targets.items():
            for file in Path(folders[side].name).iterdir():
                os.replace(file, target.with_name(file.name))
    finally:
        for folder in folders.values():
            folder.cleanup()
