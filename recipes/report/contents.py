"""``python -m recipes report``: all results as Markdown, and as one HTML page that works offline."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from tqdm import tqdm

from recipes.common.plot import validation_curve
from recipes.common.recipe import RECIPES, Recipe, recipe_names, runs_folder
from recipes.common.results import describe_options, embedding_bits, is_baseline, times_smaller
from recipes.common.table import NONE, NOT_RUN
from recipes.papers import Figure, figures, read_papers
from recipes.report import page
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
from recipes.report.page import (
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
    """A recipe with the title of its README, and its rows."""

    folder: Path
    title: str
    lines: Sequence[Line]

    @property
    def measured(self) -> list[Line]:
        return [line for line in self.lines if line.runs]

    @property
    def quality(self) -> str | None:
        """The measure that its models are judged by: of its results, or of the papers' figures."""
        keys = dict.fromkeys(key for line in self.measured for key in line.measured)
        return chosen(keys) or chosen(dict.fromkeys(key for line in self.lines for key in line.paper))


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
        for chart in tqdm(list(page.charts(blocks)), "charts of report.md", disable=None):
            write_text(output / FIGURES / f"{chart.name}.svg", page.as_svg(chart.spec))
    except OSError as error:
        raise UserError(f"{output}: the report cannot be written: {error.strerror or error}") from error
    print(f"report: {output / 'report.html'} and {output / 'report.md'}")


def build(recipes: Path, runs: Path | None) -> list[Block]:
    """The report of the recipes in a folder, with the results there and in the folder `runs`."""
    names = recipe_names(recipes)
    files = [*committed(recipes), *(of_runs(runs) if runs is not None else ())]
    found, left_out = collect(tqdm(files, "reading results", disable=None), names)
    tasks = []
    for recipe in (Recipe(recipes / name) for name in names):
        lines, replaced = lines_of(recipe, found)
        tasks.append(Task(recipe.folder, recipe.title, lines))
        left_out += replaced
    return report(tasks, figures(read_papers()), left_out)


def report(tasks: Sequence[Task], sizes: Iterable[Figure], left_out: Sequence[LeftOut]) -> list[Block]:
    """The whole report: the recipes, the printed sizes beside ours, and results that are not used."""
    rows, measured = sum(len(task.lines) for task in tasks), sum(len(task.measured) for task in tasks)
    state = "There are no results yet: none of the rows below was run."
    if measured:
        state = (
            f"{measured} of {rows} rows were run. Numbers of several seeds are mean ± standard deviation. "
            "Charts name the row of a point under the pointer, and a click on a method shows it alone. "
            "Dashed lines are at the plain tables that others start from."
        )
    blocks: list[Block] = [
        Heading(1, TITLE, "top"),
        Paragraph(
            "The rows of a task train the same model with different embeddings, for input and output; "
            "sizes count both."
        ),
        Paragraph(state),
        Heading(2, "At a glance", "glance"),
        _glance(tasks),
        Heading(2, "Beside the papers", "papers"),
        *_papers(tasks),
    ]
    found = _agreement(sizes)
    if found.rows:
        text = (
            "Sizes that the papers print, counted again by building the same models here. “quoted” are other "
            "people's models; “digits cut” agrees except for the rounding of the last digit. "
            "“python -m recipes ledger” lists the sizes, and why some differ."
        )
        blocks += [Heading(3, "Printed sizes", "printed-sizes"), Paragraph(text), found]
    for task in tasks:
        blocks += _task(task)
    if left_out:
        blocks.append(Heading(2, "Results that were left out", "left-out"))
        blocks.append(Items([f"{one.name}: {one.reason}" for one in left_out]))
    return blocks


def _glance(tasks: Sequence[Task]) -> Table:
    """One line per task: the plain table, and the best of the compressed."""
    columns = ["task", "rows run", "measure", "plain table", "best compressed", "row", "times smaller"]
    rows = []
    for task in tasks:
        known = measure(task.quality or "")
        found = _extremes(task, known) if known else [NONE] * 4
        run = f"{len(task.measured)} of {len(task.lines)}"
        rows.append([task.folder.name, run, known.title if known else NONE, *found])
    return Table(columns, rows, [number for number, task in enumerate(tasks) if not task.measured])


def _extremes(task: Task, known: Measure) -> list[str]:
    """The plain table's quality, and that of the best embedding that is smaller, with its row and size."""
    key = task.quality or ""
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


def _millions(count: Any) -> str:
    return f"{count / 1e6:.3f}" if isinstance(count, (int, float)) else NONE


def _number(table: str) -> tuple[int, str]:
    """Sorting key of a table such as "Table 12a"."""
    found = re.search(r"\d+", table)
    return (int(found[0]) if found else 0, table)


def _papers(tasks: Sequence[Task]) -> list[Block]:
    """A table for each table of a paper that rows reproduce, in natural order."""
    tables: dict[tuple[str, str], list[Line]] = {}
    for line in (line for task in tasks for line in task.lines):
        if found := _SOURCE.fullmatch(str(line.paper.get("source", ""))):
            tables.setdefault((found["paper"], found["table"]), []).append(line)
    if not tables:
        return [Paragraph("No row reproduces a row of a paper.")]
    blocks: list[Block] = [
        Paragraph(
            "Rows that reproduce a row of a published table, with the settings of the paper. Most of them "
            "need GPUs for days. Rows of smaller models are only compared with each other, under their task."
        )
    ]
    idle: list[Block] = []
    for paper, table in sorted(tables, key=lambda key: (key[0], _number(key[1]))):
        lines = tables[paper, table]
        run = sum(bool(line.runs) for line in lines)
        part = blocks if run else idle
        part.append(Heading(3, f"{paper}, {table}", anchor(paper, table)))
        part += [Paragraph(f"{run} of {len(lines)} rows run."), _comparison(lines)]
    if idle:
        blocks.append(Details(f"Tables of which no row was run ({len(idle) // 3})", idle))
    return blocks


def _comparison(lines: Sequence[Line]) -> Table:
    """One table of a paper: sizes and measures, theirs and ours."""
    keys = in_order(dict.fromkeys(key for line in lines for key in line.paper))
    measures = {key: known for key in keys if (known := measure(key))}
    sizes = [key for key in _SIZES if any(key in line.paper for line in lines)]
    titles = [*(_SIZES[key] for key in sizes), *(known.title for known in measures.values())]
    rows, hardware = [], "hardware of the paper"
    for line in lines:
        found = [[_printed_size(line, key), _millions(line.counts.get(key))] for key in sizes]
        found = found if line.runs else [[printed, NOT_RUN] for printed, _ in found]
        found += [_compare(line, key, known) for key, known in measures.items()]
        name, config = str(line.paper["source"]).split(": ", 1)[1], f"{line.recipe}/{line.row}"
        rows.append((name, config, found, str(line.paper.get("hardware", NONE))))
    if not any(line.runs for line in lines):  # a single column shows that no row was run
        columns = [
            "row of the paper",
            *(f"{title}: paper" for title in titles),
            "ours",
            "our config",
            hardware,
        ]
        cells = [[name, *(of[0] for of in found), NOT_RUN, row, on] for name, row, found, on in rows]
        return Table(columns, cells)
    columns = ["row of the paper", "our config"]
    for number, title in enumerate(titles):
        columns += [f"{title}: paper", "ours", *(["difference"] if number >= len(sizes) else [])]
    cells = [[name, row, *chain.from_iterable(found), on] for name, row, found, on in rows]
    return Table([*columns, hardware], cells, [number for number, line in enumerate(lines) if not line.runs])


def _printed_size(line: Line, key: str) -> str:
    """A size that the paper prints, such as 33.02 or 516k, in millions."""
    text = str(line.paper.get(key, NONE))
    if text[-1] not in "kM":
        return text
    return f"{float(text[:-1]) / (1000 if text[-1] == 'k' else 1):g}"


def _compare(line: Line, key: str, known: Measure) -> list[str]:
    """The paper's figure, ours, and by how much they differ."""
    printed, spread = line.paper.get(key), of_paper(key, line.measured)
    theirs = NONE if printed is None else f"{printed:.{known.decimals}f}"
    ours = NOT_RUN if spread is None else spread.describe(known.decimals)
    if spread is None or printed is None:
        return [theirs, ours, NONE]
    return [theirs, ours, f"{spread.mean - printed:+.{known.decimals}f}"]


def _agreement(sizes: Iterable[Figure]) -> Table:
    """How many of the sizes that each table prints agree with those of the models as they are built here."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for figure in sizes:
        counts.setdefault((figure.paper, figure.table), Counter())[figure.agreement] += 1
    kinds = sorted({kind for found in counts.values() for kind in found})
    ordered = sorted(counts.items(), key=lambda item: (item[0][0], _number(item[0][1])))
    rows = [[f"{paper}, {table}", *(str(found[kind]) for kind in kinds)] for (paper, table), found in ordered]
    return Table(["printed sizes of", *kinds], rows)


def _task(task: Task) -> list[Block]:
    name = task.folder.name
    blocks: list[Block] = [Heading(2, task.title, name.replace("_", "-"))]
    if not task.measured:
        blocks.append(Paragraph(f"None of its {len(task.lines)} rows was run."))
    else:
        blocks.append(Paragraph(f"{len(task.measured)} of {len(task.lines)} rows were run."))
        blocks += [*_charts(task), _results(task)]
    if idle := [line for line in task.lines if not line.runs]:
        listed = [[line.row, line.method, describe_options({"config": line.config})] for line in idle]
        summary = f"Rows that were not run ({len(idle)})"
        blocks.append(Details(summary, [Table(["row", "method", "options"], listed)]))
    if task.measured:
        blocks.append(Details("Code, machine and date of each row", [_origins(task)]))
    # What all commands have in common comes once, first.
    each = {line.row: commands(task.folder, line).splitlines() for line in task.lines}
    first = {lines[0] for lines in each.values()}
    text = [*sorted(first)]
    for row, lines in each.items():
        if rest := [line for line in lines if line not in first]:
            text += ["", f"# {row}", *rest]
    blocks.append(Details("Commands to run each row", [Code("\n".join(text))]))
    return blocks


def _charts(task: Task) -> list[Block]:
    """Quality against size by stage, training curves where there are any, and parameters."""
    name, key = task.folder.name, task.quality
    sized = [line for line in task.measured if line.counts.get("embedding")]
    scored = [line for line in sized if key in line.measured]
    known = measure(key) if key else None
    blocks: list[Block] = []
    if key and known and scored:
        for number, (stage, spec) in enumerate(page.quality_size(scored, key, known).items()):
            text = f"{known.title} against stored bytes of the rows of {name} that were {stage}"
            blocks.append(Chart(f"{name}-quality-{number}", spec, text))
    curves = {line.row: curve for line in task.measured if (curve := validation_curve(line.runs[0].folder))}
    if curves:
        text = f"Validation perplexity during the training of {len(curves)} rows of {name}"
        blocks.append(Chart(f"{name}-curves", page.training_curves(curves), text))
    if whole := [line for line in sized if line.counts.get("rest")]:
        text = f"Parameters of {len(whole)} models of {name}: embedding, output layer, rest"
        bars = Chart(f"{name}-parameters", page.parameter_bars(whole), text)
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
        seconds = [run.record["metrics"].get("training_seconds") for run in line.runs]
        times = [value for value in seconds if isinstance(value, (int, float))]
        minutes = f"{sum(times) / len(times) / 60:.1f}" if times else NONE
        cells = [line.row, scores[0], stored, _compression(line), *millions, *scores[1:], minutes]
        rows.append([*cells, line.method, describe_options({"config": line.config})])
    return Table(columns, rows)


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
