"""What ``--smoke`` does here: a few drawn vectors, a grid of one narrow width, and a folder of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recipes.common.corpus import write_lines
from recipes.common.results import SMOKE_FOLDER
from recipes.common.smoke import generated_vocabulary
from recipes.glove_reconstruction.grid import Grid, home

SMOKE_DATA_HELP = f"drawn vectors of a few words, in a folder {SMOKE_FOLDER} of its own"
SMOKE_GRID_HELP = "cells of a small grid, on what preprocess.sh --smoke has made"
# Words in the file of vectors, and those of them that are reconstructed.
WORDS, CHOSEN = 80, 60
DIMENSIONS, PAIRS = 12, 50


def smoke_home() -> Path:
    """``$RUNS/glove_reconstruction/smoke``."""
    return home() / SMOKE_FOLDER


def smoke_grid(grid: Grid) -> Grid:
    """The same rows at one narrow width, with one seed and few steps."""
    training = {**grid.training, "epochs": 2, "batch_size": 20}
    small: dict[str, Any] = {"words": CHOSEN, "hidden": [16], "seeds": grid.seeds[:1], "fit_steps": 20}
    return dataclasses.replace(grid, **small, training=training)


def write_smoke_vectors(folder: Path) -> Path:
    """Write drawn vectors as GloVe's are written, a word and its numbers on a line; returns the file."""
    rows = np.random.default_rng(0).normal(size=(WORDS, DIMENSIONS))
    path = folder / "vectors.txt"
    numbers = (" ".join(f"{number:.5f}" for number in row) for row in rows)
    write_lines(path, (f"{word} {line}" for word, line in zip(generated_vocabulary(), numbers)))
    return path


def write_smoke_pairs(folder: Path, names: Sequence[str]) -> list[Path]:
    """Write files of two words and a drawn score on a line, under the names of the published ones."""
    words = generated_vocabulary()[:WORDS]
    paths = [folder / name for name in names]
    for seed, path in enumerate(paths):
        draw = np.random.default_rng(seed)
        chosen = [draw.choice(words, size=2, replace=False) for _ in range(PAIRS)]
        write_lines(path, (f"{first}\t{second}\t{draw.uniform(0, 10):.2f}" for first, second in chosen))
    return paths
