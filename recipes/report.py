"""``python -m recipes report``: all results next to the papers' figures, as a page of the documentation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from recipes.common.plot import (
    legend_order,
    new_figure,
    quality_axis,
    quality_size_plot,
    shown_method,
    style,
    write_png,
)
from recipes.common.recipe import Recipe, find_recipe, recipe_names, runs_folder
from recipes.common.results import (
    FILE,
    SMOKE_FOLDER,
    Record,
    by_importance,
    describe_options,
    embedding_bits,
    find_measure,
    is_baseline,
    natural,
    read_results,
    times_smaller,
)
from recipes.common.table import NONE, NOT_RUN, markdown, mean_record, method_of, records_of
from recipes.papers import Paper, PrintedTable, read_papers
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import write_text
from shared_embeddings.utils.path_options import PathOption

PAGE = "report.md"
# Axes of the papers' figures that plot their tables.
_AXES = {"ratio": "reduction ratio", "width": "width of the unique part, $U_d$"}


def main(arguments: Sequence[str]) -> None:
    """Write a report of the results in the repository and in $RUNS, as Markdown with pictures."""
    parser = Parser("python -m recipes report", description=main.__doc__)
    parser.add_argument(
        "--runs", type=PathOption.SOURCE, help="folder that recipes write to (default: $RUNS, else runs)"
    )
    parser.add_argument(
        "--output", type=PathOption.FOLDER, help="folder of the report (default: report in that folder)"
    )
    options = parser.parse_args(arguments)
    if options.runs is not None and not options.runs.is_dir():
        raise UserError(
            f"--runs {options.runs}: no such folder; give the folder that recipes have written to"
        )
    runs = (options.runs or runs_folder()).absolute()
    print(f"report: {write_report(options.output or runs / 'report', runs)}")


def write_report(folder: Path, runs: Path | None = None) -> Path:
    """Write the report, with pictures, into a folder, and return its file."""
    results = read_all(runs)
    measured = {name: [one for one in records if one["metrics"]] for name, records in results.items()}
    rows, run = (sum(map(len, records.values())) for records in (results, measured))
    parts = [
        "# Results",
        "The rows of a task train the same model with different embeddings, for input and output; sizes "
        f"count both. {run} of {rows} rows were run. Numbers of several seeds are mean ± standard deviation.",
        "## At a glance",
        markdown(pd.DataFrame([_glance(name, records) for name, records in results.items()])),
        "## Beside the papers",
        "Rows that reproduce a row of a published table, with the settings of the paper. Most of them need "
        "GPUs for days. Rows of smaller models are only compared with each other, under their task.",
        *_paper_tables(measured),
    ]
    records = {f"{name}/{one['row']}": one for name, rows in results.items() for one in rows}
    for paper in read_papers():
        for table in paper.tables:
            if table.plot:
                picture = f"{table.paper}_{table.name}.png".lower().replace(" ", "_")
                draw_figure(table, paper, records, folder / picture)
                parts.append(f"![{table.paper}, {table.name}: {table.title}]({picture})")
    for name, task in measured.items():
        recipe = find_recipe(name)
        parts.append(f"## {recipe.title}")
        parts.append(f"{len(task)} of {len(results[name])} rows were run.")
        if task:
            parts += _task(recipe, task, folder)
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


def _score(record: Record, key: str) -> str:
    """Format a measure of a record, over its seeds."""
    measure = find_measure(key)
    return measure.describe(record["scores"][key]) if measure and key in record["scores"] else NONE


def _quality(records: Sequence[Record]) -> str:
    """Return the measure that the models of a recipe are judged by; empty without results."""
    return next(iter(by_importance(key for record in records for key in record["scores"])), "")


def _smaller(record: Record) -> str:
    counts = record["counts"]
    return f"{times_smaller(counts):.1f}" if {"dense_embedding", "table"} & counts.keys() else NONE


def _glance(name: str, records: Sequence[Record]) -> dict[str, str]:
    """Return the line of a task: the plain table, and the best of the compressed."""
    key = _quality(records)
    measure = find_measure(key)
    scored = [record for record in records if key in record.get("scores", {})]
    plain = [record for record in scored if method_of(record) == "standard"]
    plain.sort(key=lambda r: (not is_baseline(r["row"]), -r["counts"].get("stored_bits", 0)))
    sign = -1 if measure and measure.higher_is_better else 1
    others = [record for record in scored if record not in plain]
    best = min(others, key=lambda record: sign * fmean(record["scores"][key]), default=None)
    return {
        "task": name,
        "rows run": f"{sum(bool(record['metrics']) for record in records)} of {len(records)}",
        "measure": measure.title if measure else NONE,
        "plain table": _score(plain[0], key) if plain else NONE,
        "best compressed": _score(best, key) if best else NOT_RUN,
        "row": best["row"] if best else NONE,
        "times smaller": _smaller(best) if best else NONE,
    }


def _paper_tables(measured: Mapping[str, Sequence[Record]]) -> list[str]:
    """Return a table for each table of a paper of which rows were run, theirs beside ours."""
    tables: dict[str, list[dict[str, str]]] = {}
    for name, records in measured.items():
        for record in records:
            if paper := record["paper"]:
                table, _, row = str(paper["source"]).partition(": ")
                line = {"row of the paper": row, "our row": f"{name}/{record['row']}"}
                for key in by_importance(paper):
                    measure, ours = find_measure(key), record["scores"].get(key)
                    assert measure is not None
                    line[f"{measure.title}: paper"] = f"{paper[key]:.{measure.decimals}f}"
                    line[f"{measure.title}: ours"] = measure.describe(ours) if ours else NOT_RUN
                    if ours:
                        difference = fmean(ours) - paper[key]
                        line[f"{measure.title}: difference"] = f"{difference:+.{measure.decimals}f}"
                tables.setdefault(table, []).append({**line, "hardware of the paper": paper["hardware"]})
    if not tables:
        return ["No row of a paper was run yet."]
    return [
        f"### {table}\n\n{markdown(pd.DataFrame(lines).fillna(NONE))}"
        for table, lines in sorted(tables.items())
    ]


def _task(recipe: Recipe, records: Sequence[Record], folder: Path) -> list[str]:
    """Return the picture and the table of the rows that were run."""
    parts = []
    key = _quality(records)
    if key in ("bleu", "perplexity"):
        picture = f"{recipe.name}.png"
        scored = [record for record in records if key in record["scores"]]
        quality_size_plot(scored, folder / picture, key, recipe.title)
        parts.append(f"![{recipe.title}: quality against stored bytes]({picture})")
    keys = by_importance(dict.fromkeys(key for record in records for key in record["scores"]))
    lines = []
    for record in records:
        counts, git = record["counts"], record.get("git") or {}
        seconds = record["metrics"].get("training_seconds")
        line: dict[str, str] = {"row": record["row"]}
        line |= {measure.title: _score(record, key) for key in keys if (measure := find_measure(key))}
        line["stored (MB)"] = f"{embedding_bits(counts) / 8e6:.3f}"
        line["times smaller"] = _smaller(record)
        line["training (min)"] = f"{seconds / 60:.1f}" if seconds else NONE
        line |= {"method": method_of(record), "options": describe_options(record)}
        line |= {"date": record.get("date", NONE)[:10], "device": record.get("device", NONE)}
        lines.append({**line, "commit": str(git.get("commit") or NONE)[:10]})
    return [*parts, markdown(pd.DataFrame(lines))]


def draw_figure(table: PrintedTable, paper: Paper, records: Mapping[str, Record], path: Path) -> None:
    """Draw a figure with a ``plot`` as PNG, a panel for each recipe: hollow markers are the paper's, filled
    ones ours with one standard deviation over the seeds.
    """
    from matplotlib.lines import Line2D

    points = points_of(table, paper, records)
    recipes = list(dict.fromkeys(points["recipe"]))
    picture, panels = new_figure(len(recipes), f"{table.paper}, {table.name}: {table.title}")
    for axes, recipe in zip(panels, recipes, strict=True):
        shown = points[points["recipe"] == recipe].sort_values("x")
        for method, rows in shown.groupby("method"):
            look: dict[str, Any] = {**style(str(method))._asdict(), "linewidth": 1}
            axes.plot(rows["x"], rows["paper"], markerfacecolor="white", linestyle="--", **look)
            ours = rows.dropna(subset="ours")
            axes.errorbar(ours["x"], ours["ours"], yerr=ours["deviation"], capsize=2, **look)
        axes.set_xscale("log", base=2)
        if table.plot["x"] == "width":
            axes.set_xticks(sorted(set(points["x"])))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(_AXES[table.plot["x"]])
        run = int(shown["ours"].count())
        axes.set_title(f"{recipe}: {run} rows run" if run else f"{recipe}: not run", fontsize=10)
        axes.grid(alpha=0.3, linewidth=0.6)
    quality_axis(panels[0], table.plot["y"])
    methods = sorted(set(points["method"]), key=legend_order)
    gray: dict[str, Any] = {"marker": "o", "color": "#8c8c8c"}
    handles = [
        *(Line2D([], [], **style(name)._asdict(), label=name) for name in methods),
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
        if other.name in table.plot["tables"] and cell.trained_by:
            recipe, _, name = cell.trained_by.partition("/")
            ours = pd.Series(records[cell.trained_by]["scores"].get(table.plot["y"], []), dtype=float)
            if table.plot["x"] == "ratio":
                x = float(cell.figures.get("compression") or cell.figures["input-compression"])
            else:  # the width at the end of its label
                x = float(re.findall(r"\d+", cell.row)[-1])
            method = shown_method({"config": {"embedding": find_recipe(recipe).row(name).embedding}})
            score = float(cell.figures[table.plot["y"]])
            deviation = ours.std() if len(ours) > 1 else 0.0
            points.append((recipe, method, x, score, ours.mean(), deviation))
    return pd.DataFrame(points, columns=["recipe", "method", "x", "paper", "ours", "deviation"])
