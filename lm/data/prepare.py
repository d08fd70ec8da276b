"""The command ``lm_prepare``: converts texts to token files and a vocabulary."""

from __future__ import annotations

import argparse
import codecs
import fileinput
import math
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from lm.data.corpus import SPLITS, Limits, Published, Texts, prepare
from lm.data.datasets import SOURCES, locate
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import replacing, sha256
from shared_embeddings.utils.paths import existing_file

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
    """The number of lines of each split out of `total`: rounded, at least one; the rest is for training."""
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

    The folder gets ``train.txt``, ``valid.txt`` and ``test.txt``; only with `force`, they replace others.
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
