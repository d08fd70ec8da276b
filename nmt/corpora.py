"""Parallel text: reading it, and counting its tokens (``onmt_build_vocab``)."""

from __future__ import annotations

import os
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from onmt.constants import DefaultTokens
from onmt.inputters.text_corpus import ParallelCorpus
from onmt.transforms import get_specials, get_transforms_cls
from onmt.utils.logging import logger

from shared_embeddings.utils import reading
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import write_lines


def clean_line(line: str) -> str:
    """Collapse whitespace of any kind to single spaces, and remove a byte order mark."""
    return " ".join(line.removeprefix("\ufeff").split())


def read_lines(path: str | os.PathLike[str]) -> Iterator[str]:
    """Return the lines of a UTF-8 file with normalized whitespace."""
    return map(clean_line, reading.read_lines(path))


def check_parallel(name: str, paths: Iterable[str | os.PathLike[str]]) -> None:
    """Check that texts are UTF-8 and have the same number of lines."""
    counts = {path: sum(1 for _ in reading.read_lines(path)) for path in paths}
    if len(set(counts.values())) > 1:
        sizes = ", ".join(f"{path} has {number} lines" for path, number in counts.items())
        raise UserError(f"{name}: the files are not parallel: {sizes}; use equal numbers")


class CleanCorpus(ParallelCorpus):  # type: ignore[misc]
    """Parallel text with normalized whitespace; pairs with an empty side are skipped."""

    def load(self, offset: int = 0, stride: int = 1) -> Iterator[dict[str, Any]]:
        """Yield the examples of every ``stride``-th block of lines starting at ``offset``."""
        empty = 0
        for example in super().load(offset=offset, stride=stride):
            for key in ("src", "tgt", "src_original", "tgt_original"):
                if isinstance(example[key], str):
                    example[key] = clean_line(example[key])
            if example["tgt"] is not None and not (example["src"] and example["tgt"]):
                empty += 1
                continue
            yield example
        if empty:
            logger.warning(f"{self.id}: skipped {empty} pairs with an empty side")


def limit_vocabulary(opt: Namespace, side: str, specials: Sequence[str]) -> None:
    """Apply the limits of one side to its vocabulary file, which has the most frequent words first.

    With the special tokens that training adds, it has the maximum size, and the multiple of a size.
    """
    path = Path(getattr(opt, f"{side}_vocab"))
    size, minimum = getattr(opt, f"{side}_vocab_size"), getattr(opt, f"{side}_words_min_frequency")
    entries = [line.rpartition("\t") for line in reading.read_lines(path)]
    # Transforms may remove all tokens of a sentence.
    counts = {word: int(count) for word, _, count in entries if word}
    words = [word for word, count in counts.items() if count >= minimum]
    added = len(set(specials).difference(words))
    if size:
        words = words[: max(0, size - added)]
        added = len(set(specials).difference(words))
    if len(words) < len(counts):
        limits = f"{side}_vocab_size: {size:,}, {side}_words_min_frequency: {minimum:,}"
        logger.info(
            f"{side}_vocab: {len(words):,} of {len(counts):,} words, and {added} special tokens ({limits})"
        )
    unused = -(len(words) + added) % opt.vocab_size_multiple
    lines = [f"{word}\t{counts[word]}" for word in words]
    lines += [f"{DefaultTokens.VOCAB_PAD}{number}\t0" for number in range(unused)]
    write_lines(path, lines)


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
        specials = get_specials(opt, get_transforms_cls(opt._all_transform))
        for side in (option.removesuffix("_vocab") for option in targets):
            limit_vocabulary(opt, side, [*opt.default_specials, *specials[side]])
        for side, target in targets.items():
            for file in Path(folders[side].name).iterdir():
                os.replace(file, target.with_name(file.name))
    finally:
        for folder in folders.values():
            folder.cleanup()
