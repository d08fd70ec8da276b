"""Finding results files: those of the repository and those of runs, and which of them cannot be used."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.common.errors import UserError
from recipes.common.results import is_smoke, read_results

FILE = "results.json"
Record = dict[str, Any]
_KINDS = {"recipe": str, "row": str, "config": dict, "counts": dict, "metrics": dict, "data_checksum": str}


@dataclass(frozen=True)
class Found:
    """One results file.

    Attributes:
        record: its content.
        folder: where it lies; a run has its logs there, too.
        name: how the report calls the file.
    """

    record: Record
    folder: Path
    name: str

    @property
    def row(self) -> str:
        """The row's name; where names of runs end in their seed, without it."""
        name: str = self.record["row"]
        seed = self.record["config"].get("seed")
        return name if seed is None else name.removesuffix(f"-{seed}")

    @property
    def seed(self) -> int | None:
        """The seed of the training, if the file has it."""
        config = self.record["config"]
        train = config.get("train")
        inner = train.get("seed") if isinstance(train, Mapping) else None
        seed = config.get("seed", inner)
        return seed if isinstance(seed, int) else None


@dataclass(frozen=True)
class LeftOut:
    """A results file that is not used, and why."""

    name: str
    reason: str


def committed(recipes: Path) -> Iterator[tuple[Path, str]]:
    """Results files that lie beside the recipes, as (path, name)."""
    for path in sorted(recipes.glob(f"*/results/**/{FILE}")):
        yield path, str(path.relative_to(recipes.parent).as_posix())


def of_runs(runs: Path) -> Iterator[tuple[Path, str]]:
    """Results files below the folder that recipes write to, as (path, name), without those of ``--smoke``."""
    for path in sorted(runs.glob(f"*/**/{FILE}")):
        if not is_smoke(path, runs):
            yield path, f"{runs.name}/{path.relative_to(runs).as_posix()}"


def collect(files: Iterable[tuple[Path, str]], recipes: Iterable[str]) -> tuple[list[Found], list[LeftOut]]:
    """Read results files; a file that cannot be used is named with the reason.

    Args:
        files: of `committed` and `of_runs`.
        recipes: the names of those that a result may come from.
    """
    known = set(recipes)
    found, left_out = [], []
    for path, name in files:
        try:
            [record] = read_results([path])
        except (UserError, RecursionError) as error:
            # The message begins with a path, which the name tells.
            left_out.append(LeftOut(name, str(error).removeprefix(f"{path}: ")))
            continue
        reason = fault(record, known)
        if reason is None:
            found.append(Found(record, path.parent, name))
        else:
            left_out.append(LeftOut(name, reason))
    return found, left_out


def fault(record: Record, recipes: set[str]) -> str | None:
    """Why a record is none of these recipes', or None."""
    for key, kind in _KINDS.items():
        if not isinstance(record[key], kind):
            return f"{key} is {_short(record[key])}; it must be of type {kind.__name__}"
    if record["recipe"] not in recipes:
        return f"recipe is {_short(record['recipe'])}; there is none of this name"
    for key in ("embedding", "distill", "fit", "paper"):
        value = record["config"].get(key)
        if value is not None and not isinstance(value, dict):
            return f"config: {key} is {_short(value)}; it must be of type dict"
    for key in ("counts", "metrics"):
        if not all(math.isfinite(number) for number in _numbers(record[key])):
            return f"{key} has a number that is not finite"
    if not record["metrics"]:
        return "metrics is empty"
    return None


def _short(value: Any) -> str:
    """A value as a message tells it."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _numbers(value: Any) -> Iterator[float]:
    """All numbers in a nested value."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, (int, float)):
        yield value
