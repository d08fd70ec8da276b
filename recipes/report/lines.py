"""The lines of the report: a recipe's rows, each with its measured runs over several seeds; papers' figures.

Results are those of the repository and those of runs; what cannot be used is named with the reason.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from recipes.common.plot import legend_order, new_figure, quality_axis, shown_method, style, write_png
from recipes.common.recipe import RECIPES, Recipe, find_recipe, recipe_names
from recipes.common.results import (
    FILE,
    SEED,
    SMOKE_FOLDER,
    Record,
    is_baseline,
    natural,
    not_run,
    read_results,
)
from recipes.papers import Table
from shared_embeddings.utils.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Found:
    """One result of a recipe."""

    recipe: str
    record: Record  # the line of the results file
    folder: Path  # where a run has its logs; it need not exist
    name: str  # what the report calls the file

    @property
    def row(self) -> str:
        """The name of the row, without the seed where names of runs end in it."""
        name: str = self.record["row"]
        return name.removesuffix(f"-{self.seed}").removesuffix(f"{SEED}{self.seed}")

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
    """Results files in the folders of recipes, as (path, recipe)."""
    for path in sorted(recipes.glob(f"*/{FILE}")):
        yield path, path.parent.name


def of_runs(runs: Path) -> Iterator[tuple[Path, str]]:
    """Results files below the folder of runs, as (path, recipe), without those of ``--smoke``."""
    for path in sorted(runs.glob(f"*/**/{FILE}")):
        if SMOKE_FOLDER not in path.relative_to(runs).parts:
            yield path, path.relative_to(runs).parts[0]


def collect(files: Iterable[tuple[Path, str]], recipes: Iterable[str]) -> tuple[list[Found], list[LeftOut]]:
    """Read the results files of `committed` and `of_runs` that are of these recipes; name the others."""
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
            text = json.dumps(value, ensure_ascii=False)
            return (
                f"config: {key} is {text if len(text) <= 60 else f'{text[:57]}...'}; it must be of type dict"
            )
    for key in ("counts", "metrics"):
        if not all(math.isfinite(number) for number in _numbers(record[key])):
            return f"{key} has a number that is not finite"
    if not record["metrics"]:
        return "metrics is empty"
    return None


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, (int, float)):
        yield value


class Measure(NamedTuple):
    """A measure: its title, decimals, and whether higher is better."""

    title: str
    decimals: int
    higher_is_better: bool


class Spread(NamedTuple):
    """A measure over seeds; `deviation` is that of the sample, None of a single run."""

    mean: float
    deviation: float | None
    runs: int

    def describe(self, decimals: int) -> str:
        if self.deviation is None:
            return f"{self.mean:.{decimals}f}"
        return f"{self.mean:.{decimals}f} ± {self.deviation:.{decimals}f} ({self.runs} seeds)"


_ROUGE = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
_LENGTH = "length_"
_RHO = "rho "
_KEPT = "kept "
# In the order of importance: a recipe is judged by the first that its results have.
_PLAIN = {
    "bleu": Measure("BLEU", 2, True),
    "perplexity": Measure("test perplexity", 2, False),
    "valid_perplexity": Measure("validation perplexity", 2, False),
    "pointer_perplexity": Measure("test perplexity with pointer", 2, False),
    "valid_pointer_perplexity": Measure("validation perplexity with pointer", 2, False),
    "chrf": Measure("chrF", 2, True),
    "top10": Measure("10 nearest neighbors kept", 3, True),
    "relative_error": Measure("relative error", 3, False),
    "training_ms": Measure("training (ms per batch)", 0, False),
    "inference_ms": Measure("inference (ms per batch)", 0, False),
}


def measure(key: str) -> Measure | None:
    """The measure of a key of `flatten` or of a row's ``paper``; None for other figures."""
    name, _, length = key.partition("_")
    if name in _ROUGE:
        return Measure(f"{_ROUGE[name]} recall" + (f", {length} bytes" if length else ""), 2, True)
    if key.startswith(_RHO):
        return Measure(f"Spearman's rho, {key.removeprefix(_RHO)}", 3, True)
    if key.startswith(_KEPT):
        return Measure(f"greedy choice kept, {key.removeprefix(_KEPT)}", 3, True)
    return _PLAIN.get(key)


def flatten(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that models are judged by, of the ``metrics`` of a results file.

    ROUGE recall of headlines at a length is ``rouge1_75``, Spearman's rho of a set is ``rho SET``,
    and the share of a decoder's most probable words that stay is ``kept TEXT``.
    """
    flat = {key: metrics[key] for key in _PLAIN if key in metrics}
    for key, scores in metrics.items():
        if key.startswith(_LENGTH) and isinstance(scores, Mapping):
            recall = scores.get("recall", {})
            length = key.removeprefix(_LENGTH)
            flat |= {f"{name}_{length}": recall[name].get("mean") for name in _ROUGE if name in recall}
    similarity = metrics.get("similarity")
    if isinstance(similarity, Mapping):
        flat |= {f"{_RHO}{name}": found.get("rho") for name, found in similarity.items()}
    texts = metrics.get("texts")
    if isinstance(texts, Mapping):
        flat |= {f"{_KEPT}{name}": found.get("kept") for name, found in texts.items()}
    return {key: float(value) for key, value in flat.items() if isinstance(value, (int, float))}


def spreads(all_metrics: Iterable[Mapping[str, float]]) -> dict[str, Spread]:
    """Mean and deviation of each measure that all runs have."""
    runs = list(all_metrics)
    if not runs:
        return {}
    shared = [key for key in runs[0] if all(key in run for run in runs)]
    found = {}
    for key in shared:
        values = [run[key] for run in runs]
        deviation = statistics.stdev(values) if len(values) > 1 else None
        found[key] = Spread(statistics.fmean(values), deviation, len(values))
    return found


def chosen(keys: Iterable[str]) -> str | None:
    """The measure among `keys` that a recipe is judged by: of those without an order, the first."""
    known = [key for key in keys if measure(key) is not None]
    order = list(_PLAIN)
    # Between the metrics of whole models and those of distances between vectors.
    other = order.index("relative_error") - 0.5
    return min(known, key=lambda key: order.index(key) if key in _PLAIN else other, default=None)


def in_order(keys: Iterable[str]) -> list[str]:
    """The keys that have a measure, the most important first."""
    order = {key: number for number, key in enumerate(_PLAIN)}
    return sorted(filter(measure, keys), key=lambda key: order.get(key, len(order)))


def of_paper(key: str, found: Mapping[str, Spread]) -> Spread | None:
    """Our figure for a paper's: the same measure, or the only one of ROUGE at some length."""
    if key in found:
        return found[key]
    near = [name for name in found if name.startswith(f"{key}_") and key in _ROUGE]
    return found[near[0]] if len(near) == 1 else None


@dataclass(frozen=True)
class Line:
    """One row of a recipe."""

    recipe: str
    row: str
    config: Record  # of the newest run; of ``rows.yaml`` when none was measured
    # What the paper reports; empty for rows of no paper.
    paper: Mapping[str, Any] = field(default_factory=dict)
    runs: tuple[Found, ...] = ()  # one per seed, the smallest first; none where it was not run
    measured: Mapping[str, Spread] = field(default_factory=dict)  # each measure over the seeds

    @property
    def counts(self) -> Mapping[str, Any]:
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
    """The rows of a recipe, those of ``rows.yaml`` first; and the results that others of their row replace.

    `found` may have results of other recipes, too.
    """
    by_row: dict[str, list[Found]] = {}
    for one in found:
        if one.recipe == recipe.name:
            by_row.setdefault(one.row, []).append(one)
    lines, left_out = [], []
    names = [name for name in recipe.rows if SEED not in name]
    names.sort(key=lambda name: (not is_baseline(name), natural(name)))
    for name in [*names, *sorted(by_row.keys() - recipe.rows.keys(), key=natural)]:
        runs, others = _seeds(by_row.get(name, []))
        left_out += others
        row = recipe.rows.get(name)
        config = row.settings() if row else {}
        config = {**config, **max(runs, key=_age).record["config"]} if runs else config
        measured = spreads(flatten(run.record["metrics"]) for run in runs)
        lines.append(Line(recipe.name, name, config, (row and row.paper) or {}, tuple(runs), measured))
    return lines, left_out


def _seeds(runs: list[Found]) -> tuple[list[Found], list[LeftOut]]:
    """The newest run of each seed, of those with the same settings and data as the newest of all."""
    by_seed: dict[int | None, Found] = {}
    left_out = []
    for run in sorted(runs, key=_age, reverse=True):
        reason = ""
        if _settings(run) != _settings(max(runs, key=_age)):
            reason = "has other settings or data than the newest run of its row"
        elif (kept := by_seed.setdefault(run.seed, run)).record != run.record:
            reason = f"{kept.name} has a newer run of its row and seed"
        if reason:
            left_out.append(LeftOut(f"{run.name}, {run.record['row']}", reason))
    return sorted(by_seed.values(), key=lambda run: (run.seed is not None, run.seed or 0)), left_out


def _age(run: Found) -> tuple[str, bool, str]:
    """When a run was measured; of copies, the one with the log of its training comes last."""
    return str(run.record.get("date", "")), (run.folder / "train.log").exists(), run.name


def _settings(run: Found) -> str:
    """What runs of one row must have in common to be averaged: all but the seed."""
    config = run.record["config"]
    embedding = {key: value for key, value in (config.get("embedding") or {}).items() if key != "seed"}
    parts: dict[str, Any] = {"data": run.record["data_checksum"], "embedding": embedding}
    parts |= {key: config.get(key) for key in ("distill", "fit", "average", "hidden")}
    for key in ("train_options", "eval_options"):
        options = parts[key] = []
        given = _as_texts(config.get(key))
        for before, option in zip(["", *given], given):
            if "seed" not in (before.lstrip("-"), option.lstrip("-").partition("=")[0]):
                options.append(option)
    return json.dumps(parts, sort_keys=True)


def _as_texts(options: Any) -> list[str]:
    return list(map(str, options)) if isinstance(options, list) else []


def commands(recipe: Path, line: Line) -> str:
    """The command lines from prepared data to the results of a line, the row that it starts from first."""
    scripts = f"recipes/{recipe.name}"
    if not (recipe / "train.sh").exists():
        return f"{scripts}/run.sh"
    lines = [f"{scripts}/preprocess.sh"]
    teacher = (line.config.get("distill") or line.config.get("fit") or {}).get("teacher")
    if isinstance(teacher, str):
        lines.append(f"{scripts}/train.sh {shlex.quote(teacher)}")
    for config in [run.record["config"] for run in line.runs] or [line.config]:
        # The name of a cell with a width ends in its seed, and the cells of a grid are evaluated together.
        is_cell = "row" in config and "hidden" in config
        name = line.row if config.get("hidden") is None else f"{line.row}-{config['seed']}"
        evaluated = [] if is_cell else [name]
        lines.append(shlex.join([f"{scripts}/train.sh", name, *_as_texts(config.get("train_options"))]))
        lines.append(shlex.join([f"{scripts}/eval.sh", *evaluated, *_as_texts(config.get("eval_options"))]))
    return "\n".join(dict.fromkeys(lines))


# The papers' figures that plot their tables, with ours beside. What the axis can show of a row:
_AXES = {"ratio": "reduction ratio", "width": "width of the unique part, $U_d$"}


class Point(NamedTuple):
    """A row of a table in a figure: its method or `PLAIN`, its place, the paper's score, and ours, if any."""

    recipe: str
    method: str
    x: float
    paper: float
    ours: Spread | None


def measured_lines(runs: Path | None) -> dict[str, Line]:
    """The rows of all recipes with our results, in the repository and in `runs`, by ``RECIPE/ROW``."""
    names = recipe_names()
    found, _ = collect([*committed(RECIPES), *(of_runs(runs) if runs is not None else ())], names)
    lines = [line for name in names for line in lines_of(Recipe(RECIPES / name), found)[0]]
    return {f"{line.recipe}/{line.row}": line for line in lines}


def points_of(figure: Table, tables: Iterable[Table], lines: Mapping[str, Line]) -> list[Point]:
    """The points of a figure with a ``plot``: the rows of the paper's `tables` that a recipe trains."""
    points = []
    for cell in (cell for table in tables if table.name in figure.plot["tables"] for cell in table.cells):
        if not cell.trained_by:
            continue
        recipe, _, name = cell.trained_by.partition("/")
        score = figure.plot["y"]
        ours = of_paper(score, lines[cell.trained_by].measured) if cell.trained_by in lines else None
        method = shown_method({"config": {"embedding": find_recipe(recipe).row(name).embedding}})
        if figure.plot["x"] == "ratio":
            x = float(cell.figures.get("compression") or cell.figures["input-compression"])
        else:  # the width at the end of its label
            x = float(re.findall(r"\d+", cell.row)[-1])
        points.append(Point(recipe, method, x, float(cell.figures[score]), ours))
    return points


def draw(figure: Table, points: Sequence[Point], path: Path) -> None:
    """Draw a figure as PNG, a panel for each recipe: hollow markers are the paper's, filled ones ours."""
    from matplotlib.lines import Line2D

    recipes = list(dict.fromkeys(point.recipe for point in points))
    methods = sorted({point.method for point in points}, key=legend_order)
    title = f"{figure.paper}, {figure.name}: {figure.title}"
    picture, panels = new_figure(len(recipes), title)
    for axes, recipe in zip(panels, recipes, strict=True):
        for method in methods:
            _draw_method(axes, [one for one in points if (one.recipe, one.method) == (recipe, method)])
        run = [one for one in points if one.recipe == recipe and one.ours is not None]
        axes.set_xscale("log", base=2)
        if figure.plot["x"] == "width":
            axes.set_xticks(sorted({point.x for point in points}))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(_AXES[figure.plot["x"]])
        axes.set_title(f"{recipe}: {len(run)} rows run" if run else f"{recipe}: not run", fontsize=10)
        axes.grid(alpha=0.3, linewidth=0.6)
    quality_axis(panels[0], figure.plot["y"])
    look: dict[str, Any] = {"marker": "o", "color": "#8c8c8c"}
    handles = [
        *(Line2D([], [], color=style(name).color, marker=style(name).marker, label=name) for name in methods),
        Line2D([], [], **look, markerfacecolor="white", linestyle="--", label="in the paper"),
        Line2D([], [], **look, label="ours"),
    ]
    picture.legend(
        handles=handles, loc="outside lower center", ncols=3 * len(panels), fontsize=9, frameon=False
    )
    write_png(picture, path)


def _draw_method(axes: Axes, points: Sequence[Point]) -> None:
    """Draw the paper's points of a method, and ours with one standard deviation over the seeds."""
    ordered = sorted(points, key=lambda point: point.x)
    if not ordered:
        return
    color, marker, _ = style(ordered[0].method)
    x, y = [point.x for point in ordered], [point.paper for point in ordered]
    axes.plot(x, y, color=color, marker=marker, markerfacecolor="white", linestyle="--", linewidth=1)
    ours = [(point.x, point.ours) for point in ordered if point.ours is not None]
    if ours:
        axes.errorbar(
            [place for place, _ in ours],
            [spread.mean for _, spread in ours],
            yerr=[spread.deviation or 0.0 for _, spread in ours],
            color=color,
            marker=marker,
            linewidth=1,
            capsize=2,
        )
