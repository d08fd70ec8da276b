"""The command ``lm_prepare``: converts texts to token files and a vocabulary."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lm.data.corpus import Published, Texts, prepare
from lm.data.datasets import SOURCES, locate
from lm.data.texts import DEFAULT, FOLDER, SPLITS, Fractions, split_texts
from lm.data.vocabulary import Limits
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.path_options import PathOption


def main(arguments: Sequence[str]) -> None:
    """Convert texts to token files and a vocabulary for lm_train."""
    parser = Parser("lm_prepare", description=main.__doc__)
    for split in SPLITS:
        parser.add_argument(
            f"-{split}",
            type=PathOption.FILE,
            nargs="+",
            metavar="FILE",
            help=f"UTF-8 texts of the {split} split",
        )
    parser.add_argument(
        "-split",
        metavar="TRAIN,VALID,TEST",
        help="split the lines of -train at random into these fractions and save them to texts/ in -output "
        f"(default without -valid and -test: {DEFAULT})",
    )
    parser.add_argument("-seed", type=int, metavar="S", help="random seed of -split (default: 1)")
    parser.add_argument(
        "-dataset", choices=list(SOURCES), help="use this corpus from $DATA_DIR or download it"
    )
    parser.add_argument(
        "-downloads",
        type=PathOption.FOLDER,
        metavar="DIR",
        help="folder for downloads (default: downloads/ in -output)",
    )
    parser.add_argument("-output", type=PathOption.FOLDER, required=True, metavar="DIR", help="output folder")
    parser.add_argument(
        "-min_frequency",
        type=int,
        default=1,
        metavar="N",
        help="replace rarer words by <unk> (default: %(default)s)",
    )
    parser.add_argument(
        "-max_size",
        type=int,
        metavar="N",
        help="maximum vocabulary size with <unk>, <eos> (default: none)",
    )
    parser.add_argument(
        "-force", "--force", action="store_true", help="overwrite another corpus in the folder"
    )
    parser.add_argument("-lower", action="store_true", help="lowercase the texts")
    options = parser.parse_args(list(arguments))
    limits = _limits(options)
    with ExitStack() as stack:
        name, texts, published = _texts(options, stack)
        made = prepare(texts, options.output, name, limits, options.lower, published, options.force)
    print(describe(made, options.output))


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
        return options.train[0].stem, _split(options, stack), None
    missing = [f"-{split}" for split in SPLITS if not texts[split]]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} missing; give a text for each split, only -train, or -dataset"
        )
    return options.train[0].stem, texts, None


def _split(options: argparse.Namespace, stack: ExitStack) -> Texts:
    """Split the training text."""
    seed = 1 if options.seed is None else options.seed
    if seed < 0:
        raise UserError(f"-seed is {seed}; it must be at least 0")
    fractions = Fractions.parse(options.split or DEFAULT)
    splitting = split_texts(options.train, options.output / FOLDER, fractions, seed, options.force)
    return {split: [path] for split, path in stack.enter_context(splitting).items()}


def describe(description: dict[str, Any], folder: Path) -> str:
    """Summary of a corpus: one line per split and one for the vocabulary."""
    lines = []
    for split in SPLITS:
        tokens, unknown = description["tokens"][split], description["unknown"][split]
        lines.append(f"{split}: {tokens:,} tokens, {unknown / tokens:.2%} of them <unk>")
    return "\n".join([*lines, f"vocabulary: {description['types']:,} words", f"prepared {folder}"])


def _limits(options: argparse.Namespace) -> Limits:
    """The requested limits of the vocabulary."""
    if options.min_frequency < 1:
        raise UserError(f"-min_frequency is {options.min_frequency}; it must be at least 1")
    if options.max_size is not None and options.max_size < 3:
        raise UserError(f"-max_size is {options.max_size}; it must be at least 3: <unk>, <eos> and a word")
    return Limits(options.min_frequency, options.max_size)


if __name__ == "__main__":
    from lm.cli import prepare as command

    command()
