"""The commands that reproduce a result."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.report.lines import Line


def commands(recipe: Path, line: Line) -> str:
    """The command lines from prepared data to the results of a line, the row that it starts from first.

    Args:
        recipe: folder of the recipe.
        line: one of its rows, measured or not.
    """
    scripts = f"recipes/{recipe.name}"
    if not (recipe / "train.sh").exists():
        return f"{scripts}/run.sh"
    lines = [f"{scripts}/preprocess.sh"]
    teacher = _teacher(line.config)
    if teacher is not None:
        lines.append(f"{scripts}/train.sh {shlex.quote(teacher)}")
    for config in [run.record["config"] for run in line.runs] or [line.config]:
        name = _name(line, config)
        lines.append(_command(f"{scripts}/train.sh", name, config.get("train_options")))
        # The cells of a grid are evaluated together.
        evaluated = "" if _is_cell(config) else name
        lines.append(_command(f"{scripts}/eval.sh", evaluated, config.get("eval_options")))
    return "\n".join(dict.fromkeys(lines))


def _teacher(config: Mapping[str, Any]) -> str | None:
    """The row that a row starts from, or None."""
    start = config.get("distill") or config.get("fit") or {}
    teacher = start.get("teacher")
    return teacher if isinstance(teacher, str) else None


def _is_cell(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of a cell of a grid, whose name ends in its seed."""
    return "row" in config and "hidden" in config


def _name(line: Line, config: Mapping[str, Any]) -> str:
    """What the scripts call a run."""
    return f"{line.row}-{config['seed']}" if _is_cell(config) and "seed" in config else line.row


def _command(script: str, name: str, options: Any) -> str:
    """A command line."""
    given = [str(option) for option in options] if isinstance(options, list) else []
    return shlex.join([script, *([name] if name else []), *given])
