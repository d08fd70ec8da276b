"""Training curves of `lm_train` and `onmt_train`, read from their logs and TensorBoard files, and drawn."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from recipes.common.plot import new_figure, write_png
from shared_embeddings.errors import UserError

Curve = list[tuple[int, float]]
LOSS, PERPLEXITY, BLEU = "training loss", "validation perplexity", "BLEU"
MEASURES = (LOSS, PERPLEXITY, BLEU)
# Lines of logs with a step, with a measure, or with both; a measure without a step belongs to the last one.
_STEP = re.compile(r"\b[Ss]tep +(\d+)")
_IN_LOG = {
    LOSS: re.compile(r"\bepoch \S+ loss ([\w.]+)|\bxent: +([\w.]+)"),
    PERPLEXITY: re.compile(r"\bvalid loss \S+ ppl ([\w.]+)|\bValidation perplexity: ([\w.+]+)"),
    BLEU: re.compile(r"\bBLEU: ([\w.]+)"),
}
_IN_EVENTS = {
    **{"train/loss": LOSS, "progress/xent": LOSS, "valid/perplexity": PERPLEXITY, "valid/ppl": PERPLEXITY},
    "valid/BLEU": BLEU,
}


def read_curves(run: Path) -> dict[str, Curve]:
    """Every measure of `MEASURES` that a run has written, by step.

    A resumed training has some steps twice; the later value counts.

    Args:
        run: folder of a run, with ``train.log`` or TensorBoard files in it or below it, or a log.

    Returns:
        (step, value) by measure, the first step first; measures without values are absent.
    """
    return {**_of_events(run), **_of_log(run / "train.log" if run.is_dir() else run)}


def validation_curve(run: Path) -> Curve:
    """Validation perplexity by step; empty where there is none."""
    log = _of_log(run / "train.log")
    return (log if PERPLEXITY in log else _of_events(run)).get(PERPLEXITY, [])


def _of_events(folder: Path) -> dict[str, Curve]:
    """The curves in event files of TensorBoard, also those of folders below."""
    folders = sorted({file.parent for file in folder.rglob("*tfevents*")}) if folder.is_dir() else []
    if not folders:
        return {}
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    points: dict[str, dict[int, float]] = {}
    for part in folders:
        events = EventAccumulator(str(part), size_guidance={SCALARS: 0})  # 0: all values, not a sample
        events.Reload()
        for tag in _IN_EVENTS.keys() & events.Tags()[SCALARS]:
            values = {event.step: float(event.value) for event in events.Scalars(tag)}
            points.setdefault(_IN_EVENTS[tag], {}).update(values)
    return _sorted(points)


def _of_log(path: Path) -> dict[str, Curve]:
    """The curves in a log; none if it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    points: dict[str, dict[int, float]] = {}
    step = 0
    for line in lines:
        if found := _STEP.search(line):
            step = int(found[1])
        for measure, pattern in _IN_LOG.items():
            if found := pattern.search(line):
                try:
                    value = float(next(filter(None, found.groups())))
                except ValueError:
                    continue
                points.setdefault(measure, {})[step] = value
    return _sorted(points)


def _sorted(points: Mapping[str, Mapping[int, float]]) -> dict[str, Curve]:
    return {measure: sorted(values.items()) for measure, values in points.items()}


def plot_runs(runs: Sequence[Path], output: Path) -> None:
    """Draw the curves of runs into one PNG, a panel per measure and a line per run.

    Args:
        runs: see `read_curves`.
        output: the picture.

    Raises:
        UserError: a run has no curves.
    """
    curves = {}
    for run, name in zip(runs, short_names(runs), strict=True):
        curves[name] = read_curves(run)
        if not curves[name]:
            raise UserError(
                f"{run}: no train.log with steps and no TensorBoard files; name the folder of a run"
            )
    measures = [measure for measure in MEASURES if any(measure in found for found in curves.values())]
    figure, panels = new_figure(len(measures), "", shared=False)
    for axes, measure in zip(panels, measures, strict=True):
        for number, (name, found) in enumerate(curves.items()):
            points = [(step, value) for step, value in found.get(measure, []) if math.isfinite(value)]
            steps, values = [step for step, _ in points], [value for _, value in points]
            marker = "." if len(points) < 40 else ""
            axes.plot(steps, values, color=f"C{number % 10}", marker=marker, linewidth=1.2, label=name)
        if measure == PERPLEXITY:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_title(measure + (" (nats per token)" if measure == LOSS else ""), fontsize=10)
        axes.set_xlabel("steps")
        axes.grid(alpha=0.3, linewidth=0.6, which="both")
    handles, labels = panels[0].get_legend_handles_labels()
    columns = min(len(labels), 2 * len(panels))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)
    write_png(figure, output)


def short_names(paths: Sequence[Path]) -> list[str]:
    """The shortest suffixes of paths that differ."""
    whole = [path.absolute().parts for path in paths]
    longest = max(map(len, whole))
    length = next(
        (n for n in range(1, longest) if len({parts[-n:] for parts in whole}) == len(whole)), longest
    )
    return [os.path.join(*parts[-length:]) for parts in whole]
