"""The checkpoints that a training run has left behind."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import NamedTuple


class Checkpoint(NamedTuple):
    """A complete checkpoint; they sort by step."""

    step: int
    path: Path


def complete_checkpoints(folder: Path) -> list[Checkpoint]:
    """All checkpoints ``*_step_N.pt`` in `folder` that were written to their end, by step.

    A checkpoint is a zip archive, whose directory stands at its end: a file cut short is not one.
    """
    found = []
    for path in folder.glob("*_step_*.pt"):
        step = re.search(r"_step_(\d+)\.pt$", path.name)
        if step and zipfile.is_zipfile(path):
            found.append(Checkpoint(int(step[1]), path))
    return sorted(found)
