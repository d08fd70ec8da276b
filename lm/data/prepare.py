"""The command ``lm_prepare``: converts texts to token files and a vocabulary."""

from __future__ import annotations

import argparse
import codecs
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from lm.data.corpus import SPLITS, Published, Texts, prepare
from lm.data.datasets import SOURCES, locate
from lm.data.vocabulary import Limits
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import remove_leftovers, sha256, staged
from shared_embeddings.utils.path_options import PathOption, check_input, check_outputs

DEFAULT_SPLIT = "0.9,0.05,0.05"


def main(arguments: Sequence[str]) -> None:
    """Convert texts to token files and a vocabulary for lm_train."""
    parser = Parser("lm_prepare", "-dataset ptb -output runs/ptb/data", description=main.__doc__)
    add = parser.add_argument
    for split in SPLITS:
        text = f"UTF-8 texts of the {split} split"
        add(f"-{split}", type=PathOption.FILE, nargs="+", metavar="FILE", help=text)
    add(
        "-split",
        metavar="TRAIN,VALID,TEST",
        help="split the lines of -train at random into these fractions and save them to texts/ in -output "
        f"(default without -valid and -test: {DEFAULT_SPLIT})",
    )
    add("-seed", type=int, metavar="S", help="random seed of -split (default: 1)")
    add("-dataset", choices=list(SOURCES), help="use this corpus from $DATA_DIR or download it")
    downloads = "folder for downloads (default: downloads/ in -output)"
    add("-downloads", type=PathOption.FOLDER, metavar="DIR", help=downloads)
    add("-output", type=PathOption.FOLDER, required=True, metavar="DIR", help="output folder")
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
    with ExitStack() as stack:
        name, texts, published = _texts(options, stack)
        made = prepare(texts, options.output, name, limits, options.lower, published, options.force)
    for split in SPLITS:
        tokens, unknown = made["tokens"][split], made["unknown"][split]
        print(f"{split}: {tokens:,} tokens, {unknown / tokens:.2%} of them <unk>")
    print(f"vocabulary: {made['types']:,} words\nprepared {options.output}")


def _texts(options: argparse.Namespace, stack: ExitStack) -> tuple[str, Texts, Published | None]:
    """Name and texts of the requested corpus, and its published sizes if known.

    A split text stays in a temporary folder until `stack` is closed.
    """
    texts = {split: getattr(options, split) for split in SPLITS}
    given = [f"-{split}" for split in SPLITS if texts[split]]
    for name in ("split", "seed"):
        if getattr(options, name) is not None and given != ["-train"]:
            raise UserError(f"-{name} needs -train without other texts; remove it or the other texts")
    if options.dataset:
        if given:
            raise UserError(f"{' and '.join(given)} cannot be combined with -dataset; remove one of them")
        data_dir = os.environ.get("DATA_DIR")
        downloads = options.downloads or options.output / "downloads"
        found = locate(options.dataset, Path(data_dir) if data_dir else None, downloads)
        return options.dataset, found, SOURCES[options.dataset].published
    if options.downloads:
        raise UserError("-downloads has no effect without -dataset; remove it")
    if given == ["-train"]:
        seed = 1 if options.seed is None else options.seed
        if seed < 0:
            raise UserError(f"-seed is {seed}; it must be at least 0")
        fractions = parse_fractions(options.split or DEFAULT_SPLIT)
        splitting = split_texts(options.train, options.output / "texts", fractions, seed, options.force)
        parts = stack.enter_context(splitting)
        return options.train[0].stem, {split: [path] for split, path in parts.items()}, None
    missing = [f"-{split}" for split in SPLITS if not texts[split]]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} missing; give a text for each split, only -train, or -dataset"
        )
    return options.train[0].stem, texts, None


def parse_fractions(text: str) -> list[float]:
    """The fractions of lines of each split, from ``TRAIN,VALID,TEST``.

    Raises:
        UserError: they are not three positive numbers that sum to 1.
    """
    try:
        found = list(map(float, text.split(",")))
    except ValueError:
        found = []
    # A NaN fails the comparison.
    if len(found) != len(SPLITS) or not (min(found) > 0 and math.isclose(sum(found), 1, abs_tol=1e-6)):
        raise UserError(
            f"-split is {text!r}; give three fractions above 0 that sum to 1, such as {DEFAULT_SPLIT}"
        )
    return found


def share_lines(fractions: Sequence[float], total: int) -> dict[str, int]:
    """The number of lines of each split out of `total`: rounded, at least one; the rest is for training.

    Raises:
        UserError: there are fewer than three lines.
    """
    if total < len(SPLITS):
        raise UserError(
            f"{total} lines cannot be split into {len(SPLITS)} texts; give a longer text or one per split"
        )
    counts = {split: max(1, round(part * total)) for split, part in zip(SPLITS[1:], fractions[1:])}
    for split in sorted(counts, key=lambda name: -counts[name]):  # keep a line for training
        counts[split] = min(counts[split], total - 1 - (sum(counts.values()) - counts[split]))
    return {"train": total - sum(counts.values()), **counts}


@contextmanager
def split_texts(
    paths: Sequence[Path], folder: Path, fractions: Sequence[float], seed: int, force: bool = False
) -> Iterator[dict[str, Path]]:
    """Split the lines of concatenated texts at random, keeping their order, with one byte of memory per line.

    Yields the temporary path of each split's text; they appear in `folder` at the end as ``train.txt``,
    ``valid.txt`` and ``test.txt``, unless there is an error.

    Args:
        fractions: of lines in each split, drawn with `seed`.
        force: overwrite other texts with these names.

    Raises:
        UserError: there are too few lines; or a text cannot be read, is not UTF-8, or would be overwritten.
    """
    outputs = {split: folder / f"{split}.txt" for split in SPLITS}
    for path in paths:
        check_input("-train", path)
        check_outputs({f"-output, {split} text": outputs[split] for split in SPLITS}, {"-train": path}, True)
    remove_leftovers(*outputs.values())
    counts = share_lines(fractions, sum(map(_count_lines, paths)))
    parts = np.repeat(np.arange(len(SPLITS), dtype=np.uint8), [counts[split] for split in SPLITS])
    np.random.default_rng(seed).shuffle(parts)
    with staged(list(outputs.values())) as temporary:
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("wb")) for path in temporary]
            destinations = iter(parts)
            for path in paths:
                with path.open("rb") as text:
                    for place, line in enumerate(text):
                        content = line.removeprefix(codecs.BOM_UTF8) if place == 0 else line
                        files[next(destinations)].write(content.removesuffix(b"\n") + b"\n")
        for written, path in zip(temporary, outputs.values()):
            if not force and path.exists() and sha256(path) != sha256(written):
                raise UserError(
                    f"-output: {path} exists with other lines; use -force to overwrite it, or another folder"
                )
        named = ", ".join(f"{counts[split]:,} to {split}" for split in SPLITS)
        print(f"split {sum(counts.values()):,} lines at random with seed {seed}: {named} (texts in {folder})")
        yield dict(zip(SPLITS, temporary))


def _count_lines(path: Path) -> int:
    number = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"{path}: line {number} is not UTF-8 ({error.reason}); convert it") from error
    return number


if __name__ == "__main__":
    from lm.cli import prepare as command

    command()
