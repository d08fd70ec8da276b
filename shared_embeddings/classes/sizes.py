"""The class sizes of a vocabulary, as text and as a figure."""

from __future__ import annotations

import pathlib

import numpy as np

from shared_embeddings.classes.skipgram import Path
from shared_embeddings.classes.word_classes import WordClasses
from shared_embeddings.utils.extras import require
from shared_embeddings.utils.files import replacing

_BAR = 40


def describe_sizes(word_classes: WordClasses) -> str:
    """A text histogram of the class sizes."""
    sizes = word_classes.sizes()
    lines = [
        f"{len(word_classes.words):,} words in {len(sizes):,} classes: smallest {sizes.min():,}, "
        f"median {int(np.median(sizes)):,}, largest {sizes.max():,} words"
    ]
    # Sizes 0, 1, 2-3, 4-7, ...: class sizes are long-tailed.
    bins = np.bincount([int(size).bit_length() for size in sizes])
    for power, count in enumerate(bins):
        low, high = (1 << power) >> 1, max((1 << power) - 1, 0)
        label = f"{low:,}" if high == low else f"{low:,}-{high:,}"
        bar = "#" * int(np.ceil(_BAR * count / bins.max()))
        if count or power:
            lines.append(f"{label:>15} words  {count:>7,} classes  {bar}".rstrip())
    return "\n".join(lines)


def draw_sizes(word_classes: WordClasses, path: Path) -> None:
    """Plot the class sizes, largest first (Figure 2), to a PNG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    sizes = np.sort(word_classes.sizes())[::-1]
    figure = require("matplotlib.figure").Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.bar(np.arange(len(sizes)), sizes, width=1.0)
    axes.set_xlabel("class, by size")
    axes.set_ylabel("words")
    axes.set_title(f"{len(word_classes.words):,} words in {len(sizes):,} classes")
    with replacing(pathlib.Path(path)) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
