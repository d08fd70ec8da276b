"""What ``--smoke`` reconstructs: random vectors of a few words, and random scores of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from recipes.common.corpus import write_lines
from recipes.common.results import SMOKE_FOLDER
from recipes.common.smoke import generated_vocabulary

SMOKE_DATA_HELP = f"random vectors of a few words, in a folder {SMOKE_FOLDER} of its own"
SMOKE_GRID_HELP = "cells of a small grid, on the data of preprocess.sh --smoke"
# Words in the file of vectors.
WORDS = 80
DIMENSIONS, PAIRS = 12, 50


def write_smoke_vectors(folder: Path) -> Path:
    """Write random vectors in GloVe's format, a word and its numbers on a line; returns the file."""
    rows = np.random.default_rng(0).normal(size=(WORDS, DIMENSIONS))
    path = folder / "vectors.txt"
    numbers = (" ".join(f"{number:.5f}" for number in row) for row in rows)
    write_lines(path, (f"{word} {line}" for word, line in zip(generated_vocabulary(), numbers)))
    return path


def write_smoke_pairs(folder: Path, names: Sequence[str]) -> list[Path]:
    """Write files of two words and a random score on a line, under the names of the published ones."""
    words = generated_vocabulary()[:WORDS]
    paths = [folder / name for name in names]
    for seed, path in enumerate(paths):
        draw = np.random.default_rng(seed)
        chosen = [draw.choice(words, size=2, replace=False) for _ in range(PAIRS)]
        write_lines(path, (f"{first}\t{second}\t{draw.uniform(0, 10):.2f}" for first, second in chosen))
    return paths
