"""Training curves, read from the files of a run."""

from __future__ import annotations

import re
from pathlib import Path

Curve = list[tuple[int, float]]
_TAG = "valid/perplexity"
# Of onmt_train: a line about steps, and below it the validation after them.
_STEP = re.compile(r"\bStep (\d+)/")
_VALIDATION = re.compile(r"\bValidation perplexity: (\S+)")


def validation_curve(run: Path) -> Curve:
    """Validation perplexity by step: from ``tensorboard/`` where a run has it, otherwise from ``train.log``.

    A resumed training has some steps twice; the later value counts.

    Args:
        run: folder of the run.

    Returns:
        (step, perplexity), the first step first; empty where there is none.
    """
    points = _of_events(run / "tensorboard") or _of_log(run / "train.log")
    return sorted(points.items())


def _of_events(folder: Path) -> dict[int, float]:
    """The values in event files of TensorBoard; empty if there are none or they cannot be read."""
    if not any(folder.glob("*tfevents*")):
        return {}
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    # 0: keep all values, not a sample of them.
    events = EventAccumulator(str(folder), size_guidance={SCALARS: 0})
    events.Reload()
    if _TAG not in events.Tags()[SCALARS]:
        return {}
    return {event.step: float(event.value) for event in events.Scalars(_TAG)}


def _of_log(path: Path) -> dict[int, float]:
    """The values in the log of ``onmt_train``; empty if there is none."""
    points: dict[int, float] = {}
    step = 0
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return points
    for line in lines:
        if found := _STEP.search(line):
            step = int(found[1])
        elif found := _VALIDATION.search(line):
            try:
                points[step] = float(found[1])
            except ValueError:
                continue
    return points
