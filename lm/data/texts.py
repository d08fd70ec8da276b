"""Texts of any size: reading their words in bounded memory, and splitting their lines at random."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.data.vocabulary import EOS
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import check_input, check_outputs, remove_leftovers, sha256, staged

SPLITS = ("train", "valid", "test")
BLOCK_BYTES = 1 << 18
# The folder of split texts below -output, and the default of -split.
FOLDER, DEFAULT = "texts", "0.9,0.05,0.05"


def word_blocks(
    path: Path, lower: bool = False, progress: Callable[[int], object] | None = None
) -> Iterator[list[str]]:
    """Yield blocks of the words of a UTF-8 text, with ``<eos>`` after each line.

    Unicode whitespace separates words, and line feeds end lines. Byte order marks are dropped. Lines may be
    longer than memory, words may not.

    Args:
        path: the text.
        lower: whether to lowercase the text.
        progress: called with the number of bytes of each block.

    Raises:
        UserError: the text cannot be read or is not UTF-8.
    """
    rest, line_ended = "", True
    for text in _decoded_blocks(path, progress):
        rest += text
        line_ended = text.endswith("\n")
        end = max(rest.rfind(" "), rest.rfind("\n")) + 1
        yield _words(rest[:end], lower)
        rest = rest[end:]
    if not line_ended:
        yield _words(rest + "\n", lower)


def _words(text: str, lower: bool) -> list[str]:
    """Split a text into words, with ``<eos>`` for each line feed."""
    return (text.lower() if lower else text).replace("\n", f" {EOS} ").split()


def _decoded_blocks(path: Path, progress: Callable[[int], object] | None) -> Iterator[str]:
    """Yield non-empty blocks of the characters of a file."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    consumed = 0
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                consumed += len(block)
                if text := decoder.decode(block):
                    yield text
                if progress:
                    progress(len(block))
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        place = consumed - len(error.object) + error.start
        raise UserError(f"{path}: not UTF-8 at byte {place}; convert it") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; check the path") from error


class Fractions(NamedTuple):
    """The fraction of lines in each split; they sum to 1."""

    train: float
    valid: float
    test: float

    @classmethod
    def parse(cls, text: str) -> Fractions:
        """Read ``TRAIN,VALID,TEST``.

        Raises:
            UserError: the text is not three positive numbers that sum to 1.
        """
        try:
            found = cls(*map(float, text.split(",")))
        except (ValueError, TypeError):
            raise UserError(f"-split is {text!r}; give three fractions, such as {DEFAULT}") from None
        if not (min(found) > 0 and math.isclose(sum(found), 1, abs_tol=1e-6)):  # NaN, too, fails this way
            raise UserError(
                f"-split is {text!r}; the fractions must be above 0 and sum to 1, such as {DEFAULT}"
            )
        return found

    def lines(self, total: int) -> dict[str, int]:
        """The number of lines of each split out of `total`: rounded, at least one; the rest is for training.

        Raises:
            UserError: there are fewer than three lines.
        """
        if total < len(SPLITS):
            raise UserError(
                f"{total} lines cannot be split into {len(SPLITS)} texts; give a longer text or one for each "
                "split"
            )
        counts = {"valid": max(1, round(self.valid * total)), "test": max(1, round(self.test * total))}
        for split in sorted(counts, key=lambda name: -counts[name]):  # keep a line for training
            counts[split] = min(counts[split], total - 1 - (sum(counts.values()) - counts[split]))
        return {"train": total - sum(counts.values()), **counts}


@contextmanager
def split_texts(
    paths: Sequence[Path], folder: Path, fractions: Fractions, seed: int, force: bool = False
) -> Iterator[dict[str, Path]]:
    """Split the lines of texts at random, keeping their order. Uses one byte of memory per line.

    Yields the temporary path of each split's text; they appear in `folder` at the end, unless there is an
    error.

    Args:
        paths: the texts, which are concatenated.
        folder: output folder of ``train.txt``, ``valid.txt`` and ``test.txt``, written atomically.
        fractions: fraction of lines in each split.
        seed: random seed.
        force: overwrite other texts with these names.

    Raises:
        UserError: there are too few lines; or a text cannot be read, is not UTF-8, or would be overwritten.
    """
    outputs = {split: folder / f"{split}.txt" for split in SPLITS}
    for path in paths:
        check_input("-train", path)
        check_outputs({f"-output, {split} text": outputs[split] for split in SPLITS}, {"-train": path}, True)
    remove_leftovers(*outputs.values())
    counts = fractions.lines(sum(map(_count_lines, paths)))
    parts = np.repeat(np.arange(len(SPLITS), dtype=np.uint8), [counts[split] for split in SPLITS])
    np.random.default_rng(seed).shuffle(parts)
    with staged(list(outputs.values())) as temporary:
        _distribute(paths, temporary, parts)
        if not force:
            _check_same(temporary, list(outputs.values()))
        named = ", ".join(f"{counts[split]:,} to {split}" for split in SPLITS)
        print(f"split {sum(counts.values()):,} lines at random with seed {seed}: {named} (texts in {folder})")
        yield dict(zip(SPLITS, temporary))


def _check_same(new: Sequence[Path], old: Sequence[Path]) -> None:
    """Raise `UserError` if one of the `old` texts exists and differs from the `new` one."""
    for written, path in zip(new, old):
        if path.exists() and sha256(path) != sha256(written):
            raise UserError(
                f"-output: {path} exists with other lines; use -force to overwrite it, or another folder"
            )


def _count_lines(path: Path) -> int:
    """The number of lines of a text; raises `UserError` if it is not UTF-8."""
    number = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"{path}: line {number} is not UTF-8 ({error.reason}); convert it") from error
    return number


def _distribute(paths: Sequence[Path], outputs: Sequence[Path], parts: np.ndarray) -> None:
    """Write line i of the texts to ``outputs[parts[i]]`` without byte order marks."""
    number = 0
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("wb")) for path in outputs]
        for path in paths:
            with path.open("rb") as text:
                for place, line in enumerate(text):
                    content = line.removeprefix(codecs.BOM_UTF8) if place == 0 else line
                    files[parts[number]].write(content.removesuffix(b"\n") + b"\n")
                    number += 1
