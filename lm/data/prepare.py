"""The command ``lm_prepare``: texts to token files and a vocabulary."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm.data.corpus import SPLITS, Published, Texts, prepare
from lm.data.datasets import SOURCES, locate
from lm.data.splitting import DEFAULT, FOLDER, Fractions, split_texts
from lm.data.vocabulary import Limits
from shared_embeddings.errors import UserError
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.path_options import PathOption


def main(arguments: Sequence[str]) -> None:
    """Turn texts into token files and a vocabulary, for lm_train."""
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
        help="-train alone is divided by lines, at random, into these fractions, with the parts in texts/ of "
        f"-output (default: {DEFAULT})",
    )
    parser.add_argument("-seed", type=int, metavar="S", help="of -split (default: 1)")
    parser.add_argument(
        "-dataset", choices=list(SOURCES), help="instead: a corpus from $DATA_DIR or from the network"
    )
    parser.add_argument(
        "-downloads",
        type=PathOption.FOLDER,
        metavar="DIR",
        help="where downloads go (default: DIR/downloads in -output)",
    )
    parser.add_argument(
        "-output", type=PathOption.FOLDER, required=True, metavar="DIR", help="folder for the prepared corpus"
    )
    parser.add_argument(
        "-min_frequency",
        type=int,
        default=1,
        metavar="N",
        help="rarer words become <unk> (default: %(default)s)",
    )
    parser.add_argument(
        "-max_size", type=int, metavar="N", help="words at most, <unk> and <eos> included (default: no limit)"
    )
    parser.add_argument(
        "-force", "--force", action="store_true", help="replace another corpus that is in the folder"
    )
    parser.add_argument("-lower", action="store_true", help="put the texts into lower case")
    options = parser.parse_args(list(arguments))
    limits = _limits(options)
    name, texts, published = _texts(options)
    made = prepare(texts, options.output, name, limits, options.lower, published, options.force)
    print(describe(made, options.output))


def _texts(options: argparse.Namespace) -> tuple[str, Texts, Published | None]:
    """Name and texts of the corpus that the command line asks for, and its sizes where they are published."""
    texts = {split: getattr(options, split) for split in SPLITS}
    given = [f"-{split}" for split in SPLITS if texts[split]]
    for name in ("split", "seed"):
        if getattr(options, name) is not None and given != ["-train"]:
            raise UserError(f"-{name} divides the text of -train alone; leave it out, or the other texts")
    if options.dataset:
        if given:
            raise UserError(f"{' and '.join(given)} given beside -dataset; leave out one or the other")
        data_dir = os.environ.get("DATA_DIR")
        downloads = options.downloads or options.output / "downloads"
        found = locate(options.dataset, Path(data_dir) if data_dir else None, downloads)
        return options.dataset, found, SOURCES[options.dataset].published
    if options.downloads:
        raise UserError("-downloads given without -dataset; it would have no effect")
    if given == ["-train"]:
        return options.train[0].stem, _split(options), None
    missing = [f"-{split}" for split in SPLITS if not texts[split]]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} not given; name a text for each split, -train alone, or a -dataset"
        )
    return options.train[0].stem, texts, None


def _split(options: argparse.Namespace) -> Texts:
    """The parts of the one text that is given."""
    seed = 1 if options.seed is None else options.seed
    if seed < 0:
        raise UserError(f"-seed is {seed}; it must be at least 0")
    fractions = Fractions.parse(options.split or DEFAULT)
    found = split_texts(options.train, options.output / FOLDER, fractions, seed, options.force)
    return {split: [path] for split, path in found.items()}


def describe(description: dict[str, Any], folder: Path) -> str:
    """What a prepared corpus holds, in one line for each split and one for the vocabulary."""
    lines = []
    for split in SPLITS:
        tokens, unknown = description["tokens"][split], description["unknown"][split]
        lines.append(f"{split}: {tokens:,} tokens, {unknown / tokens:.2%} of them <unk>")
    return "\n".join([*lines, f"vocabulary: {description['types']:,} words", f"prepared {folder}"])


def _limits(options: argparse.Namespace) -> Limits:
    """The limits of the vocabulary that the command line sets."""
    if options.min_frequency < 1:
        raise UserError(f"-min_frequency is {options.min_frequency}; it must be at least 1")
    if options.max_size is not None and options.max_size < 3:
        raise UserError(f"-max_size is {options.max_size}; it must be at least 3: <unk>, <eos> and a word")
    return Limits(options.min_frequency, options.max_size)


if __name__ == "__main__":
    from lm.cli import prepare as command

    command()
