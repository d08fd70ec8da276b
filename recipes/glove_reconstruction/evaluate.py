"""Write the table of the README and plot ALONE's Figure 3 from results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.common.plot import new_figure, style, write_png
from recipes.common.recipe import Recipe
from recipes.common.results import Record, read_results
from recipes.common.smoke import SMOKE
from recipes.common.table import Column, markdown_table, update_readme
from recipes.glove_reconstruction.grid import Grid, add_grid_option, read_grid
from recipes.glove_reconstruction.source import SMOKE_GRID_HELP
from shared_embeddings.errors import UserError
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.files import write_text
from shared_embeddings.utils.path_options import PathOption

FIGURE = "figure3.png"
MARKER = "results"


def summaries(grid: Grid, records: Sequence[Record]) -> list[Record]:
    """Return one record per row and width with means over seeds; without metrics if there are no results."""
    found = []
    for row in grid.rows():
        for hidden in grid.hidden:
            cells = [
                one for one in records if (one["config"]["row"], one["config"]["hidden"]) == (row, hidden)
            ]
            found.append(_summary(row, hidden, cells))
    return found


def _summary(row: str, hidden: int, cells: Sequence[Record]) -> Record:
    """Return the means and standard deviations of the cells of one row and width."""
    record = {"row": f"{row}-{hidden}", "config": {"row": row, "hidden": hidden}}
    if not cells:
        return {**record, "counts": {}, "metrics": {}}
    metrics: Record = {"seeds": len(cells)}
    for name in ("squared_loss", "relative_error", "training_seconds"):
        metrics[name] = statistics.mean(cell["metrics"][name] for cell in cells)
    metrics["similarity"] = {
        name: _spread([cell["metrics"]["similarity"][name]["rho"] for cell in cells])
        for name in cells[0]["metrics"]["similarity"]
    }
    return {**record, "counts": cells[0]["counts"], "metrics": metrics}


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Return the mean and the standard deviation; None if a value is undefined."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return {"mean": statistics.mean(known), "std": statistics.stdev(known) if len(known) > 1 else 0.0}


def table(summary: Sequence[Record], source: Mapping[str, Any], dimensions: int) -> str:
    """Return the Markdown table of the source vectors and all rows."""
    columns = [
        Column("vectors", lambda r: r["config"]["row"], always=True),
        Column("hidden", lambda r: str(r["config"]["hidden"]), always=True),
        Column("parameters", lambda r: f"{r['counts']['embedding']:,}"),
        Column("kB stored", lambda r: f"{r['counts']['stored_bits'] / 8000:,.0f}"),
        Column("seeds", lambda r: str(r["metrics"]["seeds"])),
        Column("squared loss", lambda r: f"{r['metrics']['squared_loss']:.3f}"),
        Column("relative error", lambda r: f"{r['metrics']['relative_error']:.3f}"),
        *(Column(f"rho {name}", _rho(name)) for name in source),
        Column("seconds", lambda r: f"{r['metrics']['training_seconds']:.0f}"),
    ]
    return markdown_table([_source_record(source, summary, dimensions), *summary], columns)


def _rho(name: str) -> Callable[[Record], str]:
    """Return a column function for rho of one set, with its standard deviation over seeds."""

    def describe(record: Record) -> str:
        found = record["metrics"]["similarity"][name]
        if found is None:
            return "undefined"
        spread = f" ± {found['std']:.3f}" if record["metrics"]["seeds"] > 1 else ""
        return f"{found['mean']:.3f}{spread}"

    return describe


def _source_record(source: Mapping[str, Any], summary: Sequence[Record], dimensions: int) -> Record:
    """Return the row of the source vectors."""
    size = next(record["counts"]["table"] for record in summary if record["counts"])
    similarity = {name: _spread([found["rho"]]) for name, found in source.items()}
    return {
        "row": "source",
        "config": {"row": f"source, {dimensions} dimensions", "hidden": "–"},
        "counts": {"embedding": size, "stored_bits": 32 * size},
        "metrics": {
            "seeds": 1,
            "squared_loss": 0.0,
            "relative_error": 0.0,
            "training_seconds": 0.0,
            "similarity": similarity,
        },
    }


def draw_figure(summary: Sequence[Record], source: Mapping[str, Any], grid: Grid, path: Path) -> None:
    """Plot rho over the width, one panel per set (ALONE, Figure 3); bars are one standard deviation."""
    figure, panels = new_figure(len(source), "ALONE on skip-gram vectors: similarity of words", shared=False)
    color, marker, _ = style("alone")
    for axes, (name, found) in zip(panels, source.items(), strict=True):
        for number, row in enumerate(grid.alone):
            points = [
                (record["config"]["hidden"], record["metrics"]["similarity"][name])
                for record in summary
                if record["config"]["row"] == row and record["metrics"]
            ]
            points = [point for point in points if point[1] is not None]
            axes.errorbar(
                [hidden + 24 * (number - (len(grid.alone) - 1) / 2) for hidden, _ in points],
                [value["mean"] for _, value in points],
                yerr=[value["std"] for _, value in points],
                color=color,
                marker=marker,
                linestyle=("-", "--", ":", "-.")[number % 4],
                fillstyle=("full", "none", "left", "bottom")[number % 4],
                linewidth=1,
                capsize=2,
                label=row.replace("_", " "),
            )
        if found["rho"] is not None:
            axes.axhline(found["rho"], color="#333333", linewidth=1, zorder=1, label="the vectors themselves")
        axes.set_title(f"{name}: {found['known']} of {found['pairs']} pairs", fontsize=9)
        axes.set_xticks(grid.hidden)
        axes.set_xlabel("hidden width")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("Spearman's rho")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    write_png(figure, path)


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Write the results into the README's table, and plot Figure 3 next to it."""
    parser = Parser("eval.sh", description=main.__doc__)
    parser.add_argument(
        "--results",
        type=PathOption.SOURCE,
        default=recipe.home,
        help="results.jsonl, or a folder with one (default: %(default)s)",
    )
    parser.add_argument(
        "--readme",
        type=PathOption.UPDATED,
        default=recipe.folder / "README.md",
        help="README with the markers (default: %(default)s)",
    )
    parser.add_argument(SMOKE, action="store_true", help=f"{SMOKE_GRID_HELP}, and a separate README")
    add_grid_option(parser)
    options = parser.parse_args(arguments)
    if options.smoke:
        recipe = recipe.smoke()
        options.results, options.readme = recipe.home, recipe.home / "README.md"
        write_text(options.readme, f"<!-- BEGIN {MARKER} -->\n<!-- END {MARKER} -->\n")
    write_report(read_grid(recipe, options.grid), options.results, options.readme)


def write_report(grid: Grid, results: Path, readme: Path) -> None:
    """Write the results of a grid into a README, and plot the figure next to it.

    Raises:
        UserError: there are no results of this grid, or they have different source vectors.
    """
    records = read_results(results)
    if not records:
        raise UserError(f"{results}: no results; run train.sh first")
    if len({record["data_checksum"] for record in records}) > 1:
        raise UserError(f"{results}: has results of different source vectors; move them to separate files")
    source = records[0]["metrics"]["source_similarity"]
    summary = summaries(grid, records)
    if not any(record["metrics"] for record in summary):
        raise UserError(f"{results}: has no results of this grid; select another one with --grid")
    dimensions = records[0]["counts"]["table"] // grid.words
    text = table(summary, source, dimensions)
    if any(record["metrics"] and record["config"]["row"] in grid.alone for record in summary):
        draw_figure(summary, source, grid, readme.parent / FIGURE)
        text += f"\n![Spearman's rho against the width]({FIGURE})\n"
    update_readme(readme, MARKER, text)
    print(f"wrote the results into {readme}")
