"""Dividing texts by lines into a training, a validation and a test text, at random but reproducibly."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.data.corpus import SPLITS
from shared_embeddings.errors import UserError
from shared_embeddings.utils.files import check_input, check_outputs, remove_leftovers, replacing_all, sha256

FOLDER = "texts"
DEFAULT = "0.9,0.05,0.05"


class Fractions(NamedTuple):
    """The share of the lines that each split gets; together 1."""

    train: float
    valid: float
    test: float

    @classmethod
    def parse(cls, text: str) -> Fractions:
        """Read ``TRAIN,VALID,TEST``.

        Raises:
            UserError: there are not three numbers above 0 whose sum is 1.
        """
        try:
            found = cls(*map(float, text.split(",")))
        except (ValueError, TypeError):
            raise UserError(f"-split is {text!r}; give three fractions, such as {DEFAULT}") from None
        if not (min(found) > 0 and math.isclose(sum(found), 1, abs_tol=1e-6)):  # NaN, too, fails this way
            raise UserError(
                f"-split is {text!r}; the fractions must be above 0 with a sum of 1, as {DEFAULT}"
            )
        return found

    def lines(self, total: int) -> dict[str, int]:
        """How many of `total` lines each split gets: at least one, rounded; training has the rest.

        Raises:
            UserError: there are fewer than three lines.
        """
        if total < len(SPLITS):
            raise UserError(
                f"{total} lines cannot be divided into {len(SPLITS)} texts; give a longer text, or one for "
                "each split"
            )
        counts = {"valid": max(1, round(self.valid * total)), "test": max(1, round(self.test * total))}
        for split in sorted(counts, key=lambda name: -counts[name]):  # rounding up may leave none to train on
            counts[split] = min(counts[split], total - 1 - (sum(counts.values()) - counts[split]))
        return {"train": total - sum(counts.values()), **counts}


def split_texts(
    paths: Sequence[Path], folder: Path, fractions: Fractions, seed: int, force: bool = False
) -> dict[str, Path]:
    """Write the lines of texts into one text per split; each has its lines in their old order.

    The same lines and seed give the same parts. Takes one byte of memory for every line.

    Args:
        paths: the texts, as if one followed the other.
        folder: gets ``train.txt``, ``valid.txt`` and ``test.txt``, all three or none.
        fractions: how many lines go where.
        seed: of the random choice.
        force: replace other texts that have these names.

    Returns:
        The path of each split's text.

    Raises:
        UserError: there are too few lines, a text cannot be read, is not UTF-8, or would be replaced.
    """
    outputs = {split: folder / f"{split}.txt" for split in SPLITS}
    for path in paths:
        check_input("-train", path)
        check_outputs({f"-output, {split} text": outputs[split] for split in SPLITS}, {"-train": path}, True)
    remove_leftovers(*outputs.values())
    counts = fractions.lines(sum(map(_count_lines, paths)))
    parts = np.repeat(np.arange(len(SPLITS), dtype=np.uint8), [counts[split] for split in SPLITS])
    np.random.default_rng(seed).shuffle(parts)
    with replacing_all(list(outputs.values())) as temporary:
        _distribute(paths, temporary, parts)
        if not force:
            _check_same(temporary, list(outputs.values()))
    named = ", ".join(f"{counts[split]:,} to {split}" for split in SPLITS)
    print(f"split {sum(counts.values()):,} lines at random with seed {seed}: {named} (texts in {folder})")
    return outputs


def _check_same(new: Sequence[Path], old: Sequence[Path]) -> None:
    """Raise `UserError` for the first of the `old` texts that is there and is not as the `new` one."""
    for written, path in zip(new, old):
        if path.exists() and sha256(path) != sha256(written):
            raise UserError(
                f"-output: {path} is another text; add -force to replace it, or name another folder"
            )


def _count_lines(path: Path) -> int:
    """The number of lines of a text; UserError where it is not UTF-8."""
    number = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"{path}: line {number} is not UTF-8 ({error.reason}); convert it") from error
    return number


def _distribute(paths: Sequence[Path], outputs: Sequence[Path], parts: np.ndarray) -> None:
    """Write line i of the texts into ``outputs[parts[i]]``; byte order marks are dropped."""
    number = 0
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("wb")) for path in outputs]
        for path in paths:
            with path.open("rb") as text:
                for place, line in enumerate(text):
                    content = line.removeprefix(codecs.BOM_UTF8) if place == 0 else line
                    files[parts[number]].write(content.removesuffix(b"\n") + b"\n")
                    number += 1
