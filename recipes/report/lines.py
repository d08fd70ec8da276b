"""The lines of the report: a recipe's rows, each with its measured runs over several seeds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from recipes.common.recipe import Recipe
from recipes.common.results import Record, natural
from recipes.common.table import is_baseline, not_run
from recipes.report.collect import Found, LeftOut
from recipes.report.measures import Spread, flatten, spreads


@dataclass(frozen=True)
class Line:
    """One row of a recipe.

    Attributes:
        recipe: its name.
        row: its name.
        config: of the newest run; of ``rows.yaml`` when none was measured.
        paper: what the paper reports; empty for rows of no paper.
        runs: one per seed, the smallest first; none where it was not run.
        measured: each measure over the seeds.
    """

    recipe: str
    row: str
    config: Record
    paper: Mapping[str, Any] = field(default_factory=dict)
    runs: tuple[Found, ...] = ()
    measured: Mapping[str, Spread] = field(default_factory=dict)

    @property
    def counts(self) -> Mapping[str, Any]:
        """Parameter counts; empty where it was not run."""
        return self.runs[0].record["counts"] if self.runs else {}

    @property
    def method(self) -> str:
        """The method of the embedding; it may differ between the sides."""
        return str((self.config.get("embedding") or {}).get("method", "standard"))

    def as_record(self) -> Record:
        """The line as the record of a single run, with its measures in place of that run's metrics."""
        means = {key: spread.mean for key, spread in self.measured.items()}
        empty = not_run(self.row, self.config)
        return {**empty, "counts": dict(self.counts), "metrics": means}


def lines_of(recipe: Recipe, found: Iterable[Found]) -> tuple[list[Line], list[LeftOut]]:
    """The rows of a recipe: those of its ``rows.yaml``, then others that were measured.

    Args:
        recipe: the recipe.
        found: results, of other recipes too.

    Returns:
        The lines, and the results that others of the same row replace.

    Raises:
        UserError: ``rows.yaml`` cannot be read.
    """
    by_row: dict[str, list[Found]] = {}
    for one in found:
        if one.recipe == recipe.name:
            by_row.setdefault(one.row, []).append(one)
    lines, left_out = [], []
    names = sorted(recipe.rows, key=lambda name: (not is_baseline(name), natural(name)))
    for name in [*names, *sorted(by_row.keys() - recipe.rows.keys(), key=natural)]:
        runs, others = _seeds(by_row.get(name, []))
        left_out += others
        row = recipe.rows.get(name)
        config = row.settings() if row else {}
        config = {**config, **_newest(runs).record["config"]} if runs else config
        measured = spreads(flatten(run.record["metrics"]) for run in runs)
        lines.append(Line(recipe.name, name, config, (row and row.paper) or {}, tuple(runs), measured))
    return lines, left_out


def _seeds(runs: list[Found]) -> tuple[list[Found], list[LeftOut]]:
    """The newest run of each seed, of those with the same settings and data as the newest of all."""
    if not runs:
        return [], []
    wanted = _settings(_newest(runs))
    by_seed: dict[int | None, Found] = {}
    left_out = []
    for run in sorted(runs, key=_age, reverse=True):
        kept = by_seed.setdefault(run.seed, run) if _settings(run) == wanted else None
        if kept is None:
            left_out.append(
                LeftOut(
                    f"{run.name}, {run.record['row']}",
                    "has other settings or data than the newest run of its row",
                )
            )
        elif kept.record != run.record:
            left_out.append(
                LeftOut(
                    f"{run.name}, {run.record['row']}", f"{kept.name} has a newer run of its row and seed"
                )
            )
    return sorted(by_seed.values(), key=lambda run: (run.seed is not None, run.seed or 0)), left_out


def _newest(runs: Iterable[Found]) -> Found:
    """The newest run."""
    return max(runs, key=_age)


def _age(run: Found) -> tuple[str, bool, str]:
    """When a run was measured; of copies, the one with the log of its training comes last."""
    return str(run.record.get("date", "")), (run.folder / "train.log").exists(), run.name


def _settings(run: Found) -> str:
    """What runs of one row must have in common to be averaged: all but the seed."""
    config = run.record["config"]
    embedding = dict(config.get("embedding") or {})
    embedding.pop("seed", None)
    options = {key: _without_seed(config.get(key)) for key in ("train_options", "eval_options")}
    parts = {
        "data": run.record["data_checksum"],
        "embedding": embedding,
        **{key: config.get(key) for key in ("distill", "fit", "average", "hidden")},
        **options,
    }
    return json.dumps(parts, sort_keys=True)


def _without_seed(options: Any) -> list[str]:
    """Options of a command line but for ``-seed N``."""
    kept: list[str] = []
    given = [str(option) for option in options] if isinstance(options, list) else []
    for index, option in enumerate(given):
        is_value = index > 0 and given[index - 1].lstrip("-") == "seed"
        if not is_value and option.lstrip("-").partition("=")[0] != "seed":
            kept.append(option)
    return kept
