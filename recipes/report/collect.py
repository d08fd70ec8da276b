"""Finding results: those of the repository and those of runs, and which of them cannot be used."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.common.results import FILE, Record, is_smoke, read_results
from shared_embeddings.errors import UserError


@dataclass(frozen=True)
class Found:
    """One result.

    Attributes:
        recipe: the recipe that it comes from.
        record: the line of the results file.
        folder: where a run has its logs; it need not exist.
        name: what the report calls the file.
    """

    recipe: str
    record: Record
    folder: Path
    name: str

    @property
    def row(self) -> str:
        """The name of the row, without the seed where names of runs end in it."""
        name: str = self.record["row"]
        seed = self.record["config"].get("seed")
        return name if seed is None else name.removesuffix(f"-{seed}")

    @property
    def seed(self) -> int | None:
        """The seed of the training, if the record has it."""
        config = self.record["config"]
        train = config.get("train")
        inner = train.get("seed") if isinstance(train, Mapping) else None
        seed = config.get("seed", inner)
        return seed if isinstance(seed, int) else None


@dataclass(frozen=True)
class LeftOut:
    """A result, or a file of results, that is not used, and why."""

    name: str
    reason: str


def committed(recipes: Path) -> Iterator[tuple[Path, str]]:
    """Results files beside the recipes, as (path, recipe)."""
    for path in sorted(recipes.glob(f"*/{FILE}")):
        yield path, path.parent.name


def of_runs(runs: Path) -> Iterator[tuple[Path, str]]:
    """Results files below the folder of runs, as (path, recipe), without those of ``--smoke``."""
    for path in sorted(runs.glob(f"*/**/{FILE}")):
        if not is_smoke(path, runs):
            yield path, path.relative_to(runs).parts[0]


def collect(files: Iterable[tuple[Path, str]], recipes: Iterable[str]) -> tuple[list[Found], list[LeftOut]]:
    """Read results files; what cannot be used is named with the reason.

    Args:
        files: of `committed` and `of_runs`.
        recipes: the names of those that a result may come from.
    """
    known = set(recipes)
    found, left_out = [], []
    for path, recipe in files:
        name = "/".join([*path.parts[path.parts.index(recipe) - 1 :]]) if recipe in path.parts else str(path)
        if recipe not in known:
            left_out.append(LeftOut(name, f"there is no recipe {recipe}"))
            continue
        try:
            records = read_results(path)
        except (UserError, RecursionError) as error:
            # The message begins with a path, which the name has.
            left_out.append(LeftOut(name, str(error).removeprefix(f"{path}: ")))
            continue
        for record in records:
            if reason := fault(record):
                left_out.append(LeftOut(f"{name}, {record['row']}", reason))
            else:
                found.append(Found(recipe, record, path.parent / record["row"], name))
    return found, left_out


def fault(record: Record) -> str | None:
    """Why a record cannot be used, or None."""
    for key in ("embedding", "distill", "fit"):
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
    """A value, shortened for a message."""
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
