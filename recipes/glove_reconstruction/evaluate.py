"""Write the tables of the README, plot ALONE's Figure 3, and compare all rows at the same bytes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.common.plot import (
    PLAIN,
    best_of_each_size,
    draw_lines,
    draw_points,
    finish,
    format_name,
    new_figure,
    shown_method,
    style,
    write_png,
)
from recipes.common.recipe import Recipe
from recipes.common.results import Record, read_results
from recipes.common.smoke import SMOKE
from recipes.common.table import Column, markdown_table, update_readme
from recipes.glove_reconstruction.train import SMOKE_GRID_HELP, Grid, add_grid_option, read_grid
from shared_embeddings.methods.alone import AloneOptions
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import write_text
from shared_embeddings.utils.path_options import PathOption

FIGURE, COMPARED = "figure3.png", "compressed.png"
MARKER, COMPARISON = "results", "comparison"
# Sets with fewer known pairs are not compared: their rho means little.
_LEAST_PAIRS = 100


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
        markers = (f"<!-- BEGIN {name} -->\n<!-- END {name} -->\n" for name in (MARKER, COMPARISON))
        write_text(options.readme, "".join(markers))
    write_report(read_grid(recipe, options.grid), options.results, options.readme)


def write_report(grid: Grid, results: Path, readme: Path) -> None:
    """Write the results of a grid into a README, and plot the figures next to it.

    The vectors with the most results are those of ALONE's figure, and the vectors with the most rows of one
    size those of the comparison; they may be different ones.
    """
    records = read_results(results)
    if not records:
        raise UserError(f"{results}: no results; run train.sh first")
    by_vectors: dict[str, list[Record]] = {}
    for record in records:
        by_vectors.setdefault(record["data_checksum"], []).append(record)
    measured = {
        one["row"] for found in by_vectors.values() for one in summaries(grid, found) if one["metrics"]
    }
    if not measured:
        raise UserError(f"{results}: has no results of this grid; select another one with --grid")
    most = max(by_vectors.values(), key=len)
    summary = [one for one in summaries(grid, most) if one["metrics"] or one["row"] not in measured]
    source = most[0]["metrics"]["source_similarity"]
    alone = AloneOptions(hidden_dim=grid.hidden[0], **next(iter(grid.alone.values())))
    text = table(grid, summary, source) + (
        f"\nWith {alone.codebooks} codebooks of {alone.codebook_size} entries, two of the {grid.words:,} "
        f"words share all codes in ALONE with a probability of {alone.collision_probability(grid.words):.1e} "
        "(section 2.1).\n"
    )
    if any(record["metrics"] and record["config"]["row"] in grid.alone for record in summary):
        draw_figure(summary, source, grid, readme.parent / FIGURE)
        text += f"\n![Spearman's rho against the width]({FIGURE})\n"
    update_readme(readme, MARKER, text)

    def rows_of_one_size(found: Sequence[Record]) -> int:
        return sum(one["config"]["hidden"] is None for one in found)

    compared = max(by_vectors.values(), key=rows_of_one_size)
    if rows_of_one_size(compared):
        source = compared[0]["metrics"]["source_similarity"]
        found = [one for one in summaries(grid, compared) if one["metrics"]]
        found.sort(key=lambda one: one["counts"]["stored_bits"])
        draw_comparison(found, source, readme.parent / COMPARED)
        picture = f"![Error and Spearman's rho against the stored bytes]({COMPARED})"
        update_readme(readme, COMPARISON, f"{table(grid, found, source)}\n{picture}\n")
    print(f"wrote the results into {readme}")


def summaries(grid: Grid, records: Sequence[Record]) -> list[Record]:
    """Return one record per row and width with means over seeds; without metrics if there are no results."""
    found = []
    for row, hidden in grid.sizes():
        record: Record = {"row": f"{row}-{hidden}", "config": {"row": row, "hidden": hidden}}
        cells = [one for one in records if (one["config"]["row"], one["config"]["hidden"]) == (row, hidden)]
        if not cells:
            found.append({**record, "counts": {}, "metrics": {}})
            continue
        metrics: Record = {"seeds": len(cells)}
        for name in ("squared_loss", "relative_error", "training_seconds"):
            metrics[name] = statistics.mean(cell["metrics"][name] for cell in cells)
        metrics["similarity"] = {
            name: _spread([cell["metrics"]["similarity"][name]["rho"] for cell in cells])
            for name in cells[0]["metrics"]["similarity"]
        }
        first = cells[0]
        found.append({**record, "config": first["config"], "counts": first["counts"], "metrics": metrics})
    return found


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Return the mean and the standard deviation; None if a value is undefined."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return {"mean": statistics.mean(known), "std": statistics.stdev(known) if len(known) > 1 else 0.0}


def table(grid: Grid, summary: Sequence[Record], source: Mapping[str, Any]) -> str:
    """Return the Markdown table of the source vectors and all rows."""
    size = next(record["counts"]["table"] for record in summary if record["counts"])
    metrics: Record = {"seeds": 1, "squared_loss": 0.0, "relative_error": 0.0, "training_seconds": 0.0}
    metrics["similarity"] = {name: _spread([found["rho"]]) for name, found in source.items()}
    first: Record = {
        "row": "source",
        "config": {"row": f"source, {size // grid.words} dimensions", "hidden": None},
        "counts": {"embedding": size, "stored_bits": 32 * size, "table": size},
        "metrics": metrics,
    }

    def rho(name: str) -> Callable[[Record], str]:
        def describe(record: Record) -> str:
            found = record["metrics"]["similarity"][name]
            if found is None:
                return "undefined"
            spread = f" ± {found['std']:.3f}" if record["metrics"]["seeds"] > 1 else ""
            return f"{found['mean']:.3f}{spread}"

        return describe

    columns = [
        Column("vectors", lambda r: r["config"]["row"], always=True),
        Column("hidden", lambda r: str(r["config"]["hidden"] or "–"), always=True),
        Column("parameters", lambda r: f"{r['counts']['embedding']:,}"),
        Column("kB stored", lambda r: f"{r['counts']['stored_bits'] / 8000:,.0f}"),
        Column("bits per weight", lambda r: f"{r['counts']['stored_bits'] / r['counts']['table']:.2f}"),
        Column("seeds", lambda r: str(r["metrics"]["seeds"])),
        Column("squared loss", lambda r: f"{r['metrics']['squared_loss']:.3f}"),
        Column("relative error", lambda r: f"{r['metrics']['relative_error']:.3f}"),
        *(Column(f"rho {name}", rho(name)) for name in source),
        Column("seconds", lambda r: f"{r['metrics']['training_seconds']:.0f}"),
    ]
    return markdown_table([first, *summary], columns)


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


def draw_comparison(summary: Sequence[Record], source: Mapping[str, Any], path: Path) -> None:
    """Plot the relative error and rho against the stored bytes: the best row of each method and size."""
    sets = [name for name, found in source.items() if found["known"] >= _LEAST_PAIRS]
    plain = [one for one in summary if shown_method(one) == PLAIN]
    best = best_of_each_size(summary, "relative_error", plain)

    def label(record: Record) -> str:  # the format of a plain table, or the codec of a quantized one
        config = record["config"]
        if shown_method(record) == PLAIN:
            return str(config.get("store") or format_name(record))
        return str(config["embedding"].get("codec", ""))

    figure, panels = new_figure(1 + len(sets), "word vectors in few bytes", shared=False)
    for axes, name in zip(panels, ("", *sets), strict=True):
        points = []
        for one in best:
            metrics = one["metrics"]
            shown = metrics["similarity"][name]["mean"] if name else metrics["relative_error"]
            points.append({**one, "metrics": {"shown": float(shown)}})
        draw_lines(axes, points, "shown")
        draw_points(axes, points, "shown", label)
        axes.set_title(f"Spearman's rho, {name}" if name else "relative error", fontsize=9)
        if name:
            axes.axhline(source[name]["rho"], color="#333333", linewidth=1, zorder=1)
        else:
            axes.set_yscale("log")
    finish(figure, panels, path)
