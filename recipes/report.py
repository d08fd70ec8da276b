"""``python -m recipes report``: all results next to the papers' figures, as a page of the documentation; and
``docs/claims.md``: what the papers claim, of ``claims.yaml``, and whether it holds here.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import pandas as pd
from scipy.stats import t

from recipes.common.plot import (
    legend_order,
    new_figure,
    quality_axis,
    quality_size_plot,
    shown_method,
    style,
    write_png,
)
from recipes.common.recipe import RECIPES, Recipe, find_recipe, recipe_names, runs_folder
from recipes.common.results import (
    BASELINE,
    FILE,
    SMOKE_FOLDER,
    Measure,
    Record,
    by_importance,
    find_measure,
    is_baseline,
    natural,
    read_results,
)
from recipes.common.table import (
    NONE,
    NOT_RUN,
    Column,
    markdown,
    markdown_table,
    mean_record,
    method_of,
    number,
    records_of,
)
from recipes.papers import Paper, PrintedTable, read_papers
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import write_text
from shared_embeddings.utils.paths import existing_path, output_path
from shared_embeddings.utils.reading import read_yaml

PAGE = "report.md"
CLAIMS, CLAIMS_PAGE = RECIPES / "claims.yaml", RECIPES.parent / "docs" / "claims.md"
_HOLDS, _FAILS, _WITHIN_NOISE = "holds", "does not hold", "within noise"
_LEAST_FREEDOM = 2
# Columns of a comparison; noise is the least difference that is real.
COMPARISON = ["recipe", "row", "compared with", "noise", "verdict"]
# Axes of the papers' figures that plot their tables.
_AXES = {"ratio": "reduction ratio", "width": "width of the unique part, $U_d$"}


def main(arguments: Sequence[str]) -> None:
    """Write a report of the results in the repository and in $RUNS, as Markdown with pictures."""
    parser = Parser("python -m recipes report", description=main.__doc__)
    parser.add_argument(
        "--runs", type=existing_path, help="folder that recipes write to (default: $RUNS, else runs)"
    )
    parser.add_argument(
        "--output", type=output_path, help="folder of the report (default: report in that folder)"
    )
    options = parser.parse_args(arguments)
    runs = (options.runs or runs_folder()).absolute()
    print(f"report: {write_report(options.output or runs / 'report', runs)}")


def write_report(folder: Path, runs: Path | None = None) -> Path:
    """Write the report, with pictures, into a folder, and return its file."""
    results = read_all(runs)
    glance, tasks = [], []
    for name, records in results.items():
        recipe, run = find_recipe(name), [record for record in records if record["metrics"]]
        glance.append({"task": name, "rows run": f"{len(run)} of {len(records)}", **_best(run)})
        tasks.append(f"## {recipe.title}\n\n{len(run)} of {len(records)} rows were run.")
        if run:
            tasks += _task(recipe, run, folder)
    figures = []
    by_name = {f"{name}/{record['row']}": record for name, records in results.items() for record in records}
    for paper in read_papers():
        for table in paper.tables:
            if table.plot:
                picture = f"{table.paper}_{table.table}.png".lower().replace(" ", "_")
                draw_figure(table, points_of(table, paper, by_name), folder / picture)
                figures.append(f"![{table.paper}, {table.table}: {table.title}]({picture})")
    parts = [
        "# Results",
        "The rows of a task train the same model with different embeddings, for input and output; sizes "
        "count both. Numbers of several seeds are mean ± standard deviation.",
        markdown(pd.DataFrame(glance).fillna(NONE)),
        *tasks,
        "## Figures of the papers",
        "Their rows with the settings of the papers need GPUs for days.",
        *figures,
    ]
    write_text(folder / PAGE, "\n\n".join(parts) + "\n")
    return folder / PAGE


def read_all(runs: Path | None = None) -> dict[str, list[Record]]:
    """Return the records of each recipe, see `records_of`: of the repository, or newer ones in `runs`.

    Cells of a grid, which are no rows, come last, each with its seeds on the newest data.
    """
    results = {}
    for name in recipe_names():
        recipe = find_recipe(name)
        files = [recipe.folder / FILE, *(sorted((runs / name).rglob(FILE)) if runs else [])]
        newest: dict[str, Record] = {}
        for file in files:
            if file.is_file() and SMOKE_FOLDER not in file.parts:
                for record in read_results(file):
                    if newest.get(record["row"], {}).get("date", "") <= record.get("date", ""):
                        newest[record["row"]] = record
        cells: dict[str, list[Record]] = {}
        for row, record in sorted(newest.items(), key=lambda item: str(item[1].get("date")), reverse=True):
            if not recipe.rows:
                cell = row.removesuffix(f"-{record['config'].get('seed')}")
                seeds = cells.setdefault(cell, [])
                if not seeds or seeds[0]["data_checksum"] == record["data_checksum"]:
                    seeds.append({**record, "row": cell, "paper": None})
        grid = [mean_record(cells[cell]) for cell in sorted(cells, key=natural)]
        results[name] = [*records_of(recipe.rows, newest.values()), *grid]
    return results


def _best(records: Sequence[Record]) -> dict[str, str]:
    """Return the quality of the plain table at its best learning rate, and of the best of the compressed."""
    key, *_ = [*by_importance(key for record in records for key in record["scores"]), ""]
    if (measure := find_measure(key)) is None:
        return {}
    scored = [record for record in records if key in record["scores"]]
    scored.sort(key=lambda record: fmean(record["scores"][key]), reverse=measure.higher_is_better)
    plain = [record for record in scored if method_of(record) == BASELINE]
    plain.sort(key=lambda record: (not is_baseline(record["row"]), -record["counts"].get("stored_bits", 0)))
    best = next((record for record in scored if record not in plain), None)
    if plain:
        by_row = {record["row"]: record for record in scored}
        plain = [by_row[best_setting(plain[0]["row"], by_row, key)]]
    return {
        "measure": measure.title,
        "plain table": measure.describe(plain[0]["scores"][key]) if plain else NONE,
        "best compressed": measure.describe(best["scores"][key]) if best else NONE,
        "row": best["row"] if best else NONE,
    }


def _score(key: str, measure: Measure) -> Callable[[Record], str]:
    """Return what prints a score of a record."""
    return lambda record: measure.describe(record["scores"][key])


def _task(recipe: Recipe, records: Sequence[Record], folder: Path) -> list[str]:
    """Return the picture and the table of the rows that were run, with the figures of their papers."""
    picture, parts = f"{recipe.name}.png", []
    keys = by_importance(dict.fromkeys(key for record in records for key in record["scores"]))
    measures = {key: measure for key in keys if (measure := find_measure(key))}
    quality = next(iter(measures), "")
    if quality in ("bleu", "perplexity"):
        scored = [record for record in records if quality in record["scores"]]
        quality_size_plot(scored, folder / picture, quality, recipe.title)
        parts.append(f"![{recipe.title}: quality against stored bytes]({picture})")
    printed = [key for record in records for key in record["paper"] or ()]
    columns: list[str | Column] = ["row"]
    for key, measure in measures.items():
        columns.append(Column(measure.title, _score(key, measure)))
        if key in printed:
            columns.append(Column(f"{measure.title}, paper", number("{}", "paper", key)))
    columns += ["stored", "smaller", "minutes", "method", "options"]
    if printed:
        columns.append(Column("source", lambda r: str(r["paper"]["source"])))
    columns += [Column("device", lambda r: str(r["device"])), "date"]
    columns.append(Column("commit", lambda r: str(r["git"]["commit"])[:10]))
    return [*parts, markdown_table(records, columns, missing=NONE)]


def draw_figure(table: PrintedTable, points: pd.DataFrame, path: Path) -> None:
    """Draw a figure with a ``plot`` as PNG, a panel for each recipe: hollow markers are the paper's, filled
    ones ours with one standard deviation over the seeds.
    """
    from matplotlib.lines import Line2D

    picture, panels = new_figure(points["recipe"].nunique(), f"{table.paper}, {table.table}: {table.title}")
    for axes, (recipe, shown) in zip(panels, points.groupby("recipe", sort=False), strict=True):
        for method, rows in shown.sort_values("x").groupby("method"):
            look: dict[str, Any] = {**style(str(method)), "linewidth": 1}
            axes.plot(rows["x"], rows["paper"], markerfacecolor="white", linestyle="--", **look)
            axes.errorbar(rows["x"], rows["ours"], yerr=rows["deviation"], capsize=2, **look)
        axes.set_xscale("log", base=2)
        if table.plot["x"] == "width":
            axes.set_xticks(sorted(set(points["x"])))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(_AXES[table.plot["x"]])
        axes.set_title(f"{recipe}: {shown['ours'].count() or 'no'} rows run", fontsize=10)
        axes.grid(alpha=0.3, linewidth=0.6)
    quality_axis(panels[0], table.plot["y"])
    gray: dict[str, Any] = {"marker": "o", "color": "#8c8c8c"}
    methods = sorted(set(points["method"]), key=legend_order)
    handles = [
        *(Line2D([], [], **style(name), label=name) for name in methods),
        Line2D([], [], **gray, markerfacecolor="white", linestyle="--", label="in the paper"),
        Line2D([], [], **gray, label="ours"),
    ]
    columns = 3 * len(panels)
    picture.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)
    write_png(picture, path)


def points_of(table: PrintedTable, paper: Paper, records: Mapping[str, Record]) -> pd.DataFrame:
    """Return the points of a figure with a ``plot``: the rows of the paper's tables that a recipe trains.

    They have ``recipe``, ``method``, ``x``, the ``paper``'s score, and ``ours`` with its ``deviation``.
    """
    points = []
    for other, cell in paper.cells:
        if other.table in table.plot["tables"] and cell.trained_by:
            record, score = records[cell.trained_by], table.plot["y"]
            ours = pd.Series(record["scores"].get(score, []), dtype=float)
            if table.plot["x"] == "ratio":
                x = float(cell.figures.get("compression") or cell.figures["input-compression"])
            else:  # the width at the end of its label
                x = float(re.findall(r"\d+", cell.row)[-1])
            place = (cell.trained_by.partition("/")[0], shown_method(record), x, float(cell.figures[score]))
            points.append((*place, ours.mean(), ours.std()))
    return pd.DataFrame(points, columns=["recipe", "method", "x", "paper", "ours", "deviation"])


def comparisons(by_recipe: Mapping[str, list[str]]) -> Iterator[tuple[str, bool, str]]:
    """Yield the comparisons of recipes: row A, whether it is close, row B.

    "A > B" says that A is better than B; "A ~ B" that A is at most `within` worse.
    """
    for recipe, texts in by_recipe.items():
        for text in texts:
            first, sign, second = text.split()
            if sign not in ("~", ">"):
                raise UserError(f"{CLAIMS}: '{text}' has '{sign}'; expected '>' or '~'")
            yield f"{recipe}/{first}", sign == "~", f"{recipe}/{second}"


def best_setting(row: str, records: Mapping[str, Record], key: str) -> str:
    """Return the best of a row and its variants with other learning rates.

    The validation set chooses if it was measured: by this score, else by its perplexity.
    """
    variants = re.compile(re.escape(row) + r"(_(rate|adam)_\d+)?")
    measured = [name for name in records if variants.fullmatch(name) and key in records[name]["scores"]]
    if len(measured) < 2:
        return row
    for chosen_by in (f"valid_{key}", "valid_perplexity", key):
        measure = find_measure(chosen_by)
        if measure is not None and all(chosen_by in records[name]["scores"] for name in measured):
            choose = max if measure.higher_is_better else min
            return choose(measured, key=lambda name: fmean(records[name]["scores"][chosen_by]))
    return row


class Noise:
    """How much trainings of one row with several seeds differ: relative standard deviations, pooled.

    Args:
        records: all records by recipe and row.
    """

    def __init__(self, records: Mapping[str, Record]) -> None:
        self._records, self._groups = records, defaultdict[tuple[str, ...], list[list[float]]](list)
        for name, record in records.items():
            recipe = name.partition("/")[0]
            for key, scores in record["scores"].items():
                if len(scores) > 1:
                    for group in ((key, recipe, _rate(record)), (key, recipe), (key,)):
                        self._groups[group].append([score / fmean(scores) for score in scores])

    def threshold(self, first: str, second: str, key: str) -> float | None:
        """Return the least relative difference of two rows that is real with 95 % (Student's t); None without
        seeds.

        Seeds count that have the task and the learning rate, else the task, else the measure, with at least
        two degrees of freedom.
        """
        recipe, rates = first.partition("/")[0], {_rate(self._records[name]) for name in (first, second)}
        groups = [(key, recipe, *rates)] if len(rates) == 1 else []
        for group in [*groups, (key, recipe), (key,)]:
            seeds = self._groups.get(group, [])
            freedom = sum(len(scores) - 1 for scores in seeds)
            if freedom >= _LEAST_FREEDOM:
                deviation = math.sqrt(sum(variance(part) * (len(part) - 1) for part in seeds) / freedom)
                trainings = [len(self._records[name]["scores"][key]) for name in (first, second)]
                return float(t.ppf(0.975, freedom)) * deviation * math.sqrt(sum(1 / n for n in trainings))
        return None


def _rate(record: Record) -> str:
    return str(record.get("config", {}).get("train", {}).get("learning_rate"))


def compare(
    claim: Mapping[str, Any],
    comparison: tuple[str, bool, str],
    records: Mapping[str, Record],
    noise: Noise,
) -> list[str]:
    """Return the cells of a comparison of a claim, see `COMPARISON`, given the records by row."""
    first, is_close, second = comparison
    keys = by_importance(key for name in (first, second) for key in records[name]["scores"])
    key: str = claim.get("key") or next(iter(keys), "")
    first, second = (best_setting(name, records, key) for name in (first, second))
    measure, seeds = find_measure(key), [records[name]["scores"].get(key) for name in (first, second)]
    shown = [
        f"`{name.partition('/')[2]}` {measure.describe(scores) if measure and scores else '(not run)'}"
        for name, scores in zip((first, second), seeds, strict=True)
    ]
    least, outcome = None, NOT_RUN
    if measure and all(seeds):
        ours, others = (fmean(scores) for scores in seeds if scores)
        gain = (ours / others - 1) * (1 if measure.higher_is_better else -1)
        gain += float(claim["within"].removesuffix("%")) / 100 if is_close else 0.0
        least, outcome = noise.threshold(first, second, key), _HOLDS if gain > 0 else _FAILS
        if least is None or abs(gain) <= least:
            outcome = _WITHIN_NOISE
    return [first.partition("/")[0], *shown, NONE if least is None else f"± {100 * least:.1f} %", outcome]


def verdict(
    claim: Mapping[str, Any], records: Mapping[str, Record], noise: Noise
) -> tuple[list[list[str]], str]:
    """Return the comparisons of a claim, see `compare`, and whether it holds."""
    if "reason" in claim:
        return [], f"not tested: {claim['reason']}"
    lines = [compare(claim, comparison, records, noise) for comparison in comparisons(claim["here"])]
    counts = Counter(outcome for *_, outcome in lines if outcome != NOT_RUN)
    decided = [outcome for outcome in (_HOLDS, _FAILS) if counts[outcome]]
    if len(counts) < 2:
        return lines, next(iter(counts), NOT_RUN)
    if len(decided) == 1:
        return lines, f"{decided[0]} ({counts[decided[0]]} of {counts.total()}, others within noise)"
    parts = [f"{counts[outcome]} {outcome}" for outcome in (_HOLDS, _FAILS, _WITHIN_NOISE) if counts[outcome]]
    return lines, f"mixed: {', '.join(parts)}"


def claims_table() -> str:
    """Return all claims as Markdown: a table of verdicts and one of comparisons for each paper."""
    parts: list[str] = []
    outcomes = Counter[str]()
    records = {f"{name}/{record['row']}": record for name, rows in read_all().items() for record in rows}
    noise = Noise(records)
    cells = (cell for paper in read_papers() for _, cell in paper.cells if cell.is_own)
    # The figures that the papers' rows are judged by.
    printed = {cell.trained_by: [cell.figures[key] for key in by_importance(cell.figures)] for cell in cells}
    claims = pd.DataFrame(read_yaml(CLAIMS)["claims"])
    for paper, claimed in claims.groupby("by", sort=False):
        verdicts, compared = [], []
        for index, (_, row) in enumerate(claimed.iterrows(), 1):
            claim = row.dropna().to_dict()
            figure = "; ".join(
                f"{printed[first][0]} {'and' if is_close else 'against'} {printed[second][0]}"
                for first, is_close, second in comparisons(claim.get("paper", {}))
            )
            lines, holds = verdict(claim, records, noise)
            verdicts.append([index, claim["claim"], f"{figure or 'a plot'} ({claim['source']})", holds])
            compared += [[index, *line] for line in lines]
            outcomes[re.split("[:(]", holds)[0].strip()] += 1
        tables = [
            pd.DataFrame(verdicts, columns=["no.", "claim", "in the paper", "here"]),
            pd.DataFrame(compared, columns=["no.", *COMPARISON]),
        ]
        parts += [f"## {paper}", *(markdown(table).rstrip() for table in tables)]
    counts = ", ".join(f"{outcome}: {count}" for outcome, count in outcomes.most_common())
    return "\n\n".join([f"{outcomes.total()} claims. {counts.capitalize()}.", *parts])
