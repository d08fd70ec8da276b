"""``python -m recipes report``: all results as Markdown, and as one HTML page that works offline."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from recipes.common.plot import validation_curve
from recipes.common.recipe import RECIPES, Recipe, recipe_names, runs_folder
from recipes.common.results import describe_options, embedding_bits, is_baseline, times_smaller
from recipes.common.table import NONE, NOT_RUN
from recipes.papers.ledger import Figure, figures
from recipes.report import charts
from recipes.report.document import (
    FIGURES,
    Block,
    Chart,
    Code,
    Details,
    Heading,
    Items,
    Paragraph,
    Table,
    anchor,
    as_markdown,
    as_page,
)
from recipes.report.document import charts as all_charts
from recipes.report.lines import (
    LeftOut,
    Line,
    Measure,
    chosen,
    collect,
    commands,
    committed,
    in_order,
    lines_of,
    measure,
    of_paper,
    of_runs,
)
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import write_text
from shared_embeddings.utils.path_options import PathOption

TITLE = "Compressed word embeddings: results"
# Sizes in millions that papers print, which ours are compared with.
_SIZES = {"total": "total parameters (M)", "embedding": "embedding parameters (M)"}
_SOURCE = re.compile(r"(?P<paper>[^,]+), (?P<table>(?:Table|Figure) [^:]+): (?P<row>.+)")


@dataclass(frozen=True)
class Task:
    """A recipe and its rows.

    Attributes:
        folder: of the recipe.
        title: of its README.
        lines: its rows.
    """

    folder: Path
    title: str
    lines: Sequence[Line]

    @property
    def measured(self) -> list[Line]:
        """The rows that were run."""
        return [line for line in self.lines if line.runs]

    @property
    def quality(self) -> str | None:
        """The measure that its models are judged by: of its results, or of the papers' figures."""
        keys = dict.fromkeys(key for line in self.measured for key in line.measured)
        return chosen(keys) or chosen(dict.fromkeys(key for line in self.lines for key in line.paper))


def build(recipes: Path, runs: Path | None) -> list[Block]:
    """The report of the recipes in a folder and of what was run.

    Args:
        recipes: folder of the recipes.
        runs: folder that recipes have written to, ``$RUNS``; None without one.

    Raises:
        UserError: the rows of a recipe cannot be read.
    """
    folders = [recipes / name for name in recipe_names(recipes)]
    files = [*committed(recipes), *(of_runs(runs) if runs is not None else ())]
    found, left_out = collect(
        tqdm(files, "reading results", disable=None), [folder.name for folder in folders]
    )
    tasks = []
    replaced: list[LeftOut] = []
    for recipe in map(Recipe, folders):
        lines, others = lines_of(recipe, found)
        tasks.append(Task(recipe.folder, recipe.title, lines))
        replaced += others
    return report(tasks, figures(), [*left_out, *replaced])


def main(arguments: Sequence[str]) -> None:
    """Write the report of the results in the repository and in $RUNS, as Markdown and as an HTML page."""
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
    output = options.output or runs / "report"
    blocks = build(RECIPES, runs if runs.is_dir() else None)
    try:
        write_text(output / "report.html", as_page(blocks))
        write_text(output / "report.md", as_markdown(blocks))
        for chart in tqdm(list(all_charts(blocks)), "charts of report.md", disable=None):
            write_text(output / FIGURES / f"{chart.name}.svg", charts.as_svg(chart.spec))
    except OSError as error:
        raise UserError(f"{output}: the report cannot be written: {error.strerror or error}") from error
    print(f"report: {output / 'report.html'} and {output / 'report.md'}")


def report(tasks: Sequence[Task], sizes: Iterable[Figure], left_out: Sequence[LeftOut]) -> list[Block]:
    """The whole report.

    Args:
        tasks: the recipes.
        sizes: printed sizes and ours, of `recipes.papers.ledger`.
        left_out: results that are not used.
    """
    blocks: list[Block] = [Heading(1, TITLE, "top"), *_introduction(tasks)]
    blocks += [Heading(2, "At a glance", "glance"), *_glance(tasks)]
    blocks += [Heading(2, "Beside the papers", "papers"), *_papers(tasks)]
    found = sizes_table(sizes)
    if found.rows:
        blocks += [Heading(3, "Printed sizes", "printed-sizes"), *_sizes(found)]
    for task in tasks:
        blocks += _task(task)
    if left_out:
        blocks += [
            Heading(2, "Results that were left out", "left-out"),
            Items([f"{one.name}: {one.reason}" for one in left_out]),
        ]
    return blocks


def _introduction(tasks: Sequence[Task]) -> list[Block]:
    """What the page has, and how much of it was run."""
    blocks: list[Block] = [
        Paragraph(
            "The rows of a task train the same model with different embeddings, for input and output; "
            "sizes count both."
        )
    ]
    rows, measured = sum(len(task.lines) for task in tasks), sum(len(task.measured) for task in tasks)
    if measured == 0:
        return [*blocks, Paragraph("There are no results yet: none of the rows below was run.")]
    return [
        *blocks,
        Paragraph(
            f"{measured} of {rows} rows were run. Numbers of several seeds are mean ± standard deviation. "
            "Charts name the row of a point under the pointer, and a click on a method shows it alone. "
            "Dashed lines are at the plain tables that others start from."
        ),
    ]


def _glance(tasks: Sequence[Task]) -> list[Block]:
    """One line per task: the plain table, and the best of the compressed."""
    columns = ["task", "rows run", "measure", "plain table", "best compressed", "row", "times smaller"]
    rows = []
    for task in tasks:
        key = task.quality
        known = measure(key) if key else None
        run = f"{len(task.measured)} of {len(task.lines)}"
        found = _extremes(task, key, known) if key and known else [NONE] * 4
        rows.append([task.folder.name, run, known.title if known else NONE, *found])
    idle = [number for number, task in enumerate(tasks) if not task.measured]
    return [Table(columns, rows, idle)]


def _extremes(task: Task, key: str, known: Measure) -> list[str]:
    """The plain table's quality, and that of the best embedding that is smaller, with its row and size."""
    there = [line for line in task.measured if key in line.measured]
    plain = sorted(
        (line for line in there if line.method == "standard"),
        key=lambda line: (not is_baseline(line.row), -line.counts.get("stored_bits", 0)),
    )
    others = [line for line in there if line.method != "standard"]
    sign = -1 if known.higher_is_better else 1
    best = min(others, key=lambda line: sign * line.measured[key].mean, default=None)
    cells = [line.measured[key].describe(known.decimals) for line in plain[:1]] or [NONE]
    if best is None:
        return [*cells, NOT_RUN, NONE, NONE]
    return [*cells, best.measured[key].describe(known.decimals), best.row, _compression(best)]


def _compression(line: Line) -> str:
    """How many times fewer bits than a plain table in 32 bits the embedding takes."""
    counts = line.counts
    if "stored_bits" in counts and {"dense_embedding", "table"} & counts.keys():
        return f"{times_smaller(counts):.1f}"
    return f"{counts['compression']:.1f}" if "compression" in counts else NONE


def _papers(tasks: Sequence[Task]) -> list[Block]:
    """A table for each table of a paper that rows reproduce."""
    tables = by_table(line for task in tasks for line in task.lines)
    if not tables:
        return [Paragraph("No row reproduces a row of a paper.")]
    blocks: list[Block] = [
        Paragraph(
            "Rows that reproduce a row of a published table, with the settings of the paper. Most of them "
            "need GPUs for days. Rows of smaller models are only compared with each other, under their task."
        )
    ]
    idle: list[Block] = []
    for (paper, table), lines in tables.items():
        run = sum(bool(line.runs) for line in lines)
        part = blocks if run else idle
        part.append(Heading(3, f"{paper}, {table}", anchor(paper, table)))
        part += [Paragraph(f"{run} of {len(lines)} rows run."), comparison(lines)]
    if idle:
        blocks.append(Details(f"Tables of which no row was run ({len(idle) // 3})", idle))
    return blocks


def _sizes(table: Table) -> list[Block]:
    """The summary of printed sizes, which need no training."""
    return [
        Paragraph(
            "Sizes that the papers print, counted again by building the same models here. “quoted” are other "
            "people's models; “digits cut” agrees except for the rounding of the last digit. "
            "“python -m recipes ledger” lists the sizes, and why some differ."
        ),
        table,
    ]


def _task(task: Task) -> list[Block]:
    """Everything about one recipe."""
    name = task.folder.name
    blocks: list[Block] = [Heading(2, task.title, name.replace("_", "-"))]
    if not task.measured:
        blocks.append(Paragraph(f"None of its {len(task.lines)} rows was run."))
    else:
        blocks.append(Paragraph(f"{len(task.measured)} of {len(task.lines)} rows were run."))
        blocks += [*_charts(task), _results(task)]
    idle = [line for line in task.lines if not line.runs]
    if idle:
        listed = [[line.row, line.method, describe_options({"config": line.config})] for line in idle]
        summary = f"Rows that were not run ({len(idle)})"
        blocks.append(Details(summary, [Table(["row", "method", "options"], listed)]))
    if task.measured:
        blocks.append(Details("Code, machine and date of each row", [_origins(task)]))
    again: list[Block] = [Code(_all_commands(task))]
    blocks.append(Details("Commands to run each row", again))
    return blocks


def _charts(task: Task) -> list[Block]:
    """Quality against size by stage, training curves where there are any, and parameters."""
    name, key = task.folder.name, task.quality
    sized = [line for line in task.measured if line.counts.get("embedding")]
    scored = [line for line in sized if key in line.measured]
    known = measure(key) if key else None
    blocks: list[Block] = []
    if key and known and scored:
        for number, (stage, spec) in enumerate(charts.quality_size(scored, key, known).items()):
            text = f"{known.title} against stored bytes of the rows of {name} that were {stage}"
            blocks.append(Chart(f"{name}-quality-{number}", spec, text))
    curves = {line.row: curve for line in task.measured if (curve := validation_curve(line.runs[0].folder))}
    if curves:
        text = f"Validation perplexity during the training of {len(curves)} rows of {name}"
        blocks.append(Chart(f"{name}-curves", charts.training_curves(curves), text))
    whole = [line for line in sized if line.counts.get("rest")]
    if whole:
        text = f"Parameters of {len(whole)} models of {name}: embedding, output layer, rest"
        bars = Chart(f"{name}-parameters", charts.parameter_bars(whole), text)
        blocks.append(Details("Where the parameters are", [bars]))
    return blocks


def _results(task: Task) -> Table:
    """Sizes, measures and training times of the rows that were run."""
    keys = list(dict.fromkeys(key for line in task.measured for key in line.measured))
    if task.quality in keys:
        keys.insert(0, keys.pop(keys.index(task.quality)))
    titles = {key: found for key in keys if (found := measure(key))}
    # The most important columns come first: on a phone the others are out of sight.
    first, *others = [known.title for known in titles.values()] or ["measure"]
    sizes = ["embedding (MB)", "times smaller", "embedding (M)", "all parameters (M)"]
    columns = ["row", first, *sizes, *others, "training (min)", "method", "options"]
    rows = []
    for line in task.measured:
        counts = line.counts
        stored = f"{embedding_bits(counts) / 8e6:.3f}" if "stored_bits" in counts else NONE
        scores = [
            line.measured[key].describe(known.decimals) if key in line.measured else NONE
            for key, known in titles.items()
        ] or [NONE]
        millions = [_millions(counts.get(name)) for name in ("embedding", "total")]
        cells = [line.row, scores[0], stored, _compression(line), *millions, *scores[1:], _minutes(line)]
        rows.append([*cells, line.method, describe_options({"config": line.config})])
    return Table(columns, rows)


def _millions(count: Any) -> str:
    """A number of parameters in millions."""
    return f"{count / 1e6:.3f}" if isinstance(count, (int, float)) else NONE


def _minutes(line: Line) -> str:
    """The minutes that the training of a run took, in the mean."""
    seconds = [run.record["metrics"].get("training_seconds") for run in line.runs]
    known = [value for value in seconds if isinstance(value, (int, float))]
    return f"{sum(known) / len(known) / 60:.1f}" if known else NONE


def _origins(task: Task) -> Table:
    """With which code, where and when each run was made."""
    rows = []
    for line in task.measured:
        for run in line.runs:
            record = run.record
            git = record.get("git") or {}
            changed = " with changes" if git.get("dirty") else ""
            commit = f"{str(git.get('commit') or 'unknown')[:10]}{changed}"
            versions = ", ".join(f"{name} {of}" for name, of in (record.get("versions") or {}).items() if of)
            seed = NONE if run.seed is None else str(run.seed)
            date = str(record.get("date", NONE))[:10]
            cells = [line.row, seed, commit, date, str(record.get("device", NONE)), versions]
            rows.append([*cells, record["data_checksum"][:12], run.name])
    return Table(["row", "seed", "commit", "date", "device", "versions", "data", "file"], rows)


def _all_commands(task: Task) -> str:
    """The commands of every row, each below its name; what all have in common comes once, first."""
    each = {line.row: commands(task.folder, line).splitlines() for line in task.lines}
    first = {lines[0] for lines in each.values()}
    text = [*sorted(first)]
    for row, lines in each.items():
        rest = [line for line in lines if line not in first]
        if rest:
            text += ["", f"# {row}", *rest]
    return "\n".join(text)


def by_table(lines: Iterable[Line]) -> dict[tuple[str, str], list[Line]]:
    """The lines that reproduce rows of a paper, by (paper, table), in natural order."""
    tables: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        found = _SOURCE.fullmatch(str(line.paper.get("source", "")))
        if found:
            tables.setdefault((found["paper"], found["table"]), []).append(line)
    return dict(sorted(tables.items(), key=lambda item: (item[0][0], _number(item[0][1]))))


def _number(table: str) -> tuple[int, str]:
    """Sorting key of a table such as "Table 12a"."""
    found = re.search(r"\d+", table)
    return (int(found[0]) if found else 0, table)


def comparison(lines: Sequence[Line]) -> Table:
    """One table of a paper: sizes and measures, theirs and ours.

    Args:
        lines: the rows that reproduce the paper's.
    """
    keys = in_order(dict.fromkeys(key for line in lines for key in line.paper))
    sizes = [key for key in _SIZES if any(key in line.paper for line in lines)]
    if not any(line.runs for line in lines):
        return _printed_only(lines, sizes, keys)
    columns = ["row of the paper", "our config"]
    for key in sizes:
        columns += [f"{_SIZES[key]}: paper", "ours"]
    for key in keys:
        columns += [f"{_measure(key).title}: paper", "ours", "difference"]
    columns.append("hardware of the paper")
    rows = []
    for line in lines:
        cells = [_row_of_paper(line), f"{line.recipe}/{line.row}"]
        for key in sizes:
            cells += [_printed(line, key), _millions(line.counts.get(key)) if line.runs else NOT_RUN]
        for key in keys:
            cells += _measures(line, key)
        rows.append([*cells, str(line.paper.get("hardware", NONE))])
    return Table(columns, rows, [number for number, line in enumerate(lines) if not line.runs])


def _measure(key: str) -> Measure:
    """The measure of a key that has one."""
    known = measure(key)
    assert known is not None
    return known


def _printed_only(lines: Sequence[Line], sizes: Sequence[str], keys: Sequence[str]) -> Table:
    """A table of a paper of which no row was run; a single column shows that."""
    titles = [*(_SIZES[key] for key in sizes), *(_measure(key).title for key in keys)]
    columns = ["row of the paper", *(f"{title}: paper" for title in titles), "ours", "our config"]
    rows = []
    for line in lines:
        cells = [_printed(line, key) for key in sizes]
        cells += [_measures(line, key)[0] for key in keys]
        hardware = str(line.paper.get("hardware", NONE))
        rows.append([_row_of_paper(line), *cells, NOT_RUN, f"{line.recipe}/{line.row}", hardware])
    return Table([*columns, "hardware of the paper"], rows)


def _printed(line: Line, key: str) -> str:
    """A size that the paper prints, such as 33.02 or 516k, in millions."""
    text = str(line.paper.get(key, NONE))
    if text[-1] not in "kM":
        return text
    return f"{float(text[:-1]) / (1000 if text[-1] == 'k' else 1):g}"


def _row_of_paper(line: Line) -> str:
    """What the paper calls a line of `by_table`."""
    return str(line.paper["source"]).split(": ", 1)[1]


def _measures(line: Line, key: str) -> list[str]:
    """The paper's figure, ours, and by how much they differ."""
    known, printed = _measure(key), line.paper.get(key)
    spread = of_paper(key, line.measured)
    theirs = NONE if printed is None else f"{printed:.{known.decimals}f}"
    ours = NOT_RUN if spread is None else spread.describe(known.decimals)
    if spread is None or printed is None:
        return [theirs, ours, NONE]
    return [theirs, ours, f"{spread.mean - printed:+.{known.decimals}f}"]


def sizes_table(figures: Iterable[Figure]) -> Table:
    """How many of the sizes that each table prints agree with those of the models as they are built here."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for figure in figures:
        counts.setdefault((figure.paper, figure.table), Counter())[figure.agreement] += 1
    kinds = sorted({kind for found in counts.values() for kind in found})
    ordered = sorted(counts.items(), key=lambda item: (item[0][0], _number(item[0][1])))
    rows = [[f"{paper}, {table}", *(str(found[kind]) for kind in kinds)] for (paper, table), found in ordered]
    return Table(["printed sizes of", *kinds], rows)
